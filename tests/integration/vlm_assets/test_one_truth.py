"""What the commands say of a data set agrees, on real files made by the real example model."""

import json

from typer.testing import CliRunner

from vlm_assets.cli.main import app

BOTH = ("property_descriptions", "property_embeddings")
KEYS = ("000000000-000000007", "000000008-000000015")


def told(desk, *arguments):
    """A command of the command line over this home: its exit code and what it said, as JSON."""
    done = CliRunner().invoke(app, [*arguments, "--home", str(desk.settings.home), "--json"])
    assert done.stdout, done.exception
    return done.exit_code, json.loads(done.stdout)


def test_a_recompute_that_changes_no_text_leaves_the_embeddings_valid(desk):
    """Embeddings depend on the texts that were embedded, not on the bytes of the descriptions' file."""
    for key in KEYS:
        assert desk.materialize(*BOTH, key=key).success
    before = desk.file.read_bytes()
    assert desk.materialize("property_descriptions", config={"recompute": True}).success
    assert desk.file.read_bytes() != before
    code, found = told(desk, "audit")
    assert (code, found["wrong"]) == (0, [])
    _, status = told(desk, "status")
    assert {one["state"] for one in status["partitions"]} == {"done"}
    again = desk.materialize("property_embeddings")
    verified = again.result.asset_materializations_for_node("property_embeddings")[0].metadata["verified"]
    assert "No device was needed" in verified.value
