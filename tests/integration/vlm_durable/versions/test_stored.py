"""Partitions in a real S3 store: two machines publish, one is cut off, and the store is not always well."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from faults.s3_server import S3Proxy
from vlm_durable.files import files
from vlm_durable.files.layout import AssetFolders, Home
from vlm_durable.mirror import bucket as bucket_module
from vlm_durable.mirror.bucket import S3Folder, StoreAwayError, UnfitStoreError, client
from vlm_durable.versions import version_mark
from vlm_durable.versions.fenced_object import FencedObject, OvertakenError
from vlm_durable.versions.partition_files import (
    CannotRestoreError,
    FileDamagedError,
    PartitionFiles,
    PutBackError,
)
from vlm_durable.versions.published import PublishedPartitions
from vlm_durable.versions.stored import OlderInStoreError, StoredPartitions
from vlm_durable.versions.versioned_object import PublishedError, RecordDamagedError

KEY = "000000000-000000001"
NAMES = [
    f"property_descriptions/{KEY}.parquet",
    f".versions/property_descriptions/{KEY}.json",
    f".versions/property_descriptions/{KEY}.1.parquet",
]
SCHEMA = pa.schema([("property_id", pa.string()), ("ordinal", pa.int64()), ("text", pa.string())])


def publish(asset, text):
    """Publish two rows with this text on a machine."""
    rows = pa.record_batch([["a", "b"], [0, 1], [text, text]], schema=SCHEMA)
    here = PublishedPartitions(asset)
    staged = here.stage(KEY, [rows], SCHEMA, expected_ids=("a", "b"), fingerprint=text)
    with staged:
        return here.publish(staged)


def text_of(asset):
    return set(pq.read_table(asset.partition(KEY).published)["text"].to_pylist())


@pytest.fixture
def machines(tmp_path, bucket):
    """Two machines over one store: the folders of their asset, and their partitions in the store.

    They share a catalogue.
    """
    assets = [Home(tmp_path / name, lambda root: "shared").asset("property_descriptions") for name in "ab"]
    return [(one, StoredPartitions(one, bucket)) for one in assets]


@pytest.fixture
def in_store(bucket):
    """The text of the file that readers of the store see."""

    def read():
        data = bucket.get(f"property_descriptions/{KEY}.parquet", most=1 << 20)
        return set(pq.read_table(pa.BufferReader(data))["text"].to_pylist())

    return read


def test_another_machine_goes_on_from_the_store_alone(machines, in_store, bucket):
    """File, record and earlier versions are in the store, under the names that they have in a home."""
    (a, at_a), (b, at_b) = machines
    publish(a, "first")
    at_a.push(KEY)
    at_b.pull(KEY)
    assert text_of(b) == {"first"}
    assert PublishedPartitions(b).verify(KEY).ok
    publish(b, "second")
    at_b.push(KEY)
    at_a.pull(KEY)
    assert text_of(a) == in_store() == {"second"}
    assert PublishedPartitions(a).verify(KEY).ok
    # Asked one by one: SeaweedFS lists nothing below a folder named .versions.
    assert [bucket.head(name) is not None for name in NAMES] == [True, True, True]
    assert at_a.pull(KEY) == ()


def test_a_record_of_another_catalogue_in_the_store_is_not_taken_over(machines, bucket, tmp_path):
    """It is no version of this partition: what stands here stays, and repair puts that back there."""
    (a, at_a), _ = machines
    publish(a, "first")
    at_a.push(KEY)
    other = Home(tmp_path / "other", lambda root: "other").asset(a.name)
    for text in ("foreign", "and higher"):
        publish(other, text)
    name = f".versions/{a.name}/{KEY}.json"
    bucket.put(name, other.partition(KEY).record.read_bytes(), over=bucket.head(name))
    for call in (at_a.pull, at_a.push):
        with pytest.raises(RecordDamagedError, match=r"whose catalogue is other, not shared.*repair"):
            call(KEY)
    assert text_of(a) == {"first"}
    assert "whose catalogue is other" in at_a.trouble(KEY)
    assert at_a.put_back(KEY)
    assert at_a.trouble(KEY, deep=True) is None
    assert at_a.published(KEY).origin == "shared"


def test_readers_read_the_folder_in_the_store(machines, bucket, s3_server):
    """Any reader may be pointed at the folder: it holds finished partitions and nothing else."""
    from pyarrow.fs import S3FileSystem

    (a, at_a), _ = machines
    publish(a, "first")
    at_a.push(KEY)
    there = S3FileSystem(
        access_key="testkey",
        secret_key="testsecret",
        endpoint_override=f"127.0.0.1:{s3_server.port}",
        scheme="http",
    )
    table = pq.read_table(f"{bucket.bucket}/{bucket.prefix}property_descriptions", filesystem=there)
    assert table["property_id"].to_pylist() == ["a", "b"]


def test_a_machine_that_was_overtaken_publishes_nothing(machines, in_store):
    """What another machine published since stays; this one's file is kept as an earlier version."""
    (a, at_a), (b, at_b) = machines
    publish(a, "late")
    publish(b, "first")
    at_b.push(KEY)
    with pytest.raises(OvertakenError, match="Materialize the partition again"):
        at_a.push(KEY)
    assert in_store() == {"first"}
    at_a.pull(KEY)
    assert text_of(a) == {"first"}
    assert set(pq.read_table(a.partition(KEY).version(1))["text"].to_pylist()) == {"late"}


def test_an_older_version_in_the_store_replaces_no_newer_one(machines, in_store, bucket):
    """A store put back from a backup changes nothing here; the sentence's way out puts it right."""
    (a, at_a), (b, at_b) = machines
    publish(b, "old")
    at_b.push(KEY)
    for text in ("first", "second"):
        publish(a, text)
    with pytest.raises(PublishedError, match=r"version 2 is published here, and .* has version 1"):
        at_a.pull(KEY)
    assert (text_of(a), in_store()) == ({"second"}, {"old"})
    bucket.delete(NAMES[1])
    assert at_a.pull(KEY) == ()
    with pytest.raises(PublishedError, match="does not have the version that was published there"):
        at_a.push(KEY)
    bucket.delete(NAMES[0])
    at_a.put_back(KEY, newest_here=True)
    assert in_store() == {"second"}


def lose(asset):
    """Lose all files of a partition on a machine, and its record; its mark stays."""
    paths = asset.partition(KEY)
    for path in (paths.published, paths.record, paths.record_copy, *map(paths.version, range(3))):
        path.unlink(missing_ok=True)


@pytest.mark.promise("Of two valid versions the newer is true")
def test_what_was_lost_here_is_not_replaced_by_an_older_version_of_the_store(machines, in_store):
    """A mark is never lowered: a person accepts the older version, under a number that nobody had."""
    (a, at_a), (b, at_b) = machines
    publish(a, "first")
    at_a.push(KEY)
    at_b.pull(KEY)
    for text in ("second", "third"):
        publish(a, text)
    lose(a)
    for _ in range(2):
        with pytest.raises(PutBackError, match=r"version 3 was published here, .* --accept-version"):
            at_a.pull(KEY)
        assert PartitionFiles(a, KEY).marked().sequence == 3
    assert "as version 4" in at_a.accept_older(KEY)[0]
    with pytest.raises(PublishedError, match="nothing to accept"):
        at_a.accept_older(KEY)
    assert text_of(a) == in_store() == {"first"}
    # Every machine takes the number over, so that the next version follows it wherever it is made.
    assert at_b.pull(KEY) == ()
    assert [PublishedPartitions(one).record(KEY).sequence for one in (a, b)] == [4, 4]
    assert PublishedPartitions(b).verify(KEY).ok
    assert publish(b, "fourth").record.sequence == 5
    at_b.push(KEY)
    with pytest.raises(PublishedError, match=r"nothing to accept\. Partition .* was taken over"):
        at_a.accept_older(KEY)
    assert text_of(a) == {"fourth"}


def files_of(asset):
    """The files of a partition on a machine, without its mark."""
    paths = asset.partition(KEY)
    files = (paths.published, paths.record, paths.record_copy, *map(paths.version, range(3)))
    return {path: path.read_bytes() if path.exists() else None for path in files}


def put_back(before):
    """Have a partition's files be those of an earlier day."""
    for path, content in before.items():
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)


@pytest.mark.promise("Of two valid versions the newer is true")
def test_of_two_older_versions_the_newer_one_in_the_store_is_offered(machines, in_store):
    """Put back to the first, with the second in the store and the third lost: a person accepts the second."""
    (a, at_a), (b, at_b) = machines
    publish(a, "first")
    earlier = files_of(a)
    publish(a, "second")
    at_a.push(KEY)
    publish(a, "third")
    put_back(earlier)
    for _ in range(2):
        with pytest.raises(OlderInStoreError, match=r"version 1 .* version 3 .* is version 2 .* in s3://"):
            at_a.pull(KEY)
        assert (text_of(a), PartitionFiles(a, KEY).marked().sequence) == ({"first"}, 3)
    assert "as version 4" in at_a.accept_older(KEY)[0]
    assert text_of(a) == in_store() == {"second"}
    assert PublishedPartitions(a).verify(KEY).ok
    kept = [pq.read_table(path)["text"][0].as_py() for path in a.partition(KEY).quarantine.iterdir()]
    assert set(kept) == {"first"}
    at_b.pull(KEY)
    assert [PublishedPartitions(one).record(KEY).sequence for one in (a, b)] == [4, 4]
    assert publish(a, "third").record.sequence == 5


@pytest.mark.parametrize("writes", [1, 2, 4, None])
@pytest.mark.promise("Of two valid versions the newer is true")
def test_a_store_that_is_ahead_of_all_that_was_here_heals_what_was_put_back(
    machines, in_store, monkeypatch, writes
):
    """No person is asked, whatever write of it a process is killed at."""
    (a, at_a), (b, at_b) = machines
    publish(a, "first")
    earlier = files_of(a)
    publish(a, "second")
    at_a.push(KEY)
    at_b.pull(KEY)
    for text in ("third", "fourth", "fifth"):
        publish(b, text)
        at_b.push(KEY)
    put_back(earlier)
    with pytest.raises(PutBackError):
        PublishedPartitions(a).settled(KEY)
    real, calls = files.write_replacing, iter(range(1000))

    def die(*arguments, **options):
        if next(calls) == writes:
            raise SystemExit
        real(*arguments, **options)

    with monkeypatch.context() as killed, contextlib.suppress(SystemExit):
        killed.setattr(files, "write_replacing", die)
        killed.setattr(version_mark, "write_replacing", die)
        at_a.pull(KEY)
    at_a.pull(KEY)
    assert text_of(a) == in_store() == {"fifth"}
    assert PublishedPartitions(a).verify(KEY).ok
    assert PublishedPartitions(a).record(KEY) == PublishedPartitions(b).record(KEY)
    assert at_a.trouble(KEY) is None


@pytest.mark.promise("Of two valid versions the newer is true")
def test_a_record_without_its_file_is_not_offered_to_the_store(machines, in_store):
    """The file of the newest version is lost and its record is not: what the store has can be accepted."""
    (a, at_a), (b, at_b) = machines
    publish(b, "another")
    at_b.push(KEY)
    for text in ("first", "second"):
        publish(a, text)
    for number in (0, 1):
        a.partition(KEY).version(number).unlink()
    a.partition(KEY).published.unlink()
    with pytest.raises(OlderInStoreError, match=r"version 2 was published here, and is in none of its files"):
        at_a.pull(KEY)
    assert "as version 3" in at_a.accept_older(KEY)[0]
    assert text_of(a) == in_store() == {"another"}
    assert PublishedPartitions(a).verify(KEY).ok


def test_a_partition_that_was_put_back_here_comes_from_the_store(machines):
    """The newest version has a whole file in the store: it is fetched, not given up and not computed."""
    (a, at_a), _ = machines
    publish(a, "first")
    paths = a.partition(KEY)
    before = {
        path: path.read_bytes()
        for path in (paths.published, paths.record, paths.record_copy, paths.version(0))
    }
    newest = publish(a, "second").record
    at_a.push(KEY)
    for path, content in before.items():
        path.write_bytes(content)
    paths.version(1).unlink()
    with pytest.raises(PutBackError):
        PublishedPartitions(a).settled(KEY)
    at_a.pull(KEY)
    assert text_of(a) == {"second"}
    assert PublishedPartitions(a).verify(KEY).ok
    assert PublishedPartitions(a).record(KEY) == newest


def test_what_is_lost_twice_here_comes_from_the_store(machines, bucket):
    """Neither the file nor its second copy is whole: the store has a third."""
    (a, at_a), _ = machines
    record = publish(a, "first").record
    at_a.push(KEY)
    paths = a.partition(KEY)
    paths.published.write_bytes(b"damaged")
    paths.version(0).unlink()
    assert at_a.has(record)
    with pytest.raises(CannotRestoreError):
        PublishedPartitions(a).restore(KEY)
    PublishedPartitions(a).restore(KEY, at_a.content_of)
    assert PublishedPartitions(a).verify(KEY).ok
    assert [path.read_bytes() for path in paths.quarantine.iterdir()] == [b"damaged"]


def test_a_damaged_file_is_not_copied_to_the_store(machines, bucket, monkeypatch):
    """What stands here is not what its record says: the store keeps no such bytes."""
    (a, at_a), _ = machines
    publish(a, "first")
    a.partition(KEY).published.write_bytes(b"damaged")
    put = S3Folder.put

    def no_damage(folder, name, content, **how):
        assert content != b"damaged", name
        return put(folder, name, content, **how)

    monkeypatch.setattr(S3Folder, "put", no_damage)
    with pytest.raises(FileDamagedError, match="it was not copied"):
        at_a.push(KEY)
    assert bucket.head(NAMES[0]) is None


def test_other_bytes_than_those_of_the_checksum_are_not_taken_over(machines, monkeypatch):
    """A store may answer a HEAD rightly and hand out something else: nothing is published here."""
    (a, at_a), (b, at_b) = machines
    publish(a, "first")
    at_a.push(KEY)
    get = S3Folder.get

    def other(folder, name, **how):
        return b"other" if name.endswith(".parquet") else get(folder, name, **how)

    monkeypatch.setattr(S3Folder, "get", other)
    with pytest.raises(PublishedError, match="no object there has these bytes"):
        at_b.pull(KEY)
    assert not b.partition(KEY).published.exists()


def test_a_repair_replaces_nothing_that_another_machine_is_publishing(
    machines, in_store, bucket, monkeypatch
):
    """Its file lands while the repair judges the one before it, which is gone: the newer version stays."""
    (a, at_a), (_, at_b) = machines
    publish(a, "first")
    at_a.push(KEY)
    at_b.pull(KEY)
    publish(a, "second")
    name = f"property_descriptions/{KEY}.parquet"
    bucket.delete(name)
    put_files, wrong = FencedObject.put_files, StoredPartitions._wrong
    refused = []

    def repaired_meanwhile(fenced, files):
        def judged(stored, path, version, **options):
            sentence = wrong(stored, path, version, **options)
            put_files(fenced, files)
            return sentence

        with monkeypatch.context() as patch:
            patch.setattr(StoredPartitions, "_wrong", judged)
            with pytest.raises(OvertakenError) as caught:
                at_b.put_back(KEY)
            refused.append(caught)

    monkeypatch.setattr(FencedObject, "put_files", repaired_meanwhile)
    at_a.push(KEY)
    assert refused
    assert in_store() == {"second"}
    assert at_a.trouble(KEY) is None


@pytest.mark.parametrize("harm", [lambda path: path.write_bytes(b"rot"), lambda path: path.unlink()])
def test_a_damaged_earlier_version_blocks_no_publication_in_the_store(machines, in_store, bucket, harm):
    """The new version is put there, and the record there names only what is there too."""
    (a, at_a), (_, at_b) = machines
    for text in ("first", "second", "third"):
        publish(a, text)
    harm(a.partition(KEY).version(1))
    at_a.push(KEY)
    assert in_store() == {"third"}
    standing, _ = at_a._read_record(PartitionFiles(a, KEY))
    assert (standing.pending, [one.fingerprint for one in standing.previous]) == (None, ["first"])
    assert bucket.head(NAMES[2]) is None
    assert bucket.head(NAMES[2].replace(".1.", ".2.")).sha256 == standing.previous[0].sha256
    at_b.pull(KEY)
    assert text_of(a) == {"third"}


def test_a_process_that_was_stopped_and_overtaken_publishes_nothing_when_it_goes_on(
    machines, in_store, s3_server, tmp_path, bucket
):
    """At whatever request a machine is cut off, what the other one published meanwhile stands, whole."""
    _, (b, at_b) = machines
    program = f"""
        import sys
        from pathlib import Path
        from vlm_durable.versions.stored import StoredPartitions
        from vlm_durable.files.layout import Home
        from vlm_durable.mirror.bucket import S3Folder

        asset = Home(Path(sys.argv[1])).asset("property_descriptions")
        StoredPartitions(asset, S3Folder.parse(sys.argv[2])).push("{KEY}")
        """
    with S3Proxy(s3_server) as proxy:
        for number in (1, 2, 3):
            asset = Home(tmp_path / f"c{number}").asset("property_descriptions")
            StoredPartitions(asset, bucket).pull(KEY)
            publish(asset, f"late {number}")
            machine = Stopped(number, f"meanwhile {number}", b, at_b)
            proxy.breaks(machine.breaks)
            machine.process = subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(program), asset.home.root, str(bucket)],
                env=os.environ | proxy.environment,
                stderr=subprocess.PIPE,
                text=True,
            )
            _, said = machine.process.communicate(timeout=120)
            assert (machine.puts >= number, machine.process.returncode) == (True, 1), said
            assert "OvertakenError" in said
            assert in_store() == {f"meanwhile {number}"}
            assert at_b.pull(KEY) == ()


@dataclass
class Stopped:
    """A process that is stopped at one of its puts, before it arrives, and overtaken by another machine."""

    at: int
    text: str
    asset: AssetFolders
    other: StoredPartitions
    puts: int = 0
    process: subprocess.Popen | None = None

    def breaks(self, passing):
        if passing.command == "PUT" and "probe" not in passing.path:
            self.puts += 1
            if self.puts == self.at:
                self.process.send_signal(signal.SIGSTOP)
                self.other.pull(KEY)
                publish(self.asset, self.text)
                self.other.push(KEY)
                self.process.send_signal(signal.SIGCONT)
        return False


def test_killed_at_any_request_it_is_finished_by_doing_it_again(machines, in_store, s3_proxy, bucket):
    """A publication that ends between two requests can be read, and is finished by the next one."""
    (a, at_a), (b, at_b) = machines
    publish(a, "first")
    at_a.push(KEY)
    for number in range(1, 6):
        text = f"version {number}"
        publish(a, text)
        puts = 0

        def breaks(passing, number=number):
            nonlocal puts
            puts += passing.command == "PUT"
            if puts == number and passing.command == "PUT":
                passing.forward()  # It arrives, and its answer is lost with the process.
            return puts >= number and passing.answer(403, "AccessDenied")

        s3_proxy.breaks(breaks)
        with contextlib.suppress(bucket_module.StoreError):
            at_a.push(KEY)
        s3_proxy.heal()
        at_b.pull(KEY)
        assert PublishedPartitions(b).verify(KEY).ok
        assert text_of(b) <= {text, f"version {number - 1}", "first"}
        at_a.push(KEY)
        assert in_store() == {text}
        at_b.pull(KEY)
        assert text_of(b) == {text}


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(bucket_module, "PATIENCE_SECONDS", 0.0)
    client.cache_clear()


@pytest.mark.usefixtures("quick")
def test_a_store_that_is_down_is_an_outage_and_nothing_is_lost(machines, in_store, s3_proxy):
    """Publication does not end before the store has the file; done again, it does."""
    (a, at_a), _ = machines
    publish(a, "first")
    s3_proxy.breaks(lambda passing: passing.answer(503, "SlowDown"))
    for ask in (at_a.push, at_a.pull):
        with pytest.raises(StoreAwayError):
            ask(KEY)
    s3_proxy.heal()
    at_a.push(KEY)
    assert in_store() == text_of(a) == {"first"}


def test_a_lost_object_of_the_store_is_named_and_put_back(machines, in_store, bucket):
    """A lifecycle rule takes nothing that a machine still has; what nobody has is an error, never empty."""
    (a, at_a), (_, at_b) = machines
    publish(a, "first")
    at_a.push(KEY)
    bucket.delete(f"property_descriptions/{KEY}.parquet")
    with pytest.raises(PublishedError, match="lifecycle rule"):
        at_b.pull(KEY)
    at_a.push(KEY)
    assert in_store() == {"first"}


@pytest.mark.promise("Of two valid versions the newer is true")
def test_a_store_that_was_emptied_is_filled_only_from_the_machine_that_a_person_names(
    machines, in_store, bucket
):
    """A machine that is behind cannot tell an emptied store from a new one by what is there: its mark can."""
    (a, at_a), (_, at_b) = machines
    publish(a, "first")
    at_a.push(KEY)
    at_b.pull(KEY)
    publish(a, "second")
    at_a.push(KEY)
    for name in NAMES:
        bucket.delete(name)
    for machine in (at_a, at_b):
        assert machine.pull(KEY) == ()
        for fill in (machine.push, machine.put_back):
            with pytest.raises(PublishedError, match=r"was the\s+store emptied.*--newest-here"):
                fill(KEY)
    assert [bucket.head(name) for name in NAMES] == [None] * 3
    at_a.put_back(KEY, newest_here=True)
    assert in_store() == {"second"}
    at_a.push(KEY)
    at_b.pull(KEY)
    # A lost record beside the file that it stood for proves which version there was.
    bucket.delete(NAMES[1])
    at_b.push(KEY)
    assert at_a.put_back(KEY) == ()


@pytest.mark.promise("Of two valid versions the newer is true")
def test_a_machine_whose_mark_is_lost_does_not_fill_a_store_that_was_emptied(machines, bucket):
    """Which store had the partition is not known: a machine with a newer version may be about to come."""
    (a, at_a), (b, at_b) = machines
    publish(a, "first")
    at_a.push(KEY)
    at_b.pull(KEY)
    publish(a, "second")
    at_a.push(KEY)
    for name in NAMES:
        bucket.delete(name)
    for copy in version_mark.mark_copies(b.partition(KEY).version_mark):
        copy.write_bytes(b"damaged")
    for fill in (at_b.push, at_b.put_back, at_b.push):
        with pytest.raises(PublishedError, match=r"both may have been: was the store emptied.*--newest-here"):
            fill(KEY)
    assert [bucket.head(name) for name in NAMES] == [None] * 3


def begin_to_fill(at, s3_proxy):
    """Fill an emptied store from a machine that a person named, which is cut off after the record's put."""
    puts = []

    def breaks(passing):
        is_put = passing.command == "PUT" and "probe" not in passing.path
        puts.extend([passing.path] if is_put else [])
        return is_put and len(puts) > 1 and passing.answer(403, "AccessDenied")

    s3_proxy.breaks(breaks)
    with pytest.raises(bucket_module.StoreError):
        at.put_back(KEY, newest_here=True)
    s3_proxy.heal()


@pytest.mark.promise("Of two valid versions the newer is true")
def test_a_machine_behind_the_one_that_began_to_fill_a_store_does_not_go_before_it(
    machines, in_store, bucket, s3_proxy
):
    """The record under way names a newer version: the machine that has it goes on, or a person says so."""
    (a, at_a), (b, at_b) = machines
    publish(a, "first")
    at_a.push(KEY)
    at_b.pull(KEY)
    publish(a, "second")
    at_a.push(KEY)
    for name in NAMES:
        bucket.delete(name)
    begin_to_fill(at_a, s3_proxy)
    record = bucket.get(NAMES[1], most=1 << 20)
    assert at_b.pull(KEY) == ()
    for fill in (at_b.push, at_b.put_back):
        with pytest.raises(
            PublishedError, match=r"began to publish version 2 .* has version 1, .*--newest-here"
        ):
            fill(KEY)
    assert bucket.get(NAMES[1], most=1 << 20) == record
    at_a.push(KEY)
    assert in_store() == {"second"}
    at_b.pull(KEY)
    assert text_of(b) == {"second"}


@pytest.mark.parametrize("newer_is_gone", [False, True])
def test_a_person_fills_a_store_whose_machine_is_gone_for_good(
    machines, in_store, bucket, s3_proxy, newer_is_gone
):
    """The command in the sentence works, and a first publication that was cut off holds nobody up."""
    (a, at_a), (b, at_b) = machines
    publish(b, "mine")
    for text in ("first", "second") if newer_is_gone else ("first",):
        publish(a, text)
    begin_to_fill(at_a, s3_proxy)
    if newer_is_gone:
        with pytest.raises(PublishedError, match="--newest-here"):
            at_b.push(KEY)
        at_b.put_back(KEY, newest_here=True)
    else:
        at_b.push(KEY)
    assert in_store() == {"mine"}
    assert at_b.trouble(KEY) is None


@pytest.mark.promise("Of two valid versions the newer is true")
def test_a_damaged_record_without_its_file_is_not_replaced_from_any_machine(machines, in_store, bucket):
    """Which version it stood for nobody can read: a machine that never saw this store may be behind."""
    (a, at_a), (b, at_b) = machines
    publish(b, "mine")
    for text in ("first", "second"):
        publish(a, text)
    at_a.push(KEY)
    bucket.delete(NAMES[0])
    bucket.put(NAMES[1], b"rot", over=bucket.head(NAMES[1]))
    for machine in (at_a, at_b):
        with pytest.raises(PublishedError, match=r"The record is damaged.*--newest-here"):
            machine.put_back(KEY)
    assert bucket.get(NAMES[1], most=1 << 20) == b"rot"
    at_a.put_back(KEY, newest_here=True)
    assert in_store() == {"second"}


@pytest.mark.promise("Of two valid versions the newer is true")
def test_a_machine_behind_its_own_mark_fills_no_store(machines, bucket):
    """Whatever a person says: what stands here is not the newest, and its mark knows that."""
    (a, at_a), _ = machines
    publish(a, "first")
    earlier = files_of(a)
    publish(a, "second")
    at_a.push(KEY)
    for name in NAMES:
        bucket.delete(name)
    for harm in (lambda: put_back(earlier), lambda: lose(a)):
        harm()
        with pytest.raises(PublishedError, match=r"was put back|does not have the version"):
            at_a.put_back(KEY, newest_here=True)
        assert [bucket.head(name) for name in NAMES] == [None] * 3
        assert PartitionFiles(a, KEY).marked().sequence == 2


@pytest.mark.parametrize(
    ("header", "named"),
    [
        ("If-None-Match", "name must be free"),
        ("If-Match", "in place of what was read"),
        ("x-amz-checksum-sha256", "SHA-256"),
    ],
)
def test_a_store_that_does_not_honour_what_the_fence_needs_is_refused(machines, bucket, header, named):
    """Conditions or checksums that a store ignores are found out before anything is put there."""
    (a, at_a), _ = machines
    publish(a, "first")

    # To the server it is as if the header had not been sent: the server itself honours all of them.
    def drop(request, **_):
        del request.headers[header]

    client().meta.events.register("before-sign.s3.PutObject", drop)
    with pytest.raises(UnfitStoreError, match=named):
        at_a.push(KEY)
    assert [bucket.head(name) for name in NAMES] == [None, None, None]


def test_a_machine_that_only_verifies_takes_back_no_publication_under_way(machines, in_store, s3_proxy):
    """While one publishes a new version, another one that has the old one changes nothing there."""
    (a, at_a), (_, at_b) = machines
    publish(a, "first")
    at_a.push(KEY)
    at_b.pull(KEY)
    publish(a, "second")
    meanwhile = []

    def breaks(passing):
        if passing.command == "PUT" and passing.path.endswith(".1.parquet") and not meanwhile:
            meanwhile.append(passing.path)
            at_b.push(KEY)
        return False

    s3_proxy.breaks(breaks)
    at_a.push(KEY)
    assert meanwhile
    assert in_store() == {"second"}
