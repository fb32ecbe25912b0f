"""Rows in doubt: those that a device made since its last good canary, once it gives wrong answers.

They are found among committed and published rows. An alert names the published partitions, and a person
decides whether they are computed again. The canary itself is in ``vlm_engine/canary.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.parquet as pq

from resources.alerts.alert import Alert
from resources.alerts.outbox import Outbox
from vlm_assets.assets.published_rows import PublishedRows
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings
from vlm_durable.commands import command
from vlm_durable.files.layout import AssetFolders
from vlm_durable.journal.journal import Journal
from vlm_durable.state.sqlite_file import ControlStateError
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.versioned_object import PublishedError
from vlm_durable.wording import counted
from vlm_engine.canary import FailedCanary, note_alerted, read_failed

_MADE_AT = ("described_at", "embedded_at")
_NAMED = 40

_log = logging.getLogger(__name__)


class RowsInDoubt:
    """Tells which rows may be wrong, by the failed canaries in the control state.

    If the control state cannot be read, no row is in doubt: rows are committed and published without it.
    """

    def __init__(self, settings: Settings) -> None:
        self._failed: list[FailedCanary] = []
        try:
            self._failed = read_failed(control_state(settings))
        except ControlStateError as error:
            _log.warning("Whether rows are in doubt cannot be told: %s", error)

    def among(self, rows: pa.Table | pa.RecordBatch) -> list[bool]:
        """Whether each row is in doubt, in their order."""
        if not self._failed:
            return [False] * rows.num_rows
        return [any(canary.covers(device, at, at) for canary in self._failed) for device, at in _made(rows)]

    def in_journal(self, journal: Journal) -> int:
        """How many committed rows of a journal are in doubt."""
        if not self._failed:
            return 0
        return sum(sum(self.among(batch)) for batch in journal.read_ordered())


def published_in_doubt(asset: AssetFolders, failed: FailedCanary) -> Iterator[str]:
    """The published partitions of an asset with rows that are in doubt by a failed canary, sorted.

    With a store, those of which this machine has the record. A partition that cannot be read is named too.
    Raises OSError where the folder cannot be listed.
    """
    partitions = PublishedPartitions(asset)
    for key in asset.published_keys():
        try:
            record = partitions.record(key)
            published = datetime.fromisoformat(record.published_at).timestamp() if record is not None else 0.0
            if record is None or published < (failed.good_at or 0.0):
                continue
            rows = PublishedRows.from_record(record)
            made: list[tuple[str | None, float, float]]
            if rows is not None:
                made = [(stretch.device, stretch.first, stretch.last) for stretch in rows.stretches]
            else:
                path = asset.partition(key).published
                table = pq.read_table(path, columns=["device", "embedded_at"], partitioning=None)
                made = [(device, at, at) for device, at in _made(table)]
        except (PublishedError, OSError, pa.ArrowException) as error:
            _log.warning("Whether %s has rows by %s cannot be told: %s", key, failed.device, error)
            yield f"{key} (it could not be read)"
            continue
        if any(failed.covers(device, first, last) for device, first, last in made):
            yield key


def _made(rows: pa.Table | pa.RecordBatch) -> list[tuple[str | None, float]]:
    """The device that made each row, and the time (unix seconds; 0 where it is unknown)."""
    made_at = next(name for name in _MADE_AT if name in rows.schema.names)
    return [
        (device, 0.0 if at is None else at.timestamp())
        for device, at in zip(rows["device"].to_pylist(), rows[made_at].to_pylist(), strict=True)
    ]


def alert_failed_canaries(settings: Settings) -> None:
    """Post an alert for each failed canary that has none yet, with the partitions in doubt.

    After a kill in between, the next run of any partition posts it again; the outbox sends it once.
    """
    state = control_state(settings)
    try:
        if failed := read_failed(state, not_alerted=True):
            Outbox(state).post_all(_alert(settings, canary) for canary in failed)
            note_alerted(state, failed)
    except (ControlStateError, OSError) as error:
        _log.warning("The alert of wrong answers waits for the next run: %s", error)


def _alert(settings: Settings, failed: FailedCanary) -> Alert:
    assets = settings.partitioned_assets
    keys = {asset.name: list(published_in_doubt(asset, failed)) for asset in assets}
    since = (
        f"its last right answers ({datetime.fromtimestamp(failed.good_at, UTC):%Y-%m-%d %H:%M} UTC)"
        if failed.good_at is not None
        else "the first row, for it never gave right ones"
    )
    named = [
        f"{counted(len(in_doubt), 'partitions')} of {name}: {', '.join(in_doubt[:_NAMED])}"
        + (" …" if len(in_doubt) > _NAMED else "")
        for name, in_doubt in keys.items()
        if in_doubt
    ]
    device, advice = failed.device, ""
    if named:
        advice = (
            " Look at the partitions named; those that are wrong: materialize them with `recompute: true`."
            " Nothing of them is computed again by itself."
        )
    return Alert(
        kind="device_wrong_answers",
        subject=f"devices/{device}/wrong answers",
        occurrence=f"{failed.at}",
        severity="error",
        title=f"{device} gives wrong answers and is left out",
        next_step=(
            f"Look at it: memory test, `nvidia-smi -q -d ECC`, the kernel log. When it is sound again:"
            f" {command('devices', '--take-back', device)}.{advice}"
        ),
        expected="the same answers to the canary every time",
        actual=(
            f"The answers are wrong: {failed.why}. Published rows here that it made since {since}:"
            f" {'; '.join(named) or 'none'}."
        ),
        at=failed.at,
    )
