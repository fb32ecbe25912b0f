"""The verdicts on made files, and that a change is told once, with its end, and never in mid-publication."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import sqlite3
import time

import pyarrow.parquet as pq
import pytest

from resources.alerts.outbox import Outbox
from sensors import published_file_drift
from sensors.published_file_drift import Snapshot, evaluation
from tests.support.damage import flip_bit
from vlm_assets.assets import fingerprint
from vlm_assets.assets.fingerprint import Meaning
from vlm_assets.assets.partition_state import State
from vlm_assets.automation.sensors import build_drift_watcher
from vlm_assets.services.home_audit import audit
from vlm_assets.services.status import read_status
from vlm_catalog.ranges import DESCRIPTIONS, EMBEDDINGS
from vlm_durable.files import seen_files
from vlm_durable.files.files import make_directory, write_replacing
from vlm_durable.journal.high_water_mark import HighWaterMark, write_mark
from vlm_durable.state.database import open_state
from vlm_durable.state.workers import Workers
from vlm_durable.versions import verified_files
from vlm_durable.versions.partition_files import PartitionVersions, PendingPublication
from vlm_engine.server.running_server import ServerUnreachableError


class Desk:
    """A watcher over a made dataset, and what it told. Each dataset's parts are given, not a model's."""

    def __init__(self, dataset, monkeypatch):
        self.dataset = dataset
        self.settings = dataset.settings
        self.parts = {"maker": "s"}
        monkeypatch.setattr(fingerprint, "description_parts", lambda *_: self.parts)
        monkeypatch.setattr(fingerprint, "embedding_parts", lambda *_: {"embedder": "m"})
        self.workers = Workers(open_state(self.settings.state_directory))
        self.outbox = Outbox(open_state(self.settings.state_directory))
        self.failing = {}
        self.begin()

    def begin(self):
        """What a new code server does: nothing is kept but what stands on disk."""
        self.watcher = build_drift_watcher(self.settings, self.dataset.keys, self.workers, self.outbox)

    def tick(self):
        """What one tick told: (asset, key, kind, severity)."""
        told = []
        try:
            self.watcher.check(
                lambda *one: told.append(one), lambda asset: self.failing.get(asset, ()), time.time()
            )
        finally:
            self.verdicts = {(asset, key): verdict for asset, key, verdict, _ in told}
            self.times = {(asset, key): at for asset, key, _, at in told}
        return [(asset, key, *verdict_in_short(verdict)) for asset, key, verdict, _ in told]


def verdict_in_short(verdict):
    if verdict.worst is None:
        return "sound", None
    return verdict.worst.kind, evaluation(DESCRIPTIONS, verdict.key, verdict, 0.0).severity.value


@pytest.fixture
def desk(dataset, monkeypatch):
    desk = Desk(dataset, monkeypatch)
    assert desk.tick() == [], "what is sound when it is seen first needs no word"
    return desk


@pytest.fixture
def key(desk):
    return desk.dataset.keys[1]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-40])


def replace_by_fewer_rows(path):
    pq.write_table(pq.read_table(path).slice(1), path)


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (truncate, "truncated"),
        (replace_by_fewer_rows, "rows_differ"),
        (flip_bit, "digest_differs"),
        (lambda path: path.unlink(), "missing"),
        (lambda path: path.write_bytes(b""), "truncated"),
    ],
)
def test_damage_is_told_once_and_so_is_its_end(desk, key, damage, kind):
    """Fault 13: the sensor sees it, its partition is named, and a restored file passes again."""
    published = desk.dataset.descriptions
    damage(published.path(key))
    assert desk.tick() == [(DESCRIPTIONS, key, kind, "ERROR")]
    event = evaluation(DESCRIPTIONS, key, desk.verdicts[DESCRIPTIONS, key], desk.times[DESCRIPTIONS, key])
    assert (event.partition, event.passed, event.check_name) == (key, False, "published_file")
    assert "materializing" in event.metadata["what to do"].value
    assert desk.tick() == []
    desk.begin()
    assert desk.tick() == [], "a new code server does not tell it again"
    published.restore(key)
    assert desk.tick() == [(DESCRIPTIONS, key, "sound", None)]
    assert desk.tick() == []


def foreign(desk, key):
    """A file under a partition's name, without a record."""
    published = desk.dataset.descriptions
    content = published.path(key).read_bytes()
    published.set_aside(key)
    published.path(key).write_bytes(content)


def vanish(desk, key):
    """File and record are both gone; the high-water mark says that it was published once."""
    marks = desk.settings.state_directory / "high_water_marks" / DESCRIPTIONS / key
    make_directory(marks)
    write_mark(marks / "g.json", HighWaterMark(key, "g", 3, 1, 1, None, retired=True))
    desk.dataset.descriptions.set_aside(key)


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        (foreign, {"unrecorded": "ERROR", "descriptions_differ": "WARN"}),
        (vanish, {"vanished": "ERROR", "descriptions_differ": "WARN"}),
        (
            lambda desk, key: desk.dataset.describe(key, lambda rows: rows[:-1]),
            {"ids": "ERROR"},
        ),
    ],
    ids=["not published here", "vanished with its record", "fewer rows than the catalogue's range"],
)
def test_what_is_no_partitions_output_is_told(desk, key, change, kinds):
    """A file that nobody recorded, a record that is gone, or a published file against the catalogue."""
    change(desk, key)
    told = desk.tick()
    assert {kind: severity for _, _, kind, severity in told} == kinds
    assert {told_key for _, told_key, *_ in told} == {key}


def test_a_file_among_the_partitions_that_is_none_is_an_alert_that_recovers(desk):
    """Whoever reads *.parquet reads it too; there is no partition to fail, so it goes to a person."""
    stray = desk.settings.descriptions.published / "copy of 1.parquet"
    stray.write_bytes(b"x")
    assert desk.tick() == desk.tick() == []
    (alert,) = desk.outbox.open_subjects().values()
    assert (alert.kind, alert.finding, alert.severity) == ("foreign_file", "foreign_file", "error")
    assert str(stray) in alert.actual and "`vlm-assets repair`" in alert.next_step
    stray.unlink()
    desk.tick()
    assert not desk.outbox.open_subjects()


def test_changed_settings_warn_with_the_cost_and_pass_when_changed_back(desk):
    """Stale is no damage: a WARN that says what making it anew would cost; nothing starts by itself."""
    desk.parts = {"maker": "t"}
    desk.begin()
    told = desk.tick()
    assert told == [(DESCRIPTIONS, key, "stale", "WARN") for key in desk.dataset.keys]
    finding = desk.verdicts[DESCRIPTIONS, desk.dataset.keys[0]].worst
    assert "another maker" in finding.sentence
    assert "costs 3 properties with 3 images" in finding.next_step
    assert desk.tick() == []
    desk.parts = {"maker": "s"}
    desk.begin()
    assert desk.tick() == [(DESCRIPTIONS, key, "sound", None) for key in desk.dataset.keys]


def test_new_descriptions_make_their_embeddings_stale(desk, key):
    """The vectors of old texts are named, for the one partition whose texts changed."""
    desk.dataset.describe(key, text="another house")
    assert desk.tick() == [(EMBEDDINGS, key, "descriptions_differ", "WARN")]
    desk.dataset.embed(key)
    assert desk.tick() == [(EMBEDDINGS, key, "sound", None)]


def test_a_publication_under_way_is_no_drift(desk, key):
    """Between the record that announces a file and the rename, nothing is wrong; nor while a run works."""
    published = desk.dataset.descriptions
    record = published.record(key)
    pending = PendingPublication(dataclasses.replace(record, sequence=2, sha256="0" * 64), (record,))
    manifest = published.asset.partition(key).record
    settled = manifest.read_bytes()
    write_replacing(manifest, PartitionVersions(key, record, (), pending).to_bytes(DESCRIPTIONS))
    assert desk.tick() == []
    write_replacing(manifest, settled)
    assert desk.tick() == []
    with desk.workers.begin(run_id="r", asset=DESCRIPTIONS, partition=key, expected=3):
        truncate(published.path(key))
        assert desk.tick() == [], "the run that works on it looks at it itself"
    assert desk.tick() == [(DESCRIPTIONS, key, "truncated", "ERROR")]


def test_what_status_read_is_not_read_again_until_it_changes(dataset, monkeypatch):
    """One note of what was verified for all who look, and a changed file is looked at again."""
    monkeypatch.setattr(seen_files, "_SETTLED_NS", 0)
    read, judge = [], verified_files.judge
    monkeypatch.setattr(
        verified_files, "judge", lambda path, *one, **two: read.append(path) or judge(path, *one, **two)
    )
    desk = Desk(dataset, monkeypatch)
    read_status(desk.settings, dataset.catalog)
    assert len(read) == 2 * len(dataset.keys)
    assert desk.tick() == []
    assert len(read) == 2 * len(dataset.keys), "the first look of the sensor needs no second reading"
    path = dataset.descriptions.path(dataset.keys[1])
    flip_bit(path, 40)
    assert desk.tick() == [(DESCRIPTIONS, dataset.keys[1], "digest_differs", "ERROR")]
    assert read[2 * len(dataset.keys) :] == [path]


@pytest.fixture
def rotten(dataset, monkeypatch):
    """A dataset that was verified, and of whose file a bit has rotted since: only its bytes differ."""
    monkeypatch.setattr(seen_files, "_SETTLED_NS", -(10**9))
    for module in (verified_files, published_file_drift):
        monkeypatch.setattr(module, "signature_of", lambda stat: str(stat.st_size))
    desk = Desk(dataset, monkeypatch)
    assert desk.tick() == []
    flip_bit(dataset.descriptions.path(dataset.keys[1]), 40)
    return desk


def test_a_bit_that_rots_is_found_within_a_week(rotten, monkeypatch):
    """Each file is read whole again within it, though nothing says that it changed; it is told once."""
    assert rotten.tick() == [], "nothing is read that was verified a moment ago"
    now = time.time_ns() + int(verified_files.TRUSTED_SECONDS * 1e9)
    monkeypatch.setattr(seen_files.time, "time_ns", lambda: now)
    assert rotten.tick() == [(DESCRIPTIONS, rotten.dataset.keys[1], "digest_differs", "ERROR")]
    assert [rotten.tick() for _ in range(2)] == [[], []]


def test_what_a_deep_audit_finds_is_known_to_all(rotten):
    """The note that called the file whole is corrected: status and the sensor say what the audit said."""
    key, catalog = rotten.dataset.keys[1], rotten.dataset.catalog

    def state():
        partitions = read_status(rotten.settings, catalog).partitions
        return next(one.state for one in partitions if (one.asset, one.key) == (DESCRIPTIONS, key))

    assert state() is State.DONE
    found = {finding.kind: finding.key for finding in audit(rotten.settings, catalog, deep=True).wrong}
    assert found["digest_differs"] == key
    assert state() is State.DAMAGED
    assert rotten.tick() == [(DESCRIPTIONS, key, "digest_differs", "ERROR")]
    assert [rotten.tick() for _ in range(2)] == [[], []]


def lose(desk):
    (desk.settings.state_directory / "liveness.db").unlink()


def tear(text):
    def tear_snapshot(desk):
        """What a power cut may leave of a text that is not synced: its pages are whole, and it is not."""
        database = desk.settings.state_directory / "liveness.db"
        with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as other:
            other.execute("UPDATE drift_snapshots SET snapshot = CAST(? AS TEXT)", (text,))

    return tear_snapshot


EARLIER = b'{"is_lost": false, "partitions": {"k": ["signature", "expectation", "sound", "", "", 0.0]}}'


@pytest.mark.parametrize(
    "damage", [lose, tear(b'{"is_lost": fal'), tear(b"\xff\xfe"), tear(b"[]"), tear(EARLIER)]
)
def test_a_lost_snapshot_forgets_no_failure(desk, key, damage):
    """A lost snapshot, or one of an earlier format: the damaged file fails again, the repaired one passes."""
    sound = desk.dataset.keys[0]
    truncate(desk.dataset.descriptions.path(key))
    desk.tick()
    damage(desk)
    desk.failing = {DESCRIPTIONS: {sound}}
    assert desk.tick() == [(DESCRIPTIONS, sound, "sound", None), (DESCRIPTIONS, key, "truncated", "ERROR")]
    assert desk.tick() == []


def test_a_lost_snapshot_does_not_forget_what_a_run_was_at_work_on(desk, key):
    """A partition that stood failed, of which nothing is left, is looked at when its run has ended."""
    asset = desk.settings.descriptions
    for path in (*asset.published.glob(f"{key}*"), *asset.versions.glob(f"{key}*")):
        path.unlink()
    (desk.settings.state_directory / "liveness.db").unlink()
    desk.failing = {DESCRIPTIONS: {key}}
    with desk.workers.begin(run_id="r", asset=DESCRIPTIONS, partition=key, expected=3):
        assert desk.tick() == []
    assert [told[:2] for told in desk.tick()] == [(DESCRIPTIONS, key), (EMBEDDINGS, key)]
    assert desk.tick() == []


@pytest.mark.parametrize(("write", "restored"), [(2, False), (2, True), (1, False)])
def test_with_a_full_disk_nothing_is_told_twice_or_left_standing(desk, key, monkeypatch, write, restored):
    """The first write of a tick comes before the telling: nothing is told at each tick anew.

    What was told and not noted is told again with the same time, so as the same alert; if it was restored
    before that, it is called off.
    """
    published = desk.dataset.descriptions
    truncate(published.path(key))
    with monkeypatch.context() as patched:
        fail_write(patched, number=write)
        for _ in range(2 if write == 1 else 1):
            with pytest.raises(OSError, match="No space"):
                desk.tick()
    first = desk.times
    assert set(first) == ({(DESCRIPTIONS, key)} if write == 2 else set())
    if restored:
        published.restore(key)
    desk.begin()
    assert desk.tick() == [(DESCRIPTIONS, key, *(("sound", None) if restored else ("truncated", "ERROR")))]
    assert restored or write == 1 or desk.times == first
    assert desk.tick() == []


def fail_write(patched, *, number):
    """From this write of a snapshot on, the disk is full."""
    writes = itertools.count(1)
    write = Snapshot.write

    def counted(snapshot):
        if next(writes) >= number:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(snapshot)

    patched.setattr(Snapshot, "write", counted)


@pytest.mark.parametrize(("seconds", "told"), [(10, [0, 1, 0]), (100, [0, 0, 1])])
def test_a_first_look_that_is_cut_short_goes_on(dataset, monkeypatch, seconds, told):
    """A tick has a minute: the next ones go on, a partition of each asset a tick on a starved machine."""
    times = itertools.count(0, seconds)
    desk = Desk(dataset, monkeypatch)
    object.__setattr__(desk.watcher, "monotonic", lambda: next(times))
    truncate(dataset.descriptions.path(dataset.keys[2]))
    assert [len(desk.tick()) for _ in told] == told


def test_a_server_that_is_down_at_the_first_look_is_asked_again():
    """Nothing is stale meanwhile, no look at a partition waits for it, and once it is up, it is asked."""
    asked, now, down = [], [0.0], [True]

    def parts():
        asked.append(now[0])
        if down[0]:
            raise ServerUnreachableError("the model server does not answer")
        return {"model": "house"}

    meaning = Meaning(parts, clock=lambda: now[0])
    assert [meaning.parts for _ in range(1000)] == [{}] * 1000
    assert asked == [0.0], "one that swallows what is sent to it costs seconds"
    down[0] = False
    now[0] = 61.0
    assert meaning.parts == {"model": "house"}
    assert meaning.parts == {"model": "house"}
    assert asked == [0.0, 61.0]
