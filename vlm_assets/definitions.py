"""The definitions that Dagster loads in this project: those of the environment's settings."""

from __future__ import annotations

from vlm_assets.config.component_settings import refuse_component, settings_of_home
from vlm_assets.config.settings import current_settings
from vlm_assets.home_definitions import build_defs, check_dagster_home, claim_control_state
from vlm_durable.files.files import restrict_umask

restrict_umask()
refuse_component(settings_of_home())
check_dagster_home(current_settings())
claim_control_state(current_settings())
defs = build_defs(current_settings())
