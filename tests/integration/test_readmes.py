"""The examples in the packages' READMEs are programs that do what the text beside them says."""

import ast
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

from examples.rendered_properties import write_example

CHECKOUT = Path(__file__).resolve().parents[2]
CORE = ["vlm_durable", "vlm_engine", "vlm_catalog", "resources", "sensors", "vlm_assets"]
"""Each package of the core may import itself and those before it; the first three know no Dagster."""
EXTENSIONS = ["vlm_results", "vlm_training", "vlm_cluster"]
REFUSE = """
import importlib.metadata, sys

class Refuse:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in REFUSED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
every_entry_point = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **wanted: importlib.metadata.EntryPoints(
    point for point in every_entry_point(**wanted) if point.module.partition(".")[0] not in REFUSED
) if wanted else every_entry_point()
"""
"""Has all modules refused that a package must do without, as if they were not installed."""

Start = Callable[..., subprocess.Popen[str]]


def refused(package: str) -> set[str]:
    """The modules that the example of a package must not import, its own package's imports included."""
    allowed = CORE[: CORE.index(package) + 1] if package in CORE else [*CORE, package]
    dagster = set() if "resources" in allowed else {"dagster"}
    return {*CORE, *EXTENSIONS, "examples", "faults", "benchmarks", "tests"} - {*allowed} | dagster


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Start:
    """Starts the example of a package with these arguments, as a person who has copied it into a file."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLM_ASSETS_")}
    environment |= {"PYTHONPATH": str(CHECKOUT), "VLM_ASSETS_ENV_FILE": os.devnull}

    def started(package: str, *arguments: Path | str) -> subprocess.Popen[str]:
        text = (CHECKOUT / package / "README.md").read_text()
        (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        program = tmp_path_factory.mktemp("program") / "example.py"
        program.write_text(f"REFUSED = {refused(package)}\n{REFUSE}\n{code}")
        return subprocess.Popen(
            [sys.executable, program, *arguments], env=environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    return started


def output_of(process: subprocess.Popen[str], typed: str | None = None) -> list[str]:
    """The lines that an example prints until its end, which must be a good one."""
    output, _ = process.communicate(typed, timeout=250)
    assert process.returncode == 0, output
    return output.splitlines()


def lines_until(process: subprocess.Popen[str], words: str) -> list[str]:
    """The lines that an example prints until one with these words, which must come."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if words in line:
            return lines
    raise AssertionError("".join(lines))


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


def test_a_device_has_one_holder_and_a_file_is_published_whole(start, tmp_path):
    """``resources``: a second process names the first and waits for its end; equal rows change no file."""
    home = tmp_path / "home"
    first = start("resources", home)
    lines_until(first, "This process holds cpu-0. Press Enter.")
    second = start("resources", home)
    waiting = lines_until(second, "cpu-0")[-1]
    assert "No device is free; waiting" in waiting
    assert f"pid {first.pid} " in waiting
    assert "(partition 000000000-000000004, squares)" in waiting
    file = home / "squares" / "000000000-000000004.parquet"
    assert not file.exists()
    output = "\n".join(output_of(first, "\n"))
    assert f"Published: {file}, version 1, 5 rows" in output
    assert "The squares add up to 30" in output
    published = file.stat()
    lines_until(second, "This process holds cpu-0. Press Enter.")
    output = "\n".join(output_of(second, "\n"))
    assert f"Unchanged: {file}, version 1, 5 rows" in output
    assert "The squares add up to 30" in output
    assert file.stat().st_mtime_ns == published.st_mtime_ns
    assert pq.read_table(file)["square"].to_pylist() == [0, 1, 4, 9, 16]


def test_the_retries_decide_by_who_ended_a_run_and_by_new_rows(start):
    """``sensors``: an interruption is no attempt, rows forgive, waits double, and giving up ends by hand."""
    lines = [line.partition(": ") for line in output_of(start("sensors"))]
    assert [end.partition(", ")[0] for _, _, end in lines].count("UNEXPECTED_TERMINATION") == 1
    assert [(who.partition(" of ")[2], end.partition(", ")[2]) for who, _, end in lines] == [
        ("the schedule", "0 new rows: wait 1200 s"),
        ("the schedule", "0 new rows: launch"),
        ("the schedule", "0 new rows: wait 2400 s"),
        ("the schedule", "250 new rows: wait 600 s"),
        ("the schedule", "0 new rows: wait 1200 s"),
        ("the schedule", "0 new rows: wait 2400 s"),
        ("the schedule", "0 new rows: give up"),
        ("a person", "0 new rows: wait 600 s"),
    ]


@dataclass
class DescribedHome:
    """A home whose properties the example of ``vlm_assets`` has described, killed once.

    at_kill: what was published then, by name, with the time of its publication. output: of the second start.
    """

    home: Path
    ids: list[str]
    at_kill: dict[str, int]
    output: list[str]

    @property
    def published(self) -> dict[str, int]:
        folder = self.home / "property_descriptions"
        return {file.name: file.stat().st_mtime_ns for file in folder.glob("*.parquet")}


@pytest.fixture(scope="module")
def described_home(start, tmp_path_factory) -> DescribedHome:
    """Four rendered properties. The first start is killed while it works on the second partition."""
    folder = tmp_path_factory.mktemp("described")
    images = write_example(folder, properties=4, seed=3, workers=1).parent / "images"
    made = DescribedHome(folder / "home", sorted(path.name for path in images.iterdir()), {}, [])
    process = start("vlm_assets", images, made.home)
    lines_until(process, "Published: ")
    lines_until(process, " is leased after ")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    made.at_kill = made.published
    made.output = output_of(start("vlm_assets", images, made.home))
    return made


def test_a_home_goes_on_after_a_kill_and_describes_each_property_once(described_home):
    """``vlm_assets``: what is published stays untouched, and the disk alone says what is left."""
    keys = ["000000000-000000001", "000000002-000000003"]
    states = [line for line in described_home.output if line.startswith(tuple(f"{key} " for key in keys))]
    done = [f"{key} done 2 of 2" for key in keys]
    assert described_home.at_kill
    assert {f"{name.removesuffix('.parquet')} done 2 of 2" for name in described_home.at_kill} <= {
        *states[:2]
    }
    assert states[-2:] == done
    assert described_home.published.keys() == {f"{key}.parquet" for key in keys}
    assert described_home.published.items() >= described_home.at_kill.items()
    rows = pq.read_table(described_home.home / "property_descriptions")
    assert rows.sort_by("ordinal")["property_id"].to_pylist() == described_home.ids
    assert set(rows["status"].to_pylist()) == {"ok"}


def test_a_search_finds_words_where_a_condition_holds(start, described_home):
    """``vlm_results``: the best hit has the words, every hit meets the condition, and no file changes."""
    before = described_home.published
    rows = pq.read_table(described_home.home / "property_descriptions").to_pylist()
    for row in rows[:2]:
        description = row["description"]
        where = f"floors = {description['floors']}"
        lines = output_of(start("vlm_results", described_home.home, description["summary"], where))
        answering = {
            other["property_id"] for other in rows if other["description"]["floors"] == description["floors"]
        }
        assert lines[0] == f"{len(answering)} of 4 properties: {where}"
        hits = [line.split(" ", 3) for line in lines[1:]]
        assert hits[0][1] == row["property_id"]
        assert {property_id for _, property_id, _, _ in hits} <= answering
        for _, property_id, image, shown in hits:
            assert Path(image).parent.name == property_id
            assert Path(image).is_file()
            assert ast.literal_eval(shown)["floors"] == description["floors"]
    assert described_home.published == before


def test_a_training_is_the_same_to_the_bit_whatever_kills_it_and_on_any_ranks(start, tmp_path):
    """``vlm_training``: a training on one rank, and one that is killed and goes on with three, end alike."""
    alone = output_of(start("vlm_training", tmp_path / "alone", "1"))
    assert alone[0] == "1 ranks go on after step 0"
    process = start("vlm_training", tmp_path / "killed", "2")
    before = lines_until(process, "200 ")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    after = output_of(start("vlm_training", tmp_path / "killed", "3"))
    assert before[0] == "2 ranks go on after step 0\n"
    assert int(after[0].removeprefix("3 ranks go on after step ")) >= 200
    assert after[-1] == alone[-1]
    step, digest, *weights = after[-1].split()
    assert (step, [round(float(weight), 1) for weight in weights]) == ("1000", [1.0, 2.0, 3.0])
    (checkpoint,) = (tmp_path / "killed").glob("checkpoint-000001000-*")
    assert digest in checkpoint.name


def test_where_runs_go_follows_from_settings_and_heartbeats(start, tmp_path):
    """``vlm_cluster``: an address brings a launcher without secrets; a node that hangs takes no run."""
    one, several, *nodes = output_of(start("vlm_cluster", tmp_path / "home"))
    assert one == "one machine: the core's own"
    launcher = ast.literal_eval(several.removeprefix("several machines: "))
    assert (launcher["module"], launcher["class"]) == ("vlm_cluster.ray_launcher", "ClusterRunLauncher")
    assert launcher["config"]["address"] == {"env": "VLM_ASSETS_RAY_ADDRESS"}
    assert "secret" not in several
    assert nodes == [
        "6 runs may work at once",
        "gpu-1 beats; 0 runs",
        "gpu-2 beats; 0 runs",
        "2 runs may work at once",
        "gpu-1 beats; 0 runs",
        "gpu-2 beats, and takes no runs",
    ]
