"""The verdict on one partition for the drift sensor, made from the partition's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sensors.published_file_drift import SOUND, STALE, Verdict
from vlm_assets.assets.fingerprint import TEXTS, Meanings, digest_of
from vlm_assets.assets.partition_state import Kind, PartitionState, PartitionStates, VerifiedFiles
from vlm_assets.catalog.catalog import Catalog, catalog_path
from vlm_assets.config.settings import Settings
from vlm_assets.services.expected_cost import ExpectedCost
from vlm_assets.services.store_looks import READ_EACH_LOOK, store_looks
from vlm_durable.commands import command
from vlm_durable.files.layout import AssetFolders
from vlm_durable.mirror.bucket import StoreError
from vlm_durable.versions.partition_files import FindingKind, PublishedRecord
from vlm_durable.wording import counted

_STORE_SECONDS = 10.0
"""How long one tick looks at the store; the next tick goes on."""

_FILE_KINDS = {
    FindingKind.MISSING: "deleted",
    FindingKind.TRUNCATED: "truncated",
    FindingKind.ROWS_DIFFER: "replaced",
    FindingKind.DIGEST_DIFFERS: "replaced",
    FindingKind.UNREADABLE: "unreadable",
}
_KINDS = {
    Kind.FILE: "damaged",
    Kind.RECORD_BEHIND: "record damaged",
    Kind.PUT_BACK: "put back",
    Kind.VANISHED: "deleted",
    Kind.UNRECORDED: "foreign",
    Kind.RECORD: "record damaged",
    Kind.RECORD_COPY: "record copy damaged",
    Kind.SECOND_COPY: "second copy damaged",
    Kind.JOURNAL: "committed rows lost",
    Kind.IDS: "row count",
    Kind.STORE: "damaged in the store",
}
_WARNINGS = (Kind.RECORD_COPY, Kind.SECOND_COPY, Kind.PUT_BACK)
_RESTORE = (
    "Materialize the partition, or wait for the scheduled re-materialization: it puts the verified second"
    " copy back, without a device. What stood there is kept in .quarantine."
)


def _next_step(kind: Kind) -> str:
    """What to do about this kind of problem with a published file."""
    steps = {
        Kind.PUT_BACK: "A run stops until then.",
        Kind.UNRECORDED: "Move the file away, or materialize the partition, which keeps it in .quarantine.",
        Kind.RECORD: f"Run {command('repair')}: it says what it would do.",
        Kind.JOURNAL: f"Run {command('status')}.",
        Kind.IDS: "Materialize the partition with `recompute: true`.",
        Kind.STORE: "The next look puts it back if this machine has it. Else do that on one that has it:"
        f" {command('repair')}.",
    }
    return steps.get(kind, _RESTORE)


@dataclass(frozen=True)
class DriftLooks:
    """The looks at one asset's partitions."""

    settings: Settings
    asset: AssetFolders
    keys: Sequence[str]
    meanings: Meanings
    _opened: dict[tuple[int, int], Catalog] = field(default_factory=dict)
    _stored: dict[tuple[str, str], str] = field(default_factory=dict)
    """What was wrong in the store at the last look."""

    @property
    def made_from(self) -> AssetFolders | None:
        """The asset whose published rows this one follows from."""
        return self.settings.descriptions if self.asset == self.settings.embeddings else None

    def check_store(self) -> tuple[Mapping[str, str], list[str]]:
        """List the objects in the store, ask for what changed, read a few, and put back what was wrong.

        Returns a sentence for each partition with a problem, and sentences about what was done or failed.
        """
        looks = store_looks(self.settings).get(self.asset.name)
        if looks is None:
            return {}, []
        try:
            notes = looks.look(seconds=_STORE_SECONDS, read=READ_EACH_LOOK, mend=True)
        except StoreError as error:
            notes = [str(error)]
        troubles = looks.troubles()
        self._stored.clear()
        self._stored.update({(self.asset.name, key): trouble for key, trouble in troubles.items()})
        return troubles, notes

    def expectation(self) -> str:
        """Digest of the catalogue's version and the settings."""
        catalog = self._catalog()
        meaning = self.meanings.of_asset(self.asset.name).parts
        return digest_of([catalog.catalog_id, catalog.header.sequence, dict(meaning)])

    def verify(self, key: str) -> Verdict | None:
        """The verdict, every byte of the published file read; None while a publication is under way."""
        return self._verdict(self._states(None).read(self.asset.name, key))

    def reassess(self, key: str) -> Verdict | None:
        """The verdict on a file that was read before and did not change since."""
        return self._verdict(self._states(VerifiedFiles(None, seconds=0.0)).read(self.asset.name, key))

    def _states(self, verified: VerifiedFiles | None) -> PartitionStates:
        return PartitionStates(
            self.settings, self._catalog(), meanings=self.meanings, verified=verified, stored=self._stored
        )

    def _verdict(self, state: PartitionState) -> Verdict | None:
        problems = {problem.kind: problem for problem in state.problems}
        if Kind.PENDING in problems:
            return None
        for kind, name in _KINDS.items():
            if kind in problems:
                finding = problems[kind].finding
                return Verdict(
                    _FILE_KINDS[finding] if finding else name,
                    "WARN" if kind in _WARNINGS else "ERROR",
                    _expected(state.record),
                    problems[kind].sentence,
                    _next_step(kind),
                )
        if state.record is None:
            return Verdict(SOUND, None, "nothing published yet", "nothing.")
        if not state.changed:
            return Verdict(
                SOUND, None, _expected(state.record), f"{counted(state.rows, 'rows')}, to the byte."
            )
        images = ExpectedCost.of(self.settings, self._catalog()).whole.get(state.key, 0)
        cost = f"{counted(state.expected, 'properties')} with {counted(images, 'images')} to describe"
        if self.made_from is not None:
            cost = f"{counted(state.expected, 'descriptions')} to embed"
        names = ", ".join(name.replace("_", " ") for name in state.changed)
        step = f"It stays readable as it is. {command('run', state.key)} makes it anew; nothing else does."
        if TEXTS in state.changed:
            step = f"Materialize it: {command('run')} does so too."
        return Verdict(
            STALE,
            "WARN",
            "a file of today's catalogue and settings",
            f"it was made with another {names}; making it anew costs {cost}.",
            step,
        )

    def _catalog(self) -> Catalog:
        """The catalogue as it stands, opened anew where its file has changed."""
        stat = catalog_path(self.settings.home).stat()
        at = (stat.st_ino, stat.st_mtime_ns)
        if at not in self._opened:
            self._opened.clear()
            self._opened[at] = Catalog.open(self.settings.home)
        return self._opened[at]


def _expected(record: PublishedRecord | None) -> str:
    if record is None:
        return "a file with its record"
    return f"{counted(record.rows, 'rows')}, digest {record.sha256[:12]}, as published"
