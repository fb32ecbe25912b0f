"""time_spent.py: where a partition's time went, so that what starves the device can be seen."""

from resources.engine.feeding import TimeSpent
from vlm_assets.assets.time_spent import WorkTime

SPENT = TimeSpent(
    model=60.0,
    validating=1.0,
    waiting=30.0,
    reading=50.0,
    decoding=300.0,
    preparing=90.0,
)
WORK = WorkTime(
    SPENT, {"processor": 4.0, "prefill": 15.0, "generation": 38.0}, rows=2.0, commit=3.0, total=100.0
)


def shares(table: str) -> dict[str, str]:
    return {
        cells[1].strip(): cells[3].strip() for line in table.splitlines()[2:] if (cells := line.split("|"))
    }


def test_each_number_can_be_plotted():
    """What Dagster plots over partitions are numbers, under the names that people know."""
    numbers = {name: value.value for name, value in WORK.metadata().items()}
    numbers.pop("where the time went")
    assert numbers == {
        "seconds in model": 60.0,
        "seconds in prefill": 15.0,
        "seconds in generation": 38.0,
        "seconds validating": 1.0,
        "seconds building rows": 2.0,
        "seconds waiting for images": 30.0,
        "seconds waiting for commit": 3.0,
        "seconds reading images": 50.0,
        "seconds decoding images": 300.0,
        "seconds in processor": 94.0,
    }


def test_the_shares_are_those_of_the_whole():
    """The device's time adds up to the whole, and what goes on beside it is told apart."""
    found = shares(WORK.table())
    assert found == {
        "images and prompt (prefill)": "15.0%",
        "answers (generation)": "38.0%",
        "processor, not ahead": "4.0%",
        "validation": "1.0%",
        "model, else": "2.0%",
        "waiting for images": "30.0%",
        "rows": "2.0%",
        "waiting for commit": "3.0%",
        "else": "5.0%",
        "*beside it:* reading images": "50.0%",
        "*beside it:* decoding images": "300.0%",
        "*beside it:* processor": "90.0%",
    }


def test_an_engine_that_tells_nothing_apart():
    """A model server is one line, whatever was validated beside it; nothing at all is no table of errors."""
    found = shares(WorkTime(SPENT, {}, rows=2.0, commit=3.0, total=100.0).table())
    assert found["model"] == "60.0%"
    assert "validation" not in found
    assert shares(WorkTime().table()) == {}
