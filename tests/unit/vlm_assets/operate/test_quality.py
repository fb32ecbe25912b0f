"""Quality counts the answers, and names odd ones with their partition and examples."""

import random
from typing import ClassVar, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import BaseModel

from resources.engine.schema import DescriptionSchema
from resources.publishing.published import PublishedPartitions
from vlm_assets.automation.dataset_quality import quality_picture
from vlm_assets.operate import quality
from vlm_assets.operate.quality import FAILURE, judge, look_at_quality, summarize
from vlm_assets.operate.terminal import CommandError

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
            path, SCHEMA, path.stem, f"2026-01-{number + 1:02d}",
            conditions=House.CONTRADICTIONS if conditions is None else conditions, truth=truth or {},
        )
        for number, path in enumerate(paths)
    ]  # fmt: skip
    return judge(
        summaries,
        path_of=lambda key: tmp_path / f"{key}.parquet",
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
    assert {one.field for one in found.of_check("answers")} == {"floors", "rooms.heated", "summary"}


def test_contradictions_that_the_schema_names_are_found(tmp_path):
    """The user's condition over the fields is asked of each description, and nothing else can be asked."""

    def contradicts(chance, row):
        return usual(chance, row) | ({"kind": "bungalow", "floors": 3} if row == 7 else {})

    (one,) = look(tmp_path, [usual, contradicts]).of_check("consistent")
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
    assert (share.share, share.of) == (0.5, 2)
    assert 0.0 <= share.low < 0.2 < 0.8 < share.high <= 1.0
    assert found.agreement.keys() == {"kind"}


def test_a_second_look_reads_what_is_new_alone(dataset, monkeypatch):
    """Thousands of partitions are summarized once: neither their rows nor their records are read again."""
    monkeypatch.setattr(quality, "_TOGETHER", 2)  # What is kept comes in pages.
    before = look_at_quality(dataset.settings, dataset.catalog)
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
    again = look_at_quality(dataset.settings, dataset.catalog)
    assert (again.published, again.ok, again.failed) == (before.published, before.ok, before.failed)
    for name, one in before.fields.items():
        assert (again.fields[name].counts, again.fields[name].nulls) == (one.counts, one.nulls)
    assert (read, recorded) == ([], [])
    key = dataset.keys[1]
    dataset.describe(key, lambda rows: [{**row, "error": "again"} for row in rows])
    recorded.clear()
    look_at_quality(dataset.settings, dataset.catalog)
    assert (read, recorded) == ([key], [key])
