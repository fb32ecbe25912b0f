"""Tags by which a run says why it ended: the data path writes them, whoever tries again reads them."""

NO_ATTEMPT = "vlm-assets/no-attempt"
"""Run tag: the run's own id, where it ended for no fault of its partition though a step of it failed.

The id, because Dagster's run retries inherit tags.
"""
NEEDS_PERSON = "vlm-assets/needs-person"
"""Run tag: the run's own id, where it stopped for what another start would only repeat."""
