"""Checkpoints and models in a real S3 store: another machine goes on from there, whatever was lost here."""

import json
from dataclasses import replace

import pytest
import torch

from faults.training import make_plan, outcome, prepare
from vlm_durable.files.files import make_directory, sha256_of
from vlm_durable.files.layout import Home
from vlm_durable.mirror import bucket as bucket_module
from vlm_durable.mirror.bucket import S3Folder, client
from vlm_training import training_store
from vlm_training.checkpoints import Checkpoints, step_in
from vlm_training.loop import Training, TrainingStoppedError
from vlm_training.published_model import ASSET, PublishedModel
from vlm_training.ranks import Ranks
from vlm_training.state import TrainingState
from vlm_training.training_plan import TrainingError
from vlm_training.training_store import StoreCopies, StoredCheckpoints, StoredModel


@pytest.fixture
def place(bucket):
    """A training's own folder in the store."""
    return S3Folder.parse(bucket.address(".journal/description_model/tiny/abc/checkpoints"))


def machine(folder):
    made = Checkpoints(folder / "checkpoints", folder / "quarantine")
    made.sweep()
    return made


def write(checkpoints, step):
    return checkpoints.write(TrainingState(step), {"a": torch.full((50,), float(step))})


def test_the_newest_whole_and_sound_copy_is_taken_over(place, tmp_path, monkeypatch):
    """In parts; three are kept; what is damaged or half there in the store is passed over."""
    monkeypatch.setattr(training_store, "PART_BYTES", 300)
    here, there, copies = machine(tmp_path / "a"), machine(tmp_path / "b"), StoredCheckpoints(place)
    paths = [write(here, step) for step in range(1, 6)]
    for path in paths[2:]:
        copies.put(path)
    copies.put(paths[2])  # again, as after a lost reply
    parts = [name for name, _ in place.names()]
    assert {step_in(name) for name in parts} == {3, 4, 5} and len(parts) > 6
    newest = [name for name in parts if step_in(name) == 5]
    place.put(newest[0], b"other bytes", over=place.head(newest[0]))
    place.delete([name for name in parts if step_in(name) == 4][-1])
    assert "step 3 was taken over" in copies.pull(there, after=-1)
    assert there.newest(damaged=pytest.fail).read_bytes() == paths[2].read_bytes()
    assert copies.pull(there, after=3) is None, "what is here already is not fetched again"
    copies.put(write(here, 6))
    assert {step_in(name) for name, _ in place.names()} == {3, 5, 6}, "half a copy of an older step goes"


def test_a_store_that_is_down_stops_no_training(place, tmp_path, s3_proxy, monkeypatch):
    """It is told once; the next checkpoint is copied when the store is back."""
    monkeypatch.setattr(bucket_module, "PATIENCE_SECONDS", 0.0)
    client.cache_clear()
    here, told = machine(tmp_path), []
    copies = StoreCopies(StoredCheckpoints(place), told.append)
    s3_proxy.breaks(lambda passing: passing.answer(503, "SlowDown"))
    for step in (1, 2):
        copies.offer(write(here, step))
        copies.wait()
    assert len(told) == 1 and "was not copied to the store" in told[0]
    s3_proxy.heal()
    copies.offer(write(here, 3))
    copies.wait()
    assert [step_in(name) for name, _ in place.names()] == [3]


def test_a_foreign_object_stops_no_copy(place, tmp_path, monkeypatch):
    """What has no name of a part is passed over; whatever else goes wrong is told, and the next is copied."""
    here, told = machine(tmp_path), []
    copies = StoreCopies(StoredCheckpoints(place), told.append)
    place.put(f"{write(here, 1).name}.bak", b"foreign", over=None)
    with monkeypatch.context() as patch:
        patch.setattr(StoredCheckpoints, "put", lambda *_: 1 // 0)
        copies.offer(write(here, 2))
        copies.wait()
    assert len(told) == 1 and "was not copied to the store: integer division" in told[0]
    path = write(here, 3)
    copies.offer(path)
    copies.wait()
    assert len(told) == 1 and path.name in StoredCheckpoints(place)._parts_by_checkpoint()
    assert "step 3 was taken over" in StoredCheckpoints(place).pull(machine(tmp_path / "b"), after=-1)


def test_another_machine_goes_on_to_the_same_bits(place, tmp_path):
    """Stopped on one machine, gone on with on another that has nothing but the store."""
    samples = prepare(tmp_path / "rendered", properties=8)
    threads = torch.get_num_threads()

    def train(name, *, steps_here=99):
        folder, told = tmp_path / name, []
        plan = replace(make_plan(folder, samples, steps=6), copies=str(place), checkpoint_seconds=3600.0)
        if name == "second":
            StoredCheckpoints(place).pull(machine(folder / "work"), after=-1)
        training = Training(
            plan if name != "whole" else replace(plan, copies=None),
            folder / "work",
            folder / "quarantine",
            Ranks(),
            device="cpu",
            history=folder / "training.jsonl",
            say=lambda event, values: told.append((event, values)),
            stopping=lambda: sum(event == "step" for event, _ in told) >= steps_here,
        )
        (folder / "export").mkdir()
        training.run(folder / "export")
        return [values["step"] for event, values in told if event == "restored"]

    try:
        train("whole")
        with pytest.raises(TrainingStoppedError):
            train("first", steps_here=2)
        assert train("second")[0] >= 2
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    assert outcome(tmp_path / "second") == outcome(tmp_path / "whole")


@pytest.fixture
def publish(bucket, tmp_path):
    """Has a machine of its own publish a model at home; gives its place in the store."""

    def published(text, *, sequence, fingerprint, names=("model.safetensors",)):
        model = model_in(tmp_path / text)
        for name in names:
            (model.export / name).write_text(text)
        files = {name: sha256_of(model.export / name) for name in names}
        model.publish({"sequence": sequence, "fingerprint": fingerprint, "files": files})
        return StoredModel(bucket, model)

    return published


def model_in(home):
    model = PublishedModel(Home(home).asset(ASSET), "tiny")
    make_directory(model.folder)
    model.empty_export()
    return model


def test_a_model_is_published_and_taken_over(publish, bucket, tmp_path):
    """Its files under their names in the home; a newer training replaces it, and what it lacks goes."""
    first = publish("first", sequence=1, fingerprint="a", names=("model.safetensors", "more"))
    first.push()
    bucket.delete("description_model/tiny/more")  # as by a lifecycle rule: it is put back
    first.push()
    other = model_in(tmp_path / "other")
    assert StoredModel(bucket, other).pull(first.record()[0])
    assert sorted(path.name for path in other.export.iterdir()) == ["model.safetensors", "more"]
    assert (other.export / "model.safetensors").read_text() == "first"
    publish("second", sequence=2, fingerprint="b").push()
    assert bucket.get("description_model/tiny/model.safetensors", most=99) == b"second"
    assert [name for name, _ in bucket.names("description_model/")] == [
        "description_model/tiny/model.safetensors"
    ]


def test_a_file_that_a_withdrawal_changed_replaces_the_one_in_the_store(publish, bucket, tmp_path):
    """Else the store gives back what was withdrawn. A machine with an earlier one puts nothing over it."""
    publish("here", sequence=1, fingerprint="a", names=("model.safetensors", "list")).push()
    model = PublishedModel(Home(tmp_path / "here").asset(ASSET), "tiny")
    (model.folder / "list").write_text("shorter")
    for _ in range(2):  # the second time after a kill
        model.record_changed("list")
        StoredModel(bucket, model).push(over=True)
        assert bucket.get("description_model/tiny/list", most=99) == b"shorter"
        assert StoredModel(bucket, model).record()[0] == model.record
    assert (model.trouble(), model.record["sequence"]) == (None, 2)
    for over in (False, True):
        publish(f"other {over}", sequence=1, fingerprint="a").push(over=over)
        assert StoredModel(bucket, model).record()[0] == model.record


def test_a_machine_that_was_cut_off_publishes_nothing(publish, bucket, monkeypatch):
    """Another training was published since it began: its model stays at home, and the store keeps its own."""
    there = publish("new", sequence=1, fingerprint="b")
    there.push()
    with pytest.raises(TrainingError, match="Nothing there was replaced"):
        publish("old", sequence=1, fingerprint="a").push()
    # Overtaken in the middle, after its record was taken as pending.
    other = publish("newest", sequence=3, fingerprint="c")
    late, head = publish("late", sequence=2, fingerprint="d"), S3Folder.head

    def overtaken(folder, name):
        if name.endswith(".safetensors"):
            monkeypatch.setattr(S3Folder, "head", head)
            other.push()
        return head(folder, name)

    monkeypatch.setattr(S3Folder, "head", overtaken)
    with pytest.raises(TrainingError, match="Nothing there was replaced"):
        late.push()
    assert there.record()[0]["fingerprint"] == "c"
    assert json.loads(json.dumps(there.record()[0])).get("pending") is None
    assert bucket.get("description_model/tiny/model.safetensors", most=99) == b"newest"


def test_who_was_overtaken_removes_nothing(publish, bucket, monkeypatch):
    """Another machine begins after the last record: its files are not taken for what is left over."""
    late, names = publish("late", sequence=1, fingerprint="a"), S3Folder.names
    other = publish("newest", sequence=2, fingerprint="b", names=("model.safetensors", "more"))
    bucket.prove()  # It lists, too.

    def overtaken(of, below=""):
        monkeypatch.setattr(S3Folder, "names", names)
        other.push()
        return names(of, below)

    monkeypatch.setattr(S3Folder, "names", overtaken)
    late.push()
    assert late.record()[0]["fingerprint"] == "b"
    assert bucket.get("description_model/tiny/more", most=99) == b"newest"


def test_a_damaged_record_in_the_store_is_named(publish, bucket):
    """Nothing is put over it: a person looks first."""
    model = publish("new", sequence=1, fingerprint="a")
    model.push()
    record = ".versions/description_model/tiny.json"
    bucket.put(record, b"?", over=bucket.head(record))
    with pytest.raises(TrainingError, match=r"tiny\.json: .* Nothing was changed.* version of the bucket"):
        model.push()
    assert bucket.get(record, most=9) == b"?"
