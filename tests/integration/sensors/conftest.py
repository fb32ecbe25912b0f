"""A Dagster instance, the alerts sensor on it, and a real receiver of what the sensor tells."""

import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import pytest

from resources.alerts.delivery import Delivery
from resources.alerts.outbox import Outbox
from resources.alerts.targets import checked_targets
from sensors.alerts import AlertScan, build_alerts_sensor
from sensors.dagster_internals.events import DagsterFacts
from vlm_durable.state.database import open_state

ADDRESS = "http://127.0.0.1:3000"
KEYS = dg.StaticPartitionsDefinition([f"{n:05d}" for n in range(10)])
KEY = "00007"
DO = "Put the missing images back."


@dataclass
class Bench:
    """An instance, an asset that does as it is told, and the sensor."""

    instance: dg.DagsterInstance
    home: Path
    receiver: object
    does: str = "well"
    cursor: str | None = None

    def __post_init__(self):
        self.outbox = Outbox(open_state(self.home / ".state"))
        self.start_sensor()

    def start_sensor(self):
        """As after a restart of the code server."""
        self.delivery = Delivery(self.outbox, checked_targets([self.receiver.url()]), home=self.home)
        self.sensor = build_alerts_sensor(
            self.scan(assets=["rows"]), self.delivery, address=lambda: ADDRESS, clock=lambda: time.time()
        )

    def scan(self, **changes) -> AlertScan:
        """A scan over no sensor, with no heartbeat anywhere."""
        nothing = {"assets": [], "watched": {}, "paused": lambda: False}
        return AlertScan(self.outbox, **{**nothing, "working": frozenset, "silence": 1800.0, **changes})

    def tick(self) -> str:
        context = dg.build_sensor_context(instance=self.instance, cursor=self.cursor)
        said = self.sensor(context)
        self.cursor = context.cursor
        return said.skip_message

    def evaluated(self, *, passed: bool = False) -> None:
        """A result of a check without a run, as the drift sensor tells it."""
        found = dg.AssetCheckEvaluation(
            dg.AssetKey("rows"), "file_stands", passed=passed, metadata={"found": "truncated"}, partition=KEY
        )
        DagsterFacts(self.instance).report_evaluation(found)

    def run(self, does: str) -> dg.ExecuteInProcessResult:
        """Materialize the partition: well, with a failing check, with a warning, or with an error."""
        self.does = does
        bench = self
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dg.PreviewWarning)
            spec = dg.AssetCheckSpec("row_count", asset="rows", blocking=True, partitions_def=KEYS)

        @dg.asset(partitions_def=KEYS, check_specs=[spec])
        def rows():
            if bench.does == "error":
                raise dg.Failure("The images of p1 are gone. Put them back.", allow_retries=False)
            found = 19 if bench.does in ("check", "warning") else 20
            result = dg.AssetCheckResult(
                passed=found == 20,
                check_name="row_count",
                severity=dg.AssetCheckSeverity.WARN
                if bench.does == "warning"
                else dg.AssetCheckSeverity.ERROR,
                description=f"Expected 20 rows; found {found}.",
                metadata={"expected": "20 rows", "found": str(found), "what to do": DO},
            )
            if bench.does == "check":
                yield result
                raise dg.Failure("Not published.", allow_retries=False)
            yield dg.Output(None)
            yield result

        done = dg.materialize(
            [rows],
            selection=["rows"],
            partition_key=KEY,
            instance=self.instance,
            raise_on_error=False,
        )
        # A failed run says a moment later whether Dagster starts it again; that moment is over here.
        self.settle(done.run_id)
        return done

    def settle(self, run_id: str) -> None:
        """Put the end of a run five seconds back."""
        import sqlalchemy as db
        from dagster._core.storage.runs.schema import RunsTable

        with self.instance.run_storage.connect() as connection:
            connection.execute(
                db.update(RunsTable).where(RunsTable.c.run_id == run_id).values(end_time=time.time() - 5)
            )

    def lines_of(self, number: int) -> list[str]:
        return self.receiver.messages[number]["message"].splitlines()


@pytest.fixture
def bench(tmp_path, receiver, new_instance) -> Bench:
    """Nothing has run yet, and nothing was told."""
    with new_instance("dagster") as instance:
        yield Bench(instance, tmp_path / "home", receiver)
