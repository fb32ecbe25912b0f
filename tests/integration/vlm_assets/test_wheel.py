"""The installed package, outside of any checkout: a wheel in an environment of its own."""

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
PACKAGES = tuple(name.rstrip("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"])
SEES_ONLY = ("PATH", "HOME", "LANG", "TMPDIR")

pytestmark = pytest.mark.serves


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The programs of a new environment with the wheel; what it depends on is that of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in (*PACKAGES, "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (CHECKOUT / name).is_dir() else shutil.copy
        copy(CHECKOUT / name, source / name)
    pip = [sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, source]
    subprocess.run([*pip, *build], check=True, timeout=200)
    (wheel,) = folder.glob("*.whl")
    shutil.rmtree(source)
    programs = folder / "environment" / "bin"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", programs.parent], check=True, timeout=100)
    python = programs / "python"
    subprocess.run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], check=True)
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip())
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name in ("dagster", "dagster-daemon"):
        script = Path(sys.executable).with_name(name).read_text().splitlines(keepends=True)
        (programs / name).write_text("".join([f"#!{python}\n", *script[1:]]))
        (programs / name).chmod(0o755)
    return programs


@pytest.fixture
def person(installed, listing, tmp_path):
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


@pytest.mark.timeout(900)
def test_a_wheel_ingests_describes_and_serves(person, listing, tmp_path):
    """``pip install`` is enough for a person's own images and model; everything lies where it is run."""
    home = tmp_path / "person" / "data"
    assert "16 properties" in said(person("ingest", listing, "--range-size", 16), 0)
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
