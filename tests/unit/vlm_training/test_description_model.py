"""Which devices the ranks of a training see, and which model is kept when a publication is killed."""

import contextlib
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import pytest

from resources import gpu as resource
from resources.alerts.outbox import Outbox
from resources.gpu import GpuResource
from vlm_assets.assets.fingerprint import Fingerprint
from vlm_assets.assets.learned_labels import LEARNED_LABELS, LearnedLabels
from vlm_assets.config.engine_choice import require_models
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import SettingsError, load_settings
from vlm_durable.files.files import exchange, sha256_of
from vlm_durable.state.workers import Phase, Workers
from vlm_durable.versions.versioned_object import RecordDamagedError
from vlm_engine import model_source
from vlm_engine.devices import find, leases
from vlm_engine.devices.find import GpuReading
from vlm_engine.devices.leases import LeaseHolder
from vlm_training import published_model
from vlm_training.description_model import TrainingWork, _EventHandler
from vlm_training.published_model import PublishedModel
from vlm_training.training_plan import Sample, TrainingPlan

LOG = logging.getLogger("test_description_model")


def test_each_rank_has_a_gpu_of_its_own_and_none_is_waited_for(tmp_path, monkeypatch, caplog):
    """The lease of the run hides the other GPUs from it, not from its ranks; too few only warn."""
    gpus = [GpuReading(number, f"GPU-{number}", "H100", 80 << 30) for number in range(2)]
    for module in (find, resource):
        monkeypatch.setattr(module.DriverNvml, "readings", lambda _: gpus)
    monkeypatch.setattr(leases, "_lease", None)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.setenv(name, "as before")  # put back afterwards
        monkeypatch.delenv(name)
    gpu = GpuResource(leases_directory=str(tmp_path / "leases"))
    work = SimpleNamespace(name="tiny", plan=SimpleNamespace(ranks=3))
    context = SimpleNamespace(log=LOG)
    try:
        with TrainingWork.devices(work, gpu, LeaseHolder("run", "tiny", "train"), context) as devices:
            assert devices == ["GPU-0", "GPU-1"]
    finally:
        leases._lease.release()
    assert "Going on with 2 of 3 ranks: No device came free" in caplog.text


def test_nobody_expects_a_step_where_none_can_come(tmp_path):
    """Ranks that start, save, go back or evaluate may take what loading takes; steps count again after it."""
    settings = load_settings(home=tmp_path)
    workers = Workers(control_state(settings))
    context = SimpleNamespace(log=LOG, log_event=print, asset_key=dg.AssetKey("a"), partition_key="tiny")
    with workers.begin(run_id="run", asset="a", partition="tiny", expected=9) as beat:
        handler = _EventHandler(context, settings, beat)
        for silent in ("starting", "measuring", "saving", "restoring", "evaluating"):
            handler.handle({"event": silent})
            assert beat.worker.phase is Phase.LOADING
            handler.handle({"event": "skipped", "message": "It is skipped."})
            assert beat.worker.phase is Phase.WORKING


def test_a_stuck_or_slow_rank_is_an_alert_until_it_is_over(tmp_path):
    """It is told once, names rank and device and no property, and ends with a start, or with the run."""
    settings = load_settings(home=tmp_path)
    state = control_state(settings)
    outbox = Outbox(state)
    values = {"asset_key": dg.AssetKey("a"), "run": SimpleNamespace(run_id="r1")}
    context = SimpleNamespace(log=LOG, log_event=print, partition_key="tiny", **values)

    def kinds():
        return [one.kind for one in outbox.open_subjects().values()]

    with Workers(state).begin(run_id="r1", asset="a", partition="tiny", expected=9) as beat:
        handler = _EventHandler(context, settings, beat)
        with contextlib.closing(handler):
            stuck = {"event": "stuck", "rank": 1, "device": "GPU-1", "message": "Rank 1 was loading p7."}
            handler.handle(stuck)
            handler.handle(stuck)
            (alert,) = outbox.open_subjects().values()
            assert (alert.kind, alert.partition, alert.page) == ("rank_stuck", "tiny", "runs/r1")
            assert "Rank 1 of description_model tiny on GPU-1" in alert.title
            assert "p7" not in str(alert), "an alert stays for 90 days where a property is withdrawn"
            counts = dict.fromkeys(("step", "steps", "samples", "skipped", "starts", "interval", "mtbf"), 1)
            handler.handle({"event": "restored", "ranks": 1, **counts})
            assert kinds() == []
            for rank in (0, 2):
                handler.handle({"event": "slow", "rank": rank, "device": "cpu", "message": "Rank is slow."})
            assert kinds() == ["rank_slow", "rank_slow"]
            handler.handle({"event": "keeps pace", "rank": 2, "device": "cpu", "message": "It keeps pace."})
            assert kinds() == ["rank_slow"]
        assert kinds() == []
    assert [event.happening for event in outbox.recent(9)] == [
        *("raised", "recovered"),
        *("raised", "raised", "recovered", "recovered"),
    ]


def work_of(home, text):
    """A training whose model is one file with this text."""
    samples = str(home / "samples.jsonl")
    plan = TrainingPlan("tiny", "a:b", samples, "a:b", "Describe.", 0.1, seed=1, batch=1, microbatches=1)
    return TrainingWork(load_settings(home=home), "tiny", plan, Fingerprint({"base": text}), ())


def publish(work):
    work.prepare()
    (work.model.export / "model").write_text(work.fingerprint.parts["base"])
    work.history.write_text("")
    epochs = [{"of": "loss"}]
    counts = dict.fromkeys(("parameters", "step", "samples", "train", "held_out", "metric", "asked"), 1)
    work.publish({"event": "finished", "figures": {}, "skipped": 0, "epochs": epochs, **counts})


def test_what_another_plan_had_begun_goes_with_its_list_last(tmp_path, monkeypatch):
    """Killed in between, a withdrawal still finds the checkpoints that are left by what they learn from."""
    other = work_of(tmp_path, "other").folder
    (other / "checkpoints").mkdir(parents=True)
    (other / "samples.jsonl").write_text("")
    removed = []
    unlink = Path.unlink

    def seen(path, **options):
        removed.append((path, (other / "checkpoints").exists()))
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", seen)
    publish(work_of(tmp_path, "new"))
    assert (other / "samples.jsonl", False) in removed
    assert not other.exists()


@pytest.mark.parametrize("line", ["exchange", "sealed"])
def test_publication_killed_before_its_record_keeps_the_model_before(tmp_path, monkeypatch, line):
    """Done again, it does not take the unrecorded model of the killed start for the one before."""
    publish(work_of(tmp_path, "old"))

    def killed(*folders):
        if line == "exchange":
            exchange(*folders)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(published_model, line, killed)
        publish(work_of(tmp_path, "new"))
    again = work_of(tmp_path, "new")
    publish(again)
    assert again.is_complete()
    kept = again.paths.asset.versions / "tiny.before" / "model"
    assert ((again.model.folder / "model").read_text(), kept.read_text()) == ("new", "old")


def test_a_student_names_the_labels_that_it_learned_through_its_teacher(tmp_path):
    """Of those that a teacher had learned, those it was trained on certify nothing of it."""
    ids = [str(number) for number in range(40)]
    samples = tuple(Sample(name, (), {}) for name in ids)
    work = replace(work_of(tmp_path, "new"), samples=samples, labels=frozenset(ids[:20]))
    publish(work)
    trained = [name for name in ids[:20] if not work.plan.is_held_out(name)]
    learned = LearnedLabels.read(work.model.folder / LEARNED_LABELS)
    assert [name for name in ids if name in learned] == trained
    assert 0 < len(trained) < 20


def older(tmp_path, *, records=True):
    """A home with two versions, whose folder, and its record unless told otherwise, was put back."""
    home = tmp_path / "home"
    publish(work_of(home, "old"))
    model = work_of(home, "old").model
    shutil.copytree(model.folder, tmp_path / "folder")
    record = model.paths.record.read_bytes()
    publish(work_of(home, "new"))
    shutil.rmtree(model.folder)
    shutil.copytree(tmp_path / "folder", model.folder)
    for path in model.record_paths if records else ():
        path.write_bytes(record)
    return work_of(home, "new")


@pytest.mark.promise("Of two valid versions the newer is true")
def test_nothing_is_described_with_an_older_model_that_was_put_back(tmp_path):
    """Its folder and both copies of its record are whole: the version mark tells that it is older."""
    work = older(tmp_path)
    settings = work.settings.model_copy(update={"model": "variant:tiny"})
    with pytest.raises(SettingsError, match=r"version 1 stands there, and version 2 .* Materialize"):
        require_models(settings)
    assert not work.is_complete()
    publish(work)
    require_models(settings)
    assert (work.is_complete(), work.model.record["sequence"]) == (True, 2), "the same bytes, the same number"


def test_an_older_folder_beside_the_newest_record_is_made_anew(tmp_path, monkeypatch):
    """Digests are compared, whatever the record says; a file that did not change is read once for them."""
    work = older(tmp_path, records=False)
    settings = work.settings.model_copy(update={"model": "variant:tiny"})
    with pytest.raises(SettingsError, match=r"its files are others than those of its record.* Materialize"):
        require_models(settings)
    assert not work.is_complete()
    publish(work)
    assert (work.is_complete(), work.model.record["sequence"]) == (True, 2)
    read = []
    monkeypatch.setattr(model_source, "sha256_of", lambda path: read.append(path.name) or sha256_of(path))
    for _ in range(2):
        require_models(settings)
    assert sorted(read) == sorted(work.model.record["files"])


@pytest.mark.parametrize("gone", ["none", "records", "mark"])
def test_a_model_whose_records_are_damaged_is_never_replaced_unseen(tmp_path, gone):
    """Unreadable is not empty: it stops until a person moves them; what stands is kept aside then."""
    publish(work_of(tmp_path, "old"))
    work = work_of(tmp_path, "new")
    model = work.model
    notes = [*model.record_paths, *model.mark.copies]
    for path in notes:
        path.write_bytes(path.read_bytes()[:-5])
    for path in {"records": model.record_paths, "mark": model.mark.copies}.get(gone, ()):
        path.unlink()
    with pytest.raises(SettingsError, match=r"none of .* can be read.* Put one of them back"):
        require_models(work.settings.model_copy(update={"model": "variant:tiny"}))
    with pytest.raises(RecordDamagedError):
        publish(work)
    assert (model.folder / "model").read_text() == "old"
    for path in notes:
        path.unlink(missing_ok=True)
    publish(work)
    (aside,) = model.quarantine.iterdir()
    assert ((model.folder / "model").read_text(), (aside / "model").read_text()) == ("new", "old")


def test_the_record_of_another_model_is_damage(tmp_path):
    """A file that was copied to another variant's place does not say what that one's model is."""
    work = work_of(tmp_path, "new")
    publish(work)
    other = PublishedModel(work.model.paths.asset, "other")
    shutil.copyfile(work.model.record_paths[0], other.record_paths[1])
    with pytest.raises(RecordDamagedError):
        _ = other.record
    shutil.copyfile(work.model.record_paths[0], other.record_paths[0])
    assert "description_model/tiny" in str(other.copies()[0].damage)


@pytest.mark.parametrize("lost", [0, 1, "both", "mark"])
def test_a_lost_record_or_mark_comes_back_without_a_device(tmp_path, lost):
    """One of the three says what was published; a start makes the others say it, and trains nothing."""
    work = work_of(tmp_path, "new")
    publish(work)
    record, copies = work.model.record, work.model.record_paths
    for path in {"both": copies, "mark": work.model.mark.copies}.get(lost) or [copies[lost]]:
        path.write_bytes(b"?")
    again = work_of(tmp_path, "new")
    assert again.is_complete()
    assert [copy.record for copy in again.model.copies()] == [record] * 2
    assert again.model.mark.read().mark.sequence == 1
