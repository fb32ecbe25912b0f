"""The verdict on one partition for the drift sensor, made from the partition's state."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vlm_assets.assets.fingerprint import Meanings, digest_of
from vlm_assets.assets.partition_state import PartitionState, PartitionStates
from vlm_assets.catalog.catalog import Catalog, catalog_path
from vlm_assets.config.settings import Settings
from vlm_assets.services.expected_cost import ExpectedCost
from vlm_assets.services.store_looks import READ_EACH_LOOK, store_looks
from vlm_durable.files.layout import AssetFolders
from vlm_durable.mirror.bucket import StoreError
from vlm_durable.versions.findings import Finding, FindingKind
from vlm_durable.versions.published import Verification
from vlm_durable.versions.verified_files import VerifiedFiles
from vlm_durable.wording import counted

_STORE_SECONDS = 10.0
"""How long one tick looks at the store; the next tick goes on."""

_UNTOLD = FindingKind.EARLIER_VERSION
"""Readers and a restoration do without the earlier versions."""


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

    def doubtful(self) -> frozenset[str]:
        """The partitions whose file was verified too long ago, or was found damaged by whoever read it."""
        return VerifiedFiles(self.settings.state_directory).doubtful(self.asset.name)

    def expectation(self) -> str:
        """Digest of the catalogue's version and the settings."""
        catalog = self._catalog()
        meaning = self.meanings.of_asset(self.asset.name).parts
        return digest_of([catalog.catalog_id, catalog.header.sequence, dict(meaning)])

    @contextlib.contextmanager
    def look(self) -> Iterator[Callable[[str], Verification | None]]:
        """Gives verdicts by key. A file is read if it changed, or is in doubt, since it was verified."""
        verified = VerifiedFiles(self.settings.state_directory, seconds=math.inf)
        states = PartitionStates(
            self.settings, self._catalog(), meanings=self.meanings, verified=verified, stored=self._stored
        )
        try:
            yield lambda key: self._verdict(states.read(self.asset.name, key))
        finally:
            verified.save()

    def _verdict(self, state: PartitionState) -> Verification | None:
        if any(finding.kind is FindingKind.PENDING for finding in state.findings):
            return None
        findings = (finding for finding in state.findings if finding.kind is not _UNTOLD)
        with_costs = tuple(self._with_cost(state, finding) for finding in findings)
        return Verification(state.key, state.record, with_costs)

    def _with_cost(self, state: PartitionState, finding: Finding) -> Finding:
        """The finding of a stale partition, with what making it anew costs."""
        if finding.kind is not FindingKind.STALE:
            return finding
        images = ExpectedCost.of(self.settings, self._catalog()).whole.get(state.key, 0)
        cost = f"{counted(state.expected, 'properties')} with {counted(images, 'images')} to describe"
        if self.made_from is not None:
            cost = f"{counted(state.expected, 'descriptions')} to embed"
        step = f"{finding.next_step} That costs {cost}; nothing else does it. It stays readable as it is."
        return replace(finding, next_step=step)

    def _catalog(self) -> Catalog:
        """The catalogue as it stands, opened anew where its file has changed."""
        stat = catalog_path(self.settings.home).stat()
        at = (stat.st_ino, stat.st_mtime_ns)
        if at not in self._opened:
            self._opened.clear()
            self._opened[at] = Catalog.open(self.settings.home)
        return self._opened[at]
