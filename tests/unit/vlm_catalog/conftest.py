"""A folder tree of images to take in."""

from pathlib import Path

import pytest


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Five properties with two images each, of 1 and 2 bytes."""
    for name in ("a", "b b", "00123", "ü", "x"):
        (tmp_path / "tree" / name).mkdir(parents=True)
        (tmp_path / "tree" / name / "1.jpg").write_bytes(b"1")
        (tmp_path / "tree" / name / "2.jpg").write_bytes(b"22")
    return tmp_path / "tree"
