"""Whether the guarantee holds, on rendered properties: python -m benchmarks.guarantee HOME... [--picture P]

HOMEs are described examples (``vlm-assets demo --exit --properties 2050 --seed N --home HOME``). The example
model is nearly always right, so the images of one home are made worse before they are described: the same
command with ``--no-run``, ``python -m benchmarks.guarantee HOME --degrade``, then the command as above.

All answers together are the population, of which everything is known. Samples of 300 labels are drawn from it
again and again; each promises by the tests of the product what it can. A promise is broken if fewer of all
answers above its threshold are right than it says.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq

from vlm_assets.assets.partition import CONFIDENCE
from vlm_assets.config.settings import load_settings
from vlm_engine.schema import same
from vlm_results.confidence_statistics import (
    FIRST_LOOK,
    GRID,
    Flags,
    Floats,
    calibration_error,
    cell_counts,
    certify,
    cross_calibrated,
    looks,
    reliability,
)
from vlm_results.published_table import field_confidences

DRAWS: Final = 1000
RISK: Final = 0.05
PROMISES: Final[tuple[Mapping[str, float], ...]] = ({"roof": 0.95, "has_pool": 0.98},)
"""Guarantees that are tried beside that of 95% of each field."""


@dataclass(frozen=True)
class Answers:
    """All answers of one field, with their confidences."""

    confidences: Floats
    right: Flags

    def share_right(self, threshold: float) -> float:
        """The share of right answers from this confidence on."""
        above = self.confidences >= threshold
        return float(self.right[above].mean()) if above.any() else 1.0

    def risk_coverage(self) -> Floats:
        """The share of wrong answers among the surest, for each number of them."""
        order = np.argsort(-self.confidences, kind="stable")
        errors: Floats = np.cumsum(~self.right[order]) / np.arange(1, len(order) + 1)
        return errors


@dataclass(frozen=True)
class Drawn:
    """What all draws together showed. broken: the share of draws in which any promise was broken.

    promised: the share of draws with a promise, by field. shown: the mean share of answers that are shown.
    """

    broken: float
    promised: Mapping[str, float]
    shown: Mapping[str, float]


def read_answers(homes: Sequence[Path]) -> dict[str, Answers]:
    """The answers of all described properties, by field."""
    confidences: dict[str, list[Floats]] = {}
    right: dict[str, list[bool]] = {}
    for home in homes:
        truths: dict[str, Mapping[str, Any]] = {
            row["property_id"]: row["truth"]
            for row in pq.read_table(home / "example" / "truth.parquet").to_pylist()
        }
        for path in sorted(load_settings(home=home).descriptions.published.glob("*.parquet")):
            table = pq.read_table(path, columns=["property_id", "status", "description", CONFIDENCE])
            table = table.filter(np.array(table["status"].to_pylist()) == "ok")
            rows = table.select(["property_id", "description"]).to_pylist()
            for name in next(iter(truths.values())):
                confidences.setdefault(name, []).append(field_confidences(table[CONFIDENCE], name))
                right.setdefault(name, []).extend(
                    same(row["description"][name], truths[row["property_id"]][name]) for row in rows
                )
    answers = {
        name: Answers(np.concatenate(parts), np.array(right[name])) for name, parts in confidences.items()
    }
    return {name: of_field for name, of_field in answers.items() if np.isfinite(of_field.confidences).all()}


def degrade(home: Path) -> None:
    """Blur and darken the images of an example, each property's by its own measure, from not at all to hardly
    recognisable. In place, and the same each time."""
    from PIL import Image

    from examples.canvas import degraded

    for folder in sorted((home / "example" / "images").iterdir()):
        measure = np.random.default_rng(list(folder.name.encode())).random()
        for path in sorted(folder.iterdir()):
            try:
                with Image.open(path) as opened:
                    image = opened.convert("RGB")
            except OSError:
                continue  # The example has images that cannot be read.
            degraded(image, measure).save(path)


def draw(answers: Mapping[str, Answers], targets: Mapping[str, float], *, risk: float, draws: int) -> Drawn:
    """Draw samples of labels, and promise what each shows. risk: of each field's test."""
    chance = np.random.default_rng(1)
    size = len(next(iter(answers.values())).right)
    populations = {name: cell_counts(answers[name].confidences) for name in targets}
    shares = {name: [answers[name].share_right(at) for at in GRID] for name in targets}
    above = {name: np.cumsum(populations[name][::-1])[::-1] / size for name in targets}
    broken = 0
    shown: dict[str, list[float]] = {name: [] for name in targets}
    for _ in range(draws):
        labels = chance.choice(size, FIRST_LOOK, replace=False)
        is_broken = False
        for name, target in targets.items():
            of_field = answers[name]
            certified = certify(
                of_field.confidences[labels],
                of_field.right[labels],
                populations[name],
                target=target,
                risk=risk,
            )
            place = None if certified is None else GRID.index(certified.threshold)
            is_broken |= place is not None and shares[name][place] < target
            shown[name].append(0.0 if place is None else float(above[name][place]))
        broken += is_broken
    return Drawn(
        broken / draws,
        {name: float(np.mean(np.array(values) > 0)) for name, values in shown.items()},
        {name: float(np.mean(values)) for name, values in shown.items()},
    )


def main() -> None:
    """Print the figures, and draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("homes", type=Path, nargs="+", metavar="HOME", help="described examples")
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--picture", type=Path, help="draw the curves of the least accurate fields into it")
    parser.add_argument("--degrade", action="store_true", help="make the images worse, and end")
    options = parser.parse_args()
    if options.degrade:
        for home in options.homes:
            degrade(home)
        return
    answers = read_answers(options.homes)
    size = len(next(iter(answers.values())).right)
    first = next(iter(looks(RISK)))
    print(f"{size:,} answers of each field, {options.draws:,} draws of {FIRST_LOOK} labels\n")
    print(
        "| field | right | error of raw confidence | calibrated | area under risk and coverage, of random's |"
        " 95%: promised in | shown | broken | broken, all risk on one look |\n|" + "---|" * 9
    )
    for name, of_field in sorted(answers.items(), key=lambda item: float(item[1].right.mean())):
        weights = np.ones(size)
        raw = calibration_error(reliability(of_field.confidences, of_field.right, weights))
        calibrated = cross_calibrated(of_field.confidences, of_field.right, weights)
        after = calibration_error(reliability(calibrated, of_field.right, weights))
        wrong = 1 - float(of_field.right.mean())
        area = f"{of_field.risk_coverage().mean() / wrong:.2f}" if wrong else ""
        by_look = draw(answers, {name: 0.95}, risk=first.risk, draws=options.draws)
        at_once = draw(answers, {name: 0.95}, risk=RISK, draws=options.draws)
        cells = [f"`{name}`", f"{1 - wrong:.1%}", f"{raw:.1%}", f"{after:.1%}", area]
        cells += [f"{by_look.promised[name]:.0%}", f"{by_look.shown[name]:.0%}"]
        print("|", " | ".join([*cells, f"{by_look.broken:.1%}", f"{at_once.broken:.1%}"]), "|")
    for targets in PROMISES:
        by_look = draw(answers, targets, risk=first.risk / len(targets), draws=options.draws)
        at_once = draw(answers, targets, risk=RISK / len(targets), draws=options.draws)
        promise = ", ".join(f"{name}>={share}" for name, share in targets.items())
        shown = ", ".join(f"{name} {share:.0%}" for name, share in by_look.shown.items())
        print(
            f"\n{promise}: broken in {by_look.broken:.1%} of the draws ({at_once.broken:.1%} with all risk on"
            f" one look); shown on average: {shown}"
        )
    if options.picture is not None:
        draw_curves(answers, options.picture)


def draw_curves(answers: Mapping[str, Answers], path: Path) -> None:
    """The reliability and the risk over the coverage of the four least accurate fields, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    fields = sorted(answers.items(), key=lambda item: float(item[1].right.mean()))[:4]
    figure = Figure(figsize=(9.2, 4.6), dpi=90, facecolor="#fcfbf8", layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, len(fields), squeeze=False)
    for (top, bottom), (name, of_field) in zip(grid.T, fields, strict=True):
        weights = np.ones(len(of_field.right))
        calibrated = cross_calibrated(of_field.confidences, of_field.right, weights)
        top.plot((0, 1), (0, 1), color="#b8b5ae", linewidth=1)
        for confidences, colour, label in (
            (of_field.confidences, "#e69f00", "raw"),
            (calibrated, "#0072b2", "calibrated"),
        ):
            bins = reliability(confidences, of_field.right, weights)
            points = [one.confidence for one in bins], [one.share for one in bins]
            top.plot(*points, color=colour, marker="o", markersize=3, linewidth=1, label=label)
        low = min(0.9, *top.get_ylim(), float(np.quantile(of_field.confidences, 0.05)))
        low = max(0.0, min(low, 0.9))
        top.set(xlim=(low, 1.005), ylim=(low, 1.005))
        top.set_title(name, size=9)
        errors = of_field.risk_coverage()
        coverage = np.arange(1, len(errors) + 1) / len(errors)
        bottom.plot(coverage, errors, color="#0072b2", linewidth=1)
        bottom.axhline(errors[-1], color="#b8b5ae", linewidth=1)
        bottom.set(xlim=(0, 1), ylim=(0, max(1.3 * errors[-1], 0.01)))
        for axes in (top, bottom):
            axes.tick_params(labelsize=6, colors="#74787e")
            axes.set_facecolor("none")
            axes.spines[:].set_visible(False)
    grid[0][0].legend(fontsize=7, frameon=False)
    grid[0][0].set_ylabel("share of right answers\nover the confidence", size=7)
    grid[1][0].set_ylabel("share of wrong answers\nover the share shown, surest first", size=7)
    figure.savefig(path, format="png")


if __name__ == "__main__":
    main()
