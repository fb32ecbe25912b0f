"""The examples in the packages' READMEs are programs that do what the text beside them says."""

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def start(tmp_path):
    """Starts the example of a package with these arguments, as a person who has copied it into a file."""

    def started(package: str, *arguments: Path) -> subprocess.Popen:
        text = (CHECKOUT / package / "README.md").read_text()
        (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        program = tmp_path / "example.py"
        # Only what the package may need: another import of ours would fail the example.
        refused = "import sys\nclass Refuse:\n    def find_spec(self, name, *_):\n"
        rooms = ["vlm_durable", "vlm_engine", "vlm_catalog"]
        allowed = rooms[: rooms.index(package) + 1]
        refused += f"        if name.startswith('vlm_') and name.partition('.')[0] not in {allowed}"
        refused += " or name in ('dagster', 'resources', 'sensors'): raise ImportError(name)\n"
        program.write_text(refused + "sys.meta_path.insert(0, Refuse())\n" + code)
        return subprocess.Popen(
            [sys.executable, program, *arguments], env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    return started


def test_numbers_are_squared_once_whatever_kills_the_program(start, tmp_path):
    """``vlm_durable`` alone: a row that was flushed before ``kill -9`` is there at the next start."""
    home, squared = tmp_path / "home", 0
    for end in (7, 31, 80):
        process = start("vlm_durable", home)
        kept = int(process.stdout.readline().split()[0])
        assert kept >= squared
        for line in process.stdout:
            squared = int(line) + 1
            if squared > end:
                break
        process.send_signal(signal.SIGKILL)
        process.communicate()
    process = start("vlm_durable", home)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert squared <= int(output.split()[0]) < 100
    rows = pq.read_table(home / "squares" / "000000000-000000099.parquet")
    assert rows["square"].to_pylist() == [n * n for n in range(100)]


def test_what_is_in_the_catalogue_never_moves(start, tmp_path):
    """``vlm_catalog`` alone: a property that was listed keeps its number when the folder grows."""
    source, home = tmp_path / "photographs", tmp_path / "home"

    def listed(*names: str) -> list[str]:
        for name in names:
            (source / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(source / name / "1.jpg")
        process = start("vlm_catalog", source, home)
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output
        return [
            line.split()[:2] for line in output.splitlines() if line.endswith((".jpg", "more", "partition"))
        ]

    first = [
        ["000000000-000000001", "is"],
        ["0", "b"],
        ["1", "d"],
        ["000000002-000000002", "waits"],
        ["2", "f"],
    ]
    assert listed("b", "d", "f") == first
    second = [
        ["000000002-000000003", "is"],
        ["2", "f"],
        ["3", "a"],
        ["000000004-000000004", "waits"],
        ["4", "e"],
    ]
    assert listed("a", "e") == [*first[:3], *second]


def test_a_folder_of_photographs_is_described(start, tmp_path):
    """``vlm_engine`` alone: an answer of the schema for each photograph, and a sentence for what is none."""
    folder = tmp_path / "photographs"
    folder.mkdir()
    for number in range(3):
        Image.new("RGB", (64, 64), (80 * number, 120, 200)).save(folder / f"{number}.jpg")
    (folder / "broken.jpg").write_bytes(b"no picture")
    process = start("vlm_engine", folder, CHECKOUT / "examples" / "model")
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 0, output
    described = dict(line.split(" ", 1) for line in output.splitlines() if ".jpg " in line)
    assert described.keys() == {"0.jpg", "1.jpg", "2.jpg", "broken.jpg"}
    for number in range(3):
        answer = ast.literal_eval(described[f"{number}.jpg"])
        assert answer["roof"] in ("flat", "gable", "hip")
    assert not described["broken.jpg"].startswith("{")
