"""Dagster's run coordinator of this project: it ranks each run, the heaviest partition first.

Runs from the UI, a schedule or the command line are ranked as they enter Dagster's queue. Dagster then takes
the highest ``dagster/priority`` first. ``dagster.yaml`` names this module, so the webserver and the daemon
load it, and imports are inside functions.
"""

from __future__ import annotations

import dagster as dg

PARTITION_TAG = "dagster/partition"
PRIORITY_TAG = "dagster/priority"
EXPECTED_TAG = "vlm_assets/expected_images"
"""How many images a run had to describe when it was queued; shown with the run."""


class HeaviestFirstRunCoordinator(dg.QueuedRunCoordinator):
    """Dagster's own queue; a run of a partition is ranked by its expected cost when it is submitted.

    A priority that a person gave stays. A run that cannot be ranked is queued all the same, with a warning in
    the log.
    """

    def submit_run(self, context: dg.SubmitRunContext) -> dg.DagsterRun:
        """Rank the run, then queue it as Dagster does."""
        try:
            tags = expected_tags(context.dagster_run)
            if tags:
                self._instance.add_run_tags(context.dagster_run.run_id, tags)
        except Exception as error:
            self._logger.warning(
                "Run %s is queued in plain order, not heaviest first: %s", context.dagster_run.run_id, error
            )
        return super().submit_run(context)


def expected_tags(run: dg.DagsterRun) -> dict[str, str]:
    """The tags that rank a run of one partition; none where it has no partition, or a person ranked it.

    Raises SettingsError, CatalogError, OSError; KeyError for a partition that the catalogue does not have.
    """
    from vlm_assets.config.question_sets import options_of
    from vlm_assets.config.settings import load_settings
    from vlm_assets.services.expected_cost import ExpectedCost
    from vlm_catalog.catalog import Catalog

    key = run.tags.get(PARTITION_TAG)
    # A run retry has its parent's tags. A parent that was ranked here is ranked again: less is left to do.
    ranked_by_a_person = PRIORITY_TAG in run.tags and EXPECTED_TAG not in run.tags
    if key is None or ranked_by_a_person:
        return {}
    settings = load_settings()
    cost = ExpectedCost.from_catalog(settings, Catalog.open(settings.home))
    # Whether it computes the descriptions again, published or not.
    anew = options_of(settings, run.run_config, settings.descriptions.name).get("recompute") is True
    return {PRIORITY_TAG: str(cost.priority(key, anew=anew)), EXPECTED_TAG: str(cost.left(key, anew=anew))}
