"""What audit, prune and withdraw see and do in a real S3 store, beside what they do in a home."""

import itertools
import shutil
import threading
import time
from contextlib import suppress
from datetime import timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from resources.alerts.outbox import Outbox
from tests.support.damage import flipped
from tests.support.homes import publish
from tests.support.journals import open_journal, plain_rows
from tests.support.shares import share_of
from vlm_assets.assets.partition_state import State
from vlm_assets.automation.sensors import build_drift_watcher
from vlm_assets.commands.main import app
from vlm_assets.config.resource_settings import control_state
from vlm_assets.services import store_looks as store_looks_module
from vlm_assets.services.home_audit import audit
from vlm_assets.services.pruning import delete_set, find_removable, remove_stored, removed_set
from vlm_assets.services.pruning import remove as remove_here
from vlm_assets.services.repairs import Remedy, find_repairs, put_right
from vlm_assets.services.status import read_status
from vlm_assets.services.store_looks import StoreLooks
from vlm_assets.services.withdrawal import pending_withdrawal, prepare_withdrawal, withdraw
from vlm_catalog.catalog import Catalog
from vlm_catalog.catalog_file import CatalogError
from vlm_catalog.stored_catalog import pull_catalog
from vlm_durable.files.layout import Home
from vlm_durable.files.sealed_json import sealed
from vlm_durable.mirror import bucket as bucket_module
from vlm_durable.mirror.stored_journal import HEAD, StoredJournal
from vlm_durable.state.workers import Workers
from vlm_durable.versions.findings import FindingKind
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.stored import StoredPartitions
from vlm_durable.versions.versioned_object import PublishedError

KEY, SECOND = "000000000-000000007", "000000008-000000015"
ASSETS = ("property_descriptions", "property_embeddings")
FILES = [name for one in ASSETS for name in (f"{one}/{KEY}.parquet", f".versions/{one}/{KEY}.json")]
EARLIER = [f".versions/{one}/{KEY}.{number}.parquet" for one in ASSETS for number in (1, 2)]

pytestmark = pytest.mark.usefixtures("scripted_engine")


@pytest.fixture
def machine(desk, bucket):
    """A home whose first partition is published, in the store too."""
    one = desk.changed(store=bucket, device_wait_seconds=0.1)
    pull_catalog(one.settings.home, bucket)
    put(one)
    return one


def put(machine):
    for asset in (machine.settings.descriptions, machine.settings.embeddings):
        StoredPartitions(asset, machine.settings.store).push(KEY)


def problems(machine, **how):
    found = audit(machine.settings, Catalog.open(machine.settings.home), **how).findings
    return [(one.kind, one.asset, one.key) for one in found]


def under_way(machine, key, generation, *ids, asset=None):
    """Rows that are committed here and copied, of a generation that is not published."""
    paths = (asset or machine.settings.descriptions).partition(key)
    with open_journal(paths, generation, ids) as journal:
        journal.submit(plain_rows(ids))
    stored = StoredJournal(paths, generation, machine.settings.store)
    stored.pull()
    stored.claim(1)
    stored.copy()
    return stored


@pytest.mark.published(*ASSETS)
def test_the_audit_names_what_is_missing_or_changed_in_the_store(machine, bucket, monkeypatch, s3_proxy):
    """Published files and committed rows, each with its partition; an outage is a warning, not a loss."""
    stored = under_way(machine, SECOND, "g", "a", "b")
    assert problems(machine, deep=True) == []
    name = FILES[0]
    at = bucket.head(name)
    bucket.put(name, b"x" * at.size, over=at)
    wrong = (FindingKind.STORE, ASSETS[0], KEY)
    assert (problems(machine), problems(machine, deep=True)) == ([wrong], [wrong])
    bucket.delete(name)
    (segment,) = (one for one, _ in bucket.names(".journal/") if "segment" in one)
    bucket.delete(segment)
    assert problems(machine) == [wrong, (FindingKind.STORE_JOURNAL, ASSETS[0], SECOND)]
    put(machine)
    stored.copied_names.clear()
    stored.copy()
    assert problems(machine, deep=True) == []
    monkeypatch.setattr(bucket_module, "PATIENCE_SECONDS", 0.0)
    s3_proxy.breaks(lambda passing: passing.answer(503, "SlowDown"))
    assert problems(machine) == [(FindingKind.STORE_UNREAD, ASSETS[0], None)]


CATALOG = "property_catalog/catalog.parquet"


def remove(bucket, proxy, name):
    bucket.delete(name)


def overwrite(bucket, proxy, name):
    at = bucket.head(name)
    bucket.put(name, b"x" * at.size, over=at)


def rot(bucket, proxy, name):
    """What the server answers where its disk changed a bit: all is well but the bytes, until they are put."""

    def breaks(passing):
        if passing.path.partition("?")[0].endswith(name):
            if passing.command == "PUT":
                proxy.heal()
            return passing.command == "GET" and passing.answer(500, "InternalError")
        return False

    proxy.breaks(breaks)


def flip_on_the_way(bucket, proxy, name):
    """Bytes that are not those of the checksum that comes with them."""

    def breaks(passing):
        if passing.path.partition("?")[0].endswith(name):
            if passing.command == "PUT":
                proxy.heal()
            if passing.command == "GET":
                answer = passing.forward()
                return passing.pass_on(answer, flipped(answer.content, 0))
        return False

    proxy.breaks(breaks)


@pytest.fixture
def hasty(monkeypatch):
    """Nobody waits long for an object that the store does not give."""
    monkeypatch.setattr(bucket_module, "_ONE_OBJECT_SECONDS", 0.0)


def repair(machine, **how):
    """What ``vlm-assets repair --yes`` does; the ways it took, each with findings that say why."""
    found = audit(machine.settings, Catalog.open(machine.settings.home), **how)
    repairs = find_repairs(machine.settings, found)
    for one in repairs:
        put_right(machine.settings, one)
        assert one.findings and one.why == tuple(finding.sentence for finding in one.findings)
    return [(one.asset, one.key, one.remedy) for one in repairs]


@pytest.mark.published(*ASSETS)
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("harm", "name"),
    [
        *share_of([*itertools.product((remove, overwrite, rot, flip_on_the_way), FILES[:2])], 2),
        (rot, CATALOG),
    ],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_repair_puts_back_what_the_store_lost_or_changed(machine, bucket, s3_proxy, harm, name):
    """File, record and catalogue, from a machine that has them, without a computed row."""
    before = bucket.get(name, most=1 << 30)
    harm(bucket, s3_proxy, name)
    asset, key = (name.split("/")[0], None) if name == CATALOG else (ASSETS[0], KEY)
    assert repair(machine, deep=True) == [(asset, key, Remedy.FILL_STORE)]
    assert bucket.get(name, most=1 << 30) == before
    assert problems(machine, deep=True) == []
    assert repair(machine, deep=True) == []


@pytest.mark.published(*ASSETS)
@pytest.mark.promise("Of two valid versions the newer is true")
def test_an_emptied_store_is_filled_from_the_machine_that_a_person_names(machine, bucket):
    """Another machine may have published later: until then nothing is ingested, run or put there."""
    home = machine.settings.home
    for name in (CATALOG, *FILES):
        bucket.delete(name)
    with pytest.raises(CatalogError, match=r"was the store emptied\? .* `vlm-assets repair --newest-here`"):
        pull_catalog(home, bucket)

    def call(*options):
        command = ["repair", "--home", str(home), "--yes", *options]
        return CliRunner().invoke(app, command, env={"VLM_ASSETS_STORE": str(bucket)})

    refused = call()
    assert refused.exit_code == 1
    assert refused.output.count("--newest-here") == 3, "the catalogue and the partition of both assets"
    assert [bucket.head(name) for name in (CATALOG, *FILES)] == [None] * 5
    filled = call("--newest-here")
    assert filled.exit_code == 0, filled.output
    assert problems(machine, deep=True) == []
    pull_catalog(home, bucket)


@pytest.mark.published(*ASSETS)
@pytest.mark.usefixtures("hasty")
def test_earlier_versions_are_put_back_with_a_file(machine, bucket):
    """What a lifecycle rule took of a partition comes back whole, not its newest file alone."""
    assert machine.materialize(config={"recompute": True}).success
    put(machine)
    for name in (EARLIER[0], FILES[0]):
        bucket.delete(name)
    assert repair(machine) == [(ASSETS[0], KEY, Remedy.FILL_STORE)]
    assert [bucket.head(name) is not None for name in (EARLIER[0], FILES[0])] == [True, True]


@pytest.mark.published(*ASSETS)
def test_a_machine_without_the_file_names_who_can_put_it_back(machine, bucket, tmp_path):
    """It changes nothing there: an older file of its own must not take the place of the one that is lost."""
    bucket.delete(FILES[0])
    alone = StoredPartitions(Home(tmp_path / "other").asset(ASSETS[0]), bucket)
    with pytest.raises(PublishedError, match="on a machine that published it"):
        alone.put_back(KEY)
    bucket.delete(FILES[1])
    with pytest.raises(PublishedError, match="on the machine that published it"):
        alone.put_back(KEY)
    assert [bucket.head(one) for one in FILES[:2]] == [None, None]


@pytest.mark.published(*ASSETS)
@pytest.mark.usefixtures("hasty")
def test_the_drift_sensor_tells_of_damage_in_the_store_and_puts_it_back(machine, bucket, s3_proxy):
    """A lost object is seen at the next look, one that rotted under its ETag when its bytes' turn comes."""
    settings = machine.settings
    state = control_state(settings)
    keys = [one.key for one in Catalog.open(settings.home).ranges]
    watcher = build_drift_watcher(settings, keys, Workers(state), Outbox(state))

    def tick():
        told = []
        watcher.check(lambda *one: told.append(one), lambda asset: (), time.time())
        return [(asset, key, verdict.worst and verdict.worst.kind) for asset, key, verdict, _ in told]

    def counted():
        status = read_status(settings, Catalog.open(settings.home))
        (one,) = (one for one in status.partitions if (one.asset, one.key) == (ASSETS[0], KEY))
        return one.state, one.is_complete

    assert tick() == []
    assert counted() == (State.DONE, True)
    for harm in (remove, rot):
        harm(bucket, s3_proxy, FILES[0])
        assert tick() == [(ASSETS[0], KEY, "store")], harm.__name__
        assert counted() == (State.DAMAGED, False)
        assert problems(machine) == [(FindingKind.STORE, ASSETS[0], KEY)], "nobody needs --deep to be told"
        assert tick() == [(ASSETS[0], KEY, None)]
        assert counted() == (State.DONE, True)
        assert problems(machine, deep=True) == []


@pytest.mark.published(*ASSETS)
def test_status_sees_at_once_what_the_store_lost_and_waits_for_no_store(machine, bucket, monkeypatch):
    """Without Dagster nobody else looks; a store that says nothing holds up no terminal."""
    bucket.delete(FILES[0])
    catalog = Catalog.open(machine.settings.home)
    status = read_status(machine.settings, catalog)
    assert status.counts(ASSETS[0])[State.DAMAGED] == 1
    incomplete = {one.key for one in status.partitions if not one.is_complete}
    assert KEY in incomplete, "`run KEY` has something to do"
    monkeypatch.setattr(store_looks_module, "_FRESH_SECONDS", 0.0)
    monkeypatch.setattr(store_looks_module, "_ANSWER_SECONDS", 0.2)
    silent = threading.Event()
    monkeypatch.setattr(StoreLooks, "inspect", lambda *_, **__: silent.wait(60))
    status = read_status(machine.settings, catalog)
    silent.set()
    assert status.counts(ASSETS[0])[State.DAMAGED] == 1, "what is known stays known"
    (unread,) = (one for one in status.findings if one.kind is FindingKind.STORE_UNREAD)
    assert "does not answer" in unread.sentence and unread.text in status.warnings


@pytest.mark.long
@pytest.mark.published(*ASSETS)
@pytest.mark.usefixtures("hasty")
def test_a_materialization_puts_back_what_rotted_on_the_servers_disk(machine, bucket, s3_server):
    """It reads every byte there, whatever ETag and checksum say. The server retries a bad block for 10 s."""
    before, at = bucket.get(FILES[0], most=1 << 30), bucket.head(FILES[0])
    s3_server.flip(before)
    assert bucket.head(FILES[0]) == at
    put(machine)
    assert bucket.get(FILES[0], most=1 << 30) == before


@pytest.mark.published(*ASSETS)
def test_prune_removes_from_the_store_what_nobody_goes_on_with(machine, bucket):
    """Rows that are published, and earlier versions with those of the home; work under way stays."""
    assert machine.materialize(config={"recompute": True}).success
    put(machine)
    assert bucket.head(EARLIER[0]) is not None
    closed = f".journal/{ASSETS[0]}/{KEY}/" + next(
        one.split("/")[3] for one, _ in bucket.names(f".journal/{ASSETS[0]}/{KEY}/")
    )
    bucket.put(f"{closed}/segment-left", b"cut off", over=None)
    under_way(machine, SECOND, "g", "a", "b")
    before = [one for one, _ in bucket.names(f".journal/{ASSETS[0]}/{SECOND}/")]
    assert problems(machine) == [(FindingKind.STORE_LEFTOVER, ASSETS[0], KEY)]
    catalog = Catalog.open(machine.settings.home)
    plan = find_removable(machine.settings, catalog)
    assert [(one.key, one.objects) for one in plan.in_store] == [(KEY, 1)]
    said = [*remove_here(machine.settings, plan.removals), *remove_stored(machine.settings, plan.in_store)]
    assert any("earlier versions" in one for one in said)
    assert [one for one, _ in bucket.names(f"{closed}/")] == [f"{closed}/{HEAD}"]
    assert [one for one, _ in bucket.names(f".journal/{ASSETS[0]}/{SECOND}/")] == before
    assert [bucket.head(one) for one in EARLIER] == [None] * 4
    assert problems(machine, deep=True) == []
    assert find_removable(machine.settings, catalog).in_store == []


@pytest.mark.published(*ASSETS)
def test_prune_removes_checkpoints_of_superseded_trainings_alone(machine, bucket):
    """Those that a later publication replaced; the published one's own, and work begun since, stay."""
    below, record = ".journal/description_model/tiny", ".versions/description_model/tiny.json"
    for plan in ("old", "published"):
        bucket.put(f"{below}/{plan}/checkpoints/step-1", b"weights", over=None)
    newest = bucket.head(f"{below}/old/checkpoints/step-1").modified
    catalog = Catalog.open(machine.settings.home)
    assert find_removable(machine.settings, catalog).in_store == [], "nothing is published"
    said = sealed({"fingerprint": "published", "files": {}, "sequence": 1}, format_=1)
    at = bucket.put(record, said, over=None)
    while at.modified <= newest + timedelta(seconds=1):  # a store tells whole seconds
        bucket.delete(record)
        at = bucket.put(record, said, over=None)
    bucket.put(f"{below}/new/checkpoints/step-1", b"weights", over=None)
    plan = find_removable(machine.settings, catalog)
    assert [(one.key, one.generation, one.objects) for one in plan.in_store] == [("tiny", "old", 1)]
    assert find_removable(machine.settings, catalog, [KEY]).in_store == []
    list(remove_stored(machine.settings, plan.in_store))
    left = [name.split("/")[3] for name, _ in bucket.names(f"{below}/")]
    assert left == ["new", "published"]


def objects_with(bucket, property_id):
    """Every object in which an id stands, parquet files decoded; earlier versions are read by their names."""
    found = []
    for name in sorted({*(name for name, _ in bucket.names()), *FILES, *EARLIER}):
        with suppress(bucket_module.NoObjectError):
            data = bucket.get(name, most=1 << 30)
            rows = str(pq.read_table(pa.BufferReader(data)).to_pylist()) if name.endswith(".parquet") else ""
            if property_id in rows or property_id.encode() in data:
                found.append(name)
    return found


@pytest.mark.published(*ASSETS)
@pytest.mark.parametrize("cut_at", share_of([2, 8], 2))
def test_nothing_of_a_withdrawn_property_is_left_in_the_store(machine, bucket, s3_proxy, monkeypatch, cut_at):
    """Catalogue, published files, earlier versions and journals; cut short by an outage it is finished."""
    settings = machine.settings
    catalog = Catalog.open(settings.home)
    gone, stays = catalog.slice(catalog.ranges[0])["property_id"].to_pylist()[2:4]
    assert machine.materialize(config={"recompute": True}).success
    under_way(machine, KEY, "older", gone, stays)
    assert len(objects_with(bucket, gone)) >= 5
    wanted = prepare_withdrawal(settings, [gone])
    monkeypatch.setattr(bucket_module, "PATIENCE_SECONDS", 0.0)
    puts = []

    def breaks(passing):
        puts.extend([passing.path] if passing.command in ("PUT", "DELETE") else [])
        return len(puts) >= cut_at and passing.answer(503, "SlowDown")

    s3_proxy.breaks(breaks)
    with pytest.raises(bucket_module.StoreAwayError):
        list(withdraw(settings, wanted))
    s3_proxy.heal()
    wanted = pending_withdrawal(settings)
    said = list(withdraw(settings, wanted))
    assert any(str(bucket) in one for one in said)
    assert objects_with(bucket, gone) == []
    assert objects_with(bucket, stays) != []
    assert problems(machine, deep=True) == []
    assert pending_withdrawal(settings) is None


@pytest.mark.published(*ASSETS)
def test_a_question_set_that_only_the_store_has_is_looked_at_and_withdrawn_from(machine, bucket, tmp_path):
    """No settings name it and nothing of it is here: another machine put its file and its journal there."""
    settings = machine.settings
    other = tmp_path / "other"
    shutil.copytree(settings.home, other)
    name = "property_condition"
    asset = Home(other).asset(name)
    gone, stays = pq.read_table(machine.file)["property_id"].to_pylist()[2:4]
    rows, schema = pq.read_table(machine.file).to_pylist(), pq.read_schema(machine.file)
    publish(PublishedPartitions(asset), KEY, rows, schema, rows[0]["fingerprint"], {})
    StoredPartitions(asset, bucket).push(KEY)
    under_way(machine, KEY, "next", gone, stays, asset=asset)
    unnamed = (FindingKind.REMOVED_SET, name, None)
    assert problems(machine, deep=True) == [unnamed]
    bucket.delete(f"{name}/{KEY}.parquet")
    assert problems(machine) == [(FindingKind.STORE, name, KEY), unnamed]
    StoredPartitions(asset, bucket).put_back(KEY)
    list(withdraw(settings, prepare_withdrawal(settings, [gone])))
    assert objects_with(bucket, gone) == []
    assert f"{name}/{KEY}.parquet" in objects_with(bucket, stays)
    assert problems(machine, deep=True) == [unnamed]
    # Deleted on the other machine: what is here still is no more put there, and nothing misses it there.
    elsewhere = settings.model_copy(update={"home": other})
    list(delete_set(elsewhere, removed_set(elsewhere, "condition")))
    assert [found for found, _ in bucket.names() if name in found] == []
    assert problems(machine, deep=True) == [unnamed]
    list(withdraw(settings, prepare_withdrawal(settings, [stays])))
    assert objects_with(bucket, stays) == []
    assert [found for found, _ in bucket.names() if name in found] == []
    here = settings.layout.asset(name).partition(KEY).published
    assert stays not in pq.read_table(here)["property_id"].to_pylist()
    list(delete_set(settings, removed_set(settings, "condition")))
    assert problems(machine, deep=True) == []


@pytest.mark.published(*ASSETS)
def test_a_damaged_head_keeps_nothing_of_a_withdrawn_property_in_the_store(machine, bucket):
    """What the head listed is not known, so all below it goes, and the generation is closed."""
    settings = machine.settings
    catalog = Catalog.open(settings.home)
    gone, stays = catalog.slice(catalog.ranges[0])["property_id"].to_pylist()[2:4]
    stored = under_way(machine, KEY, "older", gone, stays)
    head = next(one for one, _ in bucket.names(".journal/") if one.endswith(f"older/{HEAD}"))
    bucket.put(head, b"rot", over=bucket.head(head))
    list(withdraw(settings, prepare_withdrawal(settings, [gone])))
    assert objects_with(bucket, gone) == []
    assert stored.read_manifest().retired
