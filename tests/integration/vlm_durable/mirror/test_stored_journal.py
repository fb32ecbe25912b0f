"""Journals in a real S3 store: any machine goes on from there, one that was cut off changes nothing more.

FAULTS_ROUNDS multiplies the puts at which a process is killed or stopped (``make test-store``).
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from faults.s3_server import Passing, S3Proxy
from tests.support.damage import flipped
from tests.support.stored_journals import GENERATION, KEY, ROUNDS, TOTAL, Machine, away, commit
from vlm_durable.journal.journal_errors import JournalLossError
from vlm_durable.journal.setting_aside import is_set_aside, move_set_aside, note_set_aside, unmoved
from vlm_durable.mirror import bucket as bucket_module
from vlm_durable.mirror import stored_journal as module
from vlm_durable.mirror.bucket import S3Folder, StoreAwayError, client
from vlm_durable.mirror.stored_journal import (
    HEAD,
    CopiesWaitError,
    Copying,
    Head,
    HeadDamagedError,
    TakenOverError,
    close_published,
    close_set_aside,
    pull_closed,
    pull_others,
    stored_generations,
)

PUTS, ORDINALS = range(1, 3 * ROUNDS + 1), range(1, 2 * ROUNDS + 1)


@pytest.fixture
def machines(tmp_path, bucket):
    return Machine(tmp_path / "a", bucket), Machine(tmp_path / "b", bucket)


@pytest.fixture
def quick(monkeypatch):
    """An outage is noticed at the first request."""
    monkeypatch.setattr(bucket_module, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(module, "_LONGEST_PAUSE", 0.05)
    client.cache_clear()


def test_another_machine_goes_on_from_the_store_alone(machines, bucket):
    """All that was copied is restored on an empty disk and verified; what is added there is restored here."""
    a, b = machines
    a.commit(0, 1, 2)
    assert b.rows() == [0, 1, 2]
    assert "3 segments of committed rows were fetched" in b.notes[0]
    b.commit(3)
    a.commit(4)
    assert a.rows() == b.rows() == [0, 1, 2, 3, 4]
    assert (a.aside(), b.aside()) == ([], [])


def test_a_machine_that_was_taken_over_commits_nothing_more_to_the_store(machines):
    """Its run ends with one sentence, its rows stay on its disk, and its next start merges both."""
    a, b = machines
    with a.at_work() as (journal, copying):
        commit(journal, 0)
        copying.flush()
        b.commit(1)
        commit(journal, 2)
        with pytest.raises(TakenOverError, match=r"was taken over by .*/b \(epoch 2\)"):
            copying.flush()
        with pytest.raises(TakenOverError):
            copying.check()
    assert b.rows() == [0, 1]
    assert a.rows() == [0, 1, 2]
    assert "have both committed rows" in " ".join(a.notes)


def test_a_segment_that_was_damaged_here_is_not_copied(machines, bucket):
    """The store has no bytes but those that were committed, and no head that lists others."""
    a, _ = machines
    with a.journal() as journal:
        commit(journal, 0)
    (segment,) = a.folder.glob("segment-*")
    segment.write_bytes(b"damaged")
    with pytest.raises(OSError, match="is not what was committed: it was not copied"):
        a.stored.copy()
    assert list(bucket.names(".journal/")) == []


def test_a_machine_with_nothing_to_copy_learns_that_it_was_taken_over(machines):
    """Before it publishes: it asks the store, also where all of its rows are there."""
    a, b = machines
    with a.at_work() as (journal, copying):
        commit(journal, 0)
        copying.flush()
        b.commit(1)
        with pytest.raises(TakenOverError, match="was taken over by"):
            copying.flush()


def test_rows_that_both_machines_computed_are_kept_once_and_put_aside(machines):
    """Of two histories of equal or higher epoch the store's counts; the other one's rows are not deleted."""
    a, b = machines
    with a.at_work() as (journal, copying):
        b.commit(0, text="theirs")
        commit(journal, 0, text="ours")
        with pytest.raises(TakenOverError):
            copying.flush()
    with a.at_work() as (journal, _):
        texts = [text for batch in journal.read_ordered() for text in batch["text"].to_pylist()]
    assert texts == ["theirs"]
    assert len(a.aside()) == 1


def test_two_takeovers_of_the_same_state_have_one_winner(machines):
    """Their manifests are alike to the byte, so the store would take either for the other one's success."""
    a, b = machines
    a.commit(0)
    b.rows()
    mine, theirs = a.stored, b.stored
    mine.pull(), theirs.pull()
    theirs.claim(9)
    with pytest.raises(TakenOverError):
        mine.claim(9)


@pytest.mark.usefixtures("quick")
def test_an_outage_of_a_day_holds_up_no_work_until_the_queue_is_full(machines, s3_proxy):
    """Commits go on, the lag is told, nothing is lost; above the limit the run ends as interrupted."""
    a, b = machines
    now = [0.0]
    told = []
    with a.at_work(wall=lambda: now[0], most_bytes=20_000) as (journal, copying):
        copying.on_lag = told.append
        commit(journal, 0)
        copying.flush()
        s3_proxy.breaks(away)
        for n in range(1, 5):
            now[0] += 6 * 3600.0
            commit(journal, n)
            copying.check()
        with pytest.raises(StoreAwayError):
            copying.flush()
        assert (copying.lag().segments, now[0] - copying.lag().since) == (4, 18 * 3600.0)
        copying._most_bytes = copying.lag().bytes - 1
        with pytest.raises(CopiesWaitError, match="MiB may"):
            copying.check()
        s3_proxy.heal()
        copying.flush()
        assert copying.lag().segments == 0
    assert max(lag.segments for lag in told) == 4
    assert b.rows() == [0, 1, 2, 3, 4]


@pytest.mark.usefixtures("quick")
def test_what_a_dead_run_could_not_copy_is_copied_by_the_next_one_here(machines, s3_proxy):
    """The queue is what is on disk and not in the store: it outlives the process."""
    a, b = machines
    with a.at_work() as (journal, _):
        s3_proxy.breaks(away)
        commit(journal, 0, 1, 2)
    s3_proxy.heal()
    with a.at_work() as (_, copying):
        copying.flush()
    assert b.rows() == [0, 1, 2]


@pytest.mark.parametrize(
    ("status", "code"), [(400, "ExpiredToken"), (500, "InternalError"), (403, "AccessDenied")]
)
@pytest.mark.usefixtures("quick")
def test_whatever_the_store_answers_it_is_tried_again(machines, s3_proxy, status, code):
    """Expired credentials, errors and refusals are an outage of copying, never the end of the work."""
    a, b = machines
    with a.at_work() as (journal, copying):
        s3_proxy.breaks(lambda passing: passing.command == "PUT" and passing.answer(status, code))
        commit(journal, 0)
        with pytest.raises(bucket_module.StoreError):
            copying.flush()
        copying.check()
        s3_proxy.heal()
        copying.flush()
    assert b.rows() == [0]


def test_puts_that_are_cut_in_the_middle_of_their_body_are_done_again(machines, s3_proxy):
    """Segment and head arrive whole or not at all."""
    a, b = machines
    left = ["segment-", HEAD]

    def breaks(passing):
        if passing.command == "PUT" and left and left[0] in passing.path:
            left.pop(0)
            return passing.cut()
        return False

    with a.at_work() as (journal, copying):
        s3_proxy.breaks(breaks)
        commit(journal, 0)
        copying.flush()
    assert not left
    assert b.rows() == [0]


def test_a_slow_store_holds_up_no_work(machines, s3_proxy):
    """While one put takes its time, rows are committed; all are copied when it is done."""
    a, b = machines
    begun, go_on = threading.Event(), threading.Event()

    def slow(passing):
        if passing.command == "PUT" and "segment-" in passing.path:
            begun.set()
            assert go_on.wait(30)
        return False

    with a.at_work() as (journal, copying):
        s3_proxy.breaks(slow)
        commit(journal, 0)
        assert begun.wait(30)
        commit(journal, 1, 2)
        copying.check()
        assert copying.lag().segments == 3
        go_on.set()
        copying.flush()
    assert b.rows() == [0, 1, 2]


@pytest.mark.parametrize("says_checksum", [True, False])
def test_wrong_bytes_of_a_segment_are_named_and_never_taken(machines, s3_proxy, says_checksum):
    """A store that hands out other bytes than were put: nothing is begun over them, and nothing is lost."""
    a, b = machines
    a.commit(0, 1)

    def wrong(passing):
        if passing.command != "GET" or "segment-" not in passing.path:
            return False
        answer = passing.forward()
        if not says_checksum:
            for name in [name for name in answer.headers if "checksum" in name]:
                del answer.headers[name]
        return passing.pass_on(answer, flipped(answer.content, 0))

    s3_proxy.breaks(wrong)
    with pytest.raises(JournalLossError), b.at_work():
        pass
    assert "2 segments" in b.notes[-1] and "cannot be fetched" in b.notes[-1]
    s3_proxy.heal()
    assert b.rows() == [0, 1]
    assert b.aside() == []


@pytest.mark.usefixtures("quick")
def test_a_head_whose_answer_was_lost_is_known_as_this_machines_own(machines, s3_proxy):
    """It arrived, and the store went away: the next head follows it, and nobody has taken over."""
    a, b = machines

    def lose(passing):
        if passing.command == "PUT" and passing.path.endswith(HEAD):
            passing.forward()
            s3_proxy.breaks(away)
            return passing.answer(503, "SlowDown")
        return False

    with a.at_work() as (journal, copying):
        s3_proxy.breaks(lose)
        commit(journal, 0)
        with pytest.raises(StoreAwayError):
            copying.flush()
        commit(journal, 1)
        s3_proxy.heal()
        copying.flush()
    assert b.rows() == [0, 1]


@pytest.mark.usefixtures("quick")
def test_an_emptied_bucket_is_named_and_filled_again(machines, bucket, s3_server):
    """A lifecycle rule takes nothing that this machine has, whether a run is under way or not."""
    a, b = machines
    with a.at_work() as (journal, copying):
        commit(journal, 0, 1)
        copying.flush()
        empty(bucket)
        commit(journal, 2)
        with contextlib.suppress(StoreAwayError):
            copying.flush()
        copying.flush()
    assert b.rows() == [0, 1, 2]
    empty(bucket)
    a.commit(3)
    assert "has nothing of the 3 rows" in a.notes[0]
    assert b.rows() == [0, 1, 2, 3]


def test_a_stale_list_loses_and_doubles_nothing(machines, s3_proxy):
    """No list decides what counts: a store may list what is gone, and not yet what is there."""
    a, b = machines
    a.commit(0)
    known = {}

    def stale(passing):
        if "list-type=2" not in passing.path:
            return False
        answer = known.setdefault(passing.path, None) or passing.forward()
        known[passing.path] = answer
        return passing.pass_on(answer)

    s3_proxy.breaks(stale)
    a.commit(1)
    b.commit(2, 3)
    a.commit(4)
    assert a.rows() == b.rows() == [0, 1, 2, 3, 4]
    assert any("journal" in path for path in known)
    assert (a.aside(), b.aside()) == ([], [])


def test_a_segment_that_is_gone_is_named_and_put_back_by_who_has_it(machines, bucket):
    """A machine without it refuses to begin over the loss; one that has it puts it back."""
    a, b = machines
    a.commit(0, 1)
    gone = sorted(path.name for path in a.folder.glob("segment-*"))[0]
    bucket.delete(f".journal/property_descriptions/{KEY}/{GENERATION}/{gone}")
    with pytest.raises(JournalLossError), b.at_work():
        pass
    assert "lifecycle rule" in b.notes[-1]
    a.commit(2)
    assert b.rows() == [0, 1, 2]


def test_a_damaged_segment_here_is_fetched_again(machines):
    """The store's copy restores what this disk has lost or changed."""
    a, _ = machines
    a.commit(0, 1, 2)
    first, second, _ = sorted(a.folder.glob("segment-*"))
    first.write_bytes(b"rot")
    second.unlink()
    assert a.rows() == [0, 1, 2]
    assert len(a.aside()) == 1


def test_rows_that_were_lost_here_and_never_copied_are_not_forgotten(machines, s3_proxy):
    """The high-water mark of this machine is compared with what the store can give back."""
    a, _ = machines
    a.commit(0)
    with a.journal() as journal:
        commit(journal, 1)
    for path in a.folder.iterdir():
        path.unlink()
    with pytest.raises(JournalLossError, match="1 row can be restored, 2 were committed"), a.at_work():
        pass


def test_a_loss_that_was_accepted_elsewhere_hides_no_other_one(machines, bucket):
    """What is gone here and was never copied is named, though a person gave up what the store had lost."""
    a, b = machines
    a.commit(0)
    (gone,) = (path.name for path in a.folder.glob("segment-*"))
    with a.journal() as journal:
        commit(journal, 1)
    bucket.delete(f".journal/property_descriptions/{KEY}/{GENERATION}/{gone}")
    stored = b.stored
    stored.pull()
    with Copying(stored, most_bytes=1 << 20) as copying, b.journal(accept_loss="a person") as journal:
        copying.begin(journal)
        copying.flush()
    for path in a.folder.glob("segment-*"):
        path.unlink()
    with pytest.raises(JournalLossError), a.at_work():
        pass


NAME = f".journal/property_descriptions/{KEY}/{GENERATION}/"


def damage_head(bucket, content=b"rot"):
    bucket.put(NAME + HEAD, content, over=bucket.head(NAME + HEAD))


@pytest.mark.parametrize("part", [0.0, 0.5, 1.5])
def test_a_damaged_head_is_replaced_by_one_that_lists_the_segments(machines, bucket, part):
    """Empty, cut short or with bytes too many: a machine with an empty disk goes on from what is there."""
    a, b = machines
    a.commit(0, 1)
    a.commit(2)
    whole = bucket.get(NAME + HEAD, most=1 << 20)
    rotten = (whole * 2)[: int(len(whole) * part)]
    damage_head(bucket, rotten)
    assert b.rows() == [0, 1, 2]
    assert "cannot be read. The work goes on from the 3 segments" in b.notes[0]
    assert b.stored.read_manifest().epoch > Head.from_bytes(whole, "").epoch
    kept = [path.read_bytes() for path in b.paths.quarantine.glob(f"*{HEAD}*")]
    assert kept == ([rotten] if rotten else [])
    b.commit(3)
    assert a.rows() == [0, 1, 2, 3]
    assert (a.aside(), b.aside()) == ([], [])


def test_a_head_that_does_not_arrive_as_it_is_kept_is_damaged(machines, s3_proxy):
    """A checksum that fails in the client says what other bytes say."""
    a, b = machines
    a.commit(0)

    def wrong(passing):
        if passing.command != "GET" or not passing.path.endswith(HEAD):
            return False
        answer = passing.forward()
        return passing.pass_on(answer, answer.content[:-1] + b"x")

    s3_proxy.breaks(wrong)
    with pytest.raises(HeadDamagedError):
        b.stored.read_manifest()


def test_a_head_that_was_removed_is_replaced_by_one_that_lists_the_segments(machines, bucket):
    """Gone never counts as empty either; and where a segment is gone too, nothing is begun over it."""
    a, b = machines
    a.commit(0, 1)
    a.commit(2)
    bucket.delete(NAME + HEAD)
    (first, *_) = sorted(name for name, _ in bucket.names(NAME) if "segment" in name)
    segment = bucket.get(first, most=1 << 20)
    bucket.delete(first)
    with pytest.raises(HeadDamagedError, match="segments are neither there nor here"):
        b.stored.pull()
    bucket.put(first, segment, over=None)
    assert b.rows() == [0, 1, 2]
    b.commit(3)
    assert a.rows() == [0, 1, 2, 3]
    assert (a.aside(), b.aside()) == ([], [])


@pytest.mark.parametrize("lose", [damage_head, lambda bucket: bucket.delete(NAME + HEAD)])
def test_the_first_head_after_a_damaged_one_hides_no_segment(machines, bucket, tmp_path, lose):
    """Killed right after the takeover, the next machine still finds every row."""
    a, b = machines
    a.commit(0, 1)
    lose(bucket)
    stored = b.stored
    stored.pull()
    with b.journal() as journal:
        stored.claim(journal.recovery.epoch)
    assert Machine(tmp_path / "c", bucket).rows() == [0, 1]


@pytest.mark.parametrize("gone", ["one", "all"])
def test_a_damaged_head_is_refused_where_segments_may_be_missing(machines, bucket, gone):
    """Unreadable never counts as empty. The machine that has the rows goes on, and puts them back."""
    a, b = machines
    a.commit(0, 1, 2)
    names = sorted(name for name, _ in bucket.names(NAME) if "segment" in name)
    for name in names[:1] if gone == "one" else names:
        bucket.delete(name)
    damage_head(bucket)
    with pytest.raises(HeadDamagedError, match=f"Nothing was changed.*repair --accept-loss {KEY}"):
        b.stored.pull()
    assert bucket.get(NAME + HEAD, most=100) == b"rot"
    assert not b.folder.exists()
    a.commit(3)
    assert b.rows() == [0, 1, 2, 3]


def test_a_damaged_head_over_a_segment_that_cannot_be_fetched_is_refused(machines, bucket):
    """A segment counts only where its bytes have the digest in its name; a person may go on without it."""
    a, b = machines
    a.commit(0, 1)
    name = min(name for name, _ in bucket.names(NAME) if "segment" in name)
    bucket.put(name, b"rot", over=bucket.head(name))
    damage_head(bucket)
    with pytest.raises(HeadDamagedError, match="1 segment cannot be fetched"):
        b.stored.pull()
    stored = b.stored
    stored.pull(accept_missing=True)
    with Copying(stored, most_bytes=1 << 20) as copying, b.journal(accept_loss="a person") as journal:
        copying.begin(journal)
    assert b.rows() == [1]


def test_a_machine_at_work_puts_nothing_over_a_head_that_it_cannot_read(machines, bucket):
    """It may be that of a machine that took over. The rows stay here, and the next start merges all."""
    a, b = machines
    with a.at_work() as (journal, copying):
        commit(journal, 0)
        copying.flush()
        b.commit(1)
        damage_head(bucket)
        commit(journal, 2)
        for _ in range(2):
            with pytest.raises(HeadDamagedError):
                copying.flush()
    assert bucket.get(NAME + HEAD, most=100) == b"rot"
    assert a.rows() == [0, 1, 2]
    assert b.rows() == [0, 1, 2]


def test_a_closed_generation_is_not_begun_again_over_a_damaged_head(machines, bucket):
    """A machine that knows it as published closes it again; one that does not know refuses."""
    a, b = machines
    with a.at_work() as (journal, copying):
        commit(journal, *range(TOTAL))
        copying.flush()
        journal.retire()
        copying.retire()
    damage_head(bucket)
    pull_closed(b.paths, bucket)
    assert list(pull_others(b.paths, "another", bucket)) != []
    with pytest.raises(HeadDamagedError, match="no segment"):
        b.stored.pull()
    assert not b.folder.exists()
    close_published(a.paths, GENERATION, bucket)
    pull_closed(b.paths, bucket)
    with pytest.raises(JournalLossError, match="retired"), b.at_work():
        pass


def test_a_retired_journal_leaves_no_segment_and_is_not_begun_again(machines, bucket):
    """After publication the store keeps that it was closed, and every machine knows."""
    a, b = machines
    with a.at_work() as (journal, copying):
        commit(journal, *range(TOTAL))
        copying.flush()
        journal.retire()
        copying.retire()
    names = [name for name, _ in bucket.names(".journal/")]
    assert [name.rpartition("/")[2] for name in names] == [HEAD]
    assert stored_generations(b.paths, bucket) == [GENERATION]
    pull_closed(b.paths, bucket)
    with pytest.raises(JournalLossError, match="retired"), b.at_work():
        pass


def test_a_generation_that_was_set_aside_comes_back_from_nowhere(machines, bucket):
    """Neither the store nor a machine that has a copy of its rows brings them back; both keep them aside."""
    a, b = machines
    a.commit(0, 1)
    b.commit(2)
    a.commit(3)
    note_set_aside(a.paths, GENERATION, "wrong answers")
    assert list(unmoved(a.paths)) == [GENERATION]
    close_set_aside(a.paths, GENERATION, bucket)
    aside = move_set_aside(a.paths, GENERATION)
    assert len(list(aside.glob("segment-*"))) == 4
    assert list(unmoved(a.paths)) == []
    assert [name.rpartition("/")[2] for name, _ in bucket.names(".journal/")] == [HEAD]
    for machine in (a, b):
        pull_closed(machine.paths, bucket)
        assert is_set_aside(machine.paths, GENERATION)
        list(pull_others(machine.paths, "another", bucket))
    assert not a.folder.exists()
    assert list(unmoved(b.paths)) == [GENERATION], "its copy is moved by its next start"
    move_set_aside(b.paths, GENERATION)
    assert not b.folder.exists()
    list(pull_others(b.paths, "another", bucket))
    assert not b.folder.exists()


PROGRAM = """
import sys
from pathlib import Path
from tests.support.stored_journals import Machine, commit
from vlm_durable.mirror.bucket import S3Folder

machine = Machine(Path(sys.argv[1]), S3Folder.parse(sys.argv[2]))
with machine.at_work() as (journal, copying):
    for n in map(int, sys.argv[3:]):
        commit(journal, n)
        print(n, flush=True)
        copying.flush()
        print("copied", n, flush=True)
"""


@dataclass
class Process:
    """A machine's process, to which something happens at one of its puts. at: counted from 1."""

    machine: Machine
    at: int
    then: Callable[["Process", Passing], None]
    puts: int = 0
    running: subprocess.Popen | None = None

    def run(self, proxy, *ordinals) -> tuple[str, str]:
        """Commit and copy these; returns what was said."""
        proxy.breaks(self.breaks)
        self.running = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, self.machine.root, str(self.machine.store), *map(str, ordinals)],
            env=os.environ | proxy.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self.running.communicate(timeout=60)

    def breaks(self, passing):
        if passing.command == "PUT" and "probe" not in passing.path:
            self.puts += 1
            if self.puts == self.at:
                self.then(self, passing)
        return False


def pair(tmp_path, bucket, number):
    """Two machines over a folder of their own, in which the first one has a row."""
    store = S3Folder(bucket.bucket, f"{bucket.prefix}{number}/")
    a, b = Machine(tmp_path / f"a{number}", store), Machine(tmp_path / f"b{number}", store)
    a.commit(0)
    return a, b


@pytest.mark.parametrize(("at", "arrives"), [(at, at % 3 != 0) for at in PUTS])
def test_killed_at_any_put_nothing_that_was_copied_is_lost_or_doubled(
    tmp_path, bucket, s3_server, at, arrives
):
    """kill -9 at takeover, segment or head, before and after it arrives; another machine goes on."""
    a, b = pair(tmp_path, bucket, at)

    def kill(process, passing):
        if arrives:
            passing.forward()
        process.running.kill()

    process = Process(a, at, kill)
    with S3Proxy(s3_server) as proxy:
        said, _ = process.run(proxy, *ORDINALS)
    assert process.running.returncode == -signal.SIGKILL
    copied = {0, *(int(line.split()[1]) for line in said.splitlines() if "copied" in line)}
    committed = {0, *(int(line) for line in said.splitlines() if "copied" not in line)}
    there = b.rows()
    assert len(there) == len(set(there))
    assert copied <= set(there)
    b.commit(TOTAL - 1)
    found = a.rows()
    assert len(found) == len(set(found))
    assert committed | {TOTAL - 1} <= set(found)


@pytest.mark.parametrize("at", PUTS)
def test_a_process_that_was_stopped_and_taken_over_changes_nothing_when_it_goes_on(
    tmp_path, bucket, s3_server, at
):
    """At whatever put it is cut off, what the other one has put since stays."""
    a, b = pair(tmp_path, bucket, at)

    def stop(process, _):
        process.running.send_signal(signal.SIGSTOP)
        b.commit(TOTAL - 1)
        process.running.send_signal(signal.SIGCONT)

    process = Process(a, at, stop)
    with S3Proxy(s3_server) as proxy:
        told, said = process.run(proxy, *ORDINALS)
    assert process.running.returncode == 1
    assert "TakenOverError: Interrupted: partition" in said
    copied = [0, *(int(line.split()[1]) for line in told.splitlines() if "copied" in line)]
    assert b.rows() == [*copied, TOTAL - 1]
    assert a.rows() in ([*copied, TOTAL - 1], [*copied, len(copied), TOTAL - 1])


def empty(bucket):
    for name, _ in list(bucket.names()):
        bucket.delete(name)
