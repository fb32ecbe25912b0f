"""The wheels that a GPU machine without a network lacks."""

import re
import subprocess

import pytest

from benchmarks import gpu_wheels


def names(load):
    lines = (gpu_wheels.LISTS / f"{load}.txt").read_text().splitlines()
    return {re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines if line[0] != "#"}


def test_each_wheel_has_a_version_and_is_not_there_already():
    """Guards: pip takes the newest of what constraints.txt does not name; what is there need not travel.

    transformers travels: a figure of another version is no figure of ours.
    """
    pinned = (gpu_wheels.ROOT / "constraints.txt").read_text().splitlines()
    pinned_names = {re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in pinned}
    assert names("brought") <= pinned_names
    assert names("brought") & names("has") == {"transformers"}


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with a file in git, a new file and an ignored one; what is brought along takes 5 bytes."""
    packed = tmp_path / ".wheels" / "site.tar.xz"

    def pack():
        packed.parent.mkdir()
        packed.write_bytes(b"12345")

    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / ".gitignore").write_text("/.wheels/\n")
    subprocess.run(["git", "add", ".gitignore"], cwd=tmp_path, check=True)
    (tmp_path / "new").write_bytes(b"123")
    monkeypatch.setattr(gpu_wheels, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_wheels, "PACKED", packed)
    monkeypatch.setattr(gpu_wheels, "pack", pack)


@pytest.mark.parametrize(("allowed", "fits"), [(18, True), (17, False)])
def test_what_does_not_fit_is_said_before_the_hour(checkout, monkeypatch, allowed, fits):
    """Guards: tree (10 and 3 bytes) and packages are counted, and too much fails the command."""
    monkeypatch.setattr(gpu_wheels, "MOST_BYTES", allowed)
    if fits:
        gpu_wheels.main()
    else:
        with pytest.raises(SystemExit, match="gpu-wheels: that is more than"):
            gpu_wheels.main()
