"""Two homes in one Dagster project do not meet: neither in names, nor in what their sensors see and do."""

import time
from pathlib import Path

import dagster as dg
import pytest
from pydantic import SecretStr

from resources.dagster_names import DagsterNames
from sensors.dagster_internals.events import DagsterFacts
from tests.support.listings import write_listing
from vlm_assets import home_definitions
from vlm_assets.automation.retries import retry_config
from vlm_assets.config.settings import SettingsError, given_settings, load_settings
from vlm_assets.home_definitions import build_defs, claim_control_state
from vlm_catalog.ingest import ingest
from vlm_durable.state.database import open_state

KEYS = ["000000000-000000001", "000000002-000000003"]
DESCRIPTIONS, EMBEDDINGS = "property_descriptions", "property_embeddings"


@pytest.fixture(scope="module")
def definitions(tmp_path_factory):
    """Houses and flats, and an asset of the project's own, as a code server loads them."""
    folder = tmp_path_factory.mktemp("two")
    listing = write_listing(folder / "listing.jsonl", {f"p{n}": [f"{n}.jpg"] for n in range(4)})

    def of(prefix: str) -> dg.Definitions:
        home: Path = folder / prefix
        ingest(listing, home, range_size=2)
        return build_defs(given_settings(home=home, name_prefix=prefix, run_new_ranges_after_hours=1.0))

    @dg.asset(key=[DESCRIPTIONS], io_manager_key="io_manager")
    def theirs() -> int:
        return 1

    return dg.Definitions.merge(
        of("houses"),
        of("flats"),
        dg.Definitions(
            [theirs], executor=dg.in_process_executor, resources={"io_manager": dg.mem_io_manager}
        ),
    )


def test_two_homes_and_a_project_of_its_own_load_together(definitions):
    """Assets, checks, ops, jobs, sensors, schedules and resources have names of their own in each home."""
    dg.Definitions.validate_loadable(definitions)
    repository = definitions.get_repository_def()
    paths = {tuple(key.path) for key in repository.asset_graph.get_all_asset_keys()}
    assert {(home, asset) for home in ("houses", "flats") for asset in (DESCRIPTIONS, EMBEDDINGS)} <= paths
    names = [definition.name for definition in (*repository.sensor_defs, *repository.schedule_defs)]
    assert {name.partition("_")[0] for name in names} == {"houses", "flats"}
    assert "houses_failed_partitions_again" in names


def test_a_home_takes_neither_executor_nor_io_manager_of_the_project(definitions):
    """The project's own assets are run and stored as before the component came."""
    for job in definitions.get_repository_def().get_all_jobs():
        for node in job.graph.nodes:
            home, _, asset = node.name.rpartition("__")
            published = home and asset in (DESCRIPTIONS, EMBEDDINGS)
            output = node.definition.output_dict["result"]
            assert output.io_manager_key == (f"{home}_io_manager" if published else "io_manager")


def run_of(instance: dg.DagsterInstance, definitions: dg.Definitions, *key: str) -> str:
    job = definitions.resolve_implicit_global_asset_job_def()
    assets = frozenset([dg.AssetKey(key)])
    partition = KEYS[0] if len(key) == 2 else None
    tags = {"dagster/partition": partition} if partition else {}
    run = instance.create_run_for_job(
        job.get_subset(asset_selection=assets),
        asset_selection=assets,
        tags=tags,
        status=dg.DagsterRunStatus.STARTED,
    )
    return run.run_id


def test_a_home_sees_its_own_runs_and_results_alone(definitions):
    """A run of the same partition in another home is nobody's attempt, cancel or failure here."""
    with dg.DagsterInstance.ephemeral() as instance:
        houses, flats = (DagsterFacts(instance, DagsterNames(home)) for home in ("houses", "flats"))
        one, other = (run_of(instance, definitions, home, DESCRIPTIONS) for home in ("houses", "flats"))
        theirs = run_of(instance, definitions, DESCRIPTIONS)
        started = [dg.DagsterRunStatus.STARTED]
        assert [run.run_id for run in houses.runs_in(started)] == [one]
        assert [run.run_id for run in flats.runs_created_since(time.time() - 60)] == [other]
        assert houses.latest_runs(KEYS)[KEYS[0]].run_id == one
        assert houses.materializations_since(DESCRIPTIONS, 0)[0].run_id == one
        # A device may be held by another home's run, which must not count as unknown.
        assert houses.run_states([one, other, theirs]).keys() == {one, other, theirs}

        houses.report_materialization(dg.AssetMaterialization(DESCRIPTIONS, partition=KEYS[1]))
        assert set(houses.materialized_partitions(DESCRIPTIONS)) == {KEYS[1]}
        assert not flats.materialized_partitions(DESCRIPTIONS)
        failed = dg.AssetCheckEvaluation(
            asset_key=dg.AssetKey(DESCRIPTIONS), check_name="published_file", passed=False, partition=KEYS[1]
        )
        houses.report_evaluation(failed)
        (result,) = houses.latest_results([DESCRIPTIONS])
        assert (result.asset, result.partition) == (DESCRIPTIONS, KEYS[1])
        assert list(flats.latest_results()) == []
        assert flats.evaluations_since(0)[0] == []


def test_a_retry_of_a_home_is_launched_for_its_own_assets(tmp_path):
    """What a person asked of the run before is asked again under the names that Dagster has."""
    before = {"ops": {f"houses__{DESCRIPTIONS}": {"config": {"recompute": True}}}}
    again = retry_config(given_settings(home=tmp_path, name_prefix="houses"), KEYS[0], [DESCRIPTIONS], before)
    assert again == (before, True)


def test_a_database_is_the_control_state_of_one_catalogue(tmp_path, monkeypatch):
    """It has the pauses, cancels and retries of one home; another home that names it is refused."""
    shared = open_state(tmp_path / "state")
    monkeypatch.setattr(home_definitions, "control_state", lambda settings: shared)
    url = {"state_url": SecretStr("postgresql+psycopg2://u:secret@h/db")}
    listing = write_listing(tmp_path / "listing.jsonl", {"p": ["p.jpg"]})
    homes = [tmp_path / "first", tmp_path / "second"]
    for home in homes:
        ingest(listing, home, range_size=1)
    first, second = (load_settings(home=home, **url) for home in homes)
    claim_control_state(first)
    claim_control_state(first)
    with pytest.raises(SettingsError, match=f"catalogue of {second.home} is ") as refused:
        claim_control_state(second)
    assert "secret" not in str(refused.value)
    claim_control_state(load_settings(home=homes[1]))  # its own SQLite is nobody else's
