"""vlm_durable/files/sealed_json.py: JSON whose every byte is protected."""

import json

import pytest

from tests.support.damage import flipped
from vlm_durable.files.sealed_json import (
    BrokenSealError,
    FormatVersionError,
    read_sealed,
    seal,
    unseal,
    write_sealed,
)

CONTENT = {"rows": 3, "name": "segment"}
SEALED = seal(json.dumps(CONTENT).encode())


def test_sealed_bytes_are_json_and_read_back():
    """People can read the file with any JSON tool; the digest stands beside the content."""
    assert json.loads(SEALED)["content"] == CONTENT
    assert unseal(SEALED) == CONTENT


@pytest.mark.parametrize("bit", range(8))
def test_every_single_bit_flip_is_noticed(bit):
    """Fault 11: each bit of each byte, the wrapping included."""
    for place in range(len(SEALED)):
        with pytest.raises(BrokenSealError):
            unseal(flipped(SEALED, place, bit))


def test_every_truncation_and_a_longer_file_are_noticed():
    """A file cut anywhere, or with anything after its end, is not what was written."""
    for size in range(len(SEALED)):
        with pytest.raises(BrokenSealError):
            unseal(SEALED[:size])
    with pytest.raises(BrokenSealError):
        unseal(SEALED + b"\n")


def test_a_file_states_its_format_the_previous_one_is_read_and_a_newer_one_is_refused(tmp_path):
    """Every sealed file goes through these two functions, so none can be without its version."""
    path = tmp_path / "note.json"
    path.write_bytes(SEALED)
    assert read_sealed(path) == CONTENT, "as written before formats were numbered"
    write_sealed(path, CONTENT)
    assert unseal(path.read_bytes()) == {"format": 1, **CONTENT}
    assert read_sealed(path) == CONTENT
    write_sealed(path, CONTENT, format_=2)
    newer = path.read_bytes()
    with pytest.raises(FormatVersionError, match="has format 2 and this version reads 1"):
        read_sealed(path)
    assert path.read_bytes() == newer


def test_content_cannot_replace_the_files_own_format(tmp_path):
    """A key of that name would make a file that its writer takes for one of a newer version."""
    with pytest.raises(AssertionError, match="own format"):
        write_sealed(tmp_path / "note.json", {"format": "csv"})
