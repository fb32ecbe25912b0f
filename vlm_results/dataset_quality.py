"""dataset_quality: what the descriptions say and where they are odd, as an asset with checks that only warn.

Dagster's side, the sensor that starts it, and the picture. The sensor starts it when no partition is worked
on, else every six hours. The findings are computed in ``vlm_results/quality.py``.
"""

# No postponed annotations here: Dagster reads an asset's parameters from its real ones.
import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import dagster as dg
import numpy as np
import numpy.typing as npt

from sensors.sensor_definition import Decided, Situation, ask_until_done, build_sensor
from sensors.ticks import Ticks
from vlm_assets.assets import markdown
from vlm_assets.assets.fingerprint import digest_of
from vlm_assets.assets.markdown import Markdown, escape, sentence, table
from vlm_assets.assets.truth import REVIEWS
from vlm_assets.config.question_sets import question_sets
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import Settings
from vlm_catalog.catalog import Catalog
from vlm_durable.files.seen_files import signature_at
from vlm_durable.state.pause import pause_of
from vlm_durable.state.workers import Workers
from vlm_durable.wording import counted
from vlm_results.calibration import Calibration, learn_curves
from vlm_results.certification import FieldPromise, read_and_certify
from vlm_results.confidence_statistics import calibration_error
from vlm_results.joined_rows import lacking_sentences
from vlm_results.published_table import last_publication
from vlm_results.quality import FieldAnswers, Kind, Quality, Suspicion, assess_quality
from vlm_results.results_settings import ResultsSettings
from vlm_results.review import Accuracy, accuracy, published_answers

ASSET = "dataset_quality"
SENSOR = "dataset_quality_due"
INTERVAL_SECONDS = 300
AGAIN_SECONDS = 6 * 3600.0

_CHECKS = {
    "alike": "No partition answers otherwise than all others, beyond chance and by far.",
    "answers": "No field is always the same, always null, or the same text again and again.",
    "consistent": "No description contradicts itself, by the conditions that the schema names.",
    "sure": "No partition is surer or less sure than all others, beyond chance and by far.",
}
_SHOWN, _SHOWN_VALUES = 20, 4


def quality_table(quality: Quality, reviewed: Accuracy) -> Markdown:
    """Each field, its most frequent answers, its nulls, and how often it is right."""
    right = {
        name: f"{share.sentence()} of {share.total:,} reviewed" for name, share in reviewed.fields.items()
    }
    right |= {name: f"{share.sentence()} of {share.total:,}" for name, share in quality.agreement.items()}
    rows = []
    for name, answers in quality.fields.items():
        nulls = f"{answers.nulls / max(1, answers.rows):.1%}"
        rows.append((name, escape(_frequent_answers(answers)), nulls, right.get(name, "")))
    return table(("field", "answers", "null", "right"), rows)


def _frequent_answers(answers: FieldAnswers) -> str:
    """The most frequent values with their shares; of texts, the most frequent one and how often it comes."""
    if answers.kind == "texts":
        repeated = islice(answers.counts.items(), 1)
        return ", ".join(f"{counted(count, 'times')} {text[:60]}" for text, count in repeated)
    total = max(1, answers.rows - answers.nulls)
    frequent = islice(answers.counts.items(), _SHOWN_VALUES)
    return ", ".join(f"{value} {count / total:.0%}" for value, count in frequent)


def calibration_table(calibrations: Sequence[Calibration]) -> Markdown:
    """Each field with a curve: its labels, and the error of the raw and of the calibrated confidences."""
    rows = [
        (
            calibration.field,
            f"{len(calibration.labels):,}",
            f"{calibration_error(calibration.before):.1%}",
            f"{calibration_error(calibration.after):.1%}",
            f"{calibration.version} of {calibration.learned_at[:10]}, answers of {calibration.made_with}",
        )
        for calibration in calibrations
    ]
    return table(("field", "labels", "error of raw confidence", "after calibration", "curve"), rows)


def quality_metadata(
    quality: Quality,
    reviewed: Accuracy,
    calibrations: Sequence[Calibration] = (),
    promises: Sequence[FieldPromise] = (),
) -> dict[str, dg.MetadataValue]:
    """The metadata of a materialization. Dagster plots its numbers over time."""
    picture = quality_picture(quality)
    metadata: dict[str, dg.MetadataValue] = {}
    if picture is not None:
        metadata["picture"] = markdown.metadata(markdown.picture(picture, alt="what the descriptions say"))
    metadata["fields"] = markdown.metadata(quality_table(quality, reviewed))
    if calibrations:
        diagrams = markdown.picture(reliability_picture(calibrations), alt="how sure and how often right")
        metadata["reliability"] = markdown.metadata(diagrams)
        metadata["calibration"] = markdown.metadata(calibration_table(calibrations))
    if promises:
        metadata["guarantee"] = markdown.metadata(
            markdown.bullets(promise.sentence() for promise in promises)
        )
    if quality.findings:
        metadata["odd"] = markdown.metadata(markdown.bullets(map(_sentence, quality.findings[:_SHOWN])))
    metadata["findings"] = dg.MetadataValue.int(len(quality.findings))
    metadata["described"] = dg.MetadataValue.int(quality.ok)
    metadata["failed"] = dg.MetadataValue.int(sum(quality.failed.values()))
    for kind, count in sorted(quality.failed.items()):
        metadata[f"failed: {kind}"] = dg.MetadataValue.int(count)
    for name, share in {**reviewed.fields, **quality.agreement}.items():
        metadata[f"right: {name}"] = dg.MetadataValue.float(round(share.share, 4))
    if reviewed.note:
        metadata["review"] = dg.MetadataValue.text(reviewed.note)
    metadata["partitions"] = dg.MetadataValue.int(len(quality.published))
    if quality.lacking:
        sentences = list(lacking_sentences(quality.lacking)) or ["Every question set is complete."]
        sentences += [
            f"The question set {name} was not asked of {counted(count, 'properties')}, which its"
            " `where` leaves out."
            for name, count in quality.not_asked.items()
            if count
        ]
        metadata["question sets"] = markdown.metadata(markdown.bullets(sentences))
    if quality.unread:
        metadata["could not be read"] = markdown.metadata(markdown.bullets(quality.unread))
    return metadata


def check_results(quality: Quality) -> list[dg.AssetCheckResult]:
    """The result of each check. A finding warns and stops nothing."""
    results = []
    for check, expected in _CHECKS.items():
        findings = quality.findings_of(check)
        sentences = " ".join(map(_sentence, findings[:_SHOWN]))
        partitions = sorted({finding.key for finding in findings if finding.key})
        results.append(
            dg.AssetCheckResult(
                passed=not findings,
                check_name=check,
                severity=dg.AssetCheckSeverity.WARN,
                description=sentence(sentences or expected),
                metadata={
                    "expected": expected,
                    "found": sentences or "nothing odd",
                    "partitions": dg.MetadataValue.json(partitions),
                    "examples": dg.MetadataValue.json(
                        [list(finding.examples) for finding in findings[:_SHOWN]]
                    ),
                },
            )
        )
    return results


def build_dataset_quality(settings: Settings) -> dg.AssetsDefinition:
    """The asset."""

    @dg.asset(
        key=settings.names.key(ASSET),
        deps=[settings.names.key(asked.asset.name) for asked in question_sets(settings)],
        group_name=settings.names.name("properties"),
        kinds={"duckdb"},
        owners=settings.owner_list,
        tags=settings.tag_values,
        check_specs=[
            dg.AssetCheckSpec(name, asset=settings.names.key(ASSET), description=expected)
            for name, expected in _CHECKS.items()
        ],
        description=(
            "What the published descriptions say, field by field, over the whole and over time; partitions"
            " that answer otherwise than the others, answers that never vary, contradictions, and how far a"
            " truth file (VLM_ASSETS_TRUTH) agrees. Only new partitions are read."
        ),
    )
    def dataset_quality(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None]]:
        settings.name_in_commands()
        changed = judged_state(settings)
        catalog = Catalog.open(settings.home)
        quality = assess_quality(settings, catalog)
        for finding in quality.findings[:_SHOWN]:
            context.log.warning(_sentence(finding))
        judged, promises = read_and_certify(settings, catalog, quality, report=context.log.warning)
        calibrations = learn_curves(settings, quality, judged, report=context.log.warning)
        right = accuracy(settings.home, published_answers(settings, catalog))
        metadata = quality_metadata(quality, right, calibrations, promises)
        metadata["changed"] = dg.MetadataValue.text(changed)
        yield dg.MaterializeResult(metadata=metadata, check_results=check_results(quality))

    return dataset_quality


def why_due(last: tuple[float, str] | None, changed: str, *, works: bool, now: float) -> str | None:
    """Why the quality is due to be judged; None if it is not. All times are in unix seconds.

    last: the time of the last judgement, and ``changed`` at that time. changed: see ``judged_state``. works:
    whether a partition is worked on.
    """
    if not changed or (last is not None and last[1] == changed):
        return None
    if not works:
        return "Partitions or labels have changed, and everything is at rest."
    if last is None or now - last[0] >= AGAIN_SECONDS:
        return "Partitions or labels have changed, and the last judgement is old."
    return None


def judged_state(settings: Settings) -> str:
    """A digest of what the quality depends on: publications, labels and promises; empty before the first."""
    published = last_publication(asked.asset for asked in question_sets(settings))
    own = ResultsSettings.part_of(settings)
    labels = [signature_at(path) for path in (settings.home / REVIEWS, own.truth)]
    promises = [own.guarantee_targets, own.guarantee_risk, str(own.truth)]
    return digest_of([published, *labels, *promises]) if published else ""


def build_quality_sensor(settings: Settings, quality: dg.AssetsDefinition) -> dg.SensorDefinition:
    """The sensor that has the quality judged as partitions are published."""
    state = control_state(settings)

    def decide(at: Situation) -> Decided:
        pause = pause_of(state)
        if pause:
            return Decided(f"Nothing is started: {pause.sentence()}.")
        materialization = at.dagster.latest_materialization(ASSET)
        last = None
        if materialization is not None:
            materialized_at, metadata = materialization
            last = materialized_at, metadata.get("changed", "")
        changed = judged_state(settings)
        why = why_due(last, changed, works=bool(Workers(state).living()), now=at.now)
        if why is None:
            return Decided("The quality is not due.")
        return ask_until_done(at, f"{ASSET} {last[0] if last else 0:.0f} {changed}", why)

    return build_sensor(
        SENSOR,
        decide,
        interval_seconds=INTERVAL_SECONDS,
        description=(
            "Judges what the descriptions say, when partitions were published and everything is at rest,"
            " and every six hours while something works."
        ),
        ticks=Ticks(state, settings.names),
        target=quality,
    )


def _sentence(finding: Suspicion) -> str:
    if not finding.examples:
        return finding.sentence
    return f"{finding.sentence} Such as {', '.join(finding.examples)}."


_MOST_VALUES, _MOST_STEPS = 7, 40
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#b8b5ae")
_INK, _FAINT, _CARD = "#262a30", "#74787e", "#fcfbf8"


def quality_picture(quality: Quality) -> bytes | None:
    """The picture as PNG; None where no field has values to draw. Time goes from left to right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = {
        name: answers
        for name, answers in quality.fields.items()
        if answers.kind != "texts" and answers.counts
    }
    if not drawn:
        return None
    rows = len(drawn)
    figure = Figure(figsize=(9.2, 0.5 + 0.62 * rows), dpi=100, facecolor=_CARD, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, 2, width_ratios=[1, 1.15], squeeze=False)
    step_of, steps = _steps(quality)
    for (whole, over_time), (name, answers) in zip(grid, drawn.items(), strict=True):
        counts = answers.counts
        values = _values(answers.kind, counts)
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
                    # A price of "$$" is no formula, and a formula that cannot be drawn would end the run.
                    parse_math=False,
                )
            left += share
        step_counts = answers.over_time(step_of, steps)
        shares = [[_share(counts, value, values) for counts in step_counts] for value in values]
        over_time.stackplot(range(steps), shares, colors=_COLOURS, step="mid")
        for axes in (whole, over_time):
            axes.set(xticks=[], yticks=[], facecolor="none")
            axes.spines[:].set_visible(False)
        label = name if len(name) < 33 else f"{name[:31]}…"
        whole.set_ylabel(label, rotation=0, ha="right", va="center", size=8, color=_INK, parse_math=False)
        whole.set_xlim(0, 1)
        over_time.set(ylim=(0, 1), xlim=(0, max(1, steps - 1)))
    grid[0][0].set_title("all descriptions", size=8, color=_FAINT)
    grid[0][1].set_title("in the order of their publication", size=8, color=_FAINT)
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


_DIAGRAMS, _IN_A_ROW = 12, 4


def reliability_picture(calibrations: Sequence[Calibration]) -> bytes:
    """Reliability diagrams as PNG: how often answers of a confidence are right, raw and calibrated.

    Calibrated means by cross-validation: no label was used for its own curve.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = calibrations[:_DIAGRAMS]
    rows = -(-len(shown) // _IN_A_ROW)
    size = (2.3 * min(len(shown), _IN_A_ROW), 2.5 * rows)
    figure = Figure(figsize=size, dpi=100, facecolor=_CARD, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, min(len(shown), _IN_A_ROW), squeeze=False).flat
    for axes, calibration in zip(grid, shown, strict=False):
        axes.plot((0, 1), (0, 1), color=_COLOURS[-1], linewidth=1)
        for bins, colour, label in (
            (calibration.before, _COLOURS[1], "raw"),
            (calibration.after, _COLOURS[0], "calibrated"),
        ):
            points = [bin_.confidence for bin_ in bins], [bin_.share for bin_ in bins]
            axes.plot(*points, color=colour, marker="o", markersize=3, linewidth=1, label=label)
        axes.set(xlim=(0, 1.02), ylim=(0, 1.02), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1), facecolor="none")
        axes.tick_params(labelsize=6, colors=_FAINT)
        axes.spines[:].set_visible(False)
        name = calibration.field
        label = name if len(name) < 26 else f"{name[:24]}…"
        axes.set_title(label, size=8, color=_INK, parse_math=False)
    for axes in grid:
        axes.set_visible(False)  # those that are left of the last row
    figure.axes[0].legend(fontsize=6, frameon=False)
    figure.supxlabel("confidence", size=7, color=_FAINT)
    figure.supylabel("share of right answers", size=7, color=_FAINT)
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


def _steps(quality: Quality) -> tuple[npt.NDArray[np.int64], int]:
    """Divide the partitions by their publication into equal steps: the step of each, and how many steps."""
    published = [(published_at, key) for key, published_at in quality.published.items()]
    ordered = sorted(range(len(published)), key=published.__getitem__)
    size = -(-len(ordered) // _MOST_STEPS) or 1
    step_of = np.empty(len(ordered), np.int64)
    step_of[ordered] = np.arange(len(ordered)) // size
    return step_of, -(-len(ordered) // size)


def _values(kind: Kind, counts: Mapping[str, int]) -> list[str]:
    """The most frequent values, and "others" for the rest."""
    values = sorted(counts, key=float) if kind == "numbers" else list(counts)
    frequent = set(list(counts)[:_MOST_VALUES])
    return [value for value in values if value in frequent] + (
        ["others"] if len(values) > _MOST_VALUES else []
    )


def _share(counts: Mapping[str, int], value: str, values: list[str]) -> float:
    total = sum(counts.values())
    count = counts.get(value, 0)
    if value == "others" and value not in counts:
        count = total - sum(counts.get(frequent, 0) for frequent in values)
    return count / max(1, total)
