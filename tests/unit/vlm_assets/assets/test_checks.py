"""The checks find what is wrong in a staged file, and say it with numbers and ids."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlm_assets.assets.checks import (
    DESCRIPTION_CHECKS,
    EMBEDDING_CHECKS,
    Acceptance,
    CheckOutcome,
    FailedShareLimits,
    Severity,
    check_descriptions,
    check_embeddings,
    check_result,
)
from vlm_durable.journal.segments import later_column

KEY = "000000000-000000009"
IDS = [f"p{number}" for number in range(10)]
LIMITS = FailedShareLimits(error=0.2)
DESCRIPTIONS = pa.schema(
    [
        ("property_id", pa.string()),
        ("ordinal", pa.int64()),
        ("status", pa.string()),
        ("error_kind", pa.string()),
        ("description", pa.struct([("roof", pa.string())])),
        ("images_not_used", pa.list_(pa.string())),
        ("fingerprint", pa.string()),
    ]
)
EMBEDDINGS = pa.schema(
    [
        ("property_id", pa.string()),
        ("ordinal", pa.int64()),
        ("status", pa.string()),
        ("embedding", pa.list_(pa.float32(), 4)),
        ("fingerprint", pa.string()),
    ]
)


def descriptions(path, ids=IDS, failed=(), schema=DESCRIPTIONS, roof=str, not_used=()):
    rows = [
        {
            "property_id": one,
            "ordinal": ordinal,
            "status": "failed" if one in failed else "ok",
            "error_kind": "missing" if one in failed else None,
            "description": None if one in failed else {"roof": roof(ordinal)},
            "images_not_used": ["13.jpg", "14.jpg"] if one in not_used else [],
        }
        for ordinal, one in enumerate(ids)
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return path


def embeddings(path, vectors, ids=IDS, failed=()):
    rows = [
        {
            "property_id": one,
            "ordinal": ordinal,
            "status": "failed" if one in failed else "ok",
            "embedding": None if one in failed else list(vector),
        }
        for ordinal, (one, vector) in enumerate(zip(ids, vectors, strict=True))
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=EMBEDDINGS), path)
    return path


def vectors():
    return np.random.default_rng(3).normal(size=(len(IDS), 4)).astype("float32")


def failing(outcomes):
    return {outcome.name: outcome for outcome in outcomes if not outcome.passed}


@pytest.fixture
def described(tmp_path):
    return descriptions(tmp_path / "described.parquet")


def test_a_sound_file_passes_every_check(tmp_path, described):
    """Every check that is declared to Dagster is run, and a sound file passes all of them."""
    found = check_descriptions(described, IDS, DESCRIPTIONS, LIMITS, key=KEY)
    assert [one.name for one in found] == list(DESCRIPTION_CHECKS)
    assert failing(found) == {}
    staged = embeddings(tmp_path / "staged", vectors())
    found = check_embeddings(staged, IDS, EMBEDDINGS, described, key=KEY)
    assert [one.name for one in found] == list(EMBEDDING_CHECKS)
    assert failing(found) == {}


ODD_FILES = {
    # What is odd, the checks that fail with what they found, and the properties that the first of them names.
    "a swapped id, though the count is right": (
        {"ids": [*IDS[:-1], "intruder"]},
        {"ids_conserved": "1 missing, 1 foreign"},
        ("intruder", "p9"),
    ),
    "a repeated row": ({"ids": [*IDS, "p3"]}, {"unique_ids": "", "row_count": ""}, ("p3",)),
    "a missing property behind a repeated one, and the count is right": (
        {"ids": [*IDS[:-1], "p3"]},
        {"ids_conserved": "1 missing, 0 foreign", "unique_ids": ""},
        ("p3", "p9"),
    ),
    "another column type, with which no row can be counted": (
        {"schema": DESCRIPTIONS.set(1, pa.field("ordinal", pa.int32()))},
        {"row_schema": "ordinal: int32 where int64 belongs"},
        (),
    ),
}


@pytest.mark.parametrize(("odd", "expected", "named"), ODD_FILES.values(), ids=ODD_FILES)
def test_a_file_with_other_rows_is_not_published(tmp_path, odd, expected, named):
    """The check of ids compares sets and names what differs. Where rows can be read, no other check fails."""
    staged = descriptions(tmp_path / "staged", **odd)
    found = failing(check_descriptions(staged, IDS, DESCRIPTIONS, LIMITS, key=KEY))
    assert found.keys() == expected.keys() or "row_schema" in expected
    assert all(found[name].actual.startswith(actual) for name, actual in expected.items())
    assert all(found[name].stops_publication for name in expected)
    assert found[next(iter(expected))].first_ids == named


def test_an_unknown_status_is_not_terminal(tmp_path):
    """Each property ends as ok or failed; anything else is not conserved."""
    table = pq.read_table(descriptions(tmp_path / "sound"))
    statuses = pa.array(["pending", None, *["ok"] * 8])
    pq.write_table(table.set_column(2, "status", statuses), tmp_path / "staged")
    found = failing(check_descriptions(tmp_path / "staged", IDS, DESCRIPTIONS, LIMITS, key=KEY))
    assert "2 neither ok nor failed" in found["ids_conserved"].actual


def test_a_file_of_an_earlier_version_lacks_a_column_and_passes(tmp_path, described):
    """What was published before rows had a confidence is verified as it was."""
    newer = DESCRIPTIONS.append(later_column("confidence", pa.struct([("roof", pa.float32())])))
    assert failing(check_descriptions(described, IDS, newer, LIMITS, key=KEY)) == {}
    other = DESCRIPTIONS.append(pa.field("confidence", pa.float32()))
    staged = descriptions(tmp_path / "staged", schema=other)
    found = failing(check_descriptions(staged, IDS, newer, LIMITS, key=KEY))
    assert found["row_schema"].actual == "confidence: float where struct<roof: float> belongs"


@pytest.mark.parametrize(
    ("failed", "passed", "severity"),
    [
        (0, True, Severity.WARN),
        (1, True, Severity.WARN),  # one bad listing of ten is 10%, and still no alarm
        (2, False, Severity.ERROR),
    ],
)
def test_the_share_of_failed_rows_is_judged_from_two_rows(tmp_path, failed, passed, severity):
    """One failed row is never an alarm; from the error share on the partition is not published."""
    staged = descriptions(tmp_path / "staged", failed=IDS[:failed])
    outcome = check_descriptions(staged, IDS, DESCRIPTIONS, LIMITS, key=KEY)[-1]
    assert (outcome.passed, outcome.severity) == (passed, severity)
    assert outcome.first_ids == tuple(IDS[:failed])
    assert not LIMITS.refuse(min(failed, 1), 2), "one of two is half of them, and still one broken listing"


@pytest.mark.parametrize(("failed", "severity"), [(3, Severity.WARN), (4, Severity.ERROR)])
def test_failed_rows_that_a_person_accepted_only_warn(tmp_path, failed, severity):
    """So many as were accepted, and no more. The warning says when; a refusal alone names the command."""
    limits = replace(LIMITS, accepted=Acceptance(3, "ada", "2026-11-22T14:00:00+00:00"))
    staged = descriptions(tmp_path / "staged", failed=IDS[:failed])
    outcome = check_descriptions(staged, IDS, DESCRIPTIONS, limits, key=KEY)[-1]
    assert not outcome.passed
    assert outcome.severity is severity
    assert "VLM_ASSETS_FAILED_SHARE" in outcome.sentence()
    assert "ada accepted 3 at 2026-11-22T14:00:00+00:00" in outcome.sentence()
    assert "To try them again: " in outcome.sentence()
    offered = f"vlm-assets run {KEY} --accept-failed" in outcome.sentence()
    assert offered == (severity is Severity.ERROR)


def test_images_beyond_the_limit_warn_and_name_the_setting(tmp_path):
    """What the model was not shown is said, with the setting; it keeps nothing from being published."""
    staged = descriptions(tmp_path / "staged", not_used=IDS[3:5])
    found = failing(check_descriptions(staged, IDS, DESCRIPTIONS, LIMITS, key=KEY))
    assert list(found) == ["images_used"]
    assert not found["images_used"].stops_publication
    assert "4 images of 2 properties" in found["images_used"].sentence()
    assert "VLM_ASSETS_MAX_IMAGES" in found["images_used"].sentence()
    assert found["images_used"].first_ids == ("p3", "p4")


def test_a_small_share_of_failed_rows_warns_and_publishes(tmp_path):
    """Between the two limits the check is a warning: shown, neither red nor stopping."""
    ids = [f"p{number:03d}" for number in range(100)]
    staged = descriptions(tmp_path / "staged", ids, failed=ids[:2])
    outcome = check_descriptions(staged, ids, DESCRIPTIONS, LIMITS, key=KEY)[-1]
    assert not outcome.passed
    assert outcome.severity is Severity.WARN
    assert not outcome.stops_publication
    assert "2 of 100 failed, 2.0% (2 missing)" in outcome.sentence()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0])
def test_an_unsound_vector_is_found_and_named(tmp_path, described, bad):
    """A vector that is not finite, or zero, would poison every search."""
    spoiled = vectors()
    spoiled[4] = bad
    staged = embeddings(tmp_path / "staged", spoiled)
    found = failing(check_embeddings(staged, IDS, EMBEDDINGS, described, key=KEY))
    assert found["vectors_sound"].first_ids == ("p4",)


def test_vectors_that_are_all_alike_are_found(tmp_path, described):
    """A broken model that gives one vector for everything is stopped, though each vector looks sound."""
    staged = embeddings(tmp_path / "staged", np.ones((len(IDS), 4), "float32"))
    found = failing(check_embeddings(staged, IDS, EMBEDDINGS, described, key=KEY))
    assert found["vectors_sound"].actual == "all alike, for descriptions that differ"


def test_descriptions_that_are_alike_may_have_vectors_that_are_alike(tmp_path):
    """A range of flats described word for word alike is no fault of the embedding model."""
    described = descriptions(tmp_path / "described.parquet", roof=lambda _: "flat")
    staged = embeddings(tmp_path / "staged", np.ones((len(IDS), 4), "float32"))
    assert failing(check_embeddings(staged, IDS, EMBEDDINGS, described, key=KEY)) == {}


def test_a_failed_description_has_no_vector_and_that_is_sound(tmp_path):
    """A failed row has a null vector; an ok row without one, or the reverse, does not match."""
    described = descriptions(tmp_path / "described.parquet", failed=["p2"])
    good = embeddings(tmp_path / "good", vectors(), failed=["p2"])
    assert failing(check_embeddings(good, IDS, EMBEDDINGS, described, key=KEY)) == {}
    other = embeddings(tmp_path / "other", vectors(), failed=["p3"])
    found = failing(check_embeddings(other, IDS, EMBEDDINGS, described, key=KEY))
    assert set(found) == {"matches_descriptions"}
    assert found["matches_descriptions"].first_ids == ("p2", "p3")


def test_an_id_that_is_markup_is_text_on_the_page_of_a_check():
    """Dagster's pages take a description for markdown, so an id fetched an image from anywhere."""
    found = CheckOutcome("f", passed=False, expected="none", actual="1 bad_kind", first_ids=("![x](y)",))
    assert check_result("a", found).description == r"Expected none; found 1 bad\_kind. First: '\!\[x\](y)'."
