"""How often a row was tried again: counted before it is tried, on disk, and never guessed."""

import pytest

from resources.state.row_retries import TRIES, RowRetries, RowRetriesFile, RowRetriesUnreadableError

FAILED = [("p1", "io_error"), ("p2", "missing"), ("p3", "engine_error"), ("p4", None)]
TRANSIENT = {"io_error", "engine_error"}
TOLD = {"run_id": "run", "at": 1.0, "checks": ("failed_share",)}


@pytest.fixture
def file(tmp_path):
    return RowRetriesFile(tmp_path, "property_descriptions", "key")


def test_a_refusal_tells_what_may_be_cured_from_what_may_not():
    """Transient kinds are counted as curable, all others by kind for a person."""
    refusal = RowRetries("f", "g", "run").refused(FAILED, TRANSIENT, **TOLD).refusal
    assert refusal.curable == 2
    assert dict(refusal.left) == {"missing": 1, "None": 1}
    assert "failed_share failed; failed rows that no further try cures: 1 missing" in refusal.sentence()


def test_a_row_has_three_tries_whatever_the_others_have(file):
    """Each round counts its rows, and what it stands on survives on disk."""
    standing = RowRetries("f", "g", "run")
    for number in range(TRIES):
        curable = standing.curable(FAILED, TRANSIENT)
        assert curable == ["p1", "p3"]
        file.write(standing.next_round(f"g{number}", f"run {number}", curable))
        standing = file.read()
    assert standing.curable([*FAILED, ("p5", "io_error")], TRANSIENT) == ["p5"]
    assert (standing.source, standing.again, standing.generation) == ("g1", ("p1", "p3"), "g2")


def test_what_is_written_is_what_is_read(file):
    """With refusal, and without."""
    assert file.read() is None
    told = RowRetries("f", "g", "run", tries={"p1": 2}).refused(FAILED, TRANSIENT, **TOLD)
    file.write(told)
    assert file.read() == told
    file.clear()
    assert file.read() is None


def test_a_damaged_file_is_named_and_kept_aside_only_when_asked(file):
    """Whoever only looks is told; the start that begins anew keeps the damaged file."""
    file.write(RowRetries("f", "g", "run", tries={"p1": 3}))
    file.path.write_bytes(file.path.read_bytes().replace(b'"p1":3', b'"p1":0'))
    with pytest.raises(RowRetriesUnreadableError, match=r"key\.json"):
        file.read()
    standing, said = file.read_or_set_aside()
    assert standing is None
    (aside,) = (file.path.parents[2] / "set_aside").iterdir()
    assert str(aside) in said
    assert file.read() is None
