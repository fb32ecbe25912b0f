"""Asset checks as Dagster knows them: the one place that touches its preview API for partitioned checks.

What lives here: specs with partitions, and turning an outcome into a result. What does not: what is
checked (``checks.py``) or in which order results are yielded (``materialize.py``).
"""

from __future__ import annotations

import warnings

import dagster as dg

from resources.publishing.record import PublishedRecord
from resources.publishing.verification import PUBLISHED_FILE
from vlm_assets.assets.checks import CheckOutcome, Severity

_OF_EVERY_ASSET = {
    PUBLISHED_FILE: (
        "The file on disk is what was published last, of today's catalogue and settings. Looked at when a"
        " materialization ends, and by the sensor published_file_drift whenever the file changes."
    )
}


def check_specs(
    asset: str, descriptions: dict[str, str], partitions: dg.PartitionsDefinition[str]
) -> list[dg.AssetCheckSpec]:
    """Blocking, inline checks of an asset, each with the asset's partitions and a sentence for people.

    With them ``published_file``, which every asset has that is published as files.
    """
    with warnings.catch_warnings():
        # Partitioned checks are a preview in Dagster 1.13; a change of that API touches this file only.
        warnings.simplefilter("ignore", dg.PreviewWarning)
        return [
            dg.AssetCheckSpec(
                name, asset=asset, description=description, blocking=True, partitions_def=partitions
            )
            for name, description in (descriptions | _OF_EVERY_ASSET).items()
        ]


def check_result(asset: str, outcome: CheckOutcome) -> dg.AssetCheckResult:
    """An outcome with expected, found and the first offending ids where the page shows them."""
    metadata: dict[str, str | dg.MetadataValue] = {"expected": outcome.expected, "found": outcome.found}
    if outcome.first_ids:
        metadata["first ids"] = dg.MetadataValue.json(list(outcome.first_ids))
    if outcome.next_step and not outcome.passed:
        metadata["what to do"] = outcome.next_step
    return dg.AssetCheckResult(
        passed=outcome.passed,
        asset_key=asset,
        check_name=outcome.name,
        severity=(
            dg.AssetCheckSeverity.WARN if outcome.severity is Severity.WARN else dg.AssetCheckSeverity.ERROR
        ),
        description=outcome.sentence(),
        metadata=metadata,
    )


def published_file_result(
    asset: str, record: PublishedRecord | None, *, damage: str = ""
) -> dg.AssetCheckResult:
    """What a materialization says of the file that stands when it ends: it was read back, or stays as it was.

    record: of that file; None where none was published before and none is now. damage: what is wrong with it.
    """
    expected = found = "nothing published yet"
    if record is not None:
        expected = "the file that was published last"
        found = damage or f"{record.rows} rows, digest {record.sha256[:12]}, read back"
    return check_result(
        asset, CheckOutcome(PUBLISHED_FILE, passed=not damage, expected=expected, found=found)
    )
