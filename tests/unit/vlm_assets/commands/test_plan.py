"""What ``vlm-assets plan`` says of a forecast."""

from __future__ import annotations

import re
from dataclasses import replace

from tests.support.measurements import MEASURED
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.commands.plan import sentences
from vlm_assets.services.forecast import make_forecast


def plan_of(settings, measured=MEASURED, **more):
    chosen = {"devices": 1, "devices_here": 1, **more}
    return make_forecast(settings, Catalog.open(settings.home), measured, **chosen)


def test_a_small_job_is_told_in_minutes(uneven) -> None:
    """No person reads 0.0006 days as a minute."""
    slow = replace(MEASURED, batches=((10, 100, 6000.0),) * 4)
    for measured, expected in ((MEASURED, "1: 55 seconds, 2: "), (slow, r"1: \d\d\.\d minutes, 2: ")):
        said = "\n".join(sentences(plan_of(uneven, measured)))
        assert re.search(expected, said.partition("What if")[2])
        assert " days" not in said
