"""The files of deploy/ for several machines: what they name is there, and nothing in them is a secret."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from dagster._core.instance.config import dagster_instance_config

from sensors.dagster_internals.events import DagsterFacts
from sensors.dagster_internals.runs import set_pool
from vlm_assets.commands.main import find_command
from vlm_assets.config.resource_settings import runs_at_once
from vlm_assets.config.settings import PREFIX, Settings, load_settings, secret_names
from vlm_assets.webserver.home import POOL, seed_settings
from vlm_cluster.cluster_extension import ClusterSettings
from vlm_cluster.cluster_launcher import filled_in, logs_prefix
from vlm_durable.mirror.bucket import S3Folder

CHECKOUT = Path(__file__).resolve().parents[3]
DEPLOY = CHECKOUT / "deploy"


def variables(name: str) -> dict[str, str]:
    """What an environment file sets, what is commented out included."""
    lines = re.findall(r"^#?([A-Z_]+)=(.*)$", (DEPLOY / name).read_text(), re.MULTILINE)
    assert lines
    return dict(lines)


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Settings:
    """The settings of a machine with this environment file."""
    found = variables("cluster.env") | {"VLM_ASSETS_HOME": str(tmp_path), "VLM_ASSETS_MODEL": "example"}
    found["VLM_ASSETS_STORE"] = found["VLM_ASSETS_STORE"].replace("BUCKET", "bucket")
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return load_settings()


def test_the_environment_is_one_that_settings_take(deployed: Settings) -> None:
    """A misspelt name is refused at the first start of a service, on each machine."""
    address = ClusterSettings.part_of(deployed).ray_address
    assert (str(deployed.store), address) == ("s3://bucket/PREFIX", "http://10.0.0.11:8265")


def test_the_pool_follows_machines_that_join_after_dagster_has_started(
    deployed: Settings, new_instance: Callable[[str], Any]
) -> None:
    """With one machine there at the start, a limit of 1 would stay for ever: no other would be used."""
    with new_instance("dagster") as instance:
        set_pool(instance, POOL, runs_at_once(deployed))
        DagsterFacts(instance).fit_pool(POOL, previous=0, slots=3)
        limits = {one.name: one.limit for one in instance.event_log_storage.get_pool_limits()}
    assert limits[POOL] == 3


def test_no_file_holds_a_secret() -> None:
    """What is filled in is a word that says so: a real password in a template ends in a repository."""
    found = variables("cluster.env")
    secret = {name for name in found if name.removeprefix(PREFIX).lower() in secret_names(Settings)}
    secret |= {name for name in found if re.search("SECRET|PASSWORD|KEY", name)}
    assert len(secret) >= 4
    assert all(re.search(r"\b(PASSWORD|SECRET|KEY)\b", found[name]) for name in secret)


def test_a_node_starts_with_options_that_there_are() -> None:
    """NODE of the environment is handed to `vlm-assets devices node`."""
    known = {option for parameter in find_command("devices node").params for option in parameter.opts}
    lines = re.findall(r"^#?NODE=(.*)$", (DEPLOY / "node.env").read_text(), re.MULTILINE)
    assert len(lines) == 2
    assert all({word for word in line.split() if word.startswith("--")} <= known for line in lines)


ACTIONS = {
    "get_object": "s3:GetObject",
    "head_object": "s3:GetObject",
    "put_object": "s3:PutObject",
    "delete_object": "s3:DeleteObject",
    "list_objects_v2": "s3:ListBucket",
}
"""Rights that requests of S3 need."""


def test_the_policy_allows_what_the_product_asks_of_a_store_and_no_more() -> None:
    """Least privilege: one prefix; and a request that is new in the code is allowed here first."""
    code = "".join(path.read_text() for path in CHECKOUT.glob("vlm_*/**/*.py"))
    asked = set(re.findall(r'client\(\)\.(?:get_paginator\()?"?(\w+)', code)) - {"get_paginator"}
    policy = json.loads((DEPLOY / "s3" / "policy.json").read_text())
    data, listed, *_ = policy["Statement"]
    allowed = {*data["Action"], listed["Action"]}
    assert allowed == {ACTIONS[request] for request in asked}
    assert data["Resource"] == "arn:aws:s3:::BUCKET/PREFIX/*"
    # S3 answers 404, not 403, where listing is allowed too, and a HEAD or GET has no s3:prefix.
    assert listed["Condition"] == {"StringLikeIfExists": {"s3:prefix": ["PREFIX/*"]}}
    for statement in policy["Statement"]:
        assert "*" not in (statement["Action"], statement["Resource"])


def test_no_rule_expires_what_is_published() -> None:
    """A lifecycle rule that empties the data set is the quietest way to lose it."""
    rules = json.loads((DEPLOY / "s3" / "lifecycle.json").read_text())["Rules"]
    expiring = [rule["Filter"]["Prefix"] for rule in rules if "Expiration" in rule]
    assert expiring == ["PREFIX/dagster-logs/"]
    assert expiring[0].startswith(logs_prefix(S3Folder.parse("s3://bucket/PREFIX")))


def test_dagster_takes_the_settings_of_a_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What serve writes is read by Dagster's own loader: Postgres, launcher, logs, coordinator, pools."""
    monkeypatch.setenv("VLM_ASSETS_STATE_URL", "postgresql+psycopg2://u:p@h/d")
    monkeypatch.setenv("VLM_ASSETS_RAY_ADDRESS", "http://10.0.0.11:8265")
    seed_settings(tmp_path, filled_in(S3Folder.parse("s3://bucket/prefix"), devices_of_a_run=2))
    read, _ = dagster_instance_config(str(tmp_path))
    assert read["run_launcher"]["config"]["gpus"] == 2
    assert read["compute_logs"]["config"]["prefix"] == "prefix/dagster-logs"
    assert {"storage", "run_coordinator", "concurrency"} <= read.keys()
    assert read["sensors"] == {"use_threads": True, "num_workers": 4}, "who lives waits for no other sensor"
    assert "u:p@h" not in yaml.safe_dump(read), "secrets stay in the environment"
