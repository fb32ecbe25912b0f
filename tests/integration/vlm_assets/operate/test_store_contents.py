"""What audit, prune and withdraw see and do in a real S3 store, beside what they do in a home."""

from contextlib import suppress
from datetime import timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from resources.journal.journal import Journal
from resources.publishing.stored import StoredPartitions
from resources.storage.sealed_json import sealed
from resources.store import bucket as bucket_module
from resources.store.bucket import client
from resources.store.stored_journal import HEAD, StoredJournal
from vlm_assets.assets.partition_state import Kind
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.catalog.stored_catalog import pull_catalog
from vlm_assets.operate.audit import audit
from vlm_assets.operate.prune import plan_prune, remove
from vlm_assets.operate.store_contents import remove_leftovers
from vlm_assets.operate.withdraw import pending_withdrawal, plan_withdrawal, withdraw

KEY, SECOND = "000000000-000000007", "000000008-000000015"
ASSETS = ("property_descriptions", "property_embeddings")
FILES = [name for one in ASSETS for name in (f"{one}/{KEY}.parquet", f".versions/{one}/{KEY}.json")]
EARLIER = [f".versions/{one}/{KEY}.{number}.parquet" for one in ASSETS for number in (1, 2)]


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
    found = audit(machine.settings, Catalog.open(machine.settings.home), **how).problems
    return [(one.kind, one.asset, one.key) for one in found]


def under_way(machine, key, generation, *ids):
    """Rows that are committed here and copied, of a generation that is not published."""
    schema = pa.schema([("ordinal", pa.int64()), ("property_id", pa.string())])
    paths = machine.settings.descriptions.partition(key)
    with Journal.open(
        paths.journal(generation),
        key=key,
        generation=generation,
        fingerprints={},
        schema=schema,
        expected_ids=ids,
        high_water_mark=paths.high_water_mark(generation),
    ) as journal:
        journal.submit(pa.table({"ordinal": range(len(ids)), "property_id": ids}, schema=schema))
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
    wrong = (Kind.STORE, ASSETS[0], KEY)
    assert (problems(machine), problems(machine, deep=True)) == ([], [wrong])
    bucket.delete(name)
    (segment,) = (one for one, _ in bucket.names(".journal/") if "segment" in one)
    bucket.delete(segment)
    assert problems(machine) == [wrong, (Kind.STORE, ASSETS[0], SECOND)]
    put(machine)
    stored.there.clear()
    stored.copy()
    assert problems(machine, deep=True) == []
    monkeypatch.setattr(bucket_module, "PATIENCE_SECONDS", 0.0)
    client.cache_clear()
    s3_proxy.breaks(lambda passing: passing.answer(503, "SlowDown"))
    assert problems(machine) == [(Kind.STORE_UNREAD, ASSETS[0], None)]


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
    assert problems(machine) == [(Kind.STORE_LEFTOVER, ASSETS[0], KEY)]
    catalog = Catalog.open(machine.settings.home)
    plan = plan_prune(machine.settings, catalog)
    assert [(one.key, one.objects) for one in plan.in_store] == [(KEY, 1)]
    said = [*remove(machine.settings, plan.removals), *remove_leftovers(machine.settings, plan.in_store)]
    assert any("earlier versions" in one for one in said)
    assert [one for one, _ in bucket.names(f"{closed}/")] == [f"{closed}/{HEAD}"]
    assert [one for one, _ in bucket.names(f".journal/{ASSETS[0]}/{SECOND}/")] == before
    assert [bucket.head(one) for one in EARLIER] == [None] * 4
    assert problems(machine, deep=True) == []
    assert plan_prune(machine.settings, catalog).in_store == []


@pytest.mark.published(*ASSETS)
def test_prune_removes_checkpoints_of_superseded_trainings_alone(machine, bucket):
    """Those that a later publication replaced; the published one's own, and work begun since, stay."""
    below, record = ".journal/description_model/tiny", ".versions/description_model/tiny.json"
    for plan in ("old", "published"):
        bucket.put(f"{below}/{plan}/checkpoints/step-1", b"weights", over=None)
    newest = bucket.head(f"{below}/old/checkpoints/step-1").modified
    catalog = Catalog.open(machine.settings.home)
    assert plan_prune(machine.settings, catalog).in_store == [], "nothing is published"
    said = sealed({"fingerprint": "published", "files": {}, "sequence": 1}, format_=1)
    at = bucket.put(record, said, over=None)
    while at.modified <= newest + timedelta(seconds=1):  # a store tells whole seconds
        bucket.delete(record)
        at = bucket.put(record, said, over=None)
    bucket.put(f"{below}/new/checkpoints/step-1", b"weights", over=None)
    plan = plan_prune(machine.settings, catalog)
    assert [(one.key, one.generation, one.objects) for one in plan.in_store] == [("tiny", "old", 1)]
    assert plan_prune(machine.settings, catalog, [KEY]).in_store == []
    list(remove_leftovers(machine.settings, plan.in_store))
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
@pytest.mark.parametrize("cut_at", [2, 8])
def test_nothing_of_a_withdrawn_property_is_left_in_the_store(machine, bucket, s3_proxy, monkeypatch, cut_at):
    """Catalogue, published files, earlier versions and journals; cut short by an outage it is finished."""
    settings = machine.settings
    catalog = Catalog.open(settings.home)
    gone, stays = catalog.slice(catalog.ranges[0])["property_id"].to_pylist()[2:4]
    assert machine.materialize(config={"recompute": True}).success
    under_way(machine, KEY, "older", gone, stays)
    assert len(objects_with(bucket, gone)) >= 5
    wanted = plan_withdrawal(settings, [gone])
    monkeypatch.setattr(bucket_module, "PATIENCE_SECONDS", 0.0)
    client.cache_clear()
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
def test_a_damaged_head_keeps_nothing_of_a_withdrawn_property_in_the_store(machine, bucket):
    """What the head listed is not known, so all below it goes, and the generation is closed."""
    settings = machine.settings
    catalog = Catalog.open(settings.home)
    gone, stays = catalog.slice(catalog.ranges[0])["property_id"].to_pylist()[2:4]
    stored = under_way(machine, KEY, "older", gone, stays)
    head = next(one for one, _ in bucket.names(".journal/") if one.endswith(f"older/{HEAD}"))
    bucket.put(head, b"rot", over=bucket.head(head))
    list(withdraw(settings, plan_withdrawal(settings, [gone])))
    assert objects_with(bucket, gone) == []
    assert stored.look().retired
