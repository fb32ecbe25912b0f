"""Dagster's pages as an ASGI application, which its own command would serve unguarded.

Checked with dagster 1.13.27 and dagster-webserver 1.13.27. Not public: ``WorkspaceProcessContext``,
``WorkspaceFileTarget``, ``create_app_from_workspace_process_context``, ``optimize_for_webserver``. If they
go: start ``dagster-webserver`` on a loopback port of its own and put the guard in front of it as a proxy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg

if TYPE_CHECKING:
    from starlette.types import ASGIApp

_STATEMENT_MILLISECONDS = 15_000
_POOL_RECYCLE_SECONDS = 1
"""The greatest age of a connection to Postgres that is used again. With Dagster's own hour the first request
after a restart of Postgres fails: its connection is cut, and that is noticed only then."""
_POOL_MAX_OVERFLOW = 20
_LOOK_MILLISECONDS = 2000

GRAPHQL = "/graphql"
REPORTS = "/report_asset_"
"""Beginning of the paths that take an asset's events from outside."""


@contextlib.contextmanager
def pages(workspace: Path) -> Iterator[ASGIApp]:
    """The pages of the instance in DAGSTER_HOME, with the code locations of a workspace file.

    The other limits are those that ``dagster-webserver`` has by default.
    """
    from dagster._core.workspace.context import WorkspaceProcessContext
    from dagster._core.workspace.load_target import WorkspaceFileTarget
    from dagster_webserver.app import create_app_from_workspace_process_context

    with dg.DagsterInstance.get() as instance:
        instance.optimize_for_webserver(_STATEMENT_MILLISECONDS, _POOL_RECYCLE_SECONDS, _POOL_MAX_OVERFLOW)
        target = WorkspaceFileTarget([str(workspace)])
        with WorkspaceProcessContext(
            instance, workspace_load_target=target, version=dg.__version__
        ) as context:
            yield create_app_from_workspace_process_context(context, live_data_poll_rate=_LOOK_MILLISECONDS)
