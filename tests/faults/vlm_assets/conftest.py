"""Runs of whole partitions, each a process of its own that may be killed; torch and the model loaded once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vlm_assets.config.settings import CHECKOUT
from vlm_durable.journal.high_water_mark import read_mark

DESCRIPTIONS = "property_descriptions"


class Lives:
    """Starts runs of a partition's descriptions, one after the other."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("partition_lives.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        )

    def run(
        self, home: Path, key: str, settings: dict[str, Any], *, may_fail: bool = False, **strike: Any
    ) -> dict[str, Any]:
        """One run; what it said, and whether it was killed. It must succeed, unless it ``may_fail``."""
        assert self._process.stdin is not None and self._process.stdout is not None
        order = {"home": str(home), "key": key, "settings": settings, **strike}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, self._log.read_text()[-2000:]
        said: dict[str, Any] = json.loads(answer)
        ended_well = said["killed"] or said.get("success") or may_fail
        assert ended_well, said.get("failures") or self._log.read_text()[-2000:]
        return said

    @staticmethod
    def committed_rows(home: Path, key: str) -> int:
        """What the high-water mark promises; 0 where there is none yet."""
        marks = (home / ".state" / "high_water_marks" / DESCRIPTIONS / key).glob("*.json")
        read = [read_mark(path, key=key, generation=path.stem).mark for path in marks]
        return max((mark.rows for mark in read if mark is not None), default=0)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


@pytest.fixture(scope="session")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    """Runs that can be killed; the model is loaded once for all of them."""
    started = Lives(tmp_path_factory.mktemp("lives") / "stderr.txt")
    yield started
    started.close()
