"""What a home's lives were promised, and the comparison with what each next life finds.

What lives here: the promise, checked. The ledger is in the campaign's memory, which no fault reaches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from faults.lives import Life
from faults.partition_life import KEY, TOTAL, VERSIONS, asset
from vlm_durable.journal.high_water_mark import read_marks


class PromiseBrokenError(AssertionError):
    """Something that was acknowledged is gone, doubled or changed, or an error had no name."""


@dataclass
class Ledger:
    """All that was promised for one home so far. ``refused``: names of errors that a life may end with."""

    home: Path
    refused: frozenset[str] = frozenset()
    published: int = 0
    publishing: int = 0
    promised: dict[int, set[int]] = field(default_factory=dict)
    submitted: dict[int, set[int]] = field(default_factory=dict)
    version: int = 0
    retired: set[str] = field(default_factory=set)
    """Generations whose journals were removed."""
    staging_is_empty: bool = False
    """Whether the last life ended after a publication and before anything else was staged."""
    unread: bool = False
    """Whether a file could not be read for a moment: it may be set aside, or its journal be left over."""
    wakes: bool = False
    """Whether a writer wakes that others overtook: it may leave a journal behind that counts for nothing."""

    def hear(self, life: Life) -> Life:
        """Check what a life found against what was promised, and note what it was promised itself."""
        if life.error is not None and life.error not in self.refused:
            self._broken(f"a life ended with {life.error}: {life.message}")
        for report in life.reports:
            if "journals" in report:
                self._found_left_over(report["journals"], report["staged"])
            elif "standing" in report:
                self._found_published(report["standing"], report["exact"])
            elif "restored" in report:
                self._found_restored(report["version"], report["restored"], report["exact"])
            elif "submitted" in report:
                self.submitted.setdefault(report.get("of", self.version), set()).update(report["submitted"])
                self.staging_is_empty = False
            elif "promised" in report:
                self.promised.setdefault(report.get("of", self.version), set()).update(report["promised"])
            elif "publishing" in report:
                self.publishing = report["publishing"]
            elif "published" in report:
                self.published = report["published"]
                self.staging_is_empty = True
            elif "retired" in report:
                self.retired.add(report["retired"])
            elif report.get("verified"):
                self._broken(f"the finished partition does not verify: {report['verified']}")
        return life

    def hear_woken(self, life: Life) -> None:
        """Note what an overtaken writer was promised after it woke. It must not go back behind others."""
        for report in life.reports:
            if report.get("published", self.published) < self.published:
                self._broken(f"version {report['published']} was published over version {self.published}")
            if "restored" in report:
                # It says what it had read before it was stopped; others may have committed more since.
                report["restored"] = sorted({*report["restored"], *self.promised.get(report["version"], ())})
            if "publishing" in report:
                # Another that died while it published may have gone further: the next life settles that.
                report["publishing"] = max(report["publishing"], self.publishing)
        self.hear(life)

    def close(self, life: Life) -> None:
        """After the last life: all is published, nothing is left over, nothing had to be put aside."""
        self.hear(life)
        if not life.finished:
            self._broken("the last life, with nothing in its way, did not finish")
        if self.published != VERSIONS and self.publishing != VERSIONS:
            self._broken(f"version {self.published} of {VERSIONS} is published at the end")
        leftovers = [path for path in self.home.rglob("*.tmp") if path.is_file()]
        partition = asset(self.home).partition(KEY)
        if not self.wakes and not self.unread:
            leftovers += [*partition.quarantine.glob("*"), *partition.journals.glob("*")]
        if leftovers:
            self._broken(f"left behind: {', '.join(map(str, leftovers))}")
        if self.wakes or self.unread:
            return  # One that stood still before the rename of a mark wakes and puts it over a newer one.
        promising = [mark for mark in read_marks(partition.high_water_marks, KEY) if not mark.retired]
        if promising:
            self._broken(f"journals are removed, and their marks still promise rows: {promising}")

    def _found_left_over(self, journals: list[str], staged: int) -> None:
        if not self.wakes and (back := self.retired.intersection(journals)):
            self._broken(f"retired journals came back: {sorted(back)}")
        if staged and self.staging_is_empty:
            self._broken(f"{staged} files of a finished publication came back in the staging folder")
        self.staging_is_empty = False

    def _found_published(self, standing: int, exact: bool) -> None:
        if not exact:
            self._broken(f"the published file of version {standing} has other rows than were published")
        if not self.published <= standing <= max(self.published, self.publishing):
            self._broken(f"version {standing} is published where version {self.published} was promised")
        self.published = standing

    def _found_restored(self, version: int, restored: list[int], exact: bool) -> None:
        self.version = version
        promised, submitted = self.promised.get(version, set()), self.submitted.get(version, set())
        if lost := promised.difference(restored):
            self._broken(f"committed rows of version {version} are lost: {sorted(lost)}")
        if len(set(restored)) != len(restored):
            self._broken(f"rows of version {version} are doubled: {restored}")
        if not exact or not submitted.issuperset(restored) or len(restored) > TOTAL:
            self._broken(f"rows of version {version} were restored that are not those submitted: {restored}")
        # What was restored is committed from now on, whether it had been acknowledged or not.
        self.promised.setdefault(version, set()).update(restored)

    def _broken(self, sentence: str) -> None:
        raise PromiseBrokenError(f"{sentence} (home: {self.home})")
