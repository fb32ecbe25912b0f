"""A render that is killed: what stands under its own name is whole, and the next start finishes the rest."""

import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.rendered_properties import list_properties, write_example
from tests.support.shares import share_of

PROPERTIES, SEED = 4, 5

# Claims the home as write_example does, then renders in this process and dies at one file.
_CHILD = """
import os, signal, sys
from pathlib import Path
from examples import rendered_properties as example

home, files = Path(sys.argv[1]), int(sys.argv[2])
written = 0
write = example.write_temporary

def write_or_die(path, data):
    global written
    if written == files:
        path.with_name(".half.tmp").write_bytes(data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    written += 1
    return write(path, data)

example.write_temporary = write_or_die
folder = home / "example"
example.make_directory(folder / "images")
example._claim(folder, properties=4, seed=5)
for listed in example.list_properties(properties=4, seed=5):
    example._render_property(folder, 5, listed)
"""


def _digests(home: Path) -> dict[str, str]:
    return {
        str(path.relative_to(home)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(home.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of an example that nothing interrupted."""
    home = tmp_path_factory.mktemp("whole")
    write_example(home, properties=PROPERTIES, seed=SEED)
    return _digests(home)


@pytest.mark.parametrize("files", share_of([0, 1, 9, 14, 30], 3))
def test_a_killed_render_is_finished_by_the_next(tmp_path: Path, whole: dict[str, str], files: int) -> None:
    """After SIGKILL at any file no half photo counts as done, and the result is that of a quiet run."""
    child = subprocess.run([sys.executable, "-c", _CHILD, str(tmp_path), str(files)], check=False)
    assert child.returncode == -signal.SIGKILL
    assert not (tmp_path / "example" / "listing.jsonl").exists()
    for listed in list_properties(properties=PROPERTIES, seed=SEED):
        standing = (tmp_path / "example" / listed.images[0]).parent
        if standing.exists():
            assert {path.name for path in standing.iterdir()} == {Path(image).name for image in listed.images}
    listing = write_example(tmp_path, properties=PROPERTIES, seed=SEED)
    assert _digests(tmp_path) == whole
    assert len([json.loads(line) for line in listing.read_text().splitlines()]) == PROPERTIES
