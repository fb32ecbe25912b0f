"""The modules that a property passes, counted in a real run."""

from benchmarks.data_path import calls_of_modules
from vlm_assets.assets.stored_settings import sources_of_rows


def test_every_module_that_a_run_calls_counts_as_making_rows(tmp_path):
    """Two machines whose code differs in any of these are told apart before rows of both are mixed."""
    called = calls_of_modules(tmp_path / "home", 4).keys()
    assert {"vlm_engine/ladder.py", "vlm_durable/journal/segments.py"} <= called
    assert called <= set(sources_of_rows("property_descriptions"))
