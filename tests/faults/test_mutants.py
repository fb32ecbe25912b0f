"""The list of mutants fits the sources: each takes out exactly one place, and what is left is Python."""

import pytest

from faults.mutations import (
    catalog_mutants,
    decision_mutants,
    journal_mutants,
    publication_mutants,
    store_mutants,
)
from faults.mutations.__main__ import CHECKOUT

BY_FILE = (catalog_mutants, decision_mutants, store_mutants)
MUTANTS = (
    *journal_mutants.MUTANTS,
    *publication_mutants.MUTANTS,
    *(mutant for part in BY_FILE for mutant in part.MUTANTS),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.promise)
def test_a_mutant_takes_out_one_safeguard(mutant):
    """A safeguard that moved must not leave the list in silence."""
    assert mutant.applied(CHECKOUT) != (CHECKOUT / mutant.file).read_text()


def test_no_mutant_is_listed_twice():
    """Each stands for a promise of its own."""
    assert len({mutant.promise for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("part", BY_FILE)
def test_every_file_has_tests_that_hold_it(part):
    """A file whose mutants are listed under no tests would be passed over."""
    assert {mutant.file for mutant in part.MUTANTS} == set(part.TESTS)
    for tests in part.TESTS.values():
        for name in tests:
            path, _, function = name.partition("::")
            assert f"def {function}" in (CHECKOUT / path).read_text()
