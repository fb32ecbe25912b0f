"""Two homes over one real S3 store: either goes on where the other one published."""

import re
import shlex
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path

import dagster as dg
import pytest
from pydantic import SecretStr
from rich.console import Console
from typer.testing import CliRunner

from resources.dagster_names import NO_ATTEMPT
from resources.vision_language_model import VisionLanguageModel
from tests.support.homes import Dataset
from tests.support.listings import read_source, write_listing
from vlm_assets.assets import stored_settings
from vlm_assets.assets.description_work import DescriptionWork
from vlm_assets.assets.fingerprint import description_parts
from vlm_assets.assets.stored_settings import (
    MachineDiffersError,
    accept_settings,
    refuse_at_start,
    refuse_other_settings,
)
from vlm_assets.automation.retries import _Files
from vlm_assets.commands import run as run_module
from vlm_assets.commands.main import app
from vlm_assets.config.resource_settings import build_vision_language_model
from vlm_assets.home_definitions import build_defs
from vlm_assets.services.home_audit import audit
from vlm_assets.services.journal_losses import accept_loss, find_losses
from vlm_assets.services.withdrawal import prepare_withdrawal, undo_withdrawal, withdraw
from vlm_catalog.catalog import Catalog, CatalogMissingError
from vlm_catalog.catalog_copies import backup_paths, catalog_path, mark_path
from vlm_catalog.catalog_file import CatalogError
from vlm_catalog.chosen_catalog import check_catalog, put_in_place
from vlm_catalog.ingest import ingest
from vlm_catalog.stored_catalog import pull_catalog, put_catalog
from vlm_catalog.withdrawn_ids import (
    WithdrawnIds,
    WithdrawnListError,
    list_paths,
    read_withdrawn,
    save_withdrawn,
)
from vlm_durable.mirror import bucket as bucket_module
from vlm_durable.mirror.bucket import UnfitStoreError, client
from vlm_durable.mirror.store_claim import OtherMachineError
from vlm_durable.versions.stored import StoredPartitions
from vlm_engine.protocol import EngineLostError

KEY = "000000000-000000007"

pytestmark = pytest.mark.usefixtures("scripted_engine")


def test_a_new_machine_needs_the_store_alone(machines, listing):
    """It takes catalogue and finished partitions from there, computes none of them again, and goes on."""
    first, second = machines
    ingest(listing, first.settings.home, store=first.settings.store)
    assert first.materialize().success
    with pytest.raises(CatalogMissingError):
        Catalog.open(second.settings.home)
    build_defs(second.settings)
    assert len(Catalog.open(second.settings.home).ranges) == 2
    embedded = second.materialize("property_embeddings")
    assert embedded.success, embedded.failure
    done = second.materialize()
    assert done.success, done.failure
    assert second.file.read_bytes() == first.file.read_bytes()
    assert "No device was needed" in done.published[0].metadata["verified"].value


def test_a_store_that_is_down_stops_a_run_before_it_takes_a_device(machines, listing, s3_proxy, monkeypatch):
    """Without the place of record no partition is begun; it is no attempt, and nothing is lost."""
    monkeypatch.setattr(bucket_module, "PATIENCE_SECONDS", 0.0)
    first, _ = machines
    s3_proxy.breaks(lambda passing: passing.answer(503, "SlowDown"))
    down = first.materialize()
    assert not down.success
    assert "No store to work from" in down.failure
    (run,) = first.instance.get_runs()
    assert NO_ATTEMPT in run.tags
    assert Catalog.open(first.settings.home).rows == 16


def test_a_store_that_goes_down_before_publication_is_no_attempt(machines, s3_proxy, monkeypatch):
    """A finished partition waits for the store; the next run publishes what is committed."""
    monkeypatch.setattr(bucket_module, "PATIENCE_SECONDS", 0.0)
    first, _ = machines
    pull_catalog(first.settings.home, first.settings.store)
    gone_down = []

    def breaks(passing):
        # A finished partition has its last segment copied before it is published.
        gone_down.extend([passing.path] if "segment-" in passing.path else [])
        return bool(gone_down) and passing.answer(503, "SlowDown")

    s3_proxy.breaks(breaks)
    down = first.materialize()
    assert "No store to publish in" in down.failure
    (run,) = first.instance.get_runs()
    assert NO_ATTEMPT in run.tags
    assert not first.file.exists()
    s3_proxy.heal()
    again = first.materialize()
    assert again.success, again.failure
    assert again.published[0].metadata["restored rows"].value == 8


class Interrupted(VisionLanguageModel):
    """A model; ``second_batch`` is called before its second batch."""

    def load(self, device, **how):
        engine = super().load(device, **how)
        whole, batches = engine.describe, []

        def describe(batch, *, attempt):
            batches.append(batch)
            if len(batches) == 2:
                second_batch.pop()()
            return whole(batch, attempt=attempt)

        engine.describe = describe
        return engine


second_batch = []


def lose_the_device():
    raise EngineLostError("the device is lost")


def test_a_store_that_takes_no_published_file_is_no_attempt(machines, s3_proxy):
    """It is no fault of the partition; the copied rows stay there until the file is in the store."""
    first, second = machines
    pull_catalog(first.settings.home, first.settings.store)

    def breaks(passing):
        is_published = passing.command == "PUT" and passing.path.endswith(f"{KEY}.parquet")
        return is_published and passing.answer(403, "AccessDenied")

    s3_proxy.breaks(breaks)
    refused = first.materialize()
    assert "is denied to these credentials" in refused.failure
    assert NO_ATTEMPT in first.instance.get_runs()[0].tags
    assert "is denied to these credentials" in first.materialize().failure
    s3_proxy.heal()
    # The first machine is lost before the store has its file.
    taken_over = second.materialize()
    assert taken_over.success, taken_over.failure
    assert taken_over.published[0].metadata["restored rows"].value == 8
    assert first.materialize().success


def test_a_new_machine_goes_on_with_work_under_way(machines, bucket):
    """Rows that another machine had committed are restored from the store alone, and said before any work."""
    first, second = machines
    pull_catalog(first.settings.home, bucket)
    second_batch.append(lose_the_device)
    assert (
        "is lost" in first.materialize(vision_language_model=Interrupted(model=first.settings.model)).failure
    )
    # A head that has no journal of it counts these rows too, so that no attempt of theirs seems fruitless.
    assert _Files(second.settings).rows(KEY) == 4
    # One that cannot be read hides nobody's rows here, and holds no partition up for ever.
    (head,) = [name for name, _ in bucket.names(".journal/") if name.endswith("head.json")]
    good = bucket.get(head, most=1 << 20)
    bucket.put(head, b"garbage", over=bucket.head(head))
    assert [_Files(one.settings).rows(KEY) for one in (first, second)] == [4, 0]
    bucket.put(head, good, over=bucket.head(head))
    done = second.materialize()
    assert done.success, done.failure
    assert done.published[0].metadata["restored rows"].value == 4
    # What is published is in no journal any more, here or there.
    assert not [name for name, _ in bucket.names(".journal/") if "segment" in name]


def test_a_loss_is_given_up_on_any_machine_for_all(machines, bucket, tmp_path):
    """The store lost rows of a machine that is gone: a person gives them up once, and any machine goes on."""
    gone, second = machines
    third = replace(gone.changed(home=tmp_path / "third"), instance=dg.DagsterInstance.ephemeral())
    pull_catalog(gone.settings.home, bucket)
    second_batch.append(lose_the_device)
    assert not gone.materialize(vision_language_model=Interrupted(model=gone.settings.model)).success
    for name, _ in bucket.names(".journal/"):
        if "segment-" in name:
            bucket.delete(name)
    assert f"--accept-loss {KEY}" in second.materialize().failure
    catalog = pull_catalog(third.settings.home, bucket) and Catalog.open(third.settings.home)
    (loss,) = find_losses(third.settings, catalog, KEY)
    assert loss.lost_rows == 4
    accept_loss(loss, bucket)
    done = second.materialize()
    assert done.success, done.failure
    assert find_losses(third.settings, catalog, KEY) == []


def test_what_a_damaged_head_hides_is_given_up_on_a_machine_that_has_nothing(machines, bucket, tmp_path):
    """The refusal names the command; it works without rows and catalogue, and then any machine goes on."""
    gone, second = machines
    third = gone.changed(home=tmp_path / "third").settings
    pull_catalog(gone.settings.home, bucket)
    second_batch.append(lose_the_device)
    assert not gone.materialize(vision_language_model=Interrupted(model=gone.settings.model)).success
    for name, _ in list(bucket.names(".journal/")):
        if "segment-" in name:
            bucket.delete(name)
        else:
            bucket.put(name, b"rot", over=bucket.head(name))
    assert f"vlm-assets repair --accept-loss {KEY}" in second.materialize().failure
    runner = CliRunner(env={"VLM_ASSETS_STORE": str(bucket), "VLM_ASSETS_MODEL": gone.settings.model})
    for said in ("nobody can tell how many rows were committed", "Nothing of"):
        told = runner.invoke(app, ["repair", "--accept-loss", KEY, "--yes", "--home", str(third.home)])
        assert told.exit_code == 0, told.output
        assert said in told.output
    done = second.materialize()
    assert done.success, done.failure
    assert done.published[0].metadata["restored rows"].value == 0


def test_a_machine_that_was_taken_over_publishes_nothing_and_it_is_no_attempt(machines, bucket):
    """Another one finished the partition meanwhile: it says so, and its next start takes that over."""
    first, second = machines
    pull_catalog(first.settings.home, bucket)
    taken = []
    second_batch.append(lambda: taken.append(second.materialize()))
    late = first.materialize(vision_language_model=Interrupted(model=first.settings.model))
    assert taken[0].success, taken[0].failure
    assert "was taken over by" in late.failure
    assert NO_ATTEMPT in first.instance.get_runs()[0].tags
    assert not first.file.exists()
    again = first.materialize()
    assert again.success, again.failure
    assert first.file.read_bytes() == second.file.read_bytes()


def test_a_machine_with_other_settings_is_refused_until_a_person_decides(machines, bucket, monkeypatch):
    """The sentence names what differs and the command that settles it; nothing is computed."""
    first, second = machines
    pull_catalog(first.settings.home, bucket)
    parts = DescriptionWork.for_range(
        first.settings,
        Catalog.open(first.settings.home),
        Catalog.open(first.settings.home).ranges[0],
        build_vision_language_model(first.settings),
    ).fingerprint.parts
    refuse_other_settings(bucket, "property_descriptions", parts, first.settings.home)
    other = second.changed(prompt="Describe it briefly.")
    refuse_at_start(first.settings, pytest.fail)
    monkeypatch.setattr(run_module, "chosen_settings", lambda home: other.settings)
    with pytest.raises(MachineDiffersError, match="in prompt"):
        run_module.serve_command()
    refused = other.materialize()
    assert re.search(
        r"differs from .* in prompt \(\w+ there, \w+ here\), so nothing was computed", refused.failure
    )
    assert NO_ATTEMPT in other.instance.get_runs()[0].tags
    accept_settings(bucket, ("property_descriptions", "property_embeddings"))
    assert other.materialize().success
    with pytest.raises(MachineDiffersError, match="prompt"):
        refuse_other_settings(bucket, "property_descriptions", parts, first.settings.home)


def test_whatever_differs_is_named_and_nothing_is_computed(machines, bucket, monkeypatch):
    """Model, schema, prompt, code and each other part that decides a row."""
    settings = machines[0].settings
    pull_catalog(settings.home, bucket)
    refuse = partial(refuse_other_settings, bucket, "property_descriptions")
    parts = description_parts(settings, build_vision_language_model(settings))
    assert {"model", "prompt", "schema"} <= parts.keys()
    refuse(parts, settings.home)
    refuse(parts, settings.home)
    for name in parts:
        with pytest.raises(MachineDiffersError, match=rf"in {name} \("):
            refuse({**parts, name: "another"}, settings.home)
    monkeypatch.setattr(stored_settings, "code_digest", lambda asset: "another")
    with pytest.raises(MachineDiffersError, match=r"in code \("):
        refuse(parts, settings.home)


def test_a_second_machine_without_postgres_starts_nothing(machines, bucket, monkeypatch):
    """Serve and run refuse it, readers do not; the machine that is gone is forgotten by one command."""
    first, second = machines
    pull_catalog(first.settings.home, bucket)
    pull_catalog(second.settings.home, bucket)
    refuse_at_start(first.settings, pytest.fail)
    here = socket.gethostname()
    monkeypatch.setattr(socket, "gethostname", lambda: "the-other-one")
    monkeypatch.setattr(run_module, "chosen_settings", lambda home: second.settings)
    for start in (
        run_module.serve_command,
        lambda: run_module.run_partitions(second.settings, port=0, keys=None, console=Console()),
    ):
        with pytest.raises(OtherMachineError, match=f"by {here} .*--forget-node {here}`"):
            start()
    audit(second.settings, Catalog.open(second.settings.home))
    shared = second.changed(state_url=SecretStr("postgresql+psycopg2://of/all"))
    refuse_at_start(shared.settings, pytest.fail)
    runner = CliRunner(env={"VLM_ASSETS_STORE": str(bucket)})
    forget = ["devices", "--forget-node", here, "--home", str(second.settings.home)]
    for code, said in ((0, f"{here} is forgotten"), (1, f"No node {here}")):
        told = runner.invoke(app, forget)
        assert (told.exit_code, said in f"{told.output}{told.exception}") == (code, True)
    refuse_at_start(second.settings, pytest.fail)


def test_a_store_that_does_not_honour_conditions_is_refused_at_start(machines, bucket, monkeypatch):
    """No command starts work over it; a run that meets it all the same is no attempt."""
    first, _ = machines
    pull_catalog(first.settings.home, bucket)
    monkeypatch.setattr(bucket_module, "_PROVED", set())

    def drop(request, **_):
        del request.headers["If-None-Match"]

    client().meta.events.register("before-sign.s3.PutObject", drop)
    monkeypatch.setattr(run_module, "chosen_settings", lambda home: first.settings)
    with pytest.raises(UnfitStoreError, match="name must be free"):
        run_module.serve_command()
    with pytest.raises(UnfitStoreError):
        run_module.run_partitions(first.settings, port=0, keys=None, console=Console())
    assert "name must be free" in first.materialize().failure
    assert NO_ATTEMPT in first.instance.get_runs()[0].tags
    assert [name for name, _ in bucket.names() if "catalog" not in name] == []


def test_two_ingests_at_once_number_no_property_twice(machines, listing, bucket):
    """The second one to reach the store changes nothing, there or here, and says what to do."""
    first, second = machines
    there = pull_catalog(first.settings.home, bucket)
    pull_catalog(second.settings.home, bucket)
    data = Catalog.open(first.settings.home).path.read_bytes()
    put_catalog(bucket, data + b" ", over=there)
    with pytest.raises(CatalogError, match="Do the same again"):
        put_catalog(bucket, data + b"  ", over=there)


def test_another_home_is_refused_at_the_same_prefix(machines, listing, bucket, tmp_path):
    """A second home that points there by mistake is named, and neither catalogue is changed."""
    first, _ = machines
    pull_catalog(first.settings.home, bucket)
    ingest(listing, tmp_path / "other")
    for ask in (
        lambda: pull_catalog(tmp_path / "other", bucket),
        lambda: ingest(listing, tmp_path / "other", store=bucket),
    ):
        with pytest.raises(CatalogError, match="a prefix of its own"):
            ask()


def test_a_store_that_was_put_back_is_not_taken_over(machines, listing, bucket):
    """An older catalogue in the store stops every machine that knows a newer one, and two commands decide."""
    first, second = (one.settings for one in machines)
    pull_catalog(first.home, bucket)
    ingest(listing, first.home, store=bucket)
    name = "property_catalog/catalog.parquet"
    older = bucket.get(name, most=1 << 30)
    grown = write_listing(listing.with_name("grown.jsonl"), {**read_source(listing), "late": []})
    ingest(grown, first.home, store=bucket, update=True)
    newer = bucket.get(name, most=1 << 30)
    pull_catalog(second.home, bucket)

    def holds(data):
        return bucket.get(name, most=1 << 30) == data

    def repair(settings, place):
        command = ["repair", "--home", str(settings.home), "--catalog", str(place), "--yes"]
        return CliRunner().invoke(app, command, env={"VLM_ASSETS_STORE": str(bucket)}, catch_exceptions=False)

    for settings in (first, second):
        bucket.put(name, older, over=bucket.head(name))
        for act in (
            lambda home: pull_catalog(home, bucket),
            lambda home: ingest(grown, home, store=bucket, update=True),
        ):
            with pytest.raises(CatalogError, match="does not come before it: the store was put back"):
                act(settings.home)
        assert Catalog.open(settings.home).path.read_bytes() == newer
        assert holds(older)
        done = repair(settings, Catalog.open(settings.home).path)
        assert done.exit_code == 0, done.output
        assert holds(newer)
        pull_catalog(settings.home, bucket)
    # A home that lost its newest catalogue takes it from the store.
    for path in (catalog_path(first.home), backup_paths(first.home)[0]):
        path.write_bytes(older)
    pull_catalog(first.home, bucket)
    assert Catalog.open(first.home).path.read_bytes() == newer
    # The other answer: the store's older one is true, and is the newest from now on, for all.
    bucket.put(name, older, over=bucket.head(name))
    done = repair(first, bucket.address(name))
    assert done.exit_code == 0, done.output
    pull_catalog(second.home, bucket)
    assert Catalog.open(second.home).header == Catalog.open(first.home).header
    assert Catalog.open(second.home).find("late") is None


@pytest.mark.promise("Of two valid versions the newer is true")
def test_the_command_accepts_the_newest_whole_version_anywhere(machines, bucket):
    """A partition that was put back further than the store: the store's counts, under a new number."""
    settings = machines[0].settings
    pull_catalog(settings.home, bucket)
    here, stored = Dataset(settings), StoredPartitions(settings.descriptions, bucket)
    paths = settings.descriptions.partition(KEY)
    here.describe(KEY, text="first")
    files = (paths.published, paths.record, paths.record_copy, paths.version(0))
    earlier = [path.read_bytes() for path in files]
    here.describe(KEY, text="second")
    stored.push(KEY)
    second = paths.published.read_bytes()
    here.describe(KEY, text="third")
    for path, content in zip(files, earlier, strict=True):
        path.write_bytes(content)
    for number in (1, 2):
        paths.version(number).unlink()
    stopped = machines[0].materialize()
    assert "The newest one that is whole is version 2" in stopped.failure
    runner = CliRunner(env={"VLM_ASSETS_STORE": str(bucket), "VLM_ASSETS_MODEL": settings.model})
    done = runner.invoke(app, ["repair", "--accept-version", KEY, "--yes", "--home", str(settings.home)])
    assert done.exit_code == 0, done.output
    assert "as version 4" in done.output
    assert paths.published.read_bytes() == second
    assert stored.pull(KEY) == ()
    assert (stored.published(KEY).sequence, here.descriptions.record(KEY).sequence) == (4, 4)


@pytest.mark.parametrize("marks", ["whole", "damaged"])
@pytest.mark.promise("Of two valid versions the newer is true")
def test_a_home_that_lost_its_catalogue_takes_an_older_one_of_the_store_only_from_a_person(
    machines, listing, bucket, marks
):
    """The sentence says what the store has, and its command makes that the newest, for every machine."""
    first, second = (one.settings for one in machines)
    name = "property_catalog/catalog.parquet"
    pull_catalog(first.home, bucket)
    older = bucket.get(name, most=1 << 30)
    grown = write_listing(listing.with_name("grown.jsonl"), {**read_source(listing), "late": []})
    ingest(grown, first.home, store=bucket, update=True)
    newest = Catalog.open(first.home).header.sequence
    for path in (catalog_path(first.home), *backup_paths(first.home)):
        path.unlink(missing_ok=True)
    if marks == "damaged":
        for path in mark_path(first.home).parent.iterdir():
            path.write_bytes(b"damaged")
    bucket.put(name, older, over=bucket.head(name))
    for _ in range(2):
        with pytest.raises(CatalogError, match=r"it is gone.* does not take its place: it .* older") as told:
            pull_catalog(first.home, bucket)
    assert not catalog_path(first.home).exists()
    command = shlex.split(re.findall("`([^`]+)`", str(told.value))[-1])
    runner = CliRunner(env={"VLM_ASSETS_STORE": str(bucket), "VLM_ASSETS_MODEL": first.model})
    done = runner.invoke(app, [*command[1:], "--yes"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    here = Catalog.open(first.home)
    assert (here.rows, here.find("late")) == (16, None)
    assert here.header.sequence > (newest if marks == "whole" else 1)
    pull_catalog(second.home, bucket)
    assert Catalog.open(second.home).header == here.header


def test_a_catalogue_that_a_person_names_counts_in_the_store_and_here(machines, bucket, tmp_path):
    """Beside marks of another home: what is refused changes nothing in the store, what is taken both."""
    home, name = machines[0].settings.home, "property_catalog/catalog.parquet"
    pull_catalog(home, bucket)
    ingest(write_listing(tmp_path / "other.jsonl", {"x": []}), tmp_path / "other")
    for path in mark_path(home).parent.iterdir():
        path.write_bytes(mark_path(tmp_path / "other").read_bytes())
    before = bucket.get(name, most=1 << 30)
    for read in (Catalog.open, lambda home: pull_catalog(home, bucket)):
        with pytest.raises(CatalogError, match="One of the two is another home's"):
            read(home)
    with pytest.raises(CatalogError, match="is no whole catalogue"):
        check_catalog(home, str(tmp_path / "other.jsonl"), bucket)
    assert bucket.get(name, most=1 << 30) == before
    put_in_place(home, check_catalog(home, str(catalog_path(home)), bucket), bucket)
    assert bucket.get(name, most=1 << 30) == Catalog.open(home).path.read_bytes() != before
    pull_catalog(home, bucket)
    # Of what changes here while a person decides the store is not told either.
    chosen, before = check_catalog(home, str(catalog_path(home)), bucket), bucket.get(name, most=1 << 30)
    ingest(tmp_path / "other.jsonl", home, image_root=Path(Catalog.open(home).image_root))
    with pytest.raises(CatalogError, match="was changed since"):
        put_in_place(home, chosen, bucket)
    assert bucket.get(name, most=1 << 30) == before


def test_machines_share_the_list_of_withdrawn_ids(machines, listing, bucket):
    """What one machine withdraws or takes off its list, the others know before their next run or ingest."""
    first, second = (one.settings for one in machines)
    pull_catalog(first.home, bucket)
    pull_catalog(second.home, bucket)
    catalog = Catalog.open(first.home)
    ids = catalog.slice(catalog.ranges[0])["property_id"].to_pylist()
    list(withdraw(first, prepare_withdrawal(first, ids[:1])))
    list(withdraw(second, prepare_withdrawal(second, ids[1:2])))
    for settings in (first, second):
        pull_catalog(settings.home, bucket)
        withdrawn = read_withdrawn(settings.home)
        assert [one in withdrawn for one in ids[:3]] == [True, True, False]
        assert list_paths(settings.home)[0].read_bytes() == bucket.get(
            "property_catalog/withdrawn.json", most=1 << 20
        )
    undo_withdrawal(first, ids[1:2])
    report = ingest(listing, second.home, store=bucket)
    assert (report.withdrawn, report.new) == (1, 1)
    # Made apart, while no store was set: nobody's list is overwritten.
    for path in list_paths(second.home):
        path.unlink()
    save_withdrawn(second.home, WithdrawnIds.new().changed(["mine"], withdrawn=True))
    with pytest.raises(WithdrawnListError, match=r"move .* away, and withdraw their ids again"):
        pull_catalog(second.home, bucket)
