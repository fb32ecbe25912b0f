"""What is planned with is what there is, in a container too."""

import os

import pytest

from resources import machine_memory


@pytest.mark.parametrize(("limit", "known"), [("max\n", None), ("4294967296\n", 4 << 30), (None, None)])
def test_a_containers_limit_counts(limit, known, tmp_path, monkeypatch):
    """A container of 4 GiB on a large machine has 4 GiB; without a limit it is the machine's memory."""
    file = tmp_path / "memory.max"
    if limit is not None:
        file.write_text(limit)
    monkeypatch.setattr(machine_memory, "_LIMITS", (file,))
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert machine_memory.memory_bytes() == (whole if known is None else min(known, whole))
