"""What this extension hands over to the core: commands, two assets with their sensors, what it forgets."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import dagster as dg

from vlm_assets.config.extensions import DoctorCheck, Extension, Findings
from vlm_assets.config.settings import PREFIX, Settings
from vlm_results.results_settings import ResultsSettings


class ResultsExtension(Extension):
    """Search, export, review, explore and the quality of what was described."""

    package = "vlm_results"
    settings = ResultsSettings
    settings_title = "With answers that are known to be right, or an Iceberg table"
    commands: ClassVar[Mapping[str, tuple[str, str]]] = {
        "changes": (
            "vlm_results.changes_command",
            "List published properties that are new, changed or withdrawn, for a database that follows.",
        ),
        "explore": ("vlm_results.explore", "Open charts, a table, a map and neighbours in a browser."),
        "export": ("vlm_results.export", "Write published rows, texts and vectors as a folder for others."),
        "review": (
            "vlm_results.review_page",
            "Mark fields of a sample right or wrong, on a page in a browser.",
        ),
        "search": (
            "vlm_results.search",
            "Find properties that answer a text or are near to another property.",
        ),
    }

    def definitions(self, settings: Settings) -> dg.Definitions:
        """The quality and the table, each with the sensor that has it follow as partitions come."""
        import dagster as dg

        from vlm_results.dataset_quality import build_dataset_quality, build_quality_sensor
        from vlm_results.described_properties import build_described_properties, build_table_sensor

        quality = build_dataset_quality(settings)
        table = build_described_properties(settings)
        return dg.Definitions(
            assets=[quality, table],
            sensors=[build_quality_sensor(settings, quality), build_table_sensor(settings, table)],
        )

    def doctor_checks(self) -> Sequence[DoctorCheck]:
        """Whether the known truth reads, and whether promised fields exist."""
        return (
            DoctorCheck("truth", examine_truth, is_quick=True),
            DoctorCheck("guarantee", examine_guarantee, is_quick=True),
        )

    def forget(self, settings: Settings, ids: Collection[str], keys: Sequence[str]) -> Iterator[str]:
        """All tables and words, every verdict on these properties, and their rows in all snapshots."""
        from vlm_assets.assets.truth import REVIEWS
        from vlm_results.explore import forget_tables
        from vlm_results.guarantee import FILE, forget_judged
        from vlm_results.known_tables import has_table, other_tables
        from vlm_results.review import forget_verdicts

        forget_tables(settings)
        if forget_verdicts(settings.home, ids):
            yield f"Removed what was said of them from {settings.home / REVIEWS}."
        if forget_judged(settings, ids):
            yield f"Removed their labels from {settings.state_directory / FILE}."
        if has_table(settings):
            from vlm_results.described_table import forget_properties

            yield from forget_properties(settings, keys)
        yield from other_tables(settings)


def examine_truth(settings: Settings) -> Findings:
    """An error where the file does not read."""
    from vlm_assets.assets.truth import TruthError, read_truth

    truth = ResultsSettings.part_of(settings).truth
    if truth is not None:
        try:
            read_truth(truth)
        except TruthError as error:
            yield "error", f"{PREFIX}TRUTH: {error}"


def examine_guarantee(settings: Settings) -> Findings:
    """An error where a promised field is in no schema, so that nobody could be shown its answers."""
    from vlm_assets.config.question_sets import question_sets
    from vlm_engine.schema import load_schema

    targets = ResultsSettings.part_of(settings).guarantee_targets
    if targets:
        schemas = (load_schema(asked.settings.description_schema) for asked in question_sets(settings))
        fields = [name for schema in schemas for name in schema.json_schema.get("properties", {})]
        for field in targets:
            if field not in fields:
                yield (
                    "error",
                    f"{PREFIX}GUARANTEE: {field!r} is no field of the description schema, which has"
                    f" {', '.join(fields)}.",
                )
