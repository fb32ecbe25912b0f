"""The recipes of docs/after.md with libraries that are too large for every environment."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg2
import pytest

from faults import postgres_server
from faults.postgres_server import PostgresServer
from tests.support.homes import Dataset
from tests.support.pictures import OPENED
from tests.support.recipes import PAGE, recipe
from vlm_assets.services.withdrawal import prepare_withdrawal, withdraw
from vlm_results.changes import Nothing, RowSnapshot, SnapshotWriter, changes, line_of
from vlm_results.export import Format, export
from vlm_results.exported_images import Images

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

PGVECTOR = ("pgserver==0.1.4",)
FIFTYONE = ("fiftyone==1.22.1",)
LABEL_STUDIO = ("label-studio-sdk==2.1.2",)


@pytest.fixture
def environment() -> Iterator[Callable[..., Path]]:
    """Makes an environment of its own with these packages; gives its folder."""
    with contextlib.ExitStack() as made:

        def make(*packages: str) -> Path:
            # Not below pytest's folders: Postgres runs as another account.
            folder = Path(made.enter_context(tempfile.TemporaryDirectory(prefix="environment-")))
            folder.chmod(0o755)
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            subprocess.run([folder / "bin" / "pip", "install", "-q", *packages], check=True)
            return folder

        yield make


@pytest.fixture
def pgvector(environment, monkeypatch) -> Iterator[PostgresServer]:
    """A real Postgres that has pgvector."""
    (binaries,) = environment(*PGVECTOR).glob("lib/python*/site-packages/pgserver/pginstall/bin")
    monkeypatch.setattr(postgres_server, "programs", lambda: binaries)
    with PostgresServer() as server:
        server._say("\\connect vlm_assets\nCREATE EXTENSION vector;")
        yield server


def test_a_table_of_pgvector_follows_what_is_published(pgvector, pictures: Dataset, tmp_path, monkeypatch):
    """Described, embedded, described anew and withdrawn: after each step the table has the published rows."""
    monkeypatch.chdir(tmp_path)
    database = pgvector.url.replace("+psycopg2", "")
    code = recipe("pgvector").replace("psycopg2.connect(database)", f"psycopg2.connect({database!r})")
    first, second = pictures.keys

    def follow(number: int) -> list[tuple]:
        catalog = pictures.catalog
        since = Nothing() if number == 0 else RowSnapshot(tmp_path / f"seen.{number}", catalog)
        with SnapshotWriter.opened(tmp_path / f"seen.{number + 1}", catalog) as writer:
            lines = [line_of(change) for change in changes(pictures.settings, catalog, since, writer)]
            writer.finish()
        (tmp_path / "changes.jsonl").write_text("\n".join([*lines, '{"new": 0}']) + "\n")
        export(pictures.settings, catalog, tmp_path / "out", Format.huggingface)
        exec(compile(code, "docs/after.md: pgvector", "exec"), {})
        with psycopg2.connect(database) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT property_id, text, embedding::real[] FROM properties ORDER BY ordinal")
            return cursor.fetchall()

    text = '{"floors":2,"has_pool":false}'
    assert follow(0) == [(name, text, None) for name in "abcd"]
    pictures.embed(first)
    pictures.embed(second)
    assert follow(1) == [(name, text, [1.0, float(at)]) for at, name in enumerate("abcd")]
    another = {"description": {"floors": 3, "has_pool": True}}
    pictures.describe(
        second, lambda rows: [{**row, **(another if row["property_id"] == "d" else {})} for row in rows]
    )
    for _ in withdraw(pictures.settings, prepare_withdrawal(pictures.settings, ["a"])):
        pass
    rows = follow(2)
    assert [row[0] for row in rows] == ["b", "c", "d"]
    assert rows[2][1] == '{"floors":3,"has_pool":true}'
    with psycopg2.connect(database) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT property_id FROM properties ORDER BY embedding <=> '[1,1]'::vector LIMIT 1")
        assert cursor.fetchall() == [("b",)]


READ_FIFTYONE = """
import sys
from fiftyone.utils.data.importers import LegacyFiftyOneDatasetImporter
from PIL import Image
with LegacyFiftyOneDatasetImporter(sys.argv[1]) as importer:
    samples = list(importer)
for sample in samples:
    with Image.open(sample.filepath) as picture:
        assert picture.size == (8, 8)
print(len(samples), samples[0]["property_id"])
"""


def test_fiftyone_reads_the_samples(environment, pictures: Dataset, tmp_path, monkeypatch):
    """Its own importer, which needs no database, reads the folder; every picture opens."""
    monkeypatch.chdir(tmp_path)
    export(pictures.settings, pictures.catalog, Path("lines"), Format.jsonl, images=Images.copy)
    exec(compile(recipe("FiftyOne"), "docs/after.md: FiftyOne", "exec"), {})
    python = environment(*FIFTYONE) / "bin" / "python"
    done = subprocess.run([python, "-c", READ_FIFTYONE, "lines"], check=True, capture_output=True, text=True)
    assert done.stdout.split() == [str(len(OPENED)), "a"]


VALIDATE = """
import json, sys
from label_studio_sdk.label_interface import LabelInterface
interface = LabelInterface(open(sys.argv[1]).read())
tasks = json.load(open("tasks.json"))
for task in tasks:
    assert interface.validate_task({"data": task["data"]})
    for prediction in task["predictions"]:
        assert interface.validate_prediction(prediction)
print(len(tasks))
"""


def test_label_studio_takes_the_tasks_and_their_predictions(
    environment, pictures: Dataset, tmp_path, monkeypatch
):
    """Its own check of what is imported into the labelling interface of the page."""
    monkeypatch.chdir(tmp_path)
    export(pictures.settings, pictures.catalog, Path("lines"), Format.jsonl, images=Images.copy)
    exec(compile(recipe("Label Studio"), "docs/after.md: Label Studio", "exec"), {})
    Path("interface.xml").write_text(PAGE.partition("```xml\n")[2].partition("```")[0])
    python = environment(*LABEL_STUDIO) / "bin" / "python"
    done = subprocess.run(
        [python, "-c", VALIDATE, "interface.xml"], check=True, capture_output=True, text=True
    )
    assert json.loads(done.stdout) == 4
