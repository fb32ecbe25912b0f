"""Dagster's own state for a home: where it is, that it belongs to this catalogue, and who runs it.

``server.py`` starts Dagster. Nothing in its databases is the only copy of finished work. A new history is
filled from disk: the catalogue when Dagster starts, published partitions by the reconciliation sensor, and
interrupted work by the scheduled re-materialization. Term: DAGSTER_HOME.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import re
import signal
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from resources.dagster_names import UNPREFIXED, DagsterNames
from vlm_durable.files.files import make_directory, sync_directory, write_replacing
from vlm_durable.files.lock_files import LockFile, is_held, lock_holders
from vlm_durable.files.processes import ProcessIdentity, process_start

_log = logging.getLogger(__name__)

_TEMPLATE = Path(__file__).with_name("dagster.yaml")
_SEAL = "# As vlm-assets wrote it, and writes it anew. Once you change it, it is yours: "
"""What a file of ours ends with, before the digest of the rest."""

_CATALOG_ID = "catalog_id"
_LOCK = "running.lock"
_LOOK_SECONDS = 0.2

HOME_HEADER = "x-vlm-assets-home"
"""Header of each request and each answer: the ``home_id`` of the home that is meant, or that answers."""

POOL = "gpu"
"""The concurrency pool of every run that needs a device."""

_DATABASES = {
    "history": ("history/runs.db", "history/runs/index.db"),
    "schedules": ("schedules/schedules.db",),
}
"""Databases by the folder that holds them. A folder is set aside whole, as its databases belong together."""

_LOCKED_SECONDS = 1.0

LOST = {
    "history": "Lost are the pages of earlier runs. Partitions on disk become green again within minutes.",
    "schedules": "Lost are the ticks of sensors and schedules, and which of them a person had switched off.",
}
"""What a new database does not know, for people."""


class DagsterHomeError(RuntimeError):
    """Dagster's state does not fit; the message says what, where and what to do."""


def prepare_dagster_home(
    dagster_home: Path, *, catalog_id: str | None, slots: int, with_launcher: str | None = None
) -> None:
    """Make a folder ready to be DAGSTER_HOME: settings, database, pool limit, catalogue.

    catalog_id: None where there is no catalogue yet; the definitions note it later.
    slots: how many runs hold a device at once. with_launcher: as in ``seed_settings``. Raises
    DagsterHomeError.
    """
    _refuse_unusable_path(dagster_home)
    seed_settings(dagster_home, with_launcher)
    if catalog_id is not None:
        claim_for_catalog(dagster_home, catalog_id)
    _initialise_storage(dagster_home, slots=slots)


def seed_settings(dagster_home: Path, with_launcher: str | None) -> None:
    """Write Dagster's settings into a home, or renew those that an older version wrote.

    The file's last line holds the digest of the others. Where it does not fit, a person changed the file, and
    it stays. with_launcher: the settings where an extension launches the runs; None for this machine's own.
    Raises DagsterHomeError.
    """
    make_directory(dagster_home)
    # Its databases and locks are for this account alone: who may read them can hold their locks.
    dagster_home.chmod(0o700)
    settings = dagster_home / "dagster.yaml"
    text = settings.read_text() if settings.exists() else None
    is_ours = text is None or (not settings.is_symlink() and _sealed(text.rpartition(_SEAL)[0]) == text)
    if with_launcher is not None and text is not None:
        _refuse_another_launcher(settings, text, with_launcher, is_ours=is_ours)
    if is_ours:
        new = _sealed(_TEMPLATE.read_text() if with_launcher is None else with_launcher)
        if new != text:
            write_replacing(settings, new.encode())


def _refuse_another_launcher(settings: Path, text: str, with_launcher: str, *, is_ours: bool) -> None:
    """Refuse settings that launch runs here, or with a module that is gone. Raises DagsterHomeError."""
    launcher = yaml.safe_load(with_launcher)["run_launcher"]
    if launcher["class"] not in text:
        raise DagsterHomeError(
            f"{settings} is of one machine, and {launcher['class']} is to launch runs on several: partitions"
            " would run here alone. Move the file away, and start again: one for the cluster is written. The"
            " history of one machine stays where it is, in SQLite; what is published becomes green again by"
            " itself."
        )
    if launcher["module"] not in text and not is_ours:
        raise DagsterHomeError(
            f"{settings} was changed by hand, and names the launcher by a module of an earlier version. Write"
            f" `module: {launcher['module']}` below run_launcher, and start again. Nothing was changed."
        )


STARTING_SECONDS = 900.0
"""How long a run's process may take to begin: by ``dagster.yaml`` here, and on the nodes of a cluster.

On an idle machine it takes 2 to 11 s, at a load of 16 minutes. A run that is ended then would begin anew on a
machine just as loaded.
"""


def start_timeout(dagster_home: Path) -> float | None:
    """Seconds that Dagster gives a run to start, as the home's settings have it; None where they do not."""
    try:
        settings = yaml.safe_load((dagster_home / "dagster.yaml").read_text())
        return float(settings["run_monitoring"]["start_timeout_seconds"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError):
        return None


def _sealed(text: str) -> str:
    return f"{text}{_SEAL}{hashlib.sha256(text.encode()).hexdigest()}\n"


def _refuse_unusable_path(dagster_home: Path) -> None:
    """Refuse a path that Dagster writes into SQLite's address as it is. Raises DagsterHomeError.

    What follows a ``?`` is left out there, so that two homes would share one database; ``%20`` is a blank.
    """
    if "?" in str(dagster_home) or re.search("%[0-9A-Fa-f]{2}", str(dagster_home)):
        raise DagsterHomeError(
            f"Dagster cannot keep its state in {dagster_home}: in its databases' address '?' and '%' before"
            " two digits have a meaning of their own. Rename the folder, or give another home (--home DIR):"
            " what lies in a home may be moved as it is."
        )


def claim_for_catalog(dagster_home: Path, catalog_id: str, names: DagsterNames = UNPREFIXED) -> None:
    """Note which catalogue this state belongs to, or refuse another one. Raises DagsterHomeError.

    In somebody else's project each prefix of names has a catalogue of its own. Partition keys are alike in
    all catalogues: a green partition without its file is the worst lie.
    """
    _refuse_unusable_path(dagster_home)
    note = dagster_home / names.name(_CATALOG_ID)
    noted = note.read_text().strip() if note.exists() else None
    if noted is None:
        write_replacing(note, f"{catalog_id}\n".encode())
    elif noted != catalog_id:
        raise DagsterHomeError(
            f"Dagster's state in {dagster_home} belongs to catalogue {noted}, but the catalogue of this home"
            f" is {catalog_id}. Its green partitions would be those of other images. Give the other data set"
            f" a home of its own (--home DIR), or move history, schedules, storage and {note.name} out of"
            f" {dagster_home} to start with an empty history."
        )


def _initialise_storage(dagster_home: Path, *, slots: int) -> None:
    """Create the database before several processes come first at once, and set the pool's limit."""
    import dagster as dg

    from sensors.dagster_internals.runs import set_pool

    with dg.DagsterInstance.from_config(str(dagster_home)) as instance:
        instance.get_runs_count()
        instance.all_instigator_state()
        # Before the first launch: a limit that comes later, or a default one, lets the first runs through.
        set_pool(instance, POOL, slots)


@contextlib.contextmanager
def only_dagster(dagster_home: Path, *, wait_seconds: float) -> Iterator[LockFile]:
    """Hold the lock of the one Dagster on this state.

    A Dagster whose starter was killed may still be ending its runs: this waits for it, ``wait_seconds`` at
    most. Its orphans, which nobody else ends, are ended here. Raises DagsterHomeError at once where
    its starter lives.
    """
    lock = LockFile(dagster_home / _LOCK)
    try:
        deadline = time.monotonic() + wait_seconds
        while not lock.try_lock():
            holder = _holder(dagster_home)
            if holder is not None and holder.lives():
                raise DagsterHomeError(
                    f"Dagster already runs on {dagster_home} at {holder.url} (process {holder.pid}). Look"
                    f" there, or end it with Ctrl-C in its terminal or `kill {holder.pid}`, and start again:"
                    " what is under way goes on."
                )
            if time.monotonic() > deadline:
                holding = lock_holders(dagster_home / _LOCK)
                which = ", ".join(map(str, holding)) or "of another user or machine"
                how = f"`kill {' '.join(map(str, holding))}`" if holding else "them there"
                raise DagsterHomeError(
                    f"Dagster already runs on {dagster_home}: its lock is held by processes {which}, and"
                    f" they did not end in {wait_seconds:.0f} s. Nothing was started. End {how}, and start"
                    " again: what is under way goes on."
                )
            for process in holder.orphans() if holder is not None else ():
                if process.send(signal.SIGKILL):
                    _log.warning(
                        "Ended process %d of an earlier Dagster on this home, whose starter was killed.",
                        process.pid,
                    )
            time.sleep(_LOOK_SECONDS)
        yield lock
    finally:
        lock.close()


def note_address(dagster_home: Path, url: str, group: int | None = None) -> None:
    """Say in the lock's file who holds it, in which process group it runs, and where its pages are."""
    (dagster_home / _LOCK).write_text(json.dumps({"pid": os.getpid(), "url": url, "group": group}))


def home_id(dagster_home: Path) -> str:
    """Identifies this Dagster home among all others of this machine, over restarts: the lock's inode.

    A copy of a home has another id, and so have two homes with one catalogue. It cannot be lost or copied.
    Raises OSError where no Dagster has run on this home yet.
    """
    status = (dagster_home / _LOCK).stat()
    return f"{status.st_dev}-{status.st_ino}"


def running_address(dagster_home: Path) -> str | None:
    """The address of the Dagster that runs on this state; None where none runs, or only orphans."""
    holder = _holder(dagster_home) if is_held(dagster_home / _LOCK) else None
    return holder.url if holder is not None and not holder.orphans() else None


def named_variables(dagster_home: Path) -> set[str]:
    """The environment variables that Dagster's settings name. Raises OSError."""
    names = set[str]()
    parts = [yaml.safe_load((dagster_home / "dagster.yaml").read_text())]
    while parts:
        match parts.pop():
            case {"env": str(name), **others} if not others:
                names.add(name)
            case dict(part):
                parts += part.values()
            case list(part):
                parts += part
    return names


@dataclass(frozen=True)
class _Holder:
    """Who has the lock, as its file says. pid: of the starter; group: of the rest, and its watchdog."""

    lock: Path
    pid: int
    url: str
    group: int | None

    def lives(self) -> bool:
        """Whether the starter lives."""
        holding = lock_holders(self.lock)
        # Another user's are not seen.
        return self.pid in holding if holding else process_start(self.pid) is not None

    def orphans(self) -> list[ProcessIdentity]:
        """The processes that hold the lock after starter and watchdog are gone: nobody else ends them."""
        holding = lock_holders(self.lock)
        if self.group is None or self.pid in holding or self.group in holding:
            return []
        identities = [ProcessIdentity.from_pid(pid) for pid in holding if _group_of(pid) == self.group]
        return [identity for identity in identities if identity is not None]


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _holder(dagster_home: Path) -> _Holder | None:
    lock = dagster_home / _LOCK
    with contextlib.suppress(ValueError, KeyError, TypeError):
        note = json.loads(lock.read_bytes())
        return _Holder(lock, int(note["pid"]), str(note["url"]), note.get("group"))
    return None


class DamagedDatabaseError(DagsterHomeError):
    """A database of the running Dagster is damaged; a start sets it aside."""


@dataclass(frozen=True)
class Damage:
    """A damaged database. folder: the name of the folder that holds it."""

    folder: str
    path: Path
    why: str


def damages(dagster_home: Path) -> list[Damage]:
    """The damaged databases, after reading all their pages; none where Dagster keeps its state elsewhere.

    A database that cannot be read at this moment (locked, a failing disk) is not called damaged.
    """
    return [
        Damage(folder, path, why)
        for folder, names in _DATABASES.items()
        for path in (dagster_home / name for name in names)
        if path.exists() and (why := _damage(path)) is not None
    ]


def _damage(path: Path) -> str | None:
    try:
        address = f"{path.absolute().as_uri()}?mode=rw"
        with contextlib.closing(sqlite3.connect(address, uri=True, timeout=_LOCKED_SECONDS)) as database:
            (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError:
        return None
    except sqlite3.DatabaseError as error:
        return str(error)
    return None if verdict == "ok" else str(verdict)


def names_aside(dagster_home: Path, damaged: Sequence[Damage]) -> dict[str, Path]:
    """The names under which the folders of damaged databases will be set aside, by the folder's name."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = {}
    for damage in damaged:
        path = dagster_home / f"{damage.folder}.damaged-{stamp}"
        unused = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
        names[damage.folder] = next(name for name in itertools.chain([path], unused) if not name.exists())
    return names


def set_databases_aside(dagster_home: Path, names: Mapping[str, Path]) -> None:
    """Rename the folders of damaged databases, durably. Dagster must not run."""
    for folder, aside in names.items():
        (dagster_home / folder).rename(aside)
    sync_directory(dagster_home)
