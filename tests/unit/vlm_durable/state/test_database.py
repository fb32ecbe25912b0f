"""The control state survives kills, damage and deletion, and never takes what it cannot read for empty."""

import contextlib
import errno
import multiprocessing
import random
import signal
import sqlite3
import struct
import subprocess
import sys
import time
from unittest.mock import Mock

import pytest
import sqlalchemy as sa

from tests.support.control_states import ROUNDS, THREADS, count_by_threads, with_version
from tests.support.damage import flip_bit
from tests.support.shares import share_of
from vlm_durable.state import sqlite_file, tables
from vlm_durable.state.database import COPY_SECONDS, ControlState, Copies, open_state
from vlm_durable.state.sqlite_file import ControlStateError, refuse_network_file_system


def note_cancel(state, partition, *, copy=True):
    state.write(
        lambda connection: connection.execute(
            tables.cancels.insert().values(partition=partition, run_id="run", at=1.5)
        ),
        copy=copy,
    )


def cancelled(state):
    return state.read(lambda connection: set(connection.scalars(sa.select(tables.cancels.c.partition))))


def paused(state):
    return state.read(lambda connection: connection.execute(sa.select(tables.pause.c.reason)).all())


def close(state):
    """Leave the database as a machine that lost power does: files alone, no connection open."""
    state._database._file._engine.dispose()


def state_with(directory, partitions):
    """A state in which these are cancelled, and no connection open."""
    state = ControlState(directory)
    for partition in partitions:
        note_cancel(state, partition)
    close(state)
    return state


@pytest.fixture
def directory(tmp_path):
    return tmp_path / ".state"


@pytest.fixture
def state(directory):
    return ControlState(directory)


def test_reading_creates_nothing(state, directory):
    """A question about a home that does not exist, or is not ours to write in, leaves no trace."""
    assert cancelled(state) == set()
    assert state.read_beats(lambda connection: connection.execute(sa.select(tables.workers)).all()) == []
    assert not directory.exists()


def test_what_is_written_is_read_by_others(state, directory):
    """Two processes' objects see each other's changes at once."""
    note_cancel(state, "a")
    other = ControlState(directory)
    assert cancelled(other) == {"a"}
    note_cancel(other, "b")
    assert cancelled(state) == {"a", "b"}
    assert open_state(directory) is open_state(directory)


def test_a_change_that_must_not_be_lost_is_copied_at_once_and_two_copies_are_kept(state, directory):
    """The newest copy has the last pause, cancel or device left out."""
    for name in "abc":
        note_cancel(state, name)
    copies = sorted((directory / "copies").iterdir())
    assert len(copies) == 2
    with contextlib.closing(sqlite3.connect(copies[-1])) as connection:
        assert {row[0] for row in connection.execute("SELECT partition FROM cancels")} == {"a", "b", "c"}


def test_other_changes_are_copied_within_the_hour(directory):
    """A damaged database costs an hour of attempts at most, also by a clock that is simulated."""
    now = [1_700_000_000.0]
    state = ControlState(directory, clock=lambda: now[0])
    note_cancel(state, "a", copy=False)
    note_cancel(state, "b", copy=False)
    assert len(list((directory / "copies").iterdir())) == 1, "only the beginning is copied"
    now[0] += COPY_SECONDS + 60.0
    state.copy_if_due()
    close(state)
    (directory / "state.db").unlink()
    assert cancelled(state) == {"a", "b"}


def damage_delete(path):
    path.unlink()


def damage_empty(path):
    path.write_bytes(b"")


def damage_truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage_header(path):
    flip_bit(path, 3)


def damage_noise(path):
    path.write_bytes(random.Random(1).randbytes(20_000))


@pytest.mark.parametrize(
    "damage",
    [damage_delete, damage_empty, damage_truncate, damage_header, damage_noise],
    ids=lambda d: d.__name__,
)
def test_a_damaged_or_deleted_database_is_restored_and_says_so_once(directory, damage):
    """Every cancel is there again, the damaged file is kept, and one restoration stands in the database."""
    state_with(directory, "abc")
    damage(directory / "state.db")
    for _ in range(2):
        state = ControlState(directory)
        assert cancelled(state) == {"a", "b", "c"}
        assert len(state.restorations()) == 1
        assert "restored from the copy" in state.restorations()[0].sentence()
    assert paused(state) == []
    if damage is not damage_delete:
        assert list((directory / "damaged").iterdir())


_RUN_AND_TIME = b"run" + struct.pack(">d", 1.5)


def cancels(state):
    return state.read(lambda connection: connection.execute(sa.select(tables.cancels)).all())


def test_every_flipped_byte_of_a_row_is_noticed(directory):
    """A cancel of one partition is never read as the cancel of another: each cell stands in an index too."""
    state = ControlState(directory)
    note_cancel(state, "000000000-000000999")
    written = cancels(state)
    close(state)
    whole = (directory / "state.db").read_bytes()
    row = b"000000000-000000999" + _RUN_AND_TIME
    assert whole.count(row) == 2
    for at in (whole.index(row), whole.rindex(row)):
        for offset in range(0, len(row), 3):
            flip_bit(directory / "state.db", at + offset)
            state = ControlState(directory)
            assert cancels(state) == written
            assert state.restorations(), f"byte {offset} was read as it is"
            close(state)
            (directory / "state.db").write_bytes(whole)


def test_damage_under_a_process_that_uses_the_database_costs_none_of_its_changes(directory):
    """The change would be lost with the damaged database if damage were seen only when it is copied."""
    state = state_with(directory, "ab")
    flip_bit(directory / "state.db", (directory / "state.db").read_bytes().index(_RUN_AND_TIME))
    note_cancel(state, "c")
    assert cancelled(ControlState(directory)) == {"a", "b", "c"}
    assert len(state.restorations()) == 1


def test_no_copy_is_made_of_a_damaged_database(directory):
    """Else two copies later nothing whole is left."""
    now = [time.time()]
    state = ControlState(directory, clock=lambda: now[0])
    note_cancel(state, "a")
    note_cancel(state, "b")
    close(state)
    flip_bit(directory / "state.db", (directory / "state.db").read_bytes().index(_RUN_AND_TIME))
    now[0] += COPY_SECONDS + 60.0
    state.copy_if_due()
    assert cancelled(state) == {"a", "b"}
    assert len(state.restorations()) == 1


def test_a_database_without_its_last_changes_is_noticed(directory):
    """A log that a failing disk cut off would be read as an older state; the copy knows more and is taken."""
    state = state_with(directory, "a")
    older = (directory / "state.db").read_bytes()
    note_cancel(state, "b")
    close(state)
    (directory / "state.db").write_bytes(older)
    state = ControlState(directory)
    assert cancelled(state) == {"a", "b"}
    assert "lost its last changes" in state.restorations()[0].why


def test_without_a_good_copy_everything_is_paused(directory):
    """Unreadable is never empty: what a person cancelled does not start by itself."""
    state = state_with(directory, "ab")
    (directory / "state.db").unlink()
    for copy in (directory / "copies").iterdir():
        flip_bit(copy, 5000)
    state = ControlState(directory)
    assert cancelled(state) == set()
    assert len(paused(state)) == 1
    assert "resume" in state.restorations()[0].sentence()


@pytest.mark.parametrize("first_on_a_full_disk", [False, True])
def test_with_only_the_older_copy_what_it_has_is_taken_and_everything_is_paused(
    directory, monkeypatch, first_on_a_full_disk
):
    """The newest copy may have held a cancel: the older one does not say that there is none."""
    state_with(directory, "ab")
    damage_noise(directory / "state.db")
    flip_bit(sorted((directory / "copies").iterdir())[-1], 5000)
    if first_on_a_full_disk:
        with monkeypatch.context() as full, pytest.raises(ControlStateError):
            full.setattr(sqlite_file, "publish_replacing", refuse_full_disk)
            cancelled(ControlState(directory))
    state = ControlState(directory)
    assert cancelled(state) == {"a"}
    assert len(paused(state)) == 1


def refuse_full_disk(*paths):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_database_that_cannot_be_replaced_says_why_in_one_line(directory, monkeypatch):
    """SQLite's own words, without the statement and the address that SQLAlchemy adds."""
    state_with(directory, "ab")
    (directory / "state.db").unlink()
    full = sa.exc.OperationalError("COMMIT", {}, sqlite3.OperationalError("database or disk is full"))
    monkeypatch.setattr(sqlite_file, "publish_replacing", Mock(side_effect=full))
    with pytest.raises(ControlStateError, match=r"could not be replaced \(database or disk is full\)\."):
        cancelled(ControlState(directory))


def test_a_copy_that_is_due_and_fails_fails_no_change(state, directory, monkeypatch):
    """The change is committed: whoever made it must not make it again because a folder cannot be read."""
    note_cancel(state, "a")
    monkeypatch.setattr(Copies, "listed", refuse_full_disk)
    note_cancel(state, "b", copy=False)
    assert cancelled(state) == {"a", "b"}


def test_a_database_deleted_in_use_is_restored_and_nothing_goes_to_the_deleted_one(directory):
    """An open connection to a file that is gone would take changes that nobody else ever sees."""
    mine, other = ControlState(directory), ControlState(directory)
    note_cancel(mine, "a")
    assert cancelled(other) == {"a"}
    for path in directory.glob("state.db*"):
        path.unlink()
    note_cancel(other, "b")
    assert cancelled(mine) == {"a", "b"}
    # The old file's last connection is closed here: it must not take the new file's log with it.
    note_cancel(mine, "c")
    assert cancelled(ControlState(directory)) == {"a", "b", "c"}
    assert len(mine.restorations()) == 1


def test_the_log_of_a_lost_database_is_no_part_of_the_restored_one(directory):
    """A killed process leaves its log: its pages would replace those of the copy, and hide the loss."""
    state = state_with(directory, "a")
    note_cancel(state, "b", copy=False)
    log = (directory / "state.db-wal").read_bytes()
    close(state)
    (directory / "state.db").unlink()
    (directory / "state.db-wal").write_bytes(log)
    state = ControlState(directory)
    assert cancelled(state) == {"a"}
    assert len(state.restorations()) == 1
    assert [path.read_bytes() for path in (directory / "damaged").iterdir()] == [log]


@pytest.mark.parametrize(
    ("version", "sentence"), [(99, "newer version"), (tables.VERSION - 1, "Nothing was changed.* begin anew")]
)
def test_a_schema_of_another_version_is_refused(directory, version, sentence):
    """A newer one has what this program does not know; of an older one no flipped bit can be told."""
    state = ControlState(directory)
    note_cancel(state, "a")
    state.write(with_version(version))
    with pytest.raises(ControlStateError, match=sentence):
        cancelled(ControlState(directory))
    for name in ("state.db", "state.db-wal", "state.db-shm", "copies"):
        with contextlib.suppress(FileNotFoundError):
            (directory / name).rename(directory.parent / name)
    assert cancelled(ControlState(directory)) == set(), "as the sentence says"


def test_a_state_on_a_disk_that_is_not_mounted_is_an_error(directory):
    """It reads as empty nowhere: everything that a person stopped would start by itself."""
    directory.symlink_to(directory.with_name("disk"))
    state = ControlState(directory)
    for use in (cancelled, lambda state: note_cancel(state, "a")):
        with pytest.raises(ControlStateError, match="Mount its disk"):
            use(state)
    directory.with_name("disk").mkdir()
    note_cancel(state, "a")
    assert cancelled(ControlState(directory)) == {"a"}


def test_heartbeats_that_do_not_read_are_begun_anew(directory):
    """They say only what is true now."""
    state = ControlState(directory)
    beat = tables.workers.insert().values(name="x", record={"at": 1.0})
    state.beat(lambda connection: connection.execute(beat))
    state._database._liveness._engine.dispose()
    damage_noise(directory / "liveness.db")
    state = ControlState(directory)
    state.beat(lambda connection: connection.execute(beat))
    assert len(state.read_beats(lambda connection: connection.execute(sa.select(tables.workers)).all())) == 1
    assert state.restorations() == []


def test_a_failed_transaction_changes_nothing(state):
    """A tick that dies half way has noted nothing."""
    note_cancel(state, "a")

    def fail(connection):
        connection.execute(tables.cancels.delete())
        raise RuntimeError("in between")

    with pytest.raises(RuntimeError):
        state.write(fail)
    assert cancelled(state) == {"a"}


def test_a_forked_child_uses_connections_of_its_own(state):
    """A connection shared over a fork corrupts an SQLite database."""
    note_cancel(state, "a")
    child = multiprocessing.get_context("fork").Process(target=note_cancel, args=(state, "child"))
    child.start()
    child.join()
    assert child.exitcode == 0
    note_cancel(state, "b")
    assert cancelled(state) == {"a", "child", "b"}


def test_no_change_of_many_processes_is_lost(directory):
    """Schedule, button, runs and commands count on the same rows at once."""
    processes = [subprocess.Popen([sys.executable, "-c", _COUNT, str(directory)]) for _ in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    counted = ControlState(directory).read(
        lambda connection: connection.execute(sa.select(tables.attempts.c.launches)).scalar()
    )
    assert counted == 4 * 25


_COUNT = """
import sys
from pathlib import Path
from vlm_durable.state import tables
from vlm_durable.state.database import ControlState
state = ControlState(Path(sys.argv[1]))
row = dict(partition="p", launches=0, attempts=0, interruptions=0, rows=0, not_before=0.0, given_up=False,
           alerted=False, why="")
def count(connection):
    more = tables.attempts.update().values(launches=tables.attempts.c.launches + 1)
    if connection.execute(more).rowcount == 0:
        connection.execute(tables.attempts.insert().values({**row, "launches": 1}))
for _ in range(25):
    state.write(count)
"""


_NOTE_UNTIL_KILLED = """
import sys
from pathlib import Path
import itertools
from vlm_durable.state import tables
from vlm_durable.state.database import ControlState
state = ControlState(Path(sys.argv[1]))
for number in itertools.count(int(sys.argv[2])):
    state.write(lambda connection: connection.execute(
        tables.cancels.insert().values(partition=str(number), run_id="run", at=1.0)), copy=True)
    print(number, flush=True)
"""


@pytest.mark.parametrize("damage", share_of([None, damage_delete, damage_noise], 3))
def test_nothing_that_was_acknowledged_is_lost_by_kills(directory, damage):
    """SIGKILL at any line, also while the database is being restored: every cancel that was noted stands."""
    chance = random.Random(7)
    acknowledged, following, killed = set(), 0, 0
    for _ in range(12):
        process = subprocess.Popen(
            [sys.executable, "-c", _NOTE_UNTIL_KILLED, str(directory), str(following)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        for _ in range(chance.randrange(0, 4)):
            acknowledged.add(process.stdout.readline().strip().decode())
        time.sleep(chance.random() * 0.15)
        process.send_signal(signal.SIGKILL)
        acknowledged |= {line.strip().decode() for line in process.stdout if line.endswith(b"\n")}
        killed += process.wait() == -signal.SIGKILL
        acknowledged.discard("")
        following = 1 + max((int(one) for one in acknowledged), default=following)
        # The one under way may have come through without having been acknowledged.
        following += 1
        if damage is not None and (directory / "state.db").exists():
            damage(directory / "state.db")
    assert killed == 12
    assert len(acknowledged) > 5, "it was killed before it did anything"
    state = ControlState(directory)
    assert acknowledged <= cancelled(state)
    assert not paused(state)
    leftovers = [path.name for path in directory.iterdir() if path.name.startswith(".state.db")]
    assert len(leftovers) <= 3


def test_a_stopped_process_is_named_and_holds_nobody_up_for_ever(directory, monkeypatch):
    """A paused process must not turn the control plane into a queue behind it."""
    state = ControlState(directory)
    monkeypatch.setattr(state._database._file, "_busy_seconds", 0.2)
    note_cancel(state, "a")
    with contextlib.closing(sqlite3.connect(directory / "state.db", isolation_level=None)) as other:
        close(state)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(ControlStateError, match="no process that uses it is stopped"):
            note_cancel(state, "b")
    note_cancel(state, "b")


def test_a_network_file_system_is_refused(tmp_path):
    """SQLite's log does not work over NFS: the sentence says what to set instead."""
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda1 / ext4 rw 0 0\nserver:/x {tmp_path} nfs rw 0 0\n")
    with pytest.raises(ControlStateError, match="VLM_ASSETS_STATE_URL"):
        refuse_network_file_system(tmp_path / "home" / ".state", mounts)
    assert list(tmp_path.iterdir()) == [mounts]


def test_a_url_that_is_none_of_a_postgres_is_refused_without_its_password(directory):
    """The address is a secret."""
    for url in ("mysql://user:secret@host/db", "secret"):
        with pytest.raises(ControlStateError) as refused:
            ControlState(directory, url)
        assert "secret" not in str(refused.value)


def test_heartbeats_of_another_version_are_begun_anew(directory):
    """A liveness database that lacks a table of this version stops no run: nothing in it must last."""
    state = ControlState(directory)
    state.beat(
        lambda connection: connection.execute(
            sa.insert(tables.ticks).values(name="a", at=1.0, interval_seconds=1.0, since=1.0)
        )
    )
    with contextlib.closing(sqlite3.connect(directory / "liveness.db")) as connection:
        connection.execute("DROP TABLE quality_summaries")
    later = ControlState(directory)
    assert (
        later.read_beats(lambda connection: connection.execute(sa.select(tables.quality_summaries)).all())
        == []
    )
    later.beat(lambda connection: connection.execute(tables.quality_summaries.delete()))


def test_threads_of_one_process_share_it(directory):
    """The daemon looks with four sensors at once: no change is lost, none fails, none waits for ever."""
    assert count_by_threads(lambda: open_state(directory)) == THREADS * ROUNDS
