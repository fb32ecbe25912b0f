"""A materialization resumes, verifies or refuses; it never loses, doubles or overwrites."""

import pyarrow.parquet as pq
import pytest

from resources.gpu import GpuResource
from resources.text_embedding import TextEmbeddingModel
from sensors.dagster_internals.events import DagsterFacts
from tests.support.damage import flip_bit
from vlm_assets.assets.fingerprint import settings_digest
from vlm_assets.assets.partition_state import PartitionStates, State
from vlm_catalog.catalog import Catalog
from vlm_catalog.ranges import DESCRIPTIONS
from vlm_durable.journal.journal import Journal
from vlm_durable.versions.published import PublishedPartitions
from vlm_engine.batches import BatchSizes

KEY = "000000000-000000007"
VOLATILE = {"seconds", "described_at"}
LOAD_EMBEDDER = TextEmbeddingModel.load

pytestmark = pytest.mark.usefixtures("scripted_engine")


def rows(path):
    """The rows by id, less what differs between any two runs."""
    table = pq.read_table(path)
    return [{name: value for name, value in row.items() if name not in VOLATILE} for row in table.to_pylist()]


def stamps(asset):
    """Every file of an asset, published or kept beside it, with its size and time of change."""
    return {
        path: (path.stat().st_size, path.stat().st_mtime_ns)
        for folder in (asset.published, asset.versions)
        for path in folder.rglob("*")
        if path.is_file() and path.suffix in (".parquet", ".json")
    }


@pytest.fixture
def text_embedder(tmp_path, desk, monkeypatch):
    """A real text embedder's folder, with random weights: first token, unit length, 32 numbers, 40 tokens."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    from transformers import AutoTokenizer, BertConfig, BertModel, PreTrainedTokenizerFast

    monkeypatch.setattr(TextEmbeddingModel, "load", LOAD_EMBEDDER)
    plain, folder = tmp_path / "plain", tmp_path / "text-embedder"
    of_example = AutoTokenizer.from_pretrained(desk.settings.model)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=of_example.backend_tokenizer, pad_token=of_example.pad_token
    )
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    shape |= {"vocab_size": len(tokenizer), "max_position_embeddings": 40}
    BertModel(BertConfig(initializer_range=0.2, **shape)).save_pretrained(plain)
    tokenizer.save_pretrained(plain)
    parts = [Transformer(str(plain)), Pooling(32, pooling_mode="cls"), Normalize()]
    SentenceTransformer(modules=parts, device="cpu").save_pretrained(str(folder))
    return folder


@pytest.mark.published("property_descriptions", "property_embeddings")
def test_another_text_embedder_makes_other_vectors_of_the_same_descriptions(desk, text_embedder):
    """Another text embedder replaces the vectors, and no description."""
    before = stamps(desk.settings.descriptions)
    named = desk.changed(embedding_model=str(text_embedder))
    done = named.materialize("property_embeddings")
    assert done.success, done.failure
    assert all(check.passed for check in done.checks.values())
    found = rows(desk.settings.embeddings.partition(KEY).published)
    assert {row["model"] for row in found} == {"text-embedder"}
    described = [row for row in found if row["status"] == "ok"]
    assert {len(row["embedding"]) for row in described} == {32}
    (event,) = done.result.asset_materializations_for_node("property_embeddings")
    assert (
        event.metadata["texts cut off"].value
        == f"{len(described)} are longer than the 40 tokens that the model takes"
    )
    assert event.metadata["embedded by"].value.startswith("text-embedder (sha256:")
    assert stamps(desk.settings.descriptions) == before


def test_a_device_is_given_back_as_soon_as_nothing_computes_on_it(desk):
    """Both assets of a run have one lease; after the last one the next run need not wait for this process."""
    leases = []

    class Watched(GpuResource):
        def lease(self, **given):
            leases.append(super().lease(**given))
            return leases[-1]

    gpu = Watched(leases_directory=str(desk.settings.state_directory / "leases"), devices="cpu:1")
    done = desk.materialize("property_descriptions", "property_embeddings", gpu=gpu)
    assert done.success, done.failure
    assert leases[0] is leases[1] and not leases[0].held


@pytest.mark.published("property_descriptions")
def test_embeddings_without_an_embedder_are_refused(desk, no_device):
    """Nothing but a named embedder embeds: one sentence says the setting, before a device is leased."""
    done = desk.changed(embedding_model=None).materialize("property_embeddings", gpu=no_device)
    assert not done.success
    assert "set VLM_ASSETS_EMBEDDING_MODEL" in done.failure


@pytest.mark.published("property_descriptions")
def test_a_complete_partition_is_verified_and_nothing_changes(desk, no_device):
    """Pressing Materialize on finished work costs no device and touches no file."""
    before = stamps(desk.settings.descriptions)
    again = desk.materialize(gpu=no_device)
    assert again.success, again.failure
    assert stamps(desk.settings.descriptions) == before
    (event,) = again.published
    assert "No device was needed" in event.metadata["verified"].value
    assert event.metadata["changed"].value is False
    assert all(check.passed for check in again.checks.values())


@pytest.mark.parametrize("asset", ["property_descriptions", "property_embeddings"])
def test_a_death_between_publication_and_retirement_is_finished_without_a_device(
    desk, no_device, monkeypatch, asset
):
    """What is published is complete: the next start retires its journal, computes nothing and says so."""
    if asset == "property_embeddings":
        assert desk.materialize().success

    def die(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "retire", die)
        assert not desk.materialize(asset).success
    folders = desk.settings.layout.asset(asset)
    journals = folders.partition(KEY).journals
    assert PublishedPartitions(folders).verify(KEY).ok
    assert list(journals.glob("*/segment-*"))
    again = desk.materialize(asset, gpu=no_device)
    assert again.success, again.failure
    assert not list(journals.iterdir())


@pytest.mark.published("property_descriptions")
def test_a_damaged_file_is_put_back_without_a_device(desk, no_device):
    """The second copy restores a damaged or deleted file; the damaged one is kept aside."""
    sound = desk.file.read_bytes()
    desk.file.write_bytes(sound[:-200])
    again = desk.materialize(gpu=no_device)
    assert again.success, again.failure
    assert desk.file.read_bytes() == sound
    assert [path.read_bytes() for path in desk.paths.quarantine.iterdir()] == [sound[:-200]]


@pytest.mark.published("property_descriptions")
def test_both_copies_lost_stops_with_the_way_out(desk, no_device):
    """What cannot be put back is never silently computed again: the message names the option that does."""
    desk.file.unlink()
    desk.paths.version(0).unlink()
    again = desk.materialize(gpu=no_device)
    assert not again.success
    assert "recompute: true" in again.failure
    assert desk.materialize(config={"recompute": True}).success
    assert len(rows(desk.file)) == 8


def publish_again(desk, fingerprint):
    """Publish the same rows once more, as those of this fingerprint."""
    published = PublishedPartitions(desk.settings.descriptions)
    table = published.read(KEY).to_table().replace_schema_metadata({"fingerprint": fingerprint})
    ids = table["property_id"].to_pylist()
    metadata = published.record(KEY).metadata
    staged = published.stage(
        KEY, table.to_batches(), table.schema, expected_ids=ids, fingerprint=fingerprint, metadata=metadata
    )
    with staged:
        return published.publish(staged).record


@pytest.mark.published("property_descriptions")
def test_an_older_record_beside_the_newest_file_costs_no_device(desk, no_device):
    """Finished work is never computed again while a whole file of it is there."""
    now = PublishedPartitions(desk.settings.descriptions).record(KEY).fingerprint
    publish_again(desk, "earlier")
    records = {path: path.read_bytes() for path in (desk.paths.record, desk.paths.record_copy)}
    newest = publish_again(desk, now)
    for path, content in records.items():
        path.write_bytes(content)
    done = desk.materialize(gpu=no_device)
    assert done.success, done.failure
    assert PublishedPartitions(desk.settings.descriptions).record(KEY) == newest
    assert "No device was needed" in done.published[0].metadata["verified"].value


@pytest.mark.published("property_descriptions")
def test_a_partition_that_was_put_back_stops_before_anything_is_computed(desk, no_device):
    """An older version is never taken for the newest: a person decides, and no schedule tries it again."""
    now = PublishedPartitions(desk.settings.descriptions).record(KEY).fingerprint
    publish_again(desk, "earlier")
    names = [desk.paths.published, desk.paths.record, desk.paths.record_copy, desk.paths.version(0)]
    before = {path: path.read_bytes() for path in names}
    publish_again(desk, now)
    for path, content in before.items():
        path.write_bytes(content)
    desk.paths.version(1).unlink()
    for asset in ("property_descriptions", "property_embeddings"):
        stopped = desk.materialize(asset, gpu=no_device)
        assert not stopped.success
        assert f"vlm-assets repair --accept-version {KEY}" in stopped.failure
    assert {path: path.read_bytes() for path in names} == before


def test_a_death_between_the_last_commit_and_publication_computes_nothing_again(desk, no_device, monkeypatch):
    """All rows are committed and no check ran: interrupted at 100%, and the next start publishes them."""

    def die(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(PublishedPartitions, "stage", die)
        assert not desk.materialize().success
    states = PartitionStates(desk.settings, Catalog.open(desk.settings.home))
    found = states.read("property_descriptions", KEY)
    assert (found.state, found.percent) == (State.INTERRUPTED, 100.0)
    done = desk.materialize(gpu=no_device)
    assert done.success, done.failure
    assert len(rows(desk.file)) == 8


def test_a_failed_check_publishes_nothing_and_says_what_to_do(desk, images_away):
    """The failing check has its partition, the run fails, and no file appears."""
    images_away.take(*images_away.ids[:4])
    refused = desk.materialize()
    assert not refused.success
    assert not refused.published
    assert not desk.file.exists()
    check = refused.checks["failed_share"]
    assert (check.passed, check.partition) == (False, KEY)
    assert check.severity.value == "ERROR"
    assert "4 missing" in refused.failure
    assert f"then `vlm-assets run {KEY}" in refused.failure
    assert refused.checks["ids_conserved"].passed


@pytest.mark.published("property_descriptions")
def test_a_refused_recomputation_leaves_the_old_file(desk, images_away):
    """A worse result never replaces a published one."""
    images_away.take(*images_away.ids[:4])
    before = stamps(desk.settings.descriptions)
    refused = desk.materialize(config={"recompute": True})
    assert not refused.success
    assert "stays in place" in refused.failure
    assert before.items() <= stamps(desk.settings.descriptions).items()


def test_retry_failed_describes_only_what_had_failed(desk, images_away):
    """Once the images are back, only the failed properties are described again; the rest is kept."""
    images_away.take(*images_away.ids[:4])
    assert not desk.materialize().success
    images_away.put_back(*images_away.ids)
    still = desk.materialize()
    assert not still.success, "without the option nothing is computed again"
    retried = desk.materialize(config={"retry_failed": True})
    assert retried.success, retried.failure
    (event,) = retried.published
    assert event.metadata["kept rows"].value == 4
    found = rows(desk.file)
    assert len(found) == 8
    assert sum(row["status"] == "ok" for row in found) >= 7


@pytest.mark.published("property_descriptions")
def test_a_file_of_before_confidences_stays_and_its_rows_are_adopted(desk, no_device):
    """It is done and not stale; a run that asks for failed rows takes over the others, with null."""
    published = PublishedPartitions(desk.settings.descriptions)
    record, table = published.record(KEY), pq.read_table(desk.file).drop_columns("confidence")
    with published.stage(
        KEY,
        table.to_batches(),
        table.schema,
        expected_ids=table["property_id"].to_pylist(),
        fingerprint=record.fingerprint,
        metadata=record.metadata,
    ) as staged:
        published.publish(staged)
    before = desk.file.read_bytes()
    verified = desk.materialize(gpu=no_device)
    assert verified.success, verified.failure
    assert desk.file.read_bytes() == before
    states = PartitionStates(desk.settings, Catalog.open(desk.settings.home))
    assert states.read("property_descriptions", KEY).state is State.DONE

    retried = desk.materialize(config={"retry_failed": True})
    assert retried.success, retried.failure
    newer = pq.read_table(desk.file)
    assert newer["confidence"].null_count == newer.num_rows
    ignored = {*VOLATILE, "confidence", "tries"}
    assert [{name: row[name] for name in row.keys() - ignored} for row in newer.to_pylist()] == [
        {name: row[name] for name in row.keys() - ignored} for row in table.to_pylist()
    ]


@pytest.mark.published("property_descriptions")
def test_a_run_that_was_not_told_leaves_what_is_stale(desk, no_device):
    """Whoever launched it agreed to no settings, or to others: the file stays, damage is undone."""
    before = stamps(desk.settings.descriptions)
    later = desk.changed(max_images=1)
    for option in ("keep", "other settings"):
        if option == "keep":
            desk.file.write_bytes(b"damaged")
        kept = later.materialize(config={"stale": option}, gpu=no_device)
        assert kept.success, kept.failure
        assert "stays: `vlm-assets run" in kept.published[0].metadata["verified"].value
        assert {path: size for path, (size, _) in stamps(desk.settings.descriptions).items()} == {
            path: size for path, (size, _) in before.items()
        }
    states = PartitionStates(later.settings, Catalog.open(later.settings.home))
    stale = states.read("property_descriptions", KEY)
    assert (stale.state, stale.why) == (
        State.STALE,
        ("processor and decoding options: max_images: 12 -> 1",),
    )
    agreed = settings_digest(states.meanings.of_asset(DESCRIPTIONS).parts)
    done = later.materialize(config={"stale": agreed})
    assert done.success, done.failure
    assert PublishedPartitions(desk.settings.descriptions).record(KEY).sequence == 2


@pytest.mark.published("property_descriptions")
def test_recompute_is_done_once_however_often_its_run_is_retried(desk, no_device):
    """A run retry of a finished recomputation verifies it; a new request computes again."""
    first = PublishedPartitions(desk.settings.descriptions).record(KEY)
    done = desk.materialize(config={"recompute": True})
    assert done.success, done.failure
    second = PublishedPartitions(desk.settings.descriptions).record(KEY)
    assert second.sequence == first.sequence + 1
    root = {"dagster/root_run_id": done.result.run_id}
    retried = desk.materialize(config={"recompute": True}, tags=root, gpu=no_device)
    assert retried.success, retried.failure
    assert PublishedPartitions(desk.settings.descriptions).record(KEY) == second
    assert "launch it anew" in retried.published[0].metadata["verified"].value


def test_a_recomputation_of_days_ago_is_re_executed_after_another_one(desk, no_device):
    """Its journal is closed: it computes again, and nobody is told that committed rows are lost."""
    first = desk.materialize(config={"recompute": True})
    root = {"dagster/root_run_id": first.result.run_id}
    assert desk.materialize(config={"recompute": True}).success
    again = desk.materialize(config={"recompute": True}, tags=root)
    assert again.success, again.failure
    record = PublishedPartitions(desk.settings.descriptions).record(KEY)
    assert record.sequence == 3
    retried = desk.materialize(config={"recompute": True}, tags=root, gpu=no_device)
    assert retried.success, retried.failure
    assert PublishedPartitions(desk.settings.descriptions).record(KEY) == record


@pytest.mark.published("property_descriptions")
def test_other_settings_are_another_generation_and_the_old_one_is_kept(desk, no_device):
    """Changed settings never mix rows: the new output replaces the old whole, which becomes a backup.

    Back at the earlier settings, the rows of that backup are taken, and no device.
    """
    old = desk.file.read_bytes()
    other = desk.changed(max_pixels=40_000)
    done = other.materialize()
    assert done.success, done.failure
    assert len({row["fingerprint"] for row in rows(desk.file)}) == 1
    assert desk.file.read_bytes() != old
    assert desk.paths.version(1).read_bytes() == old
    back = desk.materialize(gpu=no_device)
    assert back.success, back.failure
    assert back.published[0].metadata["kept rows"].value == 8
    assert desk.file.read_bytes() == desk.paths.version(2).read_bytes() == old


def test_rows_of_an_earlier_version_that_is_damaged_are_computed_again(desk):
    """A flipped bit in a version of before is found before a row is taken from it."""
    assert desk.materialize().success
    old = rows(desk.file)
    assert desk.changed(max_pixels=40_000).materialize().success
    flip_bit(desk.paths.version(1))
    back = desk.materialize()
    assert back.success, back.failure
    assert "kept rows" not in back.published[0].metadata
    assert rows(desk.file) == old


@pytest.mark.published("property_descriptions")
def test_batch_size_is_no_part_of_a_result(desk, no_device):
    """Another batch size keeps what is published."""
    assert desk.changed(batch_size=2).materialize(gpu=no_device).success


def test_options_that_exclude_each_other_are_refused(desk):
    """recompute and retry_failed together have no meaning, and say so; the schedule does not repeat it."""
    refused = desk.materialize(config={"recompute": True, "retry_failed": True})
    assert not refused.success
    assert "set only one" in refused.failure
    run_id = refused.result.run_id
    run = DagsterFacts(desk.instance).run_states([run_id])[run_id]
    assert run.needs_person_for(["property_descriptions"])


def test_work_that_ends_early_is_resumed_and_no_content_check_is_blamed(desk, monkeypatch):
    """Properties without a row end the run as one that a retry resumes; what is finished stays."""
    plan = BatchSizes.plan
    with monkeypatch.context() as patched:
        patched.setattr(BatchSizes, "plan", lambda *given, **named: plan(*given, **named)[:-1])
        ended = desk.materialize()
    assert not ended.success
    assert not ended.checks
    assert "have no row" in ended.failure
    done = desk.materialize()
    assert done.success, done.failure
    assert done.published[0].metadata["restored rows"].value == 4


def test_each_row_lists_the_images_that_were_used_and_those_that_were_not(desk):
    """Images beyond the limit are not dropped without a word: the rows name them and a check warns."""
    few = desk.changed(max_images=2)
    done = few.materialize()
    assert done.success
    check = done.checks["images_used"]
    assert (check.passed, check.severity.value) == (False, "WARN")
    catalog = Catalog.open(few.settings.home)
    properties = catalog.slice(catalog.ranges[0]).to_pylist()
    rows = pq.read_table(few.file).to_pylist()
    assert [row["property_id"] for row in rows] == [one["property_id"] for one in properties]
    for row, one in zip(rows, properties, strict=True):
        failed = [failure["uri"] for failure in row["images_failed"]]
        assert len(row["images_used"]) == row["images_seen"] <= 2
        assert sorted(row["images_used"] + row["images_not_used"] + failed) == sorted(one["image_uris"])
        assert row["images_used"] == [uri for uri in one["image_uris"] if uri in row["images_used"]]
        reason = "VLM_ASSETS_MAX_IMAGES is 2" if row["images_not_used"] else None
        assert row["images_not_used_reason"] == reason
    assert any(row["images_not_used"] for row in rows)
    assert "2 of 2 images fit" in done.published[0].metadata["image tokens"].text


def test_images_that_cannot_fit_are_named_with_the_reason(desk):
    """Where the budget holds two images, two are loaded and shown at the first attempt, and rows say why."""
    few = desk.changed(image_tokens=9)
    done = few.materialize()
    assert done.success
    assert not done.checks["images_used"].passed
    rows = pq.read_table(few.file).to_pylist()
    short = [row for row in rows if row["images_not_used"]]
    assert short
    for row in short:
        assert (row["images_seen"], row["attempts"]) == (2, 1)
        assert row["images_not_used_reason"].startswith("4 tokens an image")
        assert "; 2 of " in row["images_not_used_reason"]
