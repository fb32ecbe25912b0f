"""Every command of this extension that may take more than 5 s says what it does and how far it is."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from tests.support.activity import Told, check_steps, commands_of
from tests.support.homes import Dataset
from tests.support.scripted_engine import scripted_engine  # noqa: F401 - a fixture
from vlm_results import explore, review_page, search, word_index


def by_vectors(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """The made vectors count as those of the embedding model that is set."""
    monkeypatch.setattr(word_index, "_PARTITIONS_TOGETHER", 1)
    for module in (search, explore):
        monkeypatch.setattr(module, "comparable", lambda settings, records: (records, []))
    monkeypatch.setattr(search, "embed_text", lambda settings, text: np.array([1, 0], np.float32))
    monkeypatch.setattr(explore, "_with_places", lambda table: table)
    monkeypatch.setattr(explore, "export_page", lambda shown, folder: None)


def without_a_page(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(review_page, "serve_page", lambda page, **options: None)


TELLS: Mapping[str, Told] = {
    "changes": Told("changes", {"comparing partitions": -1}),
    "explore": Told(
        "explore --export FOLDER/page",
        {"reading which properties have a vector, partitions": 3, "reading the sample, partitions": 3},
        by_vectors,
    ),
    "export": Told("export FOLDER/out", {"writing partitions": 3, "reading each file once more": 3}),
    "review": Told("review --sample 9", {"drawing the sample from partitions": -1}, without_a_page),
    "search": Told(
        "search missing",
        {"reading words of partitions": 3, "comparing with the vectors of partitions": 3},
        by_vectors,
    ),
}


def test_each_command_tells_how_far_it_is() -> None:
    """A new command is put into the list: nobody waits before an empty line."""
    assert TELLS.keys() == commands_of("vlm_results")


@pytest.mark.parametrize("name", TELLS)
def test_a_command_says_what_it_does_and_how_far_it_is(name, dataset, steps, monkeypatch, receiver, request):
    """Each command over a small home: what takes long is said, up to the last of what can be counted."""
    check_steps(name, TELLS[name], dataset, steps, monkeypatch, receiver, request)
