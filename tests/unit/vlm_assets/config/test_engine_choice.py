"""What the engine ``auto`` stands for: with a GPU or vLLM and without, and later in the same home."""

import logging
import shutil
from pathlib import Path

import pytest

from vlm_assets.config import engine_choice
from vlm_assets.config.engine_choice import ChosenEngine, chosen_engine, keep_engine, vllm_command
from vlm_assets.config.resource_settings import build_model_server
from vlm_assets.config.settings import SettingsError, load_settings
from vlm_durable.files import files
from vlm_durable.files.files import temporary_name
from vlm_durable.files.sealed_json import seal
from vlm_engine.devices import find
from vlm_engine.devices.find import DeviceError, GpuReading
from vlm_engine.protocol import ModelLoadError

LOG = logging.getLogger("test_engine_choice")
GPU, MIG = GpuReading(0, "GPU-a", "H100", 80 << 30), GpuReading(0, "MIG-a", "H100 MIG", 40 << 30)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with these devices, and vLLM in an environment of its own where ``build`` names one."""
    environment = tmp_path / "vllm environment"
    monkeypatch.setattr(engine_choice, "_ENVIRONMENT", environment)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(*readings, build=None):
        def read(_):
            if None in readings:
                raise DeviceError("it does not answer")
            return list(readings)

        monkeypatch.setattr(find.DriverNvml, "readings", read)
        if build is not None:
            (environment / "bin").mkdir(parents=True)
            (environment / "bin" / "vllm").touch()
            (environment / f"{build}-0.32.0").touch()
        chosen_engine.cache_clear()

    yield make
    chosen_engine.cache_clear()


def settings(tmp_path: Path, **changed):
    named = {"model": "owner/model", "embedding_model": "owner/embedder"}
    return load_settings(home=tmp_path / "home", **named | changed)


def test_auto_takes_vllm_on_a_gpu(tmp_path, machine):
    """With a GPU and vLLM's CUDA build a server describes."""
    machine(GPU, build="cuda")
    assert chosen_engine(settings(tmp_path)) == ChosenEngine("server")
    assert vllm_command().startswith(f"'{tmp_path}/vllm environment/bin/vllm' serve {{model}} ")
    assert chosen_engine(settings(tmp_path, devices="cpu")) == ChosenEngine("transformers")


@pytest.mark.parametrize(
    ("readings", "build", "changed", "lost"),
    [
        ([], "cpu", {}, None),
        ([None], "cuda", {}, None),
        ([GPU], None, {}, "`make vllm`"),
        ([GPU], "cpu", {}, "`make vllm`"),
        ([MIG], "cuda", {}, "MIG"),
    ],
    ids=["no GPU", "no answer", "no vLLM", "vLLM for CPUs", "MIG"],
)
def test_auto_stays_in_the_run_and_says_what_is_lost(
    tmp_path, machine, caplog, readings, build, changed, lost
):
    """Whatever vLLM lacks, a run works all the same; on a GPU it says in one line what it forgoes."""
    machine(*readings, build=build)
    chosen = settings(tmp_path, **changed)
    assert chosen_engine(chosen).engine == "transformers"
    keep_engine(chosen, LOG)
    assert [lost in one.message for one in caplog.records] == [True] * (lost is not None)


def test_choice_is_kept_in_the_home(tmp_path, machine, caplog):
    """vLLM that comes or goes, or a driver that fails, makes no finished partition stale."""
    machine(GPU)
    keep_engine(settings(tmp_path), LOG)
    machine(GPU, build="cuda")
    caplog.clear()
    keep_engine(settings(tmp_path), LOG)
    assert "this home's work was begun in the run's own process" in caplog.text
    assert chosen_engine(settings(tmp_path)).engine == "transformers"
    assert chosen_engine(settings(tmp_path, engine="server")) == ChosenEngine("server")
    served = settings(tmp_path / "other")
    keep_engine(served, LOG)
    machine()
    assert chosen_engine(served) == ChosenEngine("server")


@pytest.mark.parametrize("changed", [{"engine": "server"}, {"server_url": "http://h:1/v1"}, {}])
def test_a_server_describes_without_an_embedder(tmp_path, machine, changed):
    """Describing waits for no embedding model: a server is chosen, and nothing is kept free beside it."""
    machine(GPU, build="cuda")
    chosen = settings(tmp_path, **changed, embedding_model=None)
    keep_engine(chosen, LOG)
    assert chosen_engine(chosen).engine == "server"
    assert build_model_server(chosen).embedder is None


def test_a_driver_that_fails_at_the_first_run_decides_nothing(tmp_path, machine):
    """What was chosen without an answer is not kept: with an answer it is chosen anew."""
    machine(None, build="cuda")
    keep_engine(settings(tmp_path), LOG)
    machine(GPU)
    assert chosen_engine(settings(tmp_path)) == ChosenEngine("server")


def test_what_a_killed_run_left_of_the_note_goes(tmp_path, machine):
    """The next run removes it, and the note is whole."""
    machine(GPU)
    here = settings(tmp_path)
    note = here.state_directory / "models" / "engine.json"
    note.parent.mkdir(parents=True)
    temporary_name(note).write_bytes(b"{")
    keep_engine(here, LOG)
    assert list(note.parent.iterdir()) == [note]


@pytest.mark.parametrize("step", ["verify_bytes", "publish_new"])
def test_a_run_whose_unfinished_note_was_removed_as_a_leftover_goes_on(tmp_path, machine, monkeypatch, step):
    """Another run began meanwhile, wrote the same note, and took this one's for that of a killed run."""
    machine(GPU)
    here = settings(tmp_path)
    note = here.state_directory / "models" / "engine.json"
    step_itself = getattr(files, step)

    def while_another_begins(*of, **named):
        monkeypatch.setattr(files, step, step_itself)
        keep_engine(here, LOG)
        step_itself(*of, **named)

    monkeypatch.setattr(files, step, while_another_begins)
    keep_engine(here, LOG)
    assert getattr(files, step) is step_itself
    assert list(note.parent.iterdir()) == [note]


def test_a_note_that_nobody_wrote_is_no_other_runs(tmp_path, machine, monkeypatch):
    """Where its folder goes away, the file system is named, and not another run."""
    machine(GPU)
    here = settings(tmp_path)
    verify = files.verify_bytes

    def without_folder(path, **named):
        shutil.rmtree(path.parent)
        verify(path, **named)

    monkeypatch.setattr(files, "verify_bytes", without_folder)
    with pytest.raises(OSError, match=r"engine\.json"):
        keep_engine(here, LOG)


def test_two_machines_that_begin_at_once_do_not_mix(tmp_path, machine):
    """Another run noted another engine meanwhile: this one ends before it describes anything."""
    machine(GPU)
    here = settings(tmp_path)
    assert chosen_engine(here).engine == "transformers"
    note = here.state_directory / "models" / "engine.json"
    note.parent.mkdir(parents=True)
    note.write_bytes(seal(b'{"engine": "server"}'))
    with pytest.raises(ModelLoadError, match=r"engine 'server' .* work with 'transformers'"):
        keep_engine(here, LOG)


def test_damaged_note_is_no_empty_one(tmp_path, machine):
    """What cannot be read is not chosen anew: the sentence says what to set."""
    machine()
    here = settings(tmp_path)
    keep_engine(here, LOG)
    note = here.state_directory / "models" / "engine.json"
    note.write_text(note.read_text().replace("transformers", "server"))
    chosen_engine.cache_clear()
    with pytest.raises(SettingsError, match=r"cannot be read .* Set VLM_ASSETS_ENGINE"):
        chosen_engine(here)


def test_a_named_server_needs_no_engine(tmp_path, machine):
    """Who names an address or a command means a server."""
    machine()
    assert chosen_engine(settings(tmp_path, server_url="http://h:1/v1")).engine == "server"
    assert chosen_engine(settings(tmp_path, server_command="s --port {port}")).engine == "server"
