"""resources/storage/sealed_json.py: JSON whose every byte is protected."""

import json

import pytest

from resources.storage.sealed_json import BrokenSealError, seal, unseal

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
        damaged = bytearray(SEALED)
        damaged[place] ^= 1 << bit
        with pytest.raises(BrokenSealError):
            unseal(bytes(damaged))


def test_every_truncation_and_a_longer_file_are_noticed():
    """A file cut anywhere, or with anything after its end, is not what was written."""
    for size in range(len(SEALED)):
        with pytest.raises(BrokenSealError):
            unseal(SEALED[:size])
    with pytest.raises(BrokenSealError):
        unseal(SEALED + b"\n")
