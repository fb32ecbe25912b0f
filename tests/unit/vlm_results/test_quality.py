"""Quality counts the answers, and names odd ones with their partition and examples."""

import random
from statistics import fmean
from typing import ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import BaseModel

from vlm_assets.services.command_error import CommandError
from vlm_durable.versions.partition_files import PublishedRecord
from vlm_durable.versions.published import PublishedPartitions
from vlm_engine.schema import DescriptionSchema
from vlm_results import quality
from vlm_results.dataset_quality import quality_picture
from vlm_results.quality import (
    FAILURE,
    FieldAnswers,
    FieldSummary,
    PartitionSummary,
    assess_quality,
    judge,
    summarize,
)

ROWS = 200


class Rooms(BaseModel):
    """A part of the schema."""

    count: int
    heated: bool | None


class House(BaseModel):
    """The schema of these tests."""

    CONTRADICTIONS: ClassVar = {"a bungalow with floors": "kind = 'bungalow' AND floors > 1"}

    kind: Literal["bungalow", "villa", "flat"]
    floors: int
    rooms: Rooms
    summary: str


SCHEMA = DescriptionSchema(House)


def write(folder, number, answer, failed=0):
    """The file of a partition whose descriptions ``answer`` makes from (chance, row)."""
    chance = random.Random(number)
    rows = [answer(chance, row) for row in range(ROWS)]
    table = pa.table(
        {
            "property_id": [f"{number}-{row}" for row in range(ROWS + failed)],
            "status": ["ok"] * ROWS + ["failed"] * failed,
            "error_kind": [None] * ROWS + ["no_image"] * failed,
            "description": pa.array([*rows, *[None] * failed], SCHEMA.arrow_type),
        }
    )
    path = folder / f"{number}.parquet"
    pq.write_table(table, path)
    return path


def usual(chance, row):
    kind = chance.choices(["bungalow", "villa", "flat"], [5, 3, 2])[0]
    floors = 1 if kind == "bungalow" else chance.randint(1, 4)
    rooms = {"count": chance.randint(1, 8), "heated": chance.choice([True, False, None])}
    return {"kind": kind, "floors": floors, "rooms": rooms, "summary": f"House {chance.random()}"}


def look(tmp_path, answers, *, truth=None, conditions=None, failed=()):
    paths = [
        write(tmp_path, number, answer, dict(failed).get(number, 0)) for number, answer in enumerate(answers)
    ]
    summaries = [
        summarize(
            path, SCHEMA, PublishedRecord(path.stem, 1, "", 0, ROWS, "", "", f"2026-01-{number + 1:02d}"),
            conditions=House.CONTRADICTIONS if conditions is None else conditions, truth=truth or {},
        )
        for number, path in enumerate(paths)
    ]  # fmt: skip
    return judge(
        summaries,
        path_of=lambda key, _: tmp_path / f"{key}.parquet",
        conditions=House.CONTRADICTIONS if conditions is None else conditions,
    )


def test_partitions_that_differ_by_chance_are_not_named(tmp_path):
    """Forty partitions of the same kind, each field drawn anew: nothing is odd, and all is counted."""
    found = look(tmp_path, [usual] * 40)
    assert found.findings == ()
    assert found.ok == 40 * ROWS
    assert set(found.fields) == {"kind", "floors", "rooms.count", "rooms.heated", "summary"}
    assert sum(found.fields["kind"].counts.values()) == 40 * ROWS
    assert 0.2 < found.fields["rooms.heated"].nulls / found.ok < 0.45
    assert quality_picture(found).startswith(b"\x89PNG")


@pytest.mark.parametrize("together", [quality._TOGETHER, 4])
def test_a_partition_that_answers_otherwise_is_named_with_field_and_examples(tmp_path, monkeypatch, together):
    """One of twelve says 'flat' nearly always: a person gets its key, the field and three examples.

    Some partitions at a time are compared as all at once would be.
    """
    monkeypatch.setattr(quality, "_TOGETHER", together)

    def odd(chance, row):
        return usual(chance, row) | ({"kind": "flat"} if row % 4 else {})

    (one,) = look(tmp_path, [usual] * 5 + [odd] + [usual] * 6, conditions={}).findings
    assert (one.check, one.key, one.field) == ("alike", "5", "kind")
    assert "'flat'" in one.sentence
    assert len(one.examples) == 3
    assert all(example.startswith("5-") for example in one.examples)


def test_a_partition_with_many_failures_is_named(tmp_path):
    """Kinds of failure are compared as answers are."""
    (one,) = look(tmp_path, [usual] * 8, failed={3: 120}).findings
    assert (one.key, one.field) == ("3", FAILURE)
    assert "no_image" in one.sentence


def test_answers_that_never_vary_and_texts_that_repeat_are_named(tmp_path):
    """A model that says the same of everything is seen, whatever the partition."""

    def dull(chance, row):
        varied = usual(chance, row)
        rooms = {"count": varied["rooms"]["count"], "heated": None}
        return varied | {"floors": 1, "rooms": rooms, "summary": "A house." if row % 3 else varied["summary"]}

    found = look(tmp_path, [dull] * 4)
    assert {one.field for one in found.findings_of("answers")} == {"floors", "rooms.heated", "summary"}


def test_contradictions_that_the_schema_names_are_found(tmp_path):
    """The user's condition over the fields is asked of each description, and nothing else can be asked."""

    def contradicts(chance, row):
        return usual(chance, row) | ({"kind": "bungalow", "floors": 3} if row == 7 else {})

    (one,) = look(tmp_path, [usual, contradicts]).findings_of("consistent")
    assert one.examples == ("1-7",)
    for condition in ("no_such_field = 1", "1 = (SELECT count(*) FROM read_csv('/etc/passwd'))"):
        with pytest.raises(CommandError, match="no condition"):
            look(tmp_path, [usual], conditions={"odd": condition})


def test_agreement_with_the_truth_comes_with_an_interval(tmp_path):
    """Of the properties in the truth file, the share that is right, per field, and how sure that is."""
    answers = {f"0-{row}": usual(random.Random(0), row) for row in range(1)}
    right = {"0-0": {"kind": answers["0-0"]["kind"]}, "0-1": {"kind": "castle"}, "9-9": {"kind": "flat"}}
    found = look(tmp_path, [usual], truth=right)
    share = found.agreement["kind"]
    assert (share.share, share.total) == (0.5, 2)
    assert 0.0 <= share.low < 0.2 < 0.8 < share.high <= 1.0
    assert found.agreement.keys() == {"kind"}


def test_a_second_look_reads_what_is_new_alone(dataset, monkeypatch):
    """Thousands of partitions are summarized once: neither their rows nor their records are read again."""
    monkeypatch.setattr(quality, "_TOGETHER", 2)  # What is kept comes in pages.
    before = assess_quality(dataset.settings, dataset.catalog)
    assert before.ok + sum(before.failed.values()) == dataset.catalog.rows
    read, recorded = [], []

    def counted(file, *rest, **named):
        read.append(file.stem)
        return summarize(file, *rest, **named)

    monkeypatch.setattr(quality, "summarize", counted)
    record = PublishedPartitions.record
    monkeypatch.setattr(
        PublishedPartitions, "record", lambda self, key: recorded.append(key) or record(self, key)
    )
    again = assess_quality(dataset.settings, dataset.catalog)
    assert (again.published, again.ok, again.failed) == (before.published, before.ok, before.failed)
    for name, one in before.fields.items():
        assert (again.fields[name].counts, again.fields[name].nulls) == (one.counts, one.nulls)
    assert (read, recorded) == ([], [])
    key = dataset.keys[1]
    dataset.describe(key, lambda rows: [{**row, "error": "again"} for row in rows])
    recorded.clear()
    assess_quality(dataset.settings, dataset.catalog)
    assert (read, recorded) == ([key], [key])


def counted(random, odd, *, partitions=200, rows=60, often=0.85):
    """Summaries of partitions with three fields of yes and no. The first ``odd`` say yes too often in one."""
    for number in range(partitions):
        fields = {}
        for name in ("first", "second", "third"):
            yes = int(random.binomial(rows, often if name == "first" and number < odd else 0.5))
            counts = {answer: count for answer, count in (("yes", yes), ("no", rows - yes)) if count}
            fields[name] = FieldSummary("values", 0, counts, 0, 0)
        yield PartitionSummary(str(number), "2026-01-01", rows, {}, fields, {})


def named(summaries):
    return {(one.key, one.field) for one in judge(summaries).findings_of("alike")}


def test_the_share_of_false_alarms_is_the_one_that_is_set(monkeypatch):
    """Of what is named, at most that share differs by chance (Benjamini and Hochberg), and the rest is found.

    600 comparisons, fifteen of them truly odd, drawn forty times. Set to 10% it can be measured.
    """
    monkeypatch.setattr(quality, "LEAST_DISTANCE", 0.0)
    random, false_shares, powers = np.random.default_rng(5), [], []
    monkeypatch.setattr(quality, "_ERROR_RATE", 0.1)
    for _ in range(40):
        found = named(counted(random, 15))
        truly = {one for one in found if one[1] == "first" and int(one[0]) < 15}
        false_shares.append(1 - len(truly) / len(found))
        powers.append(len(truly) / 15)
    # 0.1 of those that are not odd; without a correction it is four fifths, with Bonferroni's next to none.
    assert 0.05 < fmean(false_shares) < 0.13
    assert fmean(powers) > 0.97
    monkeypatch.undo()
    as_set = [named(counted(random, odd)) for odd in (0, 15) for _ in range(10)]
    assert not any(as_set[:10])
    assert {one[1] for one in set().union(*as_set)} == {"first"}
    assert fmean(len(found) for found in as_set[10:]) > 0.8 * 15


def test_many_odd_partitions_are_found_together_that_one_by_one_would_pass_for_chance(monkeypatch):
    """What is named is the rule of 1995, applied by hand; Bonferroni's would find half of it."""
    monkeypatch.setattr(quality, "LEAST_DISTANCE", 0.0)
    summaries = list(counted(np.random.default_rng(6), 60, often=0.8))
    whole = judge(summaries)
    chances = {
        (whole_key, name): one.chance
        for name, answers in whole.fields.items()
        for one in answers.compare_partitions()
        for whole_key in [list(whole.published)[one.partition]]
    }
    in_order = sorted(chances, key=chances.__getitem__)
    passed = [rank for rank, one in enumerate(in_order, 1) if chances[one] <= 0.001 * rank / len(chances)]
    assert named(summaries) == set(in_order[: max(passed)])
    bonferroni = [one for one in chances.values() if one <= 0.001 / len(chances)]
    assert max(passed) > 1.5 * len(bonferroni) > 0


def test_odd_by_a_little_is_not_named_however_sure_it_is():
    """A difference of 10 points in 5,000 rows is certain, and no reason to look at a partition."""
    random = np.random.default_rng(7)
    assert named(counted(random, 1, rows=5000, often=0.6)) == set()
    assert named(counted(random, 1, rows=5000, often=0.7)) == {("0", "first")}


@pytest.mark.parametrize("shares", [(0.6, 0.4), (0.5, 0.3, 0.2), (0.25, 0.25, 0.25, 0.245, 0.005)])
def test_the_chance_of_a_partition_is_a_chance(shares):
    """Where all partitions are alike, 5% have a chance of at most 5%, also with a value that is rare."""
    random, answers = np.random.default_rng(8), FieldAnswers("values")
    for number in range(1500):
        drawn = random.multinomial(100, shares)
        answers.add(number, {str(value): int(count) for value, count in enumerate(drawn) if count})
    chances = np.array([one.chance for one in answers.compare_partitions()])
    assert len(chances) == 1500
    for limit in (0.5, 0.05):
        assert np.mean(chances <= limit) == pytest.approx(limit, rel=0.3 if limit < 0.1 else 0.1)
    assert np.mean(chances <= 0.001) < 0.005


def test_a_few_rows_are_not_held_against_a_partition():
    """Forty properties that are all alike are a street and no mistake: they are not compared."""
    random = np.random.default_rng(9)
    few = PartitionSummary(
        "few", "2026-01-01", 40, {}, {"first": FieldSummary("values", 0, {"yes": 40}, 0, 0)}, {}
    )
    enough = PartitionSummary(
        "enough", "2026-01-01", 60, {}, {"first": FieldSummary("values", 0, {"yes": 60}, 0, 0)}, {}
    )
    assert named([*counted(random, 0), few, enough]) == {("enough", "first")}
