"""The Iceberg table of several machines: its catalogue and its writers' lock are in a real Postgres."""

from __future__ import annotations

import threading

import pytest
import sqlalchemy as sa
from pydantic import SecretStr

from tests.support.homes import Dataset
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.withdrawal import prepare_withdrawal, withdraw
from vlm_durable.mirror.bucket import StoreAwayError
from vlm_results import described_table
from vlm_results.described_table import BroughtUpToDate, TablePlace, bring_up_to_date
from vlm_results.iceberg_files import named_files


@pytest.fixture
def shared(dataset: Dataset, postgres_url: str) -> Dataset:
    """A home whose table has its catalogue in Postgres."""
    update = {"embedding_model": "example", "table_catalog": SecretStr(postgres_url)}
    return Dataset(dataset.settings.model_copy(update=update))


def ids(dataset: Dataset) -> list[str]:
    rows = TablePlace.from_settings(dataset.settings).read().scan().to_arrow()
    return sorted(name for name in rows["property_id"].to_pylist() if name.startswith("p"))


def test_two_machines_write_beside_each_other(shared, postgres_url, postgres_server):
    """Each partition is written once, whoever does it; a lost catalogue is made again; a withdrawal holds."""
    place = TablePlace.from_settings(shared.settings)
    assert place.catalog_url == postgres_url
    written = []

    def machine() -> None:
        written.append(bring_up_to_date(shared.settings, shared.catalog, place).written)

    machines = [threading.Thread(target=machine) for _ in range(2)]
    for one in machines:
        one.start()
    for one in machines:
        one.join()
    assert sum(written) == 3 and not place.sqlite.exists()
    assert ids(shared) == [f"p{number}" for number in range(9)]
    snapshots = len(place.read().snapshots())
    postgres_server.empty()
    assert bring_up_to_date(shared.settings, shared.catalog, place).written == 0
    assert len(place.read().snapshots()) == snapshots
    for _ in withdraw(shared.settings, prepare_withdrawal(shared.settings, ["p4"])):
        pass
    assert "p4" not in ids(shared) and len(ids(shared)) == 8
    assert len(place.read().snapshots()) == 1


def test_a_writer_waits_for_the_lock_and_commits_nothing_without_it(shared, postgres_url, monkeypatch):
    """Who holds the lock writes alone; who lost it with its connection leaves the table as it is."""
    place = TablePlace.from_settings(shared.settings)
    bring_up_to_date(shared.settings, shared.catalog, place)
    before = place.read().metadata_location
    shared.describe(shared.keys[0], text="another house", settings="other")
    shared.embed(shared.keys[0])
    monkeypatch.setattr(described_table, "LOCK_SECONDS", 0.2)
    refused = pytest.raises(CommandError, match="Another process has written")
    with place.opened() as holder, holder._locked(), refused:
        bring_up_to_date(shared.settings, shared.catalog, place)
    monkeypatch.undo()
    engine = sa.create_engine(postgres_url)

    def lose_connections(*_: object, **__: object) -> list[object]:
        with engine.begin() as connection:
            connection.execute(
                sa.text(
                    "SELECT pg_terminate_backend(pid) FROM pg_locks"
                    " WHERE locktype = 'advisory' AND pid <> pg_backend_pid()"
                )
            )
        return []

    with monkeypatch.context() as patch:
        patch.setattr(described_table, "_dataframe_to_data_files", lose_connections)
        with pytest.raises(CommandError, match="as its last commit left it"):
            bring_up_to_date(shared.settings, shared.catalog, place)
    engine.dispose()
    assert place.read().metadata_location == before
    assert bring_up_to_date(shared.settings, shared.catalog, place).written == 1


def test_the_state_database_keeps_the_catalogue_where_no_other_is_set(shared, postgres_url):
    """Several machines set one address; a table in another folder has a catalogue of its own all the same."""
    update = {"table_catalog": None, "state_url": SecretStr(postgres_url)}
    settings = shared.settings.model_copy(update=update)
    assert TablePlace.from_settings(settings).catalog_url == postgres_url
    assert TablePlace.from_settings(settings, settings.home / "elsewhere").catalog_url is None


def test_a_table_on_s3_keeps_what_it_promises_on_disk(shared, bucket, s3_proxy, monkeypatch):
    """Wherever the store goes away, the last commit stands; a withdrawal leaves nothing of its rows there."""
    monkeypatch.setattr("vlm_durable.mirror.bucket.PATIENCE_SECONDS", 0.0)
    shared = Dataset(shared.settings.model_copy(update={"table": bucket}))
    place = TablePlace.from_settings(shared.settings)

    def follow() -> BroughtUpToDate:
        return bring_up_to_date(shared.settings, shared.catalog, place)

    def locations() -> set[str]:
        return {bucket.address(name) for name, _ in bucket.names()}

    first = follow()
    assert (first.written, first.rows, first.snapshots, follow().written) == (3, 9, 3, 0)
    assert ids(shared) == [f"p{number}" for number in range(9)] and locations() == named_files(place.read())
    before = place.read().metadata_location
    shared.describe(shared.keys[0], text="another house", settings="other")
    shared.embed(shared.keys[0])
    for left in range(10):
        puts = iter(range(left))
        s3_proxy.breaks(
            lambda passing, puts=puts: (
                passing.command == "PUT" and next(puts, None) is None and passing.answer(503, "SlowDown")
            )
        )
        try:
            assert follow().written == 1
        except StoreAwayError:
            s3_proxy.heal()
            assert place.read().metadata_location == before
            continue
        break
    s3_proxy.heal()
    assert left == 5, "rows, two manifests, their list and the state are put before the commit"
    follow()
    assert locations() == named_files(place.read()), "what the cut commits had put is removed"
    for _ in withdraw(shared.settings, prepare_withdrawal(shared.settings, ["p4"])):
        pass
    assert "p4" not in ids(shared) and len(place.read().snapshots()) == 1
    assert locations() == named_files(place.read())
    with pytest.raises(CommandError, match="table on S3 is in Postgres"):
        bring_up_to_date(shared.settings, shared.catalog, TablePlace(bucket.below("elsewhere")))
