"""Withdrawn properties are gone from every file of a home; killed anywhere, a withdrawal is finished."""

import contextlib
import json
import os
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import SecretStr

from faults.file_operations import FileOperations
from resources.dagster_names import NO_ATTEMPT
from tests.support.shares import share_of
from vlm_assets.assets import materialize
from vlm_assets.assets.fingerprint import digest_of
from vlm_assets.assets.learned_labels import LearnedLabels, keep_learned, learned_labels, write_learned
from vlm_assets.assets.truth import verdicts
from vlm_assets.config.resource_settings import control_state
from vlm_assets.config.settings import load_settings
from vlm_assets.services.command_error import CommandError
from vlm_assets.services.home_audit import audit
from vlm_assets.services.status import read_status
from vlm_assets.services.withdrawal import (
    Withdrawal,
    pending_withdrawal,
    prepare_withdrawal,
    returned_ids,
    undo_withdrawal,
    withdraw,
)
from vlm_catalog.catalog import Catalog
from vlm_catalog.catalog_file import WITHDRAWN, CatalogError
from vlm_catalog.ingest import ingest
from vlm_catalog.withdrawn_ids import keyed_digest, list_paths
from vlm_durable.files.files import set_aside, sha256_of
from vlm_durable.state.database import open_state
from vlm_durable.state.nodes import NodeRecord, Nodes
from vlm_durable.state.withdrawing import being_withdrawn
from vlm_durable.state.workers import Phase, Workers
from vlm_durable.versions.findings import FindingKind
from vlm_durable.versions.published import PublishedPartitions
from vlm_engine.model_source import ModelSource, exact_revision
from vlm_results.guarantee import LookResult, read_looks, write_looks
from vlm_results.published_table import readable_records
from vlm_results.review import Reviewed, append_verdict, verdict_of
from vlm_results.word_index import find_words
from vlm_training.checkpoints import Checkpoints, newest_state
from vlm_training.published_model import PublishedModel
from vlm_training.rank_watch import PositionFile
from vlm_training.state import TrainingState
from vlm_training.training_plan import Sample, TrainingPlan, write_samples

ROUNDS = int(os.environ.get("FAULTS_ROUNDS", "1"))
KEY, SECOND = "000000000-000000007", "000000008-000000015"
ASSETS = ("property_descriptions", "property_embeddings")

pytestmark = pytest.mark.usefixtures("scripted_engine")


def ids_of(settings, number=0):
    catalog = Catalog.open(settings.home)
    return catalog.slice(catalog.ranges[number])["property_id"].to_pylist()


def files_with(home, property_id):
    """Every file of a home in which an id stands, parquet files decoded."""
    found = []
    for path in home.rglob("*"):
        if not path.is_file():
            continue
        if path.suffix == ".parquet":
            values = pq.read_table(path).to_pylist()
            if property_id in json.dumps(values, default=str):
                found.append(path)
        if property_id.encode() in path.read_bytes():
            found.append(path)
    return found


def keep_beside(settings, gone, stays):
    """What else names properties: a review, the page's table, a training and its passed-over batches."""
    for one in (gone, stays):
        house = Reviewed(one, KEY, 0, "a", {"floors": 2})
        append_verdict(settings.home, verdict_of(house, right=["floors"], wrong=[], corrections={}))
    shown = settings.state_directory / "explore" / "shown.parquet"
    shown.parent.mkdir(parents=True)
    pq.write_table(pa.table({"property_id": [gone, stays]}), shown)
    paths = settings.layout.asset("description_model").partition("tiny")
    for name, ids in (("with", [gone, stays]), ("without", [stays])):
        checkpoints = Checkpoints(paths.journal(name) / "checkpoints", paths.quarantine)
        checkpoints.sweep()
        checkpoints.write(TrainingState(skips={0: ids}), {})
        write_samples(paths.journal(name) / "samples.jsonl", [Sample(one, (), {"floors": 2}) for one in ids])
    training = paths.journal("with")
    PositionFile(training / "rank-0.at").begin([gone])
    (checkpoint,) = (training / "checkpoints").iterdir()
    set_aside(checkpoint, paths.quarantine, keep=True)
    records, _ = readable_records(settings.descriptions, Catalog.open(settings.home))
    find_words(settings, records, "a house", most=1)
    return [settings.home / "review.jsonl", shown, training / "samples.jsonl", checkpoint]


def keep_labels(settings, ids):
    """What names properties by digests: two models that learned their labels, one describing; and a look."""
    model = PublishedModel(settings.layout.asset("description_model"), "tiny")
    with contextlib.closing(model.lock(1)):
        model.folder.mkdir()
        for training in ("first", "second"):
            model.empty_export()
            (model.export / "config.json").write_text(json.dumps({"of": training}))
            write_learned(model.export, ids, model.export, made_of=training)
            files = {path.name: sha256_of(path) for path in model.export.iterdir()}
            model.publish({"sequence": 1, "fingerprint": training, "files": files, "step": 1})
    keep_learned(settings.model_copy(update={"model": str(model.folder)}), revision_of(model))
    judged = {digest_of(property_id): "a1 0.9000" for property_id in ids}
    write_looks(settings, [LookResult("m", "floors", 0.9, 0.05, 300, judged, 0.5, 1, 1, "today")])
    return model


def revision_of(model):
    return exact_revision(ModelSource(str(model.folder)))


def learned_in(home):
    """The files that say what models learned."""
    return [*home.rglob("learned-labels.list"), *(home / ".state" / "learned").iterdir()]


def digests_of(home, property_id):
    """The digests by which a property may be named."""
    keys = {key for path in learned_in(home) for key in LearnedLabels.read(path).digests}
    return [digest_of(property_id), *(keyed_digest(bytes.fromhex(key), property_id) for key in keys)]


def done(settings, ids) -> list[str]:
    return list(withdraw(settings, prepare_withdrawal(settings, ids)))


def is_whole(settings, gone):
    """The audit finds nothing wrong, and exactly these properties gone, each a tombstone."""
    assert audit(settings, Catalog.open(settings.home), deep=True).wrong == ()
    for asset in settings.partitioned_assets:
        table = pq.read_table(asset.partition(KEY).published)
        left = [one for one in table["property_id"].to_pylist() if not one.startswith(WITHDRAWN)]
        assert len(left) == table.num_rows - len(gone)
        assert not set(gone).intersection(left)


@pytest.mark.published(*ASSETS)
def test_nothing_of_a_withdrawn_property_is_left_and_all_else_is_as_it_was(desk, listing, no_device):
    """Files, earlier versions, copies, catalogue; the rest stays, and is still what the settings mean."""
    assert desk.materialize(*ASSETS, config={"recompute": True}).success
    gone = ids_of(desk.settings)[2:4]
    before = [row for row in pq.read_table(desk.file).to_pylist() if row["property_id"] not in gone]
    assert len(files_with(desk.settings.home, gone[0])) > 6
    said = done(desk.settings, gone)
    assert any(str(desk.file) in one for one in said)
    assert any(str(desk.paths.version(1)) in one for one in said)
    for one in gone:
        assert files_with(desk.settings.home, one) == []
    is_whole(desk.settings, gone)
    after = pq.read_table(desk.file).to_pylist()
    same = [name for name in before[0] if name != "fingerprint"]
    assert [[row[name] for name in same] for row in after if row["error_kind"] != WITHDRAWN] == [
        [row[name] for name in same] for row in before
    ]
    again = desk.materialize(*ASSETS, gpu=no_device)
    assert again.success, again.failure
    assert pending_withdrawal(desk.settings) is None
    report = ingest(listing, desk.settings.home, range_size=8, close=True)
    assert report.new_ranges == ()
    assert not set(gone).intersection(ids_of(desk.settings))


@pytest.mark.published(*ASSETS)
def test_a_withdrawn_property_that_was_put_back_is_not_conserved(desk, tmp_path):
    """With all but the list from the day before, no run works on it, and the audit does not pass it."""
    home, settings = desk.settings.home, desk.settings
    gone = ids_of(settings)[2]
    shutil.copytree(home, tmp_path / "before", symlinks=True)
    done(settings, [gone])
    lists = {path: path.read_bytes() for path in list_paths(home)}
    for folder in ("property_catalog", *ASSETS, ".versions", ".state/version_marks"):
        shutil.rmtree(home / folder)
        shutil.copytree(tmp_path / "before" / folder, home / folder)
    for path, data in lists.items():
        path.write_bytes(data)
    assert gone in ids_of(settings)
    found = audit(settings, Catalog.open(home), deep=True)
    assert [one.kind for one in found.wrong] == [FindingKind.WITHDRAWN]
    assert "Conserved" not in found.verdict()
    for config in ({}, {"recompute": True}):
        refused = desk.materialize(config=config)
        assert "Withdrawn properties are back in the catalogue" in refused.failure
        assert NO_ATTEMPT in desk.instance.get_runs()[0].tags
    done(settings, returned_ids(settings, Catalog.open(home)))
    assert files_with(home, gone) == []
    is_whole(settings, [gone])


def test_unpublished_work_of_the_others_is_kept(desk, images_away):
    """A journal with the property goes; what is finished of the others is in a new one before."""
    images_away.take(*images_away.ids[:3])
    assert not desk.materialize().success
    gone, stays = images_away.ids[5:7]
    beside = keep_beside(desk.settings, gone, stays)
    assert set(beside) <= set(files_with(desk.settings.home, gone))
    done(desk.settings, [gone])
    assert files_with(desk.settings.home, gone) == []
    assert verdicts(desk.settings.home).keys() == {stays}
    trainings = desk.settings.layout.asset("description_model").partition("tiny").journals
    assert [one.name for one in trainings.iterdir()] == ["without"], "the other training goes on"
    assert newest_state(trainings / "without" / "checkpoints")
    images_away.put_back(*images_away.ids)
    finished = desk.materialize()
    assert finished.success, finished.failure
    assert finished.published[0].metadata["restored rows"].value == 4
    found = pq.read_table(desk.file)
    assert found["error_kind"].to_pylist()[5] == WITHDRAWN
    assert found["status"].to_pylist().count("ok") >= 6


def test_no_list_of_labels_names_a_withdrawn_property(desk):
    """By no digest: not as a label that a model learned, nor as one that a look counted. The others stay.

    Where the property is taken in again, its label still certifies nothing: nobody knows who learned it.
    """
    home, (gone, stays, other) = desk.settings.home, ids_of(desk.settings)[:3]
    model = keep_labels(desk.settings, [gone, stays])
    digests = digests_of(home, gone)
    assert len(learned_in(home)) == len(digests) == 3
    assert all(files_with(home, digest) for digest in digests)
    done(desk.settings, [gone])
    assert [path for digest in digests for path in files_with(home, digest)] == []
    assert all(stays in LearnedLabels.read(path) for path in learned_in(home))
    assert read_looks(desk.settings)[0].judged.keys() == {digest_of(stays)}
    assert model.trouble() is None
    undo_withdrawal(desk.settings, [gone])
    learned = learned_labels(desk.settings, revision_of(model))
    assert (gone in learned, stays in learned, other in learned) == (True, True, False)


def test_ids_that_are_not_there_change_nothing(desk):
    """A misspelt id is named, and none of the others is withdrawn."""
    with pytest.raises(CatalogError, match="nobody"):
        prepare_withdrawal(desk.settings, [ids_of(desk.settings)[0], "nobody"])
    assert pending_withdrawal(desk.settings) is None


class Died(BaseException):
    """The process is gone: no operation of it reaches the disk any more."""


@pytest.mark.published(*ASSETS)
def test_a_withdrawal_that_is_killed_anywhere_is_finished_by_the_next(desk, tmp_path):
    """Whatever was done before, nothing is left of the property and nothing of the others is lost."""
    assert desk.materialize(*ASSETS, config={"recompute": True}).success
    gone = ids_of(desk.settings)[2:3]
    keep_beside(desk.settings, gone[0], ids_of(desk.settings)[3])
    keep_labels(desk.settings, ids_of(desk.settings)[2:4])
    digests = digests_of(desk.settings.home, gone[0])
    kills = 0
    for at in share_of(range(1, 10_000, max(1, 17 // ROUNDS)), 6):
        home = tmp_path / f"home-{at}"
        shutil.copytree(desk.settings.home, home, symlinks=True)
        settings = load_settings(home=home, devices="cpu:1")

        def die(operation, operations, at=at):
            # The locks of a process that is gone are free.
            if operations.count >= at and operation.name != "close":
                raise Died

        wanted = prepare_withdrawal(settings, gone)
        with FileOperations(home, before=die).watched():
            try:
                list(withdraw(settings, wanted))
                finished = True
            except Died:
                finished = False
        if not finished:
            kills += 1
            pending = pending_withdrawal(settings)
            assert pending in (None, wanted)
            if pending is None and any(files_with(home, name) for name in (*gone, *digests)):
                pending = wanted
            if pending is not None:
                assert isinstance(pending, Withdrawal)
                list(withdraw(settings, pending))
        assert [path for name in (*gone, *digests) for path in files_with(home, name)] == [], at
        assert PublishedModel(settings.layout.asset("description_model"), "tiny").trouble() is None, at
        is_whole(settings, gone)
        assert PublishedPartitions(settings.descriptions).verify(KEY).ok
        shutil.rmtree(home)
        if finished:
            break
    assert kills > 2, "the sweep met fewer file operations than a withdrawal has"


def test_a_property_that_a_run_trains_on_is_not_withdrawn(desk):
    """While a run trains on a property nothing is changed: it would publish what it learned from it."""
    gone, stays = ids_of(desk.settings)[:2]
    keep_beside(desk.settings, gone, stays)
    workers = Workers(control_state(desk.settings))
    with workers.begin(run_id="r", asset="description_model", partition="tiny", expected=1) as beat:
        beat.enter(Phase.WORKING)
        with pytest.raises(CommandError, match="A run works on tiny"):
            done(desk.settings, [gone])
        assert gone in ids_of(desk.settings) and pending_withdrawal(desk.settings) is None
        done(desk.settings, ids_of(desk.settings)[2:3])


def test_a_training_that_has_not_written_its_samples_yet_holds_up_a_withdrawal(desk, monkeypatch):
    """It would write down after the withdrawal what it read before; one that begins later finds the note."""
    gone = ids_of(desk.settings)[:1]
    living = Workers.living

    def looked(workers):
        assert pending_withdrawal(desk.settings) is not None, "the note stands before anyone is looked for"
        assert being_withdrawn(control_state(desk.settings)) == {KEY}, "and every machine can see it"
        return living(workers)

    monkeypatch.setattr(Workers, "living", looked)
    wanted = prepare_withdrawal(desk.settings, gone)
    beats = Workers(control_state(desk.settings))
    with beats.begin(run_id="r", asset="description_model", partition="tiny", expected=1):
        with pytest.raises(CommandError, match="A run works on tiny"):
            list(withdraw(desk.settings, wanted))
        assert pending_withdrawal(desk.settings) is None
        assert being_withdrawn(control_state(desk.settings)) is None
    steps = withdraw(desk.settings, wanted)
    next(steps)
    steps.close()
    with beats.begin(run_id="r", asset="description_model", partition="tiny", expected=1):
        with pytest.raises(CommandError, match="A run works on tiny"):
            list(withdraw(desk.settings, wanted))
        assert pending_withdrawal(desk.settings) == wanted, "one that was cut short is still to be finished"


@pytest.mark.parametrize("left", ["torn list", "no list", "no list, its plan", "no list, a function's plan"])
def test_a_training_that_may_learn_from_a_property_is_removed(desk, left):
    """A list that does not read, or that a kill took away, hides no checkpoint and stops no withdrawal."""
    folder = desk.settings.layout.asset("description_model").partition("tiny").journal("some")
    (folder / "checkpoints").mkdir(parents=True)
    if left == "torn list":
        (folder / "samples.jsonl").write_text('{"property_id": "other"}\n{"prop')
    if left.endswith("plan"):
        samples = "module:made" if "function" in left else str(folder / "samples.jsonl")
        TrainingPlan("tiny", "a:b", samples, "s", "Describe.", 0.1, seed=1, batch=1, microbatches=1).write(
            folder / "plan.json"
        )
    done(desk.settings, ids_of(desk.settings)[:1])
    assert folder.exists() == ("function" in left)


def test_a_withdrawal_that_is_under_way_or_was_cut_short_is_not_forgotten_for_another(dataset):
    """Two persons are asked at once: the second to agree overwrites no note of what the first has begun."""
    settings = dataset.settings
    first, second = (prepare_withdrawal(settings, [property_id]) for property_id in ("p1", "p3"))
    steps = withdraw(settings, first)
    next(steps)
    for state in ("Another process withdraws properties now", "Another withdrawal was cut short"):
        with pytest.raises(CommandError, match=state):
            next(withdraw(settings, second))
        assert pending_withdrawal(settings) == first
        steps.close()
    assert "p3" in ids_of(settings, 1)
    for withdrawal in (first, second):
        list(withdraw(settings, withdrawal))
    assert [path for gone in ("p1", "p3") for path in files_with(settings.home, gone)] == []


@pytest.mark.published(*ASSETS)
def test_a_withdrawal_that_was_prepared_before_another_one_of_its_partition_is_prepared_again(desk):
    """Else the partition's record names an older catalogue, and its rows count as stale."""
    gone = ids_of(desk.settings)[:2]
    first, second = (prepare_withdrawal(desk.settings, [property_id]) for property_id in gone)
    list(withdraw(desk.settings, first))
    with pytest.raises(CommandError, match="The catalogue changed"):
        list(withdraw(desk.settings, second))
    assert gone[1] in ids_of(desk.settings) and pending_withdrawal(desk.settings) is None
    done(desk.settings, gone[1:])
    is_whole(desk.settings, gone)


def test_status_names_a_withdrawal_that_was_cut_short(desk):
    """Nobody believes that all is gone while it is not."""
    wanted = prepare_withdrawal(desk.settings, ids_of(desk.settings)[:1])
    steps = withdraw(desk.settings, wanted)
    next(steps)
    steps.close()
    warnings = read_status(desk.settings, Catalog.open(desk.settings.home)).warnings
    assert any("vlm-assets withdraw" in one for one in warnings)
    assert pa.array(list(wanted.tombstones)).null_count == 0


def test_a_run_that_begins_beside_a_withdrawal_computes_nothing_and_it_is_no_attempt(desk):
    """It may have read the catalogue before: what it would publish holds what is being withdrawn."""
    steps = withdraw(desk.settings, prepare_withdrawal(desk.settings, ids_of(desk.settings)[:1]))
    next(steps)
    refused = desk.materialize()
    assert "are being withdrawn, or were since this run read them" in refused.failure
    assert NO_ATTEMPT in desk.instance.get_runs()[0].tags
    list(steps)
    assert being_withdrawn(control_state(desk.settings)) is None


def test_a_run_that_waited_while_properties_were_withdrawn_does_not_bring_them_back(desk, monkeypatch):
    """A pause holds a run that has read the catalogue and has no heartbeat yet: it reads it anew."""
    gone = ids_of(desk.settings)[:1]
    monkeypatch.setattr(materialize, "_refuse_other_settings", lambda *_: done(desk.settings, gone))
    refused = desk.materialize()
    assert "or were since this run read them" in refused.failure
    assert NO_ATTEMPT in desk.instance.get_runs()[0].tags
    assert files_with(desk.settings.home, gone[0]) == []


def test_a_training_that_has_just_begun_on_another_node_holds_up_a_withdrawal(
    desk, postgres_url, tmp_path, monkeypatch
):
    """The node that has it says so with its next heartbeats, and they are waited for."""
    settings = desk.changed(state_url=SecretStr(postgres_url)).settings
    wanted = prepare_withdrawal(settings, ids_of(settings)[:1])
    there = open_state(tmp_path / "other machine", postgres_url)
    nodes, workers = Nodes(there), Workers(there)

    def beat(seconds=0.0):
        names = frozenset(one.name for one in workers.on_this_machine())
        nodes.beat(NodeRecord("b", "boot", 1, "10.0.0.2", 1, workers=names))

    beat()
    monkeypatch.setattr(Nodes.wait_for_beats, "__kwdefaults__", {"sleep": beat})
    with (
        workers.begin(run_id="r", asset="description_model", partition="tiny", expected=1),
        pytest.raises(CommandError, match="A run works on tiny"),
    ):
        list(withdraw(settings, wanted))
    assert pending_withdrawal(settings) is None
