"""dataset_audit: the audit as an asset with a check, so that the pages show whether the dataset is whole.

The data set is audited by itself once a day, and each hour while something is wrong, so that a repair closes
the alert of the audit before it. The audit is in ``vlm_assets/services/home_audit.py``.
"""

# No postponed annotations here: Dagster reads an asset's parameters from its real ones.

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import dagster as dg

from resources.dagster_names import FINDING
from sensors.sensor_definition import Decided, Situation, build_sensor
from sensors.ticks import Ticks
from vlm_assets.assets import markdown
from vlm_assets.assets.markdown import Markdown, table
from vlm_assets.assets.partition_state import State
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings
from vlm_assets.services.home_audit import Audit, audit
from vlm_catalog.catalog import Catalog
from vlm_durable.commands import command
from vlm_durable.state.pause import pause_of
from vlm_durable.state.workers import Workers
from vlm_durable.versions.findings import worst

ASSET = "dataset_audit"
CHECK = "conserved"
SENSOR = "dataset_audit_due"
INTERVAL_SECONDS = 60
DAY_SECONDS = 24 * 3600.0
AGAIN_SECONDS = 3600.0
"""The time between an audit that found a fault and the next one."""

SHOWN = 50
"""Problems that are listed on the page; ``vlm-assets audit --json`` lists all."""


class AuditOptions(dg.Config):
    """deep: read every byte of every file and copy, instead of sizes, footers and ids."""

    deep: bool = False


def audit_table(report: Audit) -> Markdown:
    """The counts of each asset."""
    head = (
        "",
        "expected",
        "ok",
        "failed",
        "not asked",
        "missing",
        "duplicate",
        "foreign",
        "not yet published",
    )
    rows: list[tuple[object, ...]] = []
    for asset in report.assets:
        total = report.total(asset)
        row = (
            asset,
            total.expected,
            total.ok,
            total.failed,
            total.not_asked,
            total.missing,
            total.duplicate,
            total.foreign,
            total.not_yet,
        )
        rows.append(row)
    return table(head, rows)


def audit_metadata(report: Audit) -> dict[str, dg.MetadataValue]:
    """The figures and findings of an audit for its page; Dagster plots the numbers over time."""
    findings = [
        f"{finding.asset} {finding.key or ''}: {finding.text}"
        for finding in (*report.wrong, *report.warnings)[:SHOWN]
    ]
    metadata: dict[str, dg.MetadataValue] = {
        "verdict": dg.MetadataValue.text(report.verdict()),
        "counts": markdown.metadata(audit_table(report)),
        "problems": dg.MetadataValue.int(len(report.wrong)),
        "warnings": dg.MetadataValue.int(len(report.warnings)),
    }
    if findings:
        metadata["found"] = markdown.metadata(markdown.bullets(findings))
    for asset in report.assets:
        metadata[f"{asset}: partitions done"] = dg.MetadataValue.int(report.partitions_in(asset, State.DONE))
    return metadata


def build_dataset_audit(settings: Settings, *, audited: Sequence[str]) -> dg.AssetsDefinition:
    """The asset. ``audited``: the assets whose files it reads."""

    @dg.asset(
        key=settings.names.key(ASSET),
        deps=[settings.names.key(asset) for asset in audited],
        group_name=settings.names.name("properties"),
        kinds={"duckdb"},
        owners=settings.owner_list,
        tags=settings.tag_values,
        # It is audited once a day: two days without an audit mean that something is down or paused.
        freshness_policy=dg.FreshnessPolicy.time_window(fail_window=timedelta(days=2)),
        check_specs=[
            dg.AssetCheckSpec(
                CHECK,
                asset=settings.names.key(ASSET),
                description=(
                    "Over all partitions: every published id is there once, ok or failed, no other is, and"
                    " every file is what was published."
                ),
            )
        ],
        description=(
            "Expected, ok, failed, missing, duplicate and foreign ids of the whole dataset, and files that"
            " are not what was published, counted from what is on disk. Partitions that are not published"
            f" yet are counted, and are no fault. The same as {command('audit')}."
        ),
    )
    def dataset_audit(
        context: dg.AssetExecutionContext, config: AuditOptions
    ) -> Iterator[dg.MaterializeResult[None]]:
        settings.name_in_commands()
        report = audit(settings, Catalog.open(settings.home), deep=config.deep)
        context.log.info(report.verdict())
        for finding in report.findings[:SHOWN]:
            message = f"{finding.asset} {finding.key or ''}: {finding.text}"
            (context.log.warning if finding.kind.is_warning else context.log.error)(message)
        wrong = worst(report.wrong)
        check = dg.AssetCheckResult(
            passed=report.ok,
            check_name=CHECK,
            severity=dg.AssetCheckSeverity.ERROR,
            description=markdown.sentence(report.verdict()),
            metadata={
                "problems": len(report.wrong),
                **({} if wrong is None else {FINDING: wrong.kind.value}),
                "first": dg.MetadataValue.json([finding.text for finding in report.wrong[:5]]),
            },
        )
        yield dg.MaterializeResult(metadata=audit_metadata(report), check_results=[check])

    return dataset_audit


@dataclass(frozen=True)
class LastAudit:
    """The latest audit: when it ended (unix seconds) and how many faults it found."""

    at: float
    problems: int


def why_due(last: LastAudit | None, *, works: bool, now: float) -> str | None:
    """Why an audit of published files is due now; None if it is not."""
    if last is None:
        return None if works else "The data set was never audited."
    # If the clock was put back, the last audit may lie ahead, by months.
    seconds = abs(now - last.at)
    if seconds >= DAY_SECONDS:
        return "The last audit is a day old."
    if last.problems and not works and seconds >= AGAIN_SECONDS:
        return f"The last audit found {last.problems} faults."
    return None


def build_audit_sensor(settings: Settings, audit_asset: dg.AssetsDefinition) -> dg.SensorDefinition:
    """The sensor that audits once a day, and each hour while something is wrong."""
    state = control_state(settings)

    def decide(at: Situation) -> Decided:
        pause, now = pause_of(state), at.now
        if pause:
            return Decided(f"Nothing is started: {pause.sentence()}.")
        if not any(asset.published_keys() for asset in settings.partitioned_assets):
            return Decided("There is nothing to audit yet.")
        event = at.dagster.latest_materialization(ASSET)
        last = None if event is None else LastAudit(event[0], int(event[1].get("problems", 0)))
        why = why_due(last, works=bool(Workers(state).living()), now=now)
        if why is None:
            return Decided("No audit is due.")
        # One run for each cause: a tick that was killed, or that finds the run under way, uses the same key.
        since = last.at if last else 0.0
        run_key = f"{since:.0f} {int((now - since) // AGAIN_SECONDS)}"
        return Decided(why, requests=[dg.RunRequest(run_key=run_key, tags={"vlm-assets/why": why})])

    return build_sensor(
        SENSOR,
        decide,
        interval_seconds=INTERVAL_SECONDS,
        description=(
            "Audits the data set once a day, and each hour while something is wrong, so that the alert of a"
            " fault closes by itself."
        ),
        ticks=Ticks(state, settings.names),
        target=audit_asset,
    )
