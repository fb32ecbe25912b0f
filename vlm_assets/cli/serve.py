"""``vlm-assets serve``: Dagster for a home, for a service manager."""

from __future__ import annotations

from vlm_assets.cli.options import Home, Port, app, chosen_settings
from vlm_assets.operate.terminal import say
from vlm_assets.settings import require_models

_EXAMPLES = """\b
vlm-assets serve --home /srv/properties --port 3000"""


@app.command(epilog=_EXAMPLES)
def serve(home: Home = None, port: Port = 3000) -> None:
    """Run the Dagster UI, daemon, schedules and alerts of a home until SIGTERM or Ctrl-C."""
    from vlm_assets.operate.dagster_server.server import serve as serve_home
    from vlm_assets.operate.doctor import examine
    from vlm_assets.operate.terminal_console import TerminalConsole
    from vlm_assets.resource_settings import build_gpu

    current = chosen_settings(home)
    require_models(current)
    for one in examine(current, quick=True):
        if one.level != "ok":
            say(f"{one.level}: {one.check}: {one.message}", fg="yellow", err=True)
    serve_home(
        home=current.home,
        dagster_home=current.dagster_home,
        slots=len(build_gpu(current).find()),
        port=port,
        grace_seconds=current.grace_seconds,
        console=TerminalConsole(soft_wrap=True),
    )
