"""dataset_audit: the audit as an asset with a check, so that the pages show whether the dataset is whole.

What lives here: Dagster's side only. What does not: the audit (``audit.py``).
"""

# No postponed annotations here: Dagster reads an asset's parameters from its real ones.

import contextlib
import hashlib
from collections.abc import Iterator, Sequence

import dagster as dg

from resources.state.pause import pause_of
from resources.state.workers import Workers
from sensors.dataset_audit_due import build_dataset_audit_sensor
from sensors.ticks import Ticks
from vlm_assets.assets.partition_state import State
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.operate.audit import Audit, audit
from vlm_assets.resource_settings import control_state
from vlm_assets.settings import Settings

ASSET = "dataset_audit"
CHECK = "conserved"

SHOWN = 50
"""Problems that are listed on the page; ``vlm-assets audit --json`` lists all."""


class AuditOptions(dg.Config):
    """deep: read every byte of every file and copy, instead of sizes, footers and ids."""

    deep: bool = False


def audit_table(found: Audit) -> str:
    """The counts of each asset, as markdown."""
    head = ("", "expected", "ok", "failed", "missing", "duplicate", "foreign", "not yet published")
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for asset in found.assets:
        total = found.total(asset)
        numbers = (
            total.expected,
            total.ok,
            total.failed,
            total.missing,
            total.duplicate,
            total.foreign,
            total.not_yet,
        )
        lines.append(f"| {asset} | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines)


def audit_metadata(found: Audit) -> dict[str, dg.MetadataValue]:
    """What a person wants to know of an audit; the numbers are plotted over time."""
    problems = [
        f"- {one.asset} {one.key or ''}: {one.sentence}" for one in (*found.wrong, *found.warnings)[:SHOWN]
    ]
    metadata: dict[str, dg.MetadataValue] = {
        "verdict": dg.MetadataValue.text(found.verdict()),
        "counts": dg.MetadataValue.md(audit_table(found)),
        "problems": dg.MetadataValue.int(len(found.wrong)),
        "warnings": dg.MetadataValue.int(len(found.warnings)),
    }
    if problems:
        metadata["found"] = dg.MetadataValue.md("\n".join(problems))
    for asset in found.assets:
        metadata[f"{asset}: partitions done"] = dg.MetadataValue.int(found.partitions_in(asset, State.DONE))
    return metadata


def build_dataset_audit(settings: Settings, *, audited: Sequence[str]) -> dg.AssetsDefinition:
    """The asset. ``audited``: the assets whose files it reads."""

    @dg.asset(
        name=ASSET,
        deps=list(audited),
        group_name="properties",
        kinds={"duckdb"},
        check_specs=[
            dg.AssetCheckSpec(
                CHECK,
                asset=ASSET,
                description=(
                    "Over all partitions: every published id is there once, ok or failed, no other is, and"
                    " every file is what was published."
                ),
            )
        ],
        description=(
            "Expected, ok, failed, missing, duplicate and foreign ids of the whole dataset, and files that"
            " are not what was published, counted from what is on disk. Partitions that are not published"
            " yet are counted, and are no fault. The same as `vlm-assets audit`."
        ),
    )
    def dataset_audit(
        context: dg.AssetExecutionContext, config: AuditOptions
    ) -> Iterator[dg.MaterializeResult[None]]:
        found = audit(settings, Catalog.open(settings.home), deep=config.deep)
        context.log.info(found.verdict())
        for problem in found.problems[:SHOWN]:
            said = f"{problem.asset} {problem.key or ''}: {problem.sentence}"
            (context.log.warning if problem.kind.is_warning else context.log.error)(said)
        check = dg.AssetCheckResult(
            passed=found.ok,
            check_name=CHECK,
            severity=dg.AssetCheckSeverity.ERROR,
            description=found.verdict(),
            metadata={
                "problems": len(found.wrong),
                "first": dg.MetadataValue.json([one.sentence for one in found.wrong[:5]]),
            },
        )
        yield dg.MaterializeResult(metadata=audit_metadata(found), check_results=[check])

    return dataset_audit


def build_audit_sensor(settings: Settings, audit_asset: dg.AssetsDefinition) -> dg.SensorDefinition:
    """The sensor that audits once a day, and after files changed that an audit found wrong."""

    def paused() -> str | None:
        pause = pause_of(control_state(settings))
        return pause.sentence() if pause else None

    def signature() -> str:
        seen = []
        for asset in (settings.descriptions, settings.embeddings):
            for folder, pattern in ((asset.published, "*"), (asset.versions, "*"), (asset.journals, "*/*")):
                for path in sorted(folder.glob(pattern)):
                    with contextlib.suppress(FileNotFoundError):
                        stat = path.stat()
                        seen.append((str(path), stat.st_size, stat.st_ctime_ns, stat.st_ino))
        return hashlib.sha256(repr(seen).encode()).hexdigest()[:16] if seen else ""

    return build_dataset_audit_sensor(
        audit_asset,
        signature=signature,
        works=lambda: bool(Workers(control_state(settings)).living()),
        paused=paused,
        ticks=Ticks(control_state(settings)),
    )
