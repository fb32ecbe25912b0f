"""The command ``doctor``: says what ``services/doctor`` finds."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from vlm_assets.commands.terminal import AsJson, Home, app, chosen_settings, say, say_as_json
from vlm_assets.services.doctor.examination import examine

_EXAMPLES = """\b
vlm-assets doctor
vlm-assets doctor --quick --json"""

COLORS = {"ok": "green", "warning": "yellow", "error": "red"}

Quick = Annotated[bool, typer.Option("--quick", help="Only what takes under two seconds.")]


@app.command("doctor", epilog=_EXAMPLES)
def doctor_command(home: Home = None, quick: Quick = False, as_json: AsJson = False) -> None:
    """Try all that a long run will need, and say what is wrong.

    Looks at settings, catalogue, images, storage, space, store, state, devices, model, embedder, alerts,
    limits, clock and Dagster. Describes one property, sends a test message to each alert target, and takes
    two minutes at most. Nothing of the home is changed. Exit code 1 where a check finds an error.
    """
    diagnoses = []
    for diagnosis in examine(chosen_settings(home), quick=quick):
        diagnoses.append(diagnosis)
        if not as_json:
            sentence = f"{diagnosis.level:7}  {diagnosis.check}: {diagnosis.message}"
            say(sentence, fg=COLORS[diagnosis.level])
    if as_json:
        say_as_json([asdict(diagnosis) for diagnosis in diagnoses])
    raise typer.Exit(1 if any(diagnosis.level == "error" for diagnosis in diagnoses) else 0)
