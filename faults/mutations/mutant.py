"""What a mutant is: one safeguard taken out of one file, and the promise that goes with it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path


class StaleMutantError(ValueError):
    """The text that a mutant replaces is not in its file, or not just once: the list needs an update."""


@dataclass(frozen=True)
class Mutant:
    """``text`` stands once in ``file`` (relative to the checkout); ``replacement`` takes its place."""

    file: str
    text: str
    replacement: str
    promise: str

    def applied(self, root: Path) -> str:
        """The file's source with the safeguard taken out. Raises StaleMutantError, SyntaxError."""
        source = (root / self.file).read_text()
        if (count := source.count(self.text)) != 1:
            raise StaleMutantError(f"{self.file} has {count} times, not once: {self.text!r} ({self.promise})")
        mutated = source.replace(self.text, self.replacement)
        ast.parse(mutated)
        return mutated
