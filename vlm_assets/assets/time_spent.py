"""Where the time of a partition went, as a person reads it: numbers to plot over partitions, and a table.

What lives here: the seconds of a run's work on descriptions, their names in Dagster, and their shares. What
does not: measuring them (``resources/engine/feeding.py``, the engines, the journal).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import dagster as dg

from resources.engine.feeding import TimeSpent


@dataclass
class WorkTime:
    """Seconds of the work on one partition, after the model was loaded.

    feeding: the model's and what it waited for. phases: of the model's seconds, what the engine can tell
    apart (see ``Engine.seconds``). rows: results to Arrow. commit: waiting for the journal, its last flush
    included. total: from the first property to the last commit.
    """

    feeding: TimeSpent = field(default_factory=TimeSpent)
    phases: Mapping[str, float] = field(default_factory=dict)
    rows: float = 0.0
    commit: float = 0.0
    total: float = 0.0

    def metadata(self) -> dict[str, dg.MetadataValue]:
        """Each number by itself, and the table."""
        spent = self.feeding
        seconds = {
            "in model": spent.model,
            **{f"in {name}": self.phases[name] for name in ("prefill", "generation") if name in self.phases},
            "validating": spent.validating,
            "building rows": self.rows,
            "waiting for images": spent.waiting,
            "waiting for commit": self.commit,
            "reading images": spent.reading,
            "decoding images": spent.decoding,
            "in processor": spent.preparing + self.phases.get("processor", 0.0),
        }
        numbers: dict[str, dg.MetadataValue] = {
            f"seconds {name}": dg.MetadataValue.float(round(value, 3)) for name, value in seconds.items()
        }
        return {**numbers, "where the time went": dg.MetadataValue.md(self.table())}

    def table(self) -> str:
        """Shares of the whole: what the device did, what it waited for, and what went on beside it."""
        spent = self.feeding
        phases = dict(self.phases)
        # Where the engine takes several batches at once, they are validated beside each other and the model.
        validating = spent.validating if phases else 0.0
        parts = {
            "images and prompt (prefill)": phases.pop("prefill", 0.0),
            "answers (generation)": phases.pop("generation", 0.0),
            "processor, not ahead": phases.pop("processor", 0.0),
            "validation": validating,
        }
        parts["model, else" if self.phases else "model"] = max(0.0, spent.model - sum(parts.values()))
        parts |= {
            "waiting for images": spent.waiting,
            "rows": self.rows,
            "waiting for commit": self.commit,
        }
        parts["else"] = max(0.0, self.total - sum(parts.values()))
        beside = {
            "reading images": spent.reading,
            "decoding images": spent.decoding,
            "processor": spent.preparing,
        }
        rows = [
            *(_row(name, seconds, self.total) for name, seconds in parts.items()),
            *(_row(f"*beside it:* {name}", seconds, self.total) for name, seconds in beside.items()),
        ]
        return "\n".join(["| | s | share |", "|---|--:|--:|", *filter(None, rows)])


def _row(name: str, seconds: float, total: float) -> str:
    """A line of the table; none for what took no time."""
    return f"| {name} | {seconds:.1f} | {seconds / total:.1%} |" if seconds >= 0.0005 * total > 0 else ""
