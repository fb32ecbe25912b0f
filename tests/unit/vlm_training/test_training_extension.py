"""What the core's audit and repair learn of trained models through the door for extensions."""

import pytest

from tests.support.damage import flip_bit
from vlm_assets.services.home_audit import audit
from vlm_assets.services.repairs import Remedy, find_repairs
from vlm_durable.files.files import make_directory, sha256_of
from vlm_durable.files.sealed_json import sealed
from vlm_durable.versions.findings import FindingKind
from vlm_training.published_model import ASSET, PublishedModel


@pytest.fixture
def model(dataset):
    """The second published version of a model of two files."""
    model = PublishedModel(dataset.settings.layout.asset(ASSET), "tiny")
    for number, text in enumerate(("old", "new"), start=1):
        for folder in (model.folder, model.export):
            make_directory(folder)
        for name in ("model.safetensors", "config.json"):
            (model.export / name).write_text(f"{text} {name}")
        digests = {path.name: sha256_of(path) for path in model.export.iterdir()}
        model.publish({"sequence": number, "fingerprint": text, "files": digests, "step": 9})
    return model


def flipped(model):
    flip_bit(model.folder / "model.safetensors")


def without_notes(model):
    for path in (*model.record_paths, *model.mark.copies):
        path.write_bytes(path.read_bytes()[:-5])


def without_folder(model):
    for path in model.folder.iterdir():
        path.unlink()
    model.folder.rmdir()


def without_record(model):
    flipped(model)
    for path in model.record_paths:
        path.unlink()


FAULTS = [
    (flipped, FindingKind.DIGEST_DIFFERS),
    (without_folder, FindingKind.DIGEST_DIFFERS),
    (without_record, FindingKind.RECORD),
    (without_notes, FindingKind.RECORD),
]


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize(("strike", "kind"), FAULTS, ids=[strike.__name__ for strike, _ in FAULTS])
def test_a_model_that_is_not_what_was_published_is_found(dataset, model, strike, kind, deep):
    """The audit names it, no partition is wrong for it, and repair leaves it to a person."""
    strike(model)
    audited = audit(dataset.settings, dataset.catalog, deep=deep)
    (finding,) = audited.findings
    assert (finding.kind, finding.asset, finding.key, audited.ok) == (kind, ASSET, None, False)
    assert "tiny" in finding.text
    assert "0 of 6 partitions wrong" in audited.verdict()
    (repair,) = find_repairs(dataset.settings, audited)
    assert (repair.remedy, repair.why, repair.findings) == (Remedy.BY_HAND, (finding.text,), (finding,))


def test_an_older_model_that_was_put_back_is_a_warning(dataset, model):
    """Its rows are sound, as of an older partition: what describes with it stops and says the same."""
    first = model.kept / "model.safetensors"
    (model.folder / first.name).write_bytes(first.read_bytes())
    for path in model.record_paths:
        path.unlink()
    model.settle_record(sealed({**model.record, "sequence": 1}))
    (finding,) = audit(dataset.settings, dataset.catalog).findings
    assert finding.kind is FindingKind.PUT_BACK
    assert "version 1 stands there, and version 2" in finding.sentence
    assert f"Materialize {ASSET} tiny" in finding.next_step


@pytest.mark.parametrize("deep", [False, True])
def test_a_whole_model_is_no_finding(dataset, model, deep):
    """The home with a model that is what was published is conserved."""
    assert audit(dataset.settings, dataset.catalog, deep=deep).findings == ()


def test_a_model_that_is_being_changed_is_no_finding(dataset, model):
    """What a training or a withdrawal has half done, and holds the lock for, is no damage."""
    flipped(model)
    lock = model.lock(0.0)
    assert audit(dataset.settings, dataset.catalog).findings == ()
    lock.close()
    assert len(audit(dataset.settings, dataset.catalog).findings) == 1
