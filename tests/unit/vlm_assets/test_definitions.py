"""The definitions load fast, quietly, and say what Dagster needs to know."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import dagster as dg
import pytest

from tests.support.listings import write_listing
from vlm_assets.config.resource_settings import build_resources
from vlm_assets.config.settings import load_settings
from vlm_assets.home_definitions import build_defs, check_dagster_home
from vlm_assets.webserver.home import DagsterHomeError
from vlm_catalog.catalog import Catalog
from vlm_catalog.ingest import ingest
from vlm_catalog.ranges import cut_ranges

LOADING = """
import json, sys
from vlm_assets.definitions import defs
asset = defs.get_repository_def().assets_defs_by_key
keys = {key.to_user_string(): one.partitions_def.get_partition_keys() if one.partitions_def else None
        for key, one in asset.items()}
heavy = sorted({"apprise", "torch", "transformers", "xgrammar", "ray", "duckdb"} & set(sys.modules))
import pyarrow
print(json.dumps({"keys": keys, "heavy": heavy, "pool": pyarrow.default_memory_pool().backend_name}))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A catalogue of five properties whose images do not exist, in ranges of two."""
    folder = tmp_path_factory.mktemp("definitions")
    listing = write_listing(folder / "listing.jsonl", {f"p{n}": [f"{n}.jpg"] for n in range(5)})
    ingest(listing, folder / "home", range_size=2, close=True)
    return folder / "home"


def load(home, **environment):
    left_out = ("DAGSTER_HOME", "ARROW_DEFAULT_MEMORY_POOL")
    inherited = {name: value for name, value in os.environ.items() if name not in left_out}
    return subprocess.run(
        [sys.executable, "-c", LOADING],
        env={**inherited, "VLM_ASSETS_HOME": str(home), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def loaded(home):
    """A process that has loaded the definitions, and keeps Dagster's state in the home."""
    done = load(home, DAGSTER_HOME=str(home / "dagster"))
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """A home without a catalogue."""
    return tmp_path_factory.mktemp("fresh") / "home"


@pytest.fixture(scope="module")
def loaded_otherwise(fresh):
    """A process without DAGSTER_HOME and catalogue that asked for another pool of memory."""
    return load(fresh, ARROW_DEFAULT_MEMORY_POOL="mimalloc")


def test_loading_is_quiet_and_light(loaded):
    """No warning reaches the person, and no process pays for torch before it needs a model."""
    assert loaded.stderr == ""
    assert json.loads(loaded.stdout)["heavy"] == []


def test_rows_lie_in_memory_that_is_given_back(loaded, loaded_otherwise):
    """A run keeps none of what its rows once took, however many they were; who asks otherwise gets it."""
    assert json.loads(loaded.stdout)["pool"] == "system"
    assert json.loads(loaded_otherwise.stdout)["pool"] == "mimalloc"


def test_both_assets_have_the_ranges_of_the_catalogue(loaded):
    """Descriptions and embeddings are partitioned alike, by the ranges that stand in the catalogue."""
    keys = json.loads(loaded.stdout)["keys"]
    ranges = ["000000000-000000001", "000000002-000000003", "000000004-000000004"]
    assert keys["property_descriptions"] == keys["property_embeddings"] == ranges
    assert keys["property_catalog"] is None


def test_without_dagster_home_the_person_is_told_what_to_export(fresh, loaded_otherwise):
    """A throwaway instance forgets its history: the definitions say what keeps it."""
    assert f"export DAGSTER_HOME={fresh}/dagster" in loaded_otherwise.stderr


def test_dagster_state_of_another_catalogue_is_refused(home, tmp_path, monkeypatch):
    """Keys are alike in all data sets: green partitions of other images are never shown; both are named."""
    (tmp_path / "catalog_id").write_text("another\n")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    own = Catalog.open(home).catalog_id
    with pytest.raises(DagsterHomeError, match=f"belongs to catalogue another.*{own}"):
        check_dagster_home(load_settings(home=home))


def test_without_a_catalogue_the_definitions_load_and_say_what_to_do(loaded_otherwise):
    """A fresh home shows the catalogue's asset, which can be materialized, and no partitions."""
    assert loaded_otherwise.returncode == 0, loaded_otherwise.stderr
    assert json.loads(loaded_otherwise.stdout)["keys"]["property_descriptions"] == []
    assert "vlm-assets ingest" in loaded_otherwise.stderr


def test_twenty_thousand_partitions_cost_a_load_nothing_each(home, tmp_path, monkeypatch):
    """Definitions load in every run: with 20,000 ranges they read no file of a partition."""
    ranges = cut_ranges(0, 20_000, 1)
    monkeypatch.setattr("vlm_assets.home_definitions._ranges", lambda settings: ranges)
    opened: list[str] = []
    settings = load_settings(home=home)
    build_defs(settings)  # what is imported and noted once is there
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: opened.append(str(self)) or real(self, *a, **k))
    began = time.process_time()
    repository = build_defs(settings).get_repository_def()
    seconds = time.process_time() - began
    partitions = repository.asset_graph.get(dg.AssetKey("property_descriptions")).partitions_def
    assert partitions.get_num_partitions() == 20_000
    assert len(opened) < 100
    assert seconds < 10.0


def test_a_range_run_is_refused_clearly(home):
    """A partition is a run of its own: one run over several is refused with the way to do it."""
    settings = load_settings(home=home, devices="cpu:1")
    defs = build_defs(settings)
    job = defs.resolve_implicit_global_asset_job_def()
    done = job.execute_in_process(
        asset_selection=[dg.AssetKey("property_descriptions")],
        tags={
            "dagster/asset_partition_range_start": "000000000-000000001",
            "dagster/asset_partition_range_end": "000000002-000000003",
        },
        raise_on_error=False,
    )
    assert not done.success
    (failure,) = [event for event in done.all_events if event.is_step_failure]
    assert "launched for 2 partitions at once" in failure.step_failure_data.error.to_string()


def test_every_check_has_the_partitions_of_its_asset_and_a_sentence(home):
    """The page of a check says what it holds, and shows it by partition."""
    settings = load_settings(home=home)
    partitioned = [asset for asset in build_defs(settings).assets if asset.partitions_def]
    assert partitioned
    assert all(list(asset.check_specs) for asset in partitioned)
    for spec in (spec for asset in partitioned for spec in asset.check_specs):
        assert spec.blocking
        assert spec.description
        assert spec.partitions_def is not None


def test_definitions_load_as_a_code_server_loads_them(home):
    """Names of jobs, ops, sensors and schedules do not collide: a server would refuse them all."""
    dg.Definitions.validate_loadable(build_defs(load_settings(home=home)))


@pytest.fixture(scope="module")
def jobs(home):
    """Every job of the definitions that a run can be launched of."""
    jobs = build_defs(load_settings(home=home)).get_repository_def().get_all_jobs()
    assert len(jobs) > 1
    return jobs


def test_run_config_sets_no_field_of_any_resource(home, jobs):
    """Who reaches the pages starts no command, loads no code and names no folder through a resource."""
    ours = build_resources(load_settings(home=home))
    asked = 0
    for job in jobs:
        assert job.resource_defs.keys() >= ours.keys()
        for key in job.resource_defs:
            for field in (*vars(ours[key]), "base_dir", "anything"):
                with pytest.raises(dg.DagsterInvalidConfigError, match="unexpected config entr"):
                    dg.validate_run_config(job, {"resources": {key: {"config": {field: "x"}}}})
                asked += 1
    assert asked > len(jobs) * len(ours) * 2


def test_run_config_hands_no_asset_an_input_of_its_own(jobs):
    """Dagster unpickles an input from a path that run config names, where the input's type allows it."""
    asked = 0
    for job in jobs:
        for node in job.graph.nodes:
            for name in node.definition.input_dict:
                for form in ({"pickle": {"path": "x"}}, {"json": {"path": "x"}}, "x"):
                    with pytest.raises(dg.DagsterInvalidConfigError, match="unexpected config entr"):
                        dg.validate_run_config(job, {"ops": {node.name: {"inputs": {name: form}}}})
                    asked += 1
    assert asked


def test_run_config_still_sets_the_options_of_an_asset(jobs):
    """The launchpad asks for a recomputation."""
    (job,) = (job for job in jobs if job.name == "failed_partitions")
    options = {"ops": {"property_descriptions": {"config": {"recompute": True}}}}
    assert dg.validate_run_config(job, options)["ops"]["property_descriptions"]["config"]["recompute"] is True
