"""Verdicts of a review: each is kept at once, none is lost or torn, and they give each field's accuracy."""

import json
import signal
import subprocess
import sys

import pytest

from faults.file_operations import FileOperations
from vlm_assets.operate.review import (
    NAME,
    Reviewed,
    ReviewFileError,
    VerdictError,
    accuracy,
    draw_sample,
    forget_verdicts,
    keep,
    verdict_of,
    verdicts,
)

HOUSE = Reviewed("p1", "k", 1, "f", {"floors": 2, "has_pool": False, "kind": "villa"})

APPEND = """
import sys
from pathlib import Path
from vlm_assets.operate.review import Reviewed, keep, verdict_of
home, name = Path(sys.argv[1]), sys.argv[2]
for number in range(1_000_000):
    one = Reviewed(f"{name}-{number}", "k", number, "f", {"floors": 2})
    keep(home, verdict_of(one, right=["floors"], wrong=[], corrections={}))
    print(f"{name}-{number}", flush=True)
"""


def say(home, property_id="p1", right=(), wrong=(), **corrections):
    house = Reviewed(property_id, "k", 1, "f", HOUSE.description)
    keep(home, verdict_of(house, right=right, wrong=wrong, corrections=corrections))


def test_the_latest_verdict_counts_and_earlier_ones_stay(tmp_path):
    """A second thought replaces the first in every figure; the file keeps both."""
    say(tmp_path, right=["floors", "kind"])
    say(tmp_path, right=["kind"], wrong=["floors"], floors=3)
    say(tmp_path, "p2", right=["floors"])
    assert {name: (one.share, one.of) for name, one in accuracy(tmp_path).items()} == {
        "floors": (0.5, 2), "kind": (1.0, 1),
    }  # fmt: skip
    assert verdicts(tmp_path)["p1"].known == {"kind": "villa", "floors": 3}
    assert len((tmp_path / NAME).read_bytes().splitlines()) == 3


@pytest.mark.parametrize(
    ("right", "wrong", "corrections"),
    [(["garden"], [], {}), (["floors"], ["floors"], {}), (["floors"], [], {"floors": 3})],
)
def test_a_verdict_that_cannot_be_is_refused(right, wrong, corrections):
    """A field that is not there, right and wrong at once, or corrected though it is right."""
    with pytest.raises(VerdictError):
        verdict_of(HOUSE, right=right, wrong=wrong, corrections=corrections)


def test_what_two_killed_processes_were_told_is_kept_is_kept(tmp_path):
    """Two pages append at once and are killed: each verdict that was acknowledged is there, whole."""
    processes = [
        subprocess.Popen([sys.executable, "-c", APPEND, tmp_path, name], stdout=subprocess.PIPE, text=True)
        for name in ("a", "b")
    ]
    said = [[process.stdout.readline().strip() for _ in range(20)] for process in processes]
    for process, told in zip(processes, said, strict=True):
        process.send_signal(signal.SIGKILL)
        told += [line.strip() for line in process.stdout if line.endswith("\n")]
        process.wait()
    assert {one for told in said for one in told} <= verdicts(tmp_path).keys()


def test_a_torn_line_spoils_no_other(tmp_path):
    """What a power cut left of a line was not acknowledged: it is cut off, and the next one is whole."""
    say(tmp_path)
    with (tmp_path / NAME).open("ab") as file:
        file.write(b'{"property_id": "p9", "at"')
    assert verdicts(tmp_path).keys() == {"p1"}
    say(tmp_path, "p2")
    assert verdicts(tmp_path).keys() == {"p1", "p2"}
    for line in (tmp_path / NAME).read_text().splitlines():
        json.loads(line)


def test_the_name_of_the_file_is_durable_with_each_verdict(tmp_path):
    """Who made the file may have been killed before its name was durable: the next verdict makes it so."""
    (tmp_path / NAME).touch()
    with FileOperations(tmp_path).watched() as operations:
        say(tmp_path)
    done = [one.name for one in operations.log]
    assert done.index("write") < done.index("fsync") < done.index("fsync_directory")


def test_a_line_that_does_not_read_is_named(tmp_path):
    """Nothing unreadable counts as nothing: a person is told which line."""
    say(tmp_path)
    with (tmp_path / NAME).open("ab") as file:
        file.write(b"not JSON\n")
    with pytest.raises(ReviewFileError, match="line 2"):
        accuracy(tmp_path)


def test_verdicts_on_withdrawn_properties_are_removed(tmp_path):
    """Nothing that was said of a withdrawn property stays; what is said of others does."""
    say(tmp_path, "p1", right=["kind"])
    say(tmp_path, "p2", right=["kind"])
    say(tmp_path, "p1", wrong=["kind"])
    assert forget_verdicts(tmp_path, {"p1"}) == 2
    assert verdicts(tmp_path).keys() == {"p2"}
    assert b"p1" not in (tmp_path / NAME).read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_the_sample_is_drawn_of_what_is_published_and_the_same_again(dataset):
    """Ok rows of published partitions, each once; the same seed draws the same."""
    drawn = draw_sample(dataset.settings, dataset.catalog, count=50, seed=4, suspicious=False)
    ids = [one.property_id for one in drawn]
    assert len(set(ids)) == len(ids) > 3
    assert "p4" not in ids, "it could not be described"
    assert drawn == draw_sample(dataset.settings, dataset.catalog, count=50, seed=4, suspicious=False)
