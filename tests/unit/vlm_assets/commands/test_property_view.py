"""``vlm-assets show``: what a person reads is what a program gets."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from vlm_assets.commands.main import app


def test_a_property_that_is_not_published_yet(empty) -> None:
    """Its images and its partition are told before anything was described."""
    arguments = ["show", "p4", "--home", str(empty.settings.home)]
    told = json.loads(CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False).stdout)
    assert (told["ordinal"], told["partition"], told["published"]) == (4, "000000003-000000005", [])
    assert [(one["uri"], one["there"]) for one in told["images"]] == [("4.jpg", False)]
    assert told["not_published"]
    said = CliRunner().invoke(app, arguments, catch_exceptions=False).output
    assert "p4: ordinal 4, partition 000000003-000000005" in said
    assert "4.jpg: not there now" in said
