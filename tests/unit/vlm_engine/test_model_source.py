"""Which model it is: a digest of a folder's files, hashed once a day, or a hub's commit, pinned in a home."""

import os
import shutil
import subprocess
import sys
import time

import pytest
from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError

from tests.support.damage import flip_bit
from vlm_durable.files import seen_files
from vlm_engine import model_source
from vlm_engine.model_source import ModelSource, exact_revision, file_digest, noted_revision, pinned_commit
from vlm_engine.protocol import ModelLoadError

DAY = 86_400
FIRST, SECOND = "1" * 40, "2" * 40


def test_revision_of_a_folder_follows_its_content(model_folder, tmp_path):
    """A copy has the same revision; a changed weight or setting another; a README changes nothing."""
    copied = shutil.copytree(model_folder, tmp_path / "model")
    original = exact_revision(ModelSource(str(model_folder)))
    assert original.startswith("sha256:")
    assert exact_revision(ModelSource(str(copied))) == original
    (copied / "README.md").write_text("words")
    assert exact_revision(ModelSource(str(copied))) == original
    template = copied / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    changed = exact_revision(ModelSource(str(copied)))
    assert changed != original
    weights = copied / "model.safetensors"
    flip_bit(weights, -1)
    assert exact_revision(ModelSource(str(copied))) not in (original, changed)


class _Hub:
    """The hub as it answers: a commit, or an error."""

    def __init__(self, outcome):
        self.outcome = outcome

    def model_info(self, name, *, revision, timeout):
        """A model's record."""
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return type("Info", (), {"sha": self.outcome})


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Let the hub answer in a given way; nothing is asked for over the network."""
    import huggingface_hub

    def answer(outcome):
        model_source._hub_commit.cache_clear()
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: _Hub(outcome))

    yield answer
    model_source._hub_commit.cache_clear()


def test_revision_on_the_hub_is_a_commit(hub):
    """A hub branch is recorded as the commit that it names now."""
    hub("c0ffee")
    assert exact_revision(ModelSource("owner/name", revision="main")) == "c0ffee"


def test_hub_out_of_reach(hub, monkeypatch):
    """Without the hub the cached copy's commit counts; without a copy the error says how to get one."""
    import huggingface_hub

    hub(OfflineModeIsEnabled("offline"))
    with pytest.raises(ModelLoadError, match="hf download owner/name"):
        exact_revision(ModelSource("owner/name"))
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda *a, **k: "/cache/snapshots/c0ffee/config.json"
    )
    assert exact_revision(ModelSource("owner/name")) == "c0ffee"


NO_HUB = """
import sys

from vlm_engine.model_source import ModelLoadError, ModelSource, exact_revision

try:
    exact_revision(ModelSource(sys.argv[1]))
except ModelLoadError as error:
    print(error)
"""


def test_hub_that_nobody_answers_for(tmp_path):
    """No network is a sentence that says what to do, not a traceback of the HTTP library."""
    # In a process of its own: the hub's address is read when its library is imported.
    command = [sys.executable, "-c", NO_HUB, "owner/name"]
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    told = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **nowhere}, check=True)
    assert "the hub cannot be reached" in told.stdout
    assert "hf download owner/name" in told.stdout


def test_unknown_model(hub):
    """A name that is neither folder nor hub model is said to be neither."""
    import httpx2

    request = httpx2.Request("GET", "https://hub.invalid")
    hub(RepositoryNotFoundError("404", response=httpx2.Response(404, request=request)))
    with pytest.raises(ModelLoadError, match="neither a folder here nor a model on the hub"):
        exact_revision(ModelSource("owner/mistyped"))


def never(name, revision):
    raise AssertionError("the hub was asked")


def test_a_branch_stays_what_it_was_at_first(tmp_path):
    """The hub is asked once a home; another branch, model or home has a commit of its own."""
    assert pinned_commit("owner/name", None, tmp_path, lambda *_: FIRST) == FIRST
    assert pinned_commit("owner/name", None, tmp_path, never) == FIRST
    assert pinned_commit("owner/name", "main", tmp_path, never) == FIRST
    assert pinned_commit("owner/name", "v2", tmp_path, lambda *_: SECOND) == SECOND
    assert pinned_commit("owner/other", None, tmp_path, lambda *_: SECOND) == SECOND


def test_a_commit_needs_no_hub(tmp_path):
    """A revision that is a commit is itself, online or not, and nothing is written."""
    assert pinned_commit("owner/name", FIRST, tmp_path / "records", never) == FIRST
    assert not (tmp_path / "records").exists()


def test_what_is_not_noted_yet_is_not_found_out(model_folder, tmp_path, monkeypatch, hub):
    """Definitions load with it: it reads no large file and asks no hub, and never says another revision."""
    hub(AssertionError("the hub was asked"))
    records = tmp_path / "records"
    folder, branch, commit = (
        ModelSource(name, revision, records=records)
        for name, revision in ((str(model_folder), None), ("owner/name", "v2"), ("owner/name", FIRST))
    )
    assert [noted_revision(source) for source in (branch, commit, ModelSource("", records=records))] == [
        None,
        FIRST,
        None,
    ]
    assert noted_revision(folder) == exact_revision(folder), "small files are read"
    pinned_commit("owner/name", "v2", records, lambda *_: SECOND)
    assert noted_revision(branch) == SECOND
    monkeypatch.setattr(model_source, "SMALL_BYTES", 4)
    assert noted_revision(folder) is None
    monkeypatch.setattr(seen_files, "_SETTLED_NS", 0)
    model_source._digest.cache_clear()
    assert exact_revision(folder) == noted_revision(folder), "once a run has hashed it"


def test_of_two_first_runs_one_decides(tmp_path):
    """A branch that moved between two first runs is one commit for both."""

    def overtaken(name, revision):
        pinned_commit(name, revision, tmp_path, lambda *_: FIRST)
        return SECOND

    assert pinned_commit("owner/name", None, tmp_path, overtaken) == FIRST


def test_a_damaged_note_stops_and_says_what_to_do(tmp_path):
    """Unreadable is not absent: the branch is not asked for again behind a person's back."""
    pinned_commit("owner/name", None, tmp_path, lambda *_: FIRST)
    (note,) = tmp_path.iterdir()
    note.write_bytes(note.read_bytes().replace(b"1" * 40, b"3" * 40))
    with pytest.raises(ModelLoadError, match="owner/name@COMMIT in the settings"):
        pinned_commit("owner/name", None, tmp_path, never)


def test_a_source_with_records_is_pinned(tmp_path, monkeypatch):
    """What stands in rows and fingerprints is the pinned commit."""
    answers = iter([FIRST, SECOND])
    monkeypatch.setattr("vlm_engine.model_source._hub_commit", lambda name, revision: next(answers))
    source = ModelSource("owner/name", records=tmp_path)
    assert [exact_revision(source), exact_revision(source)] == [FIRST, FIRST]


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """A file that counts as large, last changed an hour ago."""
    monkeypatch.setattr(model_source, "SMALL_BYTES", 4)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    real = time.time_ns
    monkeypatch.setattr(seen_files.time, "time_ns", lambda: real() + 3600 * 10**9)
    return path


@pytest.fixture
def hashed(monkeypatch):
    """The files that were read in full, in order; every look begins as in a new process."""
    read = []
    real = model_source.sha256_of

    def noting(path):
        read.append(path)
        return real(path)

    monkeypatch.setattr(model_source, "sha256_of", noting)
    return read


def digest(path, kept_in):
    model_source._digest.cache_clear()
    return file_digest(path, kept_in)


def test_the_next_process_reads_a_digest_and_not_the_weights(weights, hashed, tmp_path):
    """The same digest, without reading the file again."""
    first = digest(weights, tmp_path / "digests")
    assert digest(weights, tmp_path / "digests") == first
    assert hashed == [weights]


@pytest.mark.parametrize("kept_time", [True, False])
def test_a_changed_file_is_hashed_again(weights, hashed, tmp_path, kept_time):
    """Other bytes of the same length, under the same modification time too."""
    first = digest(weights, tmp_path / "digests")
    before = weights.stat()
    weights.write_bytes(b"WEIGHTS")
    if kept_time:
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert digest(weights, tmp_path / "digests") != first
    assert len(hashed) == 2


def test_a_bit_that_rots_is_noticed_within_a_day(weights, hashed, tmp_path, monkeypatch):
    """What was remembered a day ago is not believed any more, nor what a later clock wrote."""
    digest(weights, tmp_path / "digests")
    now = seen_files.time.time_ns
    for days in (1.01, -1.0):
        monkeypatch.setattr(seen_files.time, "time_ns", lambda days=days: now() + int(days * DAY * 10**9))
        digest(weights, tmp_path / "digests")
    assert len(hashed) == 3


def test_a_damaged_note_counts_as_none(weights, hashed, tmp_path):
    """A digest that does not verify is computed again."""
    first = digest(weights, tmp_path / "digests")
    (note,) = (tmp_path / "digests").iterdir()
    note.write_bytes(note.read_bytes().replace(first.encode(), b"0" * 64))
    assert digest(weights, tmp_path / "digests") == first
    assert len(hashed) == 2


def test_a_file_that_changed_just_now_is_not_remembered(weights, hashed, tmp_path, monkeypatch):
    """Its next change could come within the same tick of the clock."""
    monkeypatch.setattr(seen_files.time, "time_ns", lambda: weights.stat().st_mtime_ns + 10**6)
    digest(weights, tmp_path / "digests")
    assert not (tmp_path / "digests").exists()
