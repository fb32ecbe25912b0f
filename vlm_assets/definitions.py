"""The definitions that Dagster loads in this project: those of the environment's settings."""

from __future__ import annotations

from vlm_assets.config.settings import current_settings
from vlm_assets.home_definitions import build_defs, check_dagster_home
from vlm_durable.files.files import restrict_umask

restrict_umask()
check_dagster_home(current_settings())
defs = build_defs(current_settings())
