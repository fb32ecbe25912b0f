"""Dagster's pages behind the guard: the process that ``make run`` and ``vlm-assets serve`` start.

``python -m vlm_assets.operate.dagster_server.guarded_pages HOST PORT WORKSPACE``
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from sensors.dagster_internals.pages import GRAPHQL, REPORTS, pages
from vlm_assets.operate.web_guard import WebGuard
from vlm_assets.settings import current_settings


def main(arguments: Sequence[str]) -> None:
    """Serve the pages until SIGTERM."""
    import uvicorn

    host, port, workspace = arguments
    with pages(Path(workspace)) as app:
        guarded = WebGuard(
            app, allowed_hosts=current_settings().hosts, posted=[GRAPHQL], with_header=[REPORTS]
        )
        uvicorn.run(guarded, host=host, port=int(port), log_level="warning")


if __name__ == "__main__":
    main(sys.argv[1:])
