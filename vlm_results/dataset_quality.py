"""dataset_quality: what the descriptions say and where they are odd, as an asset with checks that only warn.

What lives here: Dagster's side, and when it is looked at by itself: once what was published has come to rest,
else every six hours; and the picture. What does not: what is found (``vlm_results/quality.py``).
"""

# No postponed annotations here: Dagster reads an asset's parameters from its real ones.
import io
from collections.abc import Iterator, Mapping
from itertools import islice

import dagster as dg
import numpy as np
import numpy.typing as npt

from sensors.sensor_definition import Decided, Situation, build_sensor
from sensors.ticks import Ticks
from vlm_assets.assets import markdown, property_descriptions
from vlm_assets.assets.markdown import Markdown, escape, sentence, table
from vlm_assets.catalog.catalog import Catalog
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings
from vlm_durable.state.pause import pause_of
from vlm_durable.state.workers import Workers
from vlm_durable.wording import counted
from vlm_results.quality import Kind, Quality, Suspicion, look_at_quality
from vlm_results.review import Accuracy, accuracy, published_answers

ASSET = "dataset_quality"
SENSOR = "dataset_quality_due"
INTERVAL_SECONDS = 300
AGAIN_SECONDS = 6 * 3600.0

_CHECKS = {
    "alike": "No partition answers otherwise than all others, beyond chance and by far.",
    "answers": "No field is always the same, always null, or the same text again and again.",
    "consistent": "No description contradicts itself, by the conditions that the schema names.",
}
_SHOWN, _SHOWN_VALUES = 20, 4


def quality_table(found: Quality, reviewed: Accuracy) -> Markdown:
    """Each field, its most frequent answers, its nulls, and how often it is right."""
    right = {
        name: f"{share.sentence()} of {share.total:,} reviewed" for name, share in reviewed.fields.items()
    }
    right |= {name: f"{share.sentence()} of {share.total:,}" for name, share in found.agreement.items()}
    rows = []
    for name, one in found.fields.items():
        total = max(1, found.ok - one.nulls)
        shown = [f"{value} {count / total:.0%}" for value, count in islice(one.counts.items(), _SHOWN_VALUES)]
        if one.kind == "texts":
            most_frequent = islice(one.counts.items(), 1)
            shown = [f"{counted(count, 'times')} {value[:60]}" for value, count in most_frequent]
        nulls = f"{one.nulls / max(1, found.ok):.1%}"
        rows.append((name, escape(", ".join(shown)), nulls, right.get(name, "")))
    return table(("field", "answers", "null", "right"), rows)


def quality_metadata(found: Quality, reviewed: Accuracy) -> dict[str, dg.MetadataValue]:
    """What a person wants to see; the numbers are plotted over time."""
    picture = quality_picture(found)
    metadata: dict[str, dg.MetadataValue] = {}
    if picture is not None:
        metadata["picture"] = markdown.metadata(markdown.picture(picture, alt="what the descriptions say"))
    metadata["fields"] = markdown.metadata(quality_table(found, reviewed))
    if found.findings:
        metadata["odd"] = markdown.metadata(markdown.bullets(map(_sentence, found.findings[:_SHOWN])))
    metadata["findings"] = dg.MetadataValue.int(len(found.findings))
    metadata["described"] = dg.MetadataValue.int(found.ok)
    metadata["failed"] = dg.MetadataValue.int(sum(found.failed.values()))
    for kind, count in sorted(found.failed.items()):
        metadata[f"failed: {kind}"] = dg.MetadataValue.int(count)
    for name, share in {**reviewed.fields, **found.agreement}.items():
        metadata[f"right: {name}"] = dg.MetadataValue.float(round(share.share, 4))
    if reviewed.note:
        metadata["review"] = dg.MetadataValue.text(reviewed.note)
    metadata["partitions"] = dg.MetadataValue.int(len(found.published))
    if found.unread:
        metadata["could not be read"] = markdown.metadata(markdown.bullets(found.unread))
    return metadata


def check_results(found: Quality) -> list[dg.AssetCheckResult]:
    """A result of each check; what is odd warns and stops nothing."""
    results = []
    for check, expected in _CHECKS.items():
        odd = found.of_check(check)
        said = " ".join(_sentence(one) for one in odd[:_SHOWN]) or expected
        results.append(
            dg.AssetCheckResult(
                passed=not odd,
                check_name=check,
                severity=dg.AssetCheckSeverity.WARN,
                description=sentence(said),
                metadata={
                    "expected": expected,
                    "found": said if odd else "nothing odd",
                    "partitions": dg.MetadataValue.json(sorted({one.key for one in odd if one.key})),
                    "examples": dg.MetadataValue.json([list(one.examples) for one in odd[:_SHOWN]]),
                },
            )
        )
    return results


def build_dataset_quality(settings: Settings) -> dg.AssetsDefinition:
    """The asset."""

    @dg.asset(
        name=ASSET,
        deps=[property_descriptions.ASSET],
        group_name="properties",
        kinds={"duckdb"},
        check_specs=[
            dg.AssetCheckSpec(name, asset=ASSET, description=said) for name, said in _CHECKS.items()
        ],
        description=(
            "What the published descriptions say, field by field, over the whole and over time; partitions"
            " that answer otherwise than the others, answers that never vary, contradictions, and how far a"
            " truth file (VLM_ASSETS_TRUTH) agrees. Only what is new is read."
        ),
    )
    def dataset_quality(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None]]:
        changed = last_publication(settings)
        catalog = Catalog.open(settings.home)
        found = look_at_quality(settings, catalog)
        for one in found.findings[:_SHOWN]:
            context.log.warning(_sentence(one))
        metadata = quality_metadata(found, accuracy(settings.home, published_answers(settings, catalog)))
        metadata["changed"] = dg.MetadataValue.float(changed)
        yield dg.MaterializeResult(metadata=metadata, check_results=check_results(found))

    return dataset_quality


def why_due(last: tuple[float, float] | None, changed: float, *, works: bool, now: float) -> str | None:
    """Why a look is due now; None if it is not. All in unix seconds.

    last: the last look, and what ``changed`` was then. changed: the last publication; 0 before the first.
    """
    if not changed or (last is not None and last[1] == changed):
        return None
    if not works:
        return "Partitions were published, and everything is at rest."
    if last is None or now - last[0] >= AGAIN_SECONDS:
        return "Partitions were published, and the last look is old."
    return None


def last_publication(settings: Settings) -> float:
    """When a description file was published last; 0 where none is. Also for one that replaces another."""
    if not settings.descriptions.published_keys():
        return 0.0
    return settings.descriptions.published.stat().st_mtime


def build_quality_sensor(settings: Settings, quality: dg.AssetsDefinition) -> dg.SensorDefinition:
    """The sensor that looks at the quality as partitions come."""
    state = control_state(settings)

    def decide(at: Situation) -> Decided:
        pause = pause_of(state)
        if pause:
            return Decided(f"Nothing is started: {pause.sentence()}.")
        known = at.dagster.latest_materialization(ASSET)
        last = None if known is None else (known[0], float(known[1].get("changed", 0)))
        changed = last_publication(settings)
        why = why_due(last, changed, works=bool(Workers(state).living()), now=at.now)
        if why is None:
            return Decided("No look is due.")
        run_key = f"{last[0] if last else 0:.0f} {changed}"
        return Decided(why, requests=[dg.RunRequest(run_key=run_key, tags={"vlm-assets/why": why})])

    return build_sensor(
        SENSOR,
        decide,
        interval_seconds=INTERVAL_SECONDS,
        description=(
            "Looks at what the descriptions say, when partitions were published and everything is at rest,"
            " and every six hours while something works."
        ),
        ticks=Ticks(state),
        target=quality,
    )


def _sentence(one: Suspicion) -> str:
    return one.sentence + (f" Such as {', '.join(one.examples)}." if one.examples else "")


_MOST_VALUES, _MOST_STEPS = 7, 40
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#b8b5ae")
_INK, _FAINT, _CARD = "#262a30", "#74787e", "#fcfbf8"


def quality_picture(quality: Quality) -> bytes | None:
    """The picture as PNG; None where no field has values to draw. Time goes from left to right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = {name: one for name, one in quality.fields.items() if one.kind != "texts" and one.counts}
    if not drawn:
        return None
    rows = len(drawn)
    figure = Figure(figsize=(9.2, 0.5 + 0.62 * rows), dpi=100, facecolor=_CARD, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, 2, width_ratios=[1, 1.15], squeeze=False)
    step_of, steps = _steps(quality)
    for (whole, over_time), (name, one) in zip(grid, drawn.items(), strict=True):
        counts = one.counts
        values = _values(one.kind, counts)
        left = 0.0
        for number, value in enumerate(values):
            share = _share(counts, value, values)
            whole.barh(0, share, left=left, color=_COLOURS[number])
            if share > 0.09:
                whole.text(
                    left + share / 2,
                    0,
                    value if len(value) < 15 else f"{value[:13]}…",
                    ha="center",
                    va="center",
                    size=6.5,
                    color="white",
                    # A price of "$$" is no formula, and one that cannot be drawn would end the whole look.
                    parse_math=False,
                )
            left += share
        said = one.over_time(step_of, steps)
        shares = [[_share(counts, value, values) for counts in said] for value in values]
        over_time.stackplot(range(len(said)), shares, colors=_COLOURS, step="mid")
        for axes in (whole, over_time):
            axes.set(xticks=[], yticks=[], facecolor="none")
            axes.spines[:].set_visible(False)
        label = name if len(name) < 33 else f"{name[:31]}…"
        whole.set_ylabel(label, rotation=0, ha="right", va="center", size=8, color=_INK, parse_math=False)
        whole.set_xlim(0, 1)
        over_time.set(ylim=(0, 1), xlim=(0, max(1, len(said) - 1)))
    grid[0][0].set_title("all descriptions", size=8, color=_FAINT)
    grid[0][1].set_title("in the order of their publication", size=8, color=_FAINT)
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


def _steps(quality: Quality) -> tuple[npt.NDArray[np.int64], int]:
    """Partitions in the order of publication, in equal steps: the step of each, and how many there are."""
    published = [(at, key) for key, at in quality.published.items()]
    ordered = sorted(range(len(published)), key=published.__getitem__)
    size = -(-len(ordered) // _MOST_STEPS) or 1
    step_of = np.empty(len(ordered), np.int64)
    step_of[ordered] = np.arange(len(ordered)) // size
    return step_of, -(-len(ordered) // size)


def _values(kind: Kind, counts: Mapping[str, int]) -> list[str]:
    """The most frequent values, and what stands for all others."""
    values = sorted(counts, key=float) if kind == "numbers" else list(counts)
    frequent = set(list(counts)[:_MOST_VALUES])
    return [value for value in values if value in frequent] + (
        ["others"] if len(values) > _MOST_VALUES else []
    )


def _share(counts: Mapping[str, int], value: str, values: list[str]) -> float:
    whole = sum(counts.values())
    count = counts.get(value, 0)
    if value == "others" and value not in counts:
        count = whole - sum(counts.get(one, 0) for one in values)
    return count / max(1, whole)
