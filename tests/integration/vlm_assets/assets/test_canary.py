"""A device that gives wrong answers is found within one partition, and nothing of it is published."""

import time
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from resources.alerts.outbox import Outbox
from resources.vision_language_model import VisionLanguageModel
from sensors.dagster_internals.events import DagsterFacts
from tests.support.desks import KEY, Desk, settings_of
from tests.support.scripted_engine import load as load_scripted
from tests.support.scripted_models import ScriptedEngine
from tests.support.shares import share_of
from vlm_assets.assets import materialize, rows_in_doubt
from vlm_assets.assets.description_work import DescriptionWork
from vlm_assets.assets.partition import Partition, adopt_rows
from vlm_assets.assets.partition_state import PartitionStates, State
from vlm_assets.assets.rows_in_doubt import RowsInDoubt
from vlm_assets.config.resource_settings import build_gpu, build_vision_language_model, control_state
from vlm_catalog.catalog import Catalog
from vlm_catalog.ranges import PropertyRange
from vlm_durable.journal import setting_aside
from vlm_durable.state.tables import failed_canaries, known_canaries
from vlm_durable.versions.published import PublishedPartitions
from vlm_engine.canary import Canary
from vlm_engine.devices import leases
from vlm_engine.protocol import CanaryAnswer
from vlm_engine.transformers.transformers_engine import TransformersEngine

OTHER_KEY = "000000008-000000015"


def die(*_, **__):
    """What a kill looks like from inside of a process."""
    raise KeyboardInterrupt


class AskedEngine(ScriptedEngine):
    """A scripted engine that answers the canary too. wrong: it answers all otherwise."""

    wrong = False

    def describe(self, batch, *, attempt):
        answers = super().describe(batch, attempt=attempt)
        pool = str(self.wrong).lower()
        return [
            replace(one, text=one.text.replace('"has_pool": false', f'"has_pool": {pool}')) for one in answers
        ]

    def canary(self):
        return CanaryAnswer(f"wrong: {self.wrong}", "scripted")


def load_asked(model, device, **asked) -> AskedEngine:
    return AskedEngine(model.source, load_scripted(model, device, **asked).image_tokens)


@pytest.fixture
def asked_engine(monkeypatch) -> None:
    """Every model in this process is a scripted one that answers the canary."""
    monkeypatch.setattr(VisionLanguageModel, "load", load_asked)


def flip_a_bit(engine) -> None:
    """The highest bit of the exponent of one weight, as a sick memory does."""
    if isinstance(engine, AskedEngine):
        engine.wrong = True
        return
    import torch

    weights = engine._model.named_parameters()
    weight = next(one for name, one in weights if "lm_head" in name or "embed_tokens" in name)
    with torch.no_grad():
        weight.view(torch.int32).view(-1)[0] ^= 1 << 30


@pytest.fixture
def slots(desk, monkeypatch) -> Desk:
    """The desk with two CPU slots; each run takes the first that is not left out, as a new process would."""
    monkeypatch.setattr(leases, "_lease", None)
    yield desk.changed(devices="cpu:2")
    free()


def free() -> None:
    """Give the device back, as the end of a run's process does."""
    if leases._lease is not None:
        leases._lease.release()


def run(desk: Desk, *assets: str, key: str = KEY):
    free()
    return desk.materialize(*assets, key=key)


@pytest.fixture
def sick(monkeypatch):
    """Has a device's weights flipped once it has described its first batch."""

    def sicken(device: str) -> None:
        for kind in (TransformersEngine, AskedEngine):

            def describe_and_flip(engine, batch, *, attempt, describe=kind.describe):
                answers = describe(engine, batch, attempt=attempt)
                if leases._lease.device.id == device and not hasattr(engine, "flipped"):
                    engine.flipped = True
                    flip_a_bit(engine)
                return answers

            monkeypatch.setattr(kind, "describe", describe_and_flip)

    return sicken


def alerts(desk: Desk) -> list:
    opened = Outbox(control_state(desk.settings)).open_subjects().values()
    return [one for one in opened if one.kind == "device_wrong_answers"]


def left_out(desk: Desk) -> set[str]:
    return set(build_gpu(desk.settings).left_out_devices().left_out())


def descriptions(path) -> list:
    return pq.read_table(path, columns=["property_id", "status", "description"]).to_pylist()


def devices(path) -> set[str]:
    return set(pq.read_table(path, columns=["device"])["device"].to_pylist())


def last_run(desk: Desk):
    """The newest run, as the retry schedule sees it."""
    record = desk.instance.get_run_records(limit=1)[0]
    return DagsterFacts(desk.instance).run_states([record.dagster_run.run_id])[record.dagster_run.run_id]


@pytest.fixture
def right(published_home) -> list:
    """What a sound device says of the first range."""
    home = published_home("property_descriptions")
    return descriptions(settings_of(home).descriptions.partition(KEY).published)


@pytest.mark.promise("A sick device is found")
@pytest.mark.promise("Rows of a device that gives wrong answers")
def test_flipped_weights_are_found_within_one_partition(slots, sick, right):
    """Nothing is published, the rows lie in the quarantine, and another slot publishes the right ones."""
    sick("cpu-0")
    done = run(slots)
    assert not done.success
    assert "cpu-0 gives wrong answers to the canary" in done.failure
    assert last_run(slots).interrupted_by == "no attempt"
    assert not slots.file.exists()
    assert list(slots.paths.journals.iterdir()) == []
    (aside,) = slots.paths.quarantine.iterdir()
    assert sum(pq.read_metadata(one).num_rows for one in aside.glob("segment-*")) == 8, "none is deleted"
    assert left_out(slots) == {"cpu-0"}
    (alert,) = alerts(slots)
    assert (alert.severity, alert.subject) == ("error", "devices/cpu-0/wrong answers")
    states = PartitionStates(slots.settings, Catalog.open(slots.settings.home))
    assert states.read("property_descriptions", KEY).state is State.NOT_STARTED

    again = run(slots)
    assert again.success, again.failure
    assert descriptions(slots.file) == right
    assert devices(slots.file) == {"cpu-1"}
    assert len(alerts(slots)) == 1
    record = PublishedPartitions(slots.settings.descriptions).record(KEY)
    assert record.metadata["generation"].endswith("-after-0"), "no name is used again"
    assert run(slots).success, "complete"


@pytest.mark.usefixtures("asked_engine")
@pytest.mark.parametrize("killed", [False, True], ids=["", "killed before its alert"])
def test_known_answers_refuse_a_device_at_the_start(slots, right, monkeypatch, killed):
    """Weights that are wrong from the start answer alike at begin and end: what is known tells."""
    assert run(slots, key=OTHER_KEY).success
    # As a second device that agrees leaves it.
    control_state(slots.settings).write(
        lambda connection: connection.execute(known_canaries.update().values(confirmed=True))
    )
    load = VisionLanguageModel.load

    def load_wrong(model, device, **asked):
        engine = load(model, device, **asked)
        if device.id == "cpu-0":
            flip_a_bit(engine)
        return engine

    monkeypatch.setattr(VisionLanguageModel, "load", load_wrong)
    with monkeypatch.context() as patched:
        if killed:
            patched.setattr(Outbox, "post_all", die)
        done = run(slots)
    assert not done.success
    assert killed or "Nothing was begun" in done.failure
    assert last_run(slots).interrupted_by == "no attempt"
    assert len(alerts(slots)) == (0 if killed else 1)
    assert not list(slots.paths.journals.glob("*/segment-*"))
    assert left_out(slots) == {"cpu-0"}
    again = run(slots)
    assert again.success, again.failure
    assert descriptions(slots.file) == right
    assert len(alerts(slots)) == 1


@pytest.mark.usefixtures("asked_engine")
def test_partitions_with_rows_of_a_killed_run_are_named(slots, sick, monkeypatch):
    """A run that was killed before its last canary, and finished by another device, was never vouched for."""
    with monkeypatch.context() as patched:
        patched.setattr(Canary, "end", die)
        assert not run(slots).success
    assert run(slots, "property_descriptions").success
    assert devices(slots.file) == {"cpu-0"}
    before = slots.file.read_bytes()
    sick("cpu-0")
    assert not run(slots, key=OTHER_KEY).success
    (alert,) = alerts(slots)
    assert KEY in alert.actual
    assert OTHER_KEY not in alert.actual
    assert "recompute: true" in alert.next_step
    assert run(slots).success
    assert slots.file.read_bytes() == before, "named, and not computed again by itself"


@pytest.mark.usefixtures("asked_engine")
def test_partitions_before_the_last_good_canary_are_not_named(slots, sick):
    """A closing canary that was right vouches for what is before it."""
    assert run(slots).success
    sick("cpu-0")
    assert not run(slots, key=OTHER_KEY).success
    (alert,) = alerts(slots)
    assert KEY not in alert.actual


STEPS = [
    (rows_in_doubt, "read_failed"),
    (rows_in_doubt, "note_alerted"),
    (materialize, "note_set_aside"),
    (materialize, "move_set_aside"),
    (setting_aside.files, "make_directory"),
]


@pytest.mark.usefixtures("asked_engine")
@pytest.mark.parametrize(
    ("module", "step"), share_of(STEPS, 5), ids=lambda named: getattr(named, "__name__", named)
)
def test_a_kill_between_any_two_steps_is_finished_by_the_next_run(
    slots, sick, right, monkeypatch, module, step
):
    """Whatever step was the last, the rows are never published, and the alert is told once."""
    sick("cpu-0")
    with monkeypatch.context() as patched:
        real = getattr(module, step)

        def die_once_it_is_known(*given, **named):
            # Only once the device is left out: before that, nothing is known that a kill could lose.
            if left_out(slots):
                raise KeyboardInterrupt
            return real(*given, **named)

        patched.setattr(module, step, die_once_it_is_known)
        assert not run(slots).success
    assert left_out(slots) == {"cpu-0"}
    runs = 0
    while not (done := run(slots)).success:
        runs += 1
        assert last_run(slots).interrupted_by == "no attempt", done.failure
        assert runs < 3
    assert descriptions(slots.file) == right
    assert devices(slots.file) == {"cpu-1"}
    assert len(list(slots.paths.quarantine.glob("*/segment-*"))) > 0
    assert len(alerts(slots)) == 1


@pytest.mark.usefixtures("asked_engine")
def test_a_recomputation_on_a_sick_device_leaves_the_old_file(slots, sick, right):
    """What is published stays as it was, and asked for anew another device makes it."""
    assert run(slots).success
    sick("cpu-0")
    free()
    asked = slots.materialize(config={"recompute": True})
    assert not asked.success
    assert descriptions(slots.file) == right
    assert devices(slots.file) == {"cpu-0"}
    free()
    again = slots.materialize(config={"recompute": True})
    assert again.success, again.failure
    assert devices(slots.file) == {"cpu-1"}


@pytest.mark.usefixtures("asked_engine")
def test_rows_in_doubt_are_not_adopted(slots, monkeypatch):
    """A generation that was interrupted gives its rows to the next one, but for those of a sick device."""
    with monkeypatch.context() as patched:
        patched.setattr(Canary, "end", die)
        assert not run(slots).success
    state, now = control_state(slots.settings), time.time()
    row = {"device": "cpu-0", "at": now, "good_at": None, "why": "test", "told": True}
    state.write(lambda connection: connection.execute(failed_canaries.insert().values(row)))
    catalog, wanted = Catalog.open(slots.settings.home), PropertyRange.from_key(KEY)
    model = build_vision_language_model(slots.settings)
    work = DescriptionWork.for_range(slots.settings, catalog, wanted, model)
    partition = Partition(slots.settings, "property_descriptions", KEY, work.ids, work.fingerprint)
    published = PublishedPartitions(slots.settings.descriptions)
    with partition.open_journal("another", work.rows_schema()) as journal:
        doubt = RowsInDoubt(slots.settings).among
        taken, notes = adopt_rows(journal, partition, work.inputs, published, failed_too=True, in_doubt=doubt)
        assert taken == 0
        assert any("8 finished rows are not adopted" in note for note in notes)
        taken, _ = adopt_rows(journal, partition, work.inputs, published, failed_too=True)
        assert taken == 8


@pytest.mark.published("property_descriptions")
def test_an_embedder_with_flipped_weights_publishes_nothing(slots, monkeypatch):
    """Vectors are watched as descriptions are."""
    from resources.text_embedding import TextEmbedder

    embed = TextEmbedder.embed

    def embed_and_flip(embedder, texts):
        vectors = embed(embedder, texts)
        if leases._lease.device.id == "cpu-0" and len(texts) > 3 and not hasattr(embedder, "flipped"):
            embedder.flipped = True
            import torch

            with torch.no_grad():
                next(embedder._encoder.parameters()).view(torch.int32).view(-1)[0] ^= 1
        return vectors

    monkeypatch.setattr(TextEmbedder, "embed", embed_and_flip)
    done = run(slots, "property_embeddings")
    assert not done.success
    assert "wrong answers" in done.failure
    paths = slots.settings.embeddings.partition(KEY)
    assert not paths.published.exists()
    again = run(slots, "property_embeddings")
    assert again.success, again.failure
    assert devices(paths.published) == {"cpu-1"}
