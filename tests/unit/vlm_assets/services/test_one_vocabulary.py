"""The same state of the disk has the same words in status, audit, repair, drift, checks and alerts."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict

import pyarrow.parquet as pq
import pytest

from sensors.alerts import alert_of
from sensors.dagster_internals.events import CheckEvaluation
from sensors.published_file_drift import evaluation
from tests.support.damage import flip_bit
from vlm_assets.assets import fingerprint
from vlm_assets.assets.checks import published_file_result
from vlm_assets.assets.fingerprint import Meanings
from vlm_assets.automation.sensors import DriftLooks
from vlm_assets.services.home_audit import audit
from vlm_assets.services.repairs import Remedy, find_repairs
from vlm_assets.services.status import read_status
from vlm_durable.journal.high_water_mark import HighWaterMark, write_mark
from vlm_durable.versions.findings import OF_THE_FILE, Finding, FindingKind
from vlm_durable.versions.version_mark import mark_copies

FIRST, DESCRIBED = "000000000-000000002", "property_descriptions"
SETTLED = {FindingKind.RECORD_COPY, FindingKind.RECORD_BEHIND}
"""What a materialization puts right before it looks."""


@pytest.fixture(autouse=True)
def meanings(monkeypatch):
    """The settings mean what the made data set was made with, until a test changes that."""
    parts = {"maker": "s"}
    monkeypatch.setattr(fingerprint, "description_parts", lambda *_: parts)
    monkeypatch.setattr(fingerprint, "embedding_parts", lambda *_: {"embedder": "m"})
    return parts


def damage_records_and_marks(dataset, paths):
    for path in (paths.record, paths.record_copy, *mark_copies(paths.version_mark)):
        path.write_bytes(b"?")


def forget_all(dataset, paths):
    path = paths.high_water_mark("g")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_mark(path, HighWaterMark(FIRST, "g", 3, 1, 1, None, retired=True))
    dataset.descriptions.set_aside(FIRST)


def forget_record(dataset, paths):
    content = paths.published.read_bytes()
    dataset.descriptions.set_aside(FIRST)
    paths.published.write_bytes(content)


def overwrite(_, paths):
    paths.published.write_bytes(b"x" * paths.published.stat().st_size)


def drop_a_row(_, paths):
    pq.write_table(pq.read_table(paths.published).slice(1), paths.published)


STATES = [
    (lambda _, paths: paths.published.unlink(), FindingKind.MISSING),
    (lambda _, paths: os.truncate(paths.published, 100), FindingKind.TRUNCATED),
    (overwrite, FindingKind.UNREADABLE),
    (drop_a_row, FindingKind.ROWS_DIFFER),
    (lambda _, paths: flip_bit(paths.published, 40), FindingKind.DIGEST_DIFFERS),
    (lambda _, paths: paths.version(0).unlink(), FindingKind.SECOND_COPY),
    (lambda _, paths: paths.record_copy.unlink(), FindingKind.RECORD_COPY),
    (lambda _, paths: (paths.record.unlink(), paths.record_copy.unlink()), FindingKind.RECORD_BEHIND),
    (damage_records_and_marks, FindingKind.RECORD),
    (forget_all, FindingKind.VANISHED),
    (forget_record, FindingKind.UNRECORDED),
    (lambda dataset, _: dataset.put_back(FIRST), FindingKind.PUT_BACK),
]


def audited_finding(dataset, kind: FindingKind) -> Finding:
    findings = audit(dataset.settings, dataset.catalog).findings
    (finding,) = (one for one in findings if (one.kind, one.asset) == (kind, DESCRIBED))
    return finding


@pytest.mark.parametrize(("damage", "kind"), STATES, ids=[kind for _, kind in STATES])
def test_all_say_the_same_of_the_same_disk(dataset, damage, kind):
    """All six speakers give the same kind, the same sentence and the same next step."""
    settings = dataset.settings
    damage(dataset, settings.descriptions.partition(FIRST))
    finding = audited_finding(dataset, kind)

    status = read_status(settings, dataset.catalog)
    (note,) = (one.note for one in status.partitions if (one.asset, one.key) == (DESCRIBED, FIRST))
    assert note == finding.text
    assert json.loads(json.dumps(asdict(finding))) in json.loads(json.dumps(status.as_json()))["findings"]

    report = audit(settings, dataset.catalog)
    repairs = [one for one in find_repairs(settings, report) if (one.asset, one.key) == (DESCRIBED, FIRST)]
    whys = [why for repair in repairs for why in repair.why]
    by_hand = any(repair.remedy is Remedy.BY_HAND for repair in repairs)
    assert (finding.text if by_hand else finding.sentence) in whys
    assert finding in [one for repair in repairs for one in repair.findings]

    looks = DriftLooks(settings, settings.descriptions, dataset.keys, Meanings.from_settings(settings))
    with looks.verifier() as verify:
        verdict = verify(FIRST)
    assert verdict is not None and verdict.worst == finding
    told = evaluation(DESCRIBED, FIRST, verdict, 1.0)
    metadata = {name: str(value.value) for name, value in told.metadata.items()}
    assert (metadata["found"], metadata.get("what to do", "")) == (finding.sentence, finding.next_step)

    read = CheckEvaluation(
        DESCRIBED, told.check_name, FIRST, told.passed, told.severity.value, "", metadata, "", 1.0, 1
    )
    alert = alert_of(read)
    assert alert is not None and (alert.as_json()["finding"], alert.actual) == (kind, finding.sentence)
    assert alert.next_step == finding.next_step or not finding.next_step

    verified = dataset.descriptions.verify(FIRST)
    if kind in SETTLED:
        assert verified.ok and verified.repairs
        return
    worst = verified.worst
    assert worst is not None and worst.kind is kind
    assert kind in (FindingKind.RECORD, FindingKind.PUT_BACK) or worst == finding
    result = published_file_result(DESCRIBED, verified)
    assert (result.severity, result.metadata["finding"].value) == (told.severity, kind)


def test_a_stale_partition_and_a_foreign_file_have_one_sentence_each(dataset, meanings):
    """What readers meet beside the partitions, and what nobody repairs, is said in one way too."""
    settings = dataset.settings
    meanings["maker"] = "t"
    shutil.copy(dataset.descriptions.path(FIRST), settings.descriptions.published / "mine.parquet")
    stale = next(one for one in audit(settings, dataset.catalog).findings if one.kind is FindingKind.STALE)
    foreign = audited_finding(dataset, FindingKind.FOREIGN_FILE)
    status = read_status(settings, dataset.catalog)
    assert status.partitions[0].note == stale.text
    assert foreign.text in status.warnings
    assert {stale, foreign} <= set(status.findings)
    looks = DriftLooks(settings, settings.descriptions, dataset.keys, Meanings.from_settings(settings))
    with looks.verifier() as verify:
        verdict = verify(stale.key or "")
    assert verdict is not None and verdict.worst is not None
    assert verdict.worst.sentence == stale.sentence
    assert verdict.worst.next_step.startswith(stale.next_step), "and what that costs"
    assert "to describe" in verdict.worst.next_step


def test_every_kind_about_a_file_is_an_error():
    """What readers must not read is never a mere warning."""
    for kind in OF_THE_FILE:
        assert not kind.is_warning and not kind.leaves_rows_sound


def test_a_warning_of_the_audit_never_fails_a_check():
    """Nothing to repair means that what readers see is sound."""
    assert all(kind.leaves_rows_sound for kind in FindingKind if kind.is_warning)
