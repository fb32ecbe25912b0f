"""What a person meets where a cluster's packages are missing."""

import re
import sys

import pytest
from typer.testing import CliRunner

from vlm_assets.commands import main as cli


def test_a_command_of_a_cluster_names_the_extra_that_is_missing(monkeypatch, capsys):
    """Where the extra is not installed, a person reads what to install, and no traceback."""
    for name in ("vlm_cluster.node", "vlm_cluster.ray_launcher"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "dagster_ray", None)
    monkeypatch.setattr(sys, "argv", ["vlm-assets", "devices", "node", "--help"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "'distributions/cluster[ray]'" in said
    assert "Traceback" not in said


def test_the_command_of_a_node_is_listed_by_its_own_word():
    """In the list of `devices` it stands as it is typed there."""
    listed = CliRunner().invoke(cli.app, ["devices", "--help"]).output
    assert re.search(r"^\W*node\s+Be a node", listed, re.MULTILINE), listed
    assert not re.search(r"^\W*devices node", listed, re.MULTILINE)
    assert "vlm-assets devices node" in CliRunner().invoke(cli.app, ["devices", "node", "--help"]).output
