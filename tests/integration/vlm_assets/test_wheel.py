"""The installed package, outside of any checkout: a wheel in an environment of its own."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from tests.support.dagster_pages import started
from tests.support.waiting import wait_until

CHECKOUT = Path(__file__).resolve().parents[3]
CORE = ("vlm_durable", "vlm_engine", "vlm_catalog", "resources", "sensors", "vlm_assets")
EXTENSIONS = ("vlm_results", "vlm_training", "vlm_cluster")
SEES_ONLY = ("PATH", "HOME", "LANG", "TMPDIR")

pytestmark = pytest.mark.serves


PIP = (sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, Path]:
    """The wheel of each distribution, by its name."""
    folder = tmp_path_factory.mktemp("wheels")
    source = folder / "source"
    source.mkdir()
    beside = ("distributions", "setup.py", "pyproject.toml", "README.md", "LICENSE")
    for name in (*CORE, *EXTENSIONS, *beside):
        copy = shutil.copytree if (CHECKOUT / name).is_dir() else shutil.copy
        copy(CHECKOUT / name, source / name)
    # What an earlier build left: an extension that the core's wheel had then.
    stale = source / "build" / "lib" / "vlm_results"
    stale.mkdir(parents=True)
    (stale / "__init__.py").touch()
    build = (*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder)
    subprocess.run([*build, source, *(source / "distributions").iterdir()], check=True, timeout=400)
    shutil.rmtree(source)
    return {path.name.partition("-0")[0].replace("_", "-"): path for path in folder.glob("*.whl")}


@pytest.fixture(scope="module")
def installed(wheels, tmp_path_factory) -> Path:
    """The programs of a new environment with the core's wheel alone.

    What it depends on is that of this environment, without the distributions of this checkout.
    """
    folder = tmp_path_factory.mktemp("environment")
    programs = folder / "bin"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=100)
    python = programs / "python"
    install(programs, wheels["vlm-assets"])
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip())
    dependencies = folder / "dependencies"
    dependencies.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("vlm_assets", "__editable__")):
            (dependencies / path.name).symlink_to(path)
    (own / "dependencies.pth").write_text(f"{dependencies}\n")
    for name in ("dagster", "dagster-daemon", "dg"):
        script = Path(sys.executable).with_name(name).read_text().splitlines(keepends=True)
        (programs / name).write_text("".join([f"#!{python}\n", *script[1:]]))
        (programs / name).chmod(0o755)
    return programs


def install(programs: Path, *wheels: Path) -> None:
    python = programs / "python"
    subprocess.run([*PIP, "--python", python, "install", "--no-deps", "--no-index", *wheels], check=True)


@pytest.fixture
def person(installed, listing, tmp_path, quick_daemon):
    """Runs a program of the environment in a folder of the person's own, whose .env names the model."""
    folder = tmp_path / "person"
    # The person's own project, with packages named as ours in a checkout.
    for name in ("resources", "sensors"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("OWNER = 'the person'\n")
    (folder / ".env").write_text(
        f"VLM_ASSETS_MODEL={CHECKOUT / 'examples' / 'model'}\nVLM_ASSETS_DEVICES=cpu:1\n"
        f"VLM_ASSETS_EMBEDDING_MODEL={CHECKOUT / 'examples' / 'embedder'}\n"
    )
    environment = {name: os.environ[name] for name in SEES_ONLY if name in os.environ}
    environment["PYTHONPATH"] = quick_daemon["PYTHONPATH"].split(os.pathsep)[0]  # without the checkout
    started = []

    def start(*arguments: object, program: str = "vlm-assets") -> subprocess.Popen:
        command = [installed / program, *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, cwd=folder, env=environment, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.send_signal(signal.SIGTERM)  # so that what it started ends too
        process.communicate(timeout=60)


def said(process: subprocess.Popen, code: int) -> str:
    output, _ = process.communicate(timeout=400)
    assert process.returncode == code, output
    return output


def test_a_wheel_ingests_describes_and_serves(person, listing, tmp_path):
    """``pip install`` is enough for a person's own images and model; everything lies where it is run."""
    home = tmp_path / "person" / "data"
    few = listing.with_name("wheel.jsonl")
    few.write_text("".join(listing.read_text().splitlines(keepends=True)[:2]))
    assert "2 properties" in said(person("ingest", few, "--range-size", 2), 0)
    served = person("serve", "--port", 3800)
    for line in served.stdout:
        if line.startswith("Schedules"):
            break
    said(person("run"), 0)
    assert len(list((home / "property_descriptions").glob("*.parquet"))) == 1
    assert len(list((home / "property_embeddings").glob("*.parquet"))) == 1
    assert (home / "dagster" / "dagster.yaml").is_file()
    served.send_signal(signal.SIGTERM)
    said(served, 0)
    for command in ("audit", "doctor --quick"):
        said(person(*command.split()), 0)
    assert json.loads(said(person("status", "--json"), 0))["extensions"] == []


def test_a_wheel_has_nothing_of_an_earlier_build(wheels):
    """Each file belongs to one distribution: an extension is there where it is installed, and only there."""
    names = zipfile.ZipFile(wheels["vlm-assets"]).namelist()
    assert "vlm_assets/definitions.py" in names
    assert not [name for name in names if name.startswith(EXTENSIONS)]


def test_each_wheel_carries_the_licence(wheels):
    """Whoever has one distribution alone has its terms."""
    for wheel in map(zipfile.ZipFile, wheels.values()):
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
        assert wheel.read(name) == (CHECKOUT / "LICENSE").read_bytes()


def test_clean_removes_what_was_built():
    """The next build begins with nothing."""
    done = subprocess.run(["make", "-n", "clean"], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert {"build", "distributions/*/build"} <= set(done.stdout.split())


def test_a_wheel_says_that_the_example_is_in_a_checkout(person):
    """No traceback where rendered properties and the example model are not installed."""
    assert "Run this command in a checkout" in said(person("demo"), 1)


def test_a_project_with_packages_of_our_names_keeps_them(person):
    """Definitions load where ``resources`` and ``sensors`` are the person's, and a wheel installs neither."""
    code = (
        "import resources, sensors, vlm_assets.definitions as ours;"
        "print(resources.OWNER, sensors.OWNER, len(list(ours.defs.sensors)))"
    )
    output = said(person("-c", code, program="python"), 0)
    assert re.search(r"^the person the person \d+$", output, re.MULTILINE), output
    code = (
        "import importlib.util as u, sys; sys.path.pop(0);"
        "print(u.find_spec('resources'), u.find_spec('sensors'))"
    )
    assert said(person("-c", code, program="python"), 0) == "None None\n"


EXTENSIONS_HERE = """
from vlm_assets.commands.main import commands, find_command
from vlm_assets.config.extensions import installed
from vlm_assets.config.settings import current_settings
for extension in installed():
    extension.definitions(current_settings())
    print(extension.package)
for name in commands().keys() & {"search", "review"}:
    find_command(name)
    print(name)
"""


def test_extensions_are_distributions_that_join_the_core(person, installed, wheels, listing):
    """The core's environment knows none; each wheel adds its own, with the names of the core's wheel."""
    assert said(person("-c", EXTENSIONS_HERE, program="python"), 0) == ""
    extensions = {name: wheel for name, wheel in wheels.items() if name != "vlm-assets"}
    assert len(extensions) == len(EXTENSIONS)
    try:
        install(installed, *extensions.values())
        lines = said(person("-c", EXTENSIONS_HERE, program="python"), 0).splitlines()
        names = sorted(line.split()[0] for line in lines)
        assert names == ["review", "search", "vlm_cluster", "vlm_results", "vlm_training"]
        assert "vlm-assets devices node" in said(person("devices", "node", "--help"), 0)
    finally:
        python = installed / "python"
        subprocess.run([*PIP, "--python", python, "uninstall", "-y", *extensions], check=True)


SCHEMA = """
import time
from pathlib import Path
from pydantic import model_validator
from vlm_assets.config.property_description import PropertyDescription

HELD = Path(__file__).with_name("held")
answers = 0

class House(PropertyDescription):
    @model_validator(mode="after")
    def wait(self):
        global answers
        answers += 1
        while answers > 8 and HELD.exists():
            time.sleep(0.05)
        return self
"""
COMPONENT = "vlm_assets.component.PropertyDescriptionsComponent"
KEY = "000000000-000000015"


@pytest.fixture
def project(tmp_path) -> Path:
    """A Dagster project as `create-dagster project homes` makes it, with a schema of its own."""
    folder = tmp_path / "homes"
    package = folder / "src" / "homes"
    (package / "defs").mkdir(parents=True)
    for name in ("", "defs"):
        (package / name / "__init__.py").touch()
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "homes"\nversion = "0.1.0"\n'
        '[tool.dg]\ndirectory_type = "project"\n[tool.dg.project]\nroot_module = "homes"\n'
    )
    (package / "definitions.py").write_text(
        "from pathlib import Path\nfrom dagster import definitions, load_from_defs_folder\n\n"
        "@definitions\ndef defs():\n"
        "    return load_from_defs_folder(path_within_project=Path(__file__).parent)\n"
    )
    (package / "house.py").write_text(SCHEMA)
    (package / "held").touch()
    # An empty dagster.yaml: everything is Dagster's default.
    (folder / "dagster_home").mkdir()
    (folder / "dagster_home" / "dagster.yaml").touch()
    return folder


@pytest.mark.timeout(1500)
def test_a_component_describes_in_any_project_and_goes_on_after_a_kill(project, installed, listing):
    """defs.yaml is all: a default Dagster describes; what `kill -9` ends goes on by itself, rows kept."""
    environment = {name: os.environ[name] for name in SEES_ONLY if name in os.environ}
    environment |= {
        "DAGSTER_HOME": str(project / "dagster_home"),
        "PYTHONPATH": str(project / "src"),
        # Nobody reads these: settings come from the file.
        "VLM_ASSETS_MODEL": "nobody/nothing",
        "VLM_ASSETS_HOME": str(project / "elsewhere"),
    }
    model = CHECKOUT / "examples" / "model"
    options = ("--images", listing, "--model", model, "--range-size", "16")
    scaffold = [installed / "dg", "scaffold", "defs", COMPONENT, "houses", *options]
    done = subprocess.run(scaffold, cwd=project, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    file = project / "src" / "homes" / "defs" / "houses" / "defs.yaml"
    written = yaml.safe_load(file.read_text())
    assert written["type"] == COMPONENT
    written["attributes"] |= {
        "description_schema": "homes.house:House",
        "settings": {"devices": "cpu:1", "batch_size": 2, "commit_seconds": 0.1, "retry_minutes": 1},
    }
    file.write_text(yaml.safe_dump(written))

    home, log = project / "data" / "houses", project / "dagster.log"
    with started(installed / "dg", "dev", environment=environment, folder=project, log=log) as pages:
        run = pages.launch("houses", "property_catalog")
        wait_until(lambda: pages.status(run) == "SUCCESS", "the catalogue is made")
        pages.reload()
        run = pages.launch("houses", "property_descriptions", partition=KEY)
        journal = home / ".journal" / "property_descriptions" / KEY
        wait_until(lambda: list(journal.glob("*/segment-*.parquet")), "rows are committed")
        lease = json.loads(next((project / "data" / ".devices" / "leases").glob("*.json")).read_text())
        step = lease["pid"]
        process_of_run = int(Path(f"/proc/{step}/stat").read_text().rpartition(")")[2].split()[1])
        for process in (process_of_run, step):
            os.kill(process, signal.SIGKILL)
        killed = time.time()
        (project / "src" / "homes" / "held").unlink()
        wait_until(lambda: pages.status(run) == "FAILURE", "the killed run is seen")
        published = home / "property_descriptions" / f"{KEY}.parquet"
        wait_until(published.exists, "a run that nobody launched publishes", seconds=600.0)
    rows = pq.read_table(published)
    assert len(set(rows["property_id"].to_pylist())) == rows.num_rows == 16
    kept = [at for at in rows["described_at"].to_pylist() if at.timestamp() < killed]
    assert 0 < len(kept) < 16
    assert not (project / "elsewhere").exists()
