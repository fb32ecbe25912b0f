"""Command ``vlm-assets publish``: a partition that a check refused is published as a person accepts it.

What lives here: arguments, the question, exit codes. What does not: what the acceptance does
(``assets/materialize.py``), and the run (``operate/run.py``).
"""

from __future__ import annotations

from typing import Annotated

import typer

from vlm_assets.cli.options import Home, Port, Yes, agreed, app, chosen_settings
from vlm_assets.operate.terminal import say

_EXAMPLES = """\b
vlm-assets publish 000000000-000000999 --accept-failed"""


@app.command(epilog=_EXAMPLES)
def publish(
    key: Annotated[str, typer.Argument(metavar="KEY", help="The partition.")],
    accept_failed: Annotated[
        bool, typer.Option("--accept-failed", help="Publish it although so many properties failed.")
    ] = False,
    home: Home = None,
    port: Port = 3000,
    yes: Yes = False,
) -> None:
    """Publish a partition that the check failed_share refused, with its failed properties as they are.

    The published record says that you accepted them, and the check warns from then on.
    Exit code 0 if the partition is published, 1 if not.
    """
    from vlm_assets.assets.partition_state import MEANING, PartitionStates, State, VerifiedFiles
    from vlm_assets.assets.published_rows import unpublished_failures
    from vlm_assets.catalog.catalog import Catalog
    from vlm_assets.operate.run import known_keys, run_partitions
    from vlm_assets.operate.terminal_console import TerminalConsole

    current = chosen_settings(home)
    wanted = known_keys(current.home, [key])
    states = PartitionStates(current, Catalog.open(current.home), verified=VerifiedFiles(None))
    found = states.of(current.descriptions.name, key)
    if found.state is not State.REFUSED:
        say(f"{key} is {found.state.value}: {MEANING[found.state]}. Nothing was done.", fg="yellow")
        raise typer.Exit(0 if found.state is State.DONE else 1)
    failures = unpublished_failures(current.descriptions.partition(key))
    say(f"{failures.sentence()}.")
    if not accept_failed:
        say(f"To publish it with them: `vlm-assets publish {key} --accept-failed`.", fg="yellow")
        raise typer.Exit(1)
    if not agreed(f"Publish {key} with {failures.failed} failed properties?", yes):
        raise typer.Exit(1)
    run_config = {"ops": {current.descriptions.name: {"config": {"accept_failed": True}}}}
    console = TerminalConsole(soft_wrap=True)
    raise typer.Exit(
        run_partitions(current, port=port, keys=lambda api: wanted, run_config=run_config, console=console)
    )
