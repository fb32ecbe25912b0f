"""Run tags that say why a run ended: assets write them, the retry schedule reads them."""

NO_ATTEMPT = "vlm-assets/no-attempt"
"""Run tag: a step of the run failed, but not through a fault of its partition, so it counts as no attempt.

Its value is the run's own id, because Dagster's run retries inherit tags.
"""
NEEDS_PERSON = "vlm-assets/needs-person"
"""Run tag: another start would only end the same way. Its value is the run's own id."""
