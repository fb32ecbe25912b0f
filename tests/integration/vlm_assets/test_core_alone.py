"""The core's main job where no extension is installed: in processes that cannot import any."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[3]
KEY = "000000000-000000007"
HOOK = CHECKOUT / "tests" / "support" / "core_alone"


def test_the_core_ingests_describes_embeds_and_answers_alone(listing: Path, tmp_path: Path) -> None:
    """Extensions add to it, and it needs none: not for its definitions, its runs or its commands."""
    home = tmp_path / "home"
    path = os.pathsep.join(filter(None, (str(HOOK), os.environ.get("PYTHONPATH"))))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "VLM_ASSETS_HOME": str(home),
        "VLM_ASSETS_DEVICES": "cpu:1",
        "VLM_ASSETS_DECODE_WORKERS": "1",
        "DAGSTER_HOME": str(tmp_path),
    }

    def call(*words: object, program: str = "vlm-assets") -> str:
        command = [Path(sys.executable).with_name(program), *map(str, words)]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    refused = "import importlib.util as u; print(u.find_spec('vlm_results'))"
    with pytest.raises(AssertionError, match="ModuleNotFoundError: No module named 'vlm_results'"):
        call("-c", refused, program="python")
    commands = call("--help")
    assert "withdraw" in commands
    assert "search" not in commands
    assert "16 properties" in call("ingest", listing, "--range-size", 8)
    (tmp_path / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    both = "property_descriptions,property_embeddings"
    run = ("asset", "materialize", "-m", "vlm_assets.definitions", "--select", both, "--partition", KEY)
    call(*run, program="dagster")
    for asset in both.split(","):
        assert (home / asset / f"{KEY}.parquet").is_file()
    assert json.loads(call("status", "--json"))["extensions"] == []
    call("doctor", "--quick")
    call("audit")
