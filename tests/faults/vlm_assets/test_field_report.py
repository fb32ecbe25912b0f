"""The four losses of the field report: real runs of a model that is scripted, and real commands.

315,000 finished properties were lost by these four. Each test takes a partition that is 98% done, does to it
what happened then, and looks at what a person would look at: the terminal, the files, the rows.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import duckdb
import pytest
from PIL import Image
from typer.testing import CliRunner

from vlm_assets.commands.main import app
from vlm_catalog.ingest import ingest

PROPERTIES = 50
DONE = 49
KEY = f"{0:09d}-{PROPERTIES - 1:09d}"
ASSET = "property_descriptions"
ONE_BY_ONE = {"batch_size": 1, "commit_rows": 1, "decode_workers": 1}


@pytest.fixture(scope="module")
def nearly_done(tmp_path_factory: pytest.TempPathFactory, lives: Any) -> Path:
    """A home whose only partition was killed after 49 of 50 properties were committed."""
    root = tmp_path_factory.mktemp("field-report")
    for number in range(PROPERTIES):
        folder = root / "images" / f"p{number:02d}"
        folder.mkdir(parents=True)
        Image.new("RGB", (48, 32), (5 * number, 99, 255 - 5 * number)).save(folder / "1.jpg")
    home = root / "home"
    ingest(root / "images", home, range_size=PROPERTIES)
    life = lives.run(home, KEY, ONE_BY_ONE, scripted=True, batch=PROPERTIES)
    assert life["killed"]
    assert len(segments(home)) >= DONE - 1, "most of the work must have been committed before the kill"
    return home


@pytest.fixture
def home(nearly_done: Path, tmp_path: Path) -> Path:
    """A copy of that home, for one test to damage."""
    return Path(shutil.copytree(nearly_done, tmp_path / "home"))


def segments(home: Path) -> list[Path]:
    """The committed segments of the partition, oldest first."""
    return sorted(home.rglob("segment-*.parquet"))


def manifests(home: Path) -> list[Path]:
    """The journal's manifests, oldest first."""
    return sorted(home.rglob("manifest-*.json"))


def described_at(files: list[Path]) -> dict[str, Any]:
    """When each property of these files was described, by id."""
    names = [str(file) for file in files]
    rows = duckdb.execute("SELECT property_id, described_at FROM read_parquet($1)", [names]).fetchall()
    assert len(rows) == len(dict(rows)), "an id came out twice"
    return dict(rows)


def command(*arguments: str) -> tuple[int, str]:
    """A command's exit code and everything that it printed."""
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.output


def percent_done(home: Path) -> float:
    """What `vlm-assets status` says of the partition."""
    code, output = command("status", "--home", str(home), "--json")
    assert code == 0, output
    (found,) = (one for one in json.loads(output)["partitions"] if one["asset"] == ASSET)
    return 100.0 * float(found["rows"]) / float(found["expected"])


def published(home: Path) -> Path:
    """The file that readers see."""
    return home / ASSET / f"{KEY}.parquet"


@pytest.mark.promise("What is done is derived from committed rows")
def test_loss_1_progress_that_reads_18_percent_where_98_are_done(home: Path, lives: Any) -> None:
    """Manifests that are gone or damaged take nothing away: progress is counted from the rows themselves."""
    committed = described_at(segments(home))
    newest, *older = reversed(manifests(home))
    newest.unlink()
    for path in older:
        path.write_bytes(path.read_bytes()[:-30])
    assert percent_done(home) >= 100.0 * len(committed) / PROPERTIES >= 96.0
    life = lives.run(home, KEY, ONE_BY_ONE, scripted=True)
    assert life["restored"] == len(committed)
    after = described_at([published(home)])
    assert len(after) == PROPERTIES
    assert {one: after[one] for one in committed} == committed, "finished properties were described again"


def test_loss_2_backups_exist_where_they_are_looked_for(home: Path, lives: Any) -> None:
    """The published file is overwritten: the audit names it, and its copy is there, whole, and put back."""
    lives.run(home, KEY, ONE_BY_ONE, scripted=True)
    whole = published(home).read_bytes()
    published(home).write_bytes(b"\0" * len(whole))
    code, output = command("audit", "--deep", "--home", str(home))
    assert code == 1, output
    assert KEY in output
    command("repair", "--deep", "--yes", "--home", str(home))
    assert published(home).read_bytes() == whole
    assert command("audit", "--deep", "--home", str(home))[0] == 0


def test_loss_3_a_restart_that_overwrites(home: Path, lives: Any) -> None:
    """A start without any flag, with other batch settings, keeps every committed byte and row."""
    before = {path: path.read_bytes() for path in segments(home)}
    committed = described_at(list(before))
    other = {"batch_size": 7, "commit_rows": 3, "decode_workers": 2}
    life = lives.run(home, KEY, other, scripted=True, operation=40)
    assert life["killed"], "this start was to die early"
    assert {path: path.read_bytes() for path in before} == before
    lives.run(home, KEY, other, scripted=True)
    after = described_at([published(home)])
    assert len(after) == PROPERTIES
    assert {one: after[one] for one in committed} == committed, "finished properties were described again"


@pytest.mark.parametrize("lost", ["segments", "journal"])
def test_loss_4_a_resume_that_restores_the_position_but_not_the_data(
    home: Path, lives: Any, lost: str
) -> None:
    """The records say 49 of 50 and the rows are gone: every start refuses, and every command says so."""
    journal = segments(home)[0].parent
    if lost == "segments":
        for path in segments(home):
            path.unlink()
    else:
        shutil.rmtree(journal)
    life = lives.run(home, KEY, ONE_BY_ONE, scripted=True, may_fail=True)
    assert not life["success"]
    (failure,) = life["failures"]
    assert "cannot be restored" in failure
    assert failure.count("is not there") <= 3, "a message that lists every segment is read by nobody"
    named = re.findall(
        r"(/\S+?)[;.]? ", failure.partition("Copies to look at first:")[2].partition("Put the")[0]
    )
    assert all(Path(one).exists() for one in named), "a backup is named that is not there"
    assert f"vlm-assets repair --accept-loss {KEY}" in failure
    assert not life["submitted"], "it went on from the position without the data"
    assert not published(home).exists()
    code, output = command("audit", "--deep", "--home", str(home))
    assert code == 1, output
    assert KEY in output
