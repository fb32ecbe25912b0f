"""The results file: what each part has done so far, so that a campaign of hours goes on where it was stopped.

What lives here: counts and failures on disk, and the table, with the branches of recovery that were reached.
Results speak of one seed and one state of the code under test; for another they begin anew and the old ones
stay beside.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import vlm_durable
from faults.branches import NOT_BY_FAULTS
from faults.parts import PARTS, Part

SOURCES = Path(vlm_durable.__file__).parent.parent
_UNDER_TEST = ("vlm_durable/journal", "vlm_durable/versions", "vlm_durable/files", "vlm_catalog")


def code_digest() -> str:
    """One digest over the sources under test: the journal, the published partitions and the catalogue."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in _UNDER_TEST for path in (SOURCES / folder).glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@dataclass
class PartResults:
    """``cases``: how many are done, which is also the number of the next one."""

    cases: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, object]] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Results:
    """All parts' results, and the file they are kept in."""

    path: Path
    seed: int
    code: str
    parts: dict[str, PartResults] = field(default_factory=dict)
    missing: str | None = None
    """What the parts that did not run needed."""
    branches: Counter[str] = field(default_factory=Counter)
    """How often each branch of recovery was reached; 0 for one that never was."""

    @classmethod
    def load(cls, path: Path, seed: int) -> Results:
        """Go on from ``path`` where it is of this seed and code; else begin anew, the old file put beside."""
        fresh = cls(path, seed, code_digest())
        if not path.exists():
            return fresh
        content = json.loads(path.read_text())
        if (content["seed"], content["code"]) != (seed, fresh.code):
            path.rename(path.with_name(f"{path.stem}-{content['code']}-{content['seed']}.json"))
            return fresh
        for name, part in content["parts"].items():
            fresh.parts[name] = PartResults(
                part["cases"], Counter(part["counts"]), part["failures"], part["seconds"]
            )
        fresh.branches.update(content["branches"])
        return fresh

    def results_of(self, part: Part) -> PartResults:
        """The results of one part."""
        return self.parts.setdefault(part.name, PartResults())

    def is_full(self, scale: float) -> bool:
        """Whether every part has met its target: then each branch of recovery must have been reached."""
        return scale >= 1.0 and all(self.results_of(part).counts[part.unit] >= part.target for part in PARTS)

    @property
    def never_reached(self) -> list[str]:
        """The branches of recovery that no case reached, though a fault leads to them."""
        return sorted(
            name for name, count in self.branches.items() if not count and name not in NOT_BY_FAULTS
        )

    @property
    def failures(self) -> int:
        """Broken promises."""
        return sum(len(results.failures) for results in self.parts.values())

    def save(self) -> None:
        """Write the file in one step."""
        content = {
            "seed": self.seed,
            "code": self.code,
            "system": f"{platform.system()} {platform.release()}",
            "missing": self.missing,
            "branches": dict(sorted(self.branches.items())),
            "parts": {
                name: {**vars(results), "counts": dict(results.counts)}
                for name, results in self.parts.items()
            },
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(content, indent=1))
        temporary.replace(self.path)

    def table(self) -> str:
        """One line a part: what was done, out of how many, what broke, how fast."""
        lines = [f"{'part':24} {'fault rows':11} {'done':>22} {'of':>7} {'broken':>7} {'a second':>9}"]
        for part in PARTS:
            results = self.results_of(part)
            done = results.counts[part.unit]
            pace = f"{done / results.seconds:9.1f}" if results.seconds else f"{'-':>9}"
            lines.append(
                f"{part.name:24} {part.rows:11} {f'{done} {part.unit}':>22} {part.target:7} "
                f"{len(results.failures):7} {pace}"
            )
        if self.branches:
            expected = len(self.branches.keys() - NOT_BY_FAULTS)
            reached = expected - len(self.never_reached)
            lines.append(f"Branches of recovery: {reached} of {expected} reached.")
            lines += [f"  never reached: {name}" for name in self.never_reached]
        if self.missing:
            lines.append(f"Not run, because this is missing: {self.missing}.")
        return "\n".join(lines)
