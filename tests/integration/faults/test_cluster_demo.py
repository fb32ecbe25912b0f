"""`make cluster-demo` on machines that are apart, with a real Postgres and a real S3 store."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
import sqlalchemy as sa

from faults.machines import missing
from faults.postgres_server import PostgresServer, programs

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.fixture
def demo(left_out: Callable[[str], NoReturn], scripted_runs: dict[str, str]) -> Callable[..., dict[str, Any]]:
    """Lives through the story; gives its last line. The runs of machines alone have scripted models."""
    if (why := missing()) is not None:
        left_out(why)
    if programs() is None:
        left_out("postgresql")

    def live(*arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "faults.cluster_demo", *arguments],
            cwd=CHECKOUT,
            env={**os.environ, **scripted_runs, "TESTS_SCRIPTED_MODELS": "0.4"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    return live


def test_machines_that_go_on_from_one_store_lose_and_double_nothing(
    demo: Callable[..., dict[str, Any]],
) -> None:
    """One loses its power and one is cut off and comes back: others go on with what was committed."""
    found = demo("--alone", "--properties", "16", "--range-size", "8", "--machines", "3", "--seed", "3")
    assert (found["kills"], found["cuts"], found["lost"], found["doubled"]) == (1, 1, 0, 0)
    assert found["recomputed_at_most"] <= 4, "a batch is two rows: what was committed was computed again"


@pytest.mark.long
def test_ray_has_the_work_of_lost_machines_go_on_elsewhere(demo: Callable[..., dict[str, Any]]) -> None:
    """Heartbeats find out which machine is lost, Dagster launches anew, and Ray's part comes back."""
    found = demo("--properties", "60", "--range-size", "20", "--seed", "3", "--at-once")
    assert (found["kills"], found["cuts"], found["lost"], found["doubled"]) == (1, 1, 0, 0)
    assert found["seconds_until_elsewhere"] > 0


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("options", [(), ("--redis",)], ids=["no redis", "redis"])
def test_work_goes_on_by_itself_whatever_is_restarted(
    demo: Callable[..., dict[str, Any]], left_out: Callable[[str], NoReturn], options: Sequence[str]
) -> None:
    """Store, Postgres, daemon, Ray's head, and the head's whole machine: another run works after each."""
    if options and shutil.which("redis-server") is None:
        left_out("redis-server")
    found = demo("--properties", "60", "--range-size", "20", "--seed", "5", "--restarts", *options)
    assert (found["lost"], found["doubled"], found["failed"]) == (0, 0, 0)


def test_a_secret_in_any_column_of_any_table_is_found(
    postgres_server: PostgresServer, postgres_url: str
) -> None:
    """Dagster keeps tags, run config and events in texts and JSON."""
    engine = sa.create_engine(postgres_url)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE run_tags (id int, value text)"))
        connection.execute(sa.text("""CREATE TABLE events (event jsonb)"""))
        connection.execute(sa.text("INSERT INTO run_tags VALUES (1, 'a tag')"))
        connection.execute(sa.text("INSERT INTO events VALUES (:said)"), {"said": '{"a": ["x", "-secret-"]}'})
    engine.dispose()
    assert postgres_server.tables_with(["secret", "another"]) == ["events"]
    assert postgres_server.tables_with(["another"]) == []
