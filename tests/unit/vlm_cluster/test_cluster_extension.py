"""What a person meets where a cluster's packages are missing."""

import sys

import pytest

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
