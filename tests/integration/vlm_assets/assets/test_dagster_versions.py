"""What Dagster calls stale, beside the state of the partition; real files, by a scripted engine."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver
from dagster._core.loader import LoadingContextForTest

from resources.vision_language_model import VisionLanguageModel
from sensors.cancels import Cancel
from sensors.dagster_internals.events import DagsterFacts
from sensors.reconciliation import report_published
from sensors.retry_ledger import Entry
from tests.support.desks import KEY, Desk
from tests.support.listings import read_source, write_listing
from tests.support.scripted_engine import LostAfterOneBatch
from vlm_assets.assets.partition_state import PartitionState, PartitionStates, State
from vlm_assets.assets.property_catalog import record_catalog
from vlm_assets.automation.sensors import build_tags_of
from vlm_assets.config.resource_settings import control_state
from vlm_assets.home_definitions import build_defs
from vlm_assets.services.status import RetryNotes
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest
from vlm_durable.state.workers import Workers

DESCRIPTIONS, EMBEDDINGS = BOTH = ("property_descriptions", "property_embeddings")
FRESH, STALE, MISSING = "FRESH", "STALE", "MISSING"

pytestmark = pytest.mark.usefixtures("scripted_engine")


def in_dagster(desk: Desk, asset: str) -> str:
    """What Dagster's pages say of the first partition, with definitions that are loaded now."""
    graph = build_defs(desk.settings).resolve_asset_graph()
    resolver = CachingStaleStatusResolver(desk.instance, graph, LoadingContextForTest(desk.instance))
    return resolver.get_status(dg.AssetKey(asset), KEY).value


def state_of(desk: Desk, asset: str) -> PartitionState:
    return PartitionStates(desk.settings, Catalog.open(desk.settings.home), deep=True).read(asset, KEY)


def materialize_catalog(desk: Desk) -> None:
    """As the asset's button does, and the command line after an ingest."""
    defs = build_defs(desk.settings)
    assert dg.materialize(
        defs.assets, selection=["property_catalog"], instance=desk.instance, resources=defs.resources
    ).success


def ingest_again(desk: Desk, listing: Path, changes: dict[str, list[str]], **options: bool) -> None:
    """Take in the listing with other images of some properties."""
    changed = write_listing(desk.settings.home.parent / "changed.jsonl", {**read_source(listing), **changes})
    ingest(changed, desk.settings.home, range_size=8, image_root=listing.parent, **options)
    materialize_catalog(desk)


def undone(desk: Desk, **notes: object) -> State:
    """The state of the first partition with what the retries know of it."""
    return RetryNotes(**notes).beside(state_of(desk, DESCRIPTIONS)).state


class WrongOfTwo(VisionLanguageModel):
    """A model whose answers about two properties are no descriptions: more than a partition may have."""

    def load(self, *arguments, **options):
        engine = super().load(*arguments, **options)
        describe, wrong = engine.describe, []

        def describe_wrongly(batch, **more):
            wrong.extend([loaded.property_id for loaded in batch][: 2 - len(wrong)])
            return [
                replace(answer, text="no") if loaded.property_id in wrong else answer
                for loaded, answer in zip(batch, describe(batch, **more), strict=True)
            ]

        engine.describe = describe_wrongly
        return engine


@contextlib.contextmanager
def worked_on(desk: Desk) -> Iterator[None]:
    with Workers(control_state(desk.settings)).begin(
        run_id="r", asset=DESCRIPTIONS, partition=KEY, expected=8, began=0.0
    ):
        yield


def test_nothing_that_keeps_a_partition_done_makes_it_stale_in_dagster(desk, listing, tmp_path):
    """Published, verified, recomputed with the same texts, beside a grown catalogue, by a moved model."""

    def check(desk: Desk, what: str) -> None:
        for asset in BOTH:
            assert state_of(desk, asset).state is State.DONE, (what, asset)
            assert in_dagster(desk, asset) == FRESH, (what, asset)

    shutil.copytree(desk.settings.model, model := tmp_path / "model")
    desk = desk.changed(model=str(model))
    assert desk.materialize(*BOTH).success
    check(desk, "verified")
    materialize_catalog(desk)
    check(desk, "the catalogue was materialized after it")
    assert desk.materialize(DESCRIPTIONS, config={"recompute": True}).success
    check(desk, "recomputed with the same texts")
    ingest_again(desk, listing, {"new": []})
    check(desk, "a property was added")
    model.rename(tmp_path / "moved")
    desk = desk.changed(model=str(tmp_path / "moved"))
    check(desk, "the model's folder was moved")
    desk = Desk(desk.settings)
    folders = (desk.settings.descriptions, desk.settings.embeddings)
    for _ in range(2):
        report_published(
            DagsterFacts(desk.instance),
            folders,
            [KEY],
            Workers(control_state(desk.settings)),
            tags_of=build_tags_of(desk.settings),
        )
        check(desk, "Dagster's database was lost")
        materialize_catalog(desk)
    assert desk.materialize(*BOTH).success
    check(desk, "verified after that")
    record_catalog_of(desk, tmp_path)


def record_catalog_of(desk: Desk, tmp_path: Path) -> None:
    """The command line reports the catalogue by the same version as the asset does."""
    home = tmp_path / "dagster"
    home.mkdir()
    record_catalog(home, Catalog.open(desk.settings.home))
    with dg.DagsterInstance.from_config(str(home)) as instance:
        event = instance.get_latest_materialization_event(dg.AssetKey("property_catalog"))
        assert "dagster/data_version" not in (event.tags or {}), "without a version, Dagster takes INITIAL"


def test_dagster_shows_what_is_stale_by_settings_or_texts(desk):
    """Other settings are another code version, also where a file of others is kept; and back again."""
    assert desk.materialize(*BOTH).success
    assert desk.changed(max_new_tokens=400).materialize(DESCRIPTIONS).success
    assert (state_of(desk, EMBEDDINGS).state, in_dagster(desk, EMBEDDINGS)) == (State.DONE, FRESH), (
        "the texts are the same under other settings"
    )
    assert desk.materialize(DESCRIPTIONS).success
    other = desk.changed(max_images=1)
    assert (state_of(other, DESCRIPTIONS).state, in_dagster(other, DESCRIPTIONS)) == (State.STALE, STALE)
    assert in_dagster(other, EMBEDDINGS) == FRESH
    assert other.materialize(DESCRIPTIONS, config={"stale": "keep"}).success
    assert in_dagster(other, DESCRIPTIONS) == STALE, "it was verified, and is as stale as before"
    assert (state_of(desk, DESCRIPTIONS).state, in_dagster(desk, DESCRIPTIONS)) == (State.DONE, FRESH)
    assert other.materialize(DESCRIPTIONS).success
    assert in_dagster(other, DESCRIPTIONS) == FRESH
    assert (state_of(other, EMBEDDINGS).state, in_dagster(other, EMBEDDINGS)) == (State.STALE, STALE)
    assert other.materialize(EMBEDDINGS).success
    assert in_dagster(other, EMBEDDINGS) == FRESH


def test_what_dagster_cannot_express_is_fresh_there(desk, listing):
    """docs/dagster.md lists it: images that changed, and a file that is not what was published."""
    assert desk.materialize(*BOTH).success
    (name, images), *_ = read_source(listing).items()
    ingest_again(desk, listing, {name: images[:-1]}, update=True)
    assert (state_of(desk, DESCRIPTIONS).state, in_dagster(desk, DESCRIPTIONS)) == (State.STALE, FRESH)
    assert desk.materialize(DESCRIPTIONS).success
    assert state_of(desk, DESCRIPTIONS).state is State.DONE
    assert (state_of(desk, EMBEDDINGS).state, in_dagster(desk, EMBEDDINGS)) == (State.STALE, STALE)
    with worked_on(desk):
        assert (state_of(desk, DESCRIPTIONS).state, in_dagster(desk, DESCRIPTIONS)) == (State.RUNNING, FRESH)
    desk.file.write_bytes(desk.file.read_bytes()[:-9])
    assert (state_of(desk, DESCRIPTIONS).state, in_dagster(desk, DESCRIPTIONS)) == (State.DAMAGED, FRESH)


def test_what_was_never_published_is_missing_in_dagster(desk):
    """Whatever kept it from being published, it is neither stale nor fresh."""
    seen = {undone(desk)}
    with worked_on(desk):
        seen.add(undone(desk))
    assert not desk.materialize(vision_language_model=LostAfterOneBatch(desk.settings.model)).success
    seen.add(undone(desk))
    seen.add(undone(desk, entries={KEY: Entry(KEY, attempts=1)}))
    seen.add(undone(desk, entries={KEY: Entry(KEY, attempts=5, given_up=True)}))
    seen.add(undone(desk, cancelled={KEY: Cancel("r", 0.0)}))
    assert not desk.materialize(vision_language_model=WrongOfTwo(desk.settings.model)).success
    seen.add(undone(desk))
    shutil.rmtree(desk.paths.journals)
    seen.add(undone(desk))
    assert in_dagster(desk, DESCRIPTIONS) == MISSING
    assert seen == set(State) - {State.DONE, State.STALE, State.DAMAGED}
