"""Exports that are killed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.forking import StartForkServer, fork_server  # noqa: F401 - a fixture


@pytest.fixture(scope="session")
def killed_exports(fork_server: StartForkServer) -> Iterator[Callable[..., list[Path]]]:  # noqa: F811
    """A function that exports a home into a folder of its own for each number, killed at that operation.

    Gives the folders that were made by then. The last is that of the first export which ran through.
    """
    with fork_server(Path(__file__).with_name("killed_export.py")) as server:

        def export(home, results: Path, images: str, numbers: Iterable[int]) -> list[Path]:
            results.mkdir()
            folders = []
            for number in numbers:
                folders.append(results / str(number))
                order = {"home": str(home.settings.home), "folder": str(folders[-1]), "images": images}
                if server.kill_at(number, **order) is None:
                    break
            return [folder for folder in folders if folder.exists()]

        yield export
