"""A question set with a condition: asked of the properties for which it holds, after what it looks at."""

import json
import shutil
from pathlib import Path
from typing import ClassVar

import pyarrow.parquet as pq
import pytest

from resources.dagster_names import NEEDS_PERSON
from resources.vision_language_model import VisionLanguageModel
from tests.support.desks import KEY, Desk, settings_of
from tests.support.homes import Condition
from tests.support.scripted_models import ScriptedEngine
from vlm_assets.assets.checks import FailedShareLimits, check_descriptions
from vlm_assets.assets.description_work import DescriptionWork
from vlm_assets.assets.looked_at import LookedAt, asked_shares
from vlm_assets.assets.materialize import Materialization
from vlm_assets.assets.partition import NOT_ASKED, OK
from vlm_assets.assets.partition_state import PartitionStates, State
from vlm_assets.config.question_sets import question_sets
from vlm_assets.config.resource_settings import build_vision_language_model
from vlm_assets.config.where import WhereError
from vlm_assets.services.home_audit import audit
from vlm_assets.services.repairs import Remedy, find_repairs
from vlm_assets.services.status import read_status
from vlm_assets.services.withdrawal import prepare_withdrawal, withdraw
from vlm_catalog.catalog import Catalog
from vlm_durable.versions.findings import FindingKind
from vlm_engine.protocol import Answer

DESCRIPTIONS, CONDITION = "property_descriptions", "property_condition"


class Asking(ScriptedEngine):
    """Says of the tall ones that they have four floors. asked: the properties of each set, in order."""

    tall: ClassVar[set[str]] = set()
    asked: ClassVar[dict[str, list[str]]] = {}
    speechless: ClassVar[set[str]] = set()

    def __init__(self, source, schema):
        super().__init__(source, None)
        self.asset = CONDITION if "wear" in schema.json_schema["properties"] else DESCRIPTIONS

    def describe(self, batch, *, attempt):
        ids = [loaded.property_id for loaded in batch]
        Asking.asked.setdefault(self.asset, []).extend(ids)
        if self.asset == CONDITION:
            answer = json.dumps({"wear": "little", "needs_paint": False})
            return [Answer("" if of in Asking.speechless else answer, "stop", 8, 10) for of in ids]
        answers = super().describe(batch, attempt=attempt)
        return [
            Answer(
                json.dumps({**json.loads(answer.text), "floors": 4 if of in Asking.tall else 2}), "stop", 8, 9
            )
            for of, answer in zip(ids, answers, strict=True)
        ]


def load(model, device, *, schema, prompt, further=()) -> Asking:
    return Asking(model.source, schema)


@pytest.fixture
def ask(desk, tmp_path, monkeypatch, published_home):
    """Makes homes whose set `condition` is asked where this holds; `Asking` notes what was asked.

    The descriptions are published; the first three properties are tall.
    """
    monkeypatch.setattr(VisionLanguageModel, "load", load)
    monkeypatch.setattr(Asking, "tall", set(ids_of(desk)[:3]))
    monkeypatch.setattr(Asking, "asked", {})
    monkeypatch.setattr(Asking, "speechless", set())
    shutil.copytree(published_home(DESCRIPTIONS), desk.settings.home, dirs_exist_ok=True)
    return lambda where: asking(desk, tmp_path / "questions.yaml", where)


def asking(desk: Desk, file: Path, where: str) -> Desk:
    line = f"  where: {json.dumps(where)}\n" if where else ""
    file.write_text(f"condition:\n  schema: {Condition.__module__}:{Condition.__name__}\n{line}")
    return Desk(settings_of(desk.settings.home, questions=file), desk.instance)


def ids_of(desk: Desk) -> list[str]:
    """The properties of the first range, in the catalogue's order."""
    catalog = Catalog.open(desk.settings.home)
    return catalog.slice(catalog.ranges[0])["property_id"].to_pylist()


def statuses(desk: Desk) -> dict[str, str]:
    rows = pq.read_table(desk.settings.layout.asset(CONDITION).partition(KEY).published)
    return dict(zip(rows["property_id"].to_pylist(), rows["status"].to_pylist(), strict=True))


def asked_now(desk: Desk, **how) -> list[str]:
    """Materialize the set; gives the properties that it was asked."""
    Asking.asked.clear()
    done = desk.materialize(CONDITION, **how)
    assert done.success, done.failure
    return sorted(Asking.asked.get(CONDITION, []))


def state_of(desk: Desk):
    return PartitionStates(desk.settings, Catalog.open(desk.settings.home)).read(CONDITION, KEY)


def test_only_those_for_which_it_holds_are_asked_and_all_others_are_counted(ask):
    """Every property has its row: an answer, or that it was not asked."""
    desk = ask("floors > 3")
    ids = ids_of(desk)
    assert asked_now(desk) == sorted(ids[:3])
    assert statuses(desk) == {of: OK if of in ids[:3] else NOT_ASKED for of in ids}
    assert state_of(desk).state is State.DONE
    counts = audit(desk.settings, Catalog.open(desk.settings.home), deep=True)
    total = counts.total(CONDITION)
    assert (total.ok, total.failed, total.not_asked, total.unsettled) == (3, 0, 5, 0)
    assert counts.ok, counts.wrong
    of_set = read_status(desk.settings, Catalog.open(desk.settings.home)).further[0]
    assert (of_set.ok, of_set.not_asked, of_set.failed_by_kind) == (3, 5, {})
    assert asked_now(desk) == [], "it is complete"


def test_where_it_holds_for_none_no_device_is_needed(ask):
    """A row that says that nothing was asked costs no model."""
    desk = ask("floors > 100").changed(devices="cpu:1")
    assert asked_now(desk) == []
    assert set(statuses(desk).values()) == {NOT_ASKED}


def test_other_answers_are_followed_and_what_was_answered_is_kept(ask):
    """Described anew, one property is tall that was not, and one is no more: one is asked, none again."""
    desk = ask("floors > 3")
    ids = ids_of(desk)
    asked_now(desk)
    Asking.tall.remove(ids[0])
    Asking.tall.add(ids[4])
    done = desk.materialize(DESCRIPTIONS, config={"recompute": True})
    assert done.success, done.failure
    before = state_of(desk)
    assert (before.state, before.changed, before.is_complete) == (State.STALE, ("looked_at",), False)
    stale = read_status(desk.settings, Catalog.open(desk.settings.home)).stale
    assert not stale.keys, "it is made without asking a person"
    assert asked_now(desk, config={"stale": "keep"}) == [ids[4]]
    assert statuses(desk) == {of: OK if of in (*ids[1:3], ids[4]) else NOT_ASKED for of in ids}
    assert state_of(desk).state is State.DONE


def test_a_wider_condition_asks_the_others_alone_and_none_that_is_gone_keeps_all(ask):
    """Whom a set asks decides no answer: an answered row stays what it is, and nothing is asked twice."""
    desk = ask("floors > 3")
    ids = ids_of(desk)
    asked_now(desk)
    desk = ask("floors > 1")
    state = state_of(desk)
    assert (state.state, state.changed) == (State.STALE, ("where",))
    assert state.why == ("where: floors > 3 -> floors > 1",)
    assert asked_now(desk) == sorted(ids[3:])
    desk = ask("")
    assert state_of(desk).why == ("where: floors > 1 -> all properties",)
    assert asked_now(desk) == []
    assert set(statuses(desk).values()) == {OK}


@pytest.mark.parametrize("later", ["floors > 1", ""])
def test_another_condition_waits_for_a_person_whatever_is_published_meanwhile(ask, later):
    """A condition that was changed or taken away asks nobody whom no person agreed to ask."""
    desk = ask("floors > 3")
    ids = ids_of(desk)
    asked_now(desk)
    desk = ask(later)
    Asking.tall.add(ids[4])
    done = desk.materialize(DESCRIPTIONS, config={"recompute": True})
    assert done.success, done.failure
    state = state_of(desk)
    assert (state.state, state.is_complete) == (State.STALE, True)
    assert [finding.kind for finding in state.findings] == [FindingKind.STALE]
    assert read_status(desk.settings, Catalog.open(desk.settings.home)).stale.keys
    assert asked_now(desk, config={"stale": "keep"}) == []
    assert statuses(desk) == {of: OK if of in ids[:3] else NOT_ASKED for of in ids}
    assert asked_now(desk) == sorted(ids[3:]), "a person asked for it"


def test_a_condition_that_is_added_waits_for_a_person(ask):
    """It takes answers out of what readers see: that is no work that a run does by itself."""
    desk = ask("")
    assert asked_now(desk) == sorted(ids_of(desk))
    desk = ask("floors > 3")
    assert state_of(desk).is_complete
    assert asked_now(desk, config={"stale": "keep"}) == []
    assert set(statuses(desk).values()) == {OK}


def test_a_repair_follows_what_it_looks_at_and_asks_nobody_again(ask):
    """A repair keeps the answers of a set whose upstream published other ones: that is no damage."""
    desk = ask("floors > 3")
    ids = ids_of(desk)
    asked_now(desk)
    Asking.tall.add(ids[4])
    done = desk.materialize(DESCRIPTIONS, config={"recompute": True})
    assert done.success, done.failure
    catalog = Catalog.open(desk.settings.home)
    repairs = [
        repair
        for repair in find_repairs(desk.settings, audit(desk.settings, catalog))
        if repair.asset == CONDITION
    ]
    assert [(repair.key, repair.remedy) for repair in repairs] == [(KEY, Remedy.RESUME)]


def test_where_few_are_asked_a_few_failures_keep_no_partition_from_being_published(ask):
    """A set that asks again those that failed may fail with all of them: they are few of the partition."""
    desk = ask("floors > 3").changed(failed_share=0.3)
    ids = ids_of(desk)
    Asking.speechless |= set(ids[:2])
    asked_now(desk)
    assert statuses(desk) == {of: "failed" if of in ids[:2] else NOT_ASKED for of in ids} | {ids[2]: OK}


def test_what_it_looks_at_is_published_first(desk, tmp_path):
    """Rows that are not there are no answer for which a condition does not hold."""
    desk = asking(desk, tmp_path / "questions.yaml", "floors > 3")
    done = desk.materialize(CONDITION)
    assert not done.success
    assert "is not published in" in done.failure
    assert not desk.settings.layout.asset(CONDITION).partition(KEY).published.exists()


def test_a_condition_that_the_answers_do_not_fit_waits_for_a_person(ask):
    """Tried again it would fail alike, in every partition."""
    desk = ask("CAST('no ' || floors AS INTEGER) > 3")
    done = desk.materialize(CONDITION)
    assert "Conversion Error" in done.failure and "Nothing was computed." in done.failure
    assert CONDITION in desk.instance.get_run_by_id(done.result.run_id).tags[NEEDS_PERSON]


def test_a_row_that_was_left_out_or_asked_wrongly_keeps_a_file_from_being_published(ask):
    """The check asks the published answers, whatever made the rows."""
    desk = ask("floors > 3")
    asked_now(desk)
    asked = question_sets(desk.settings)[1]
    catalog = Catalog.open(desk.settings.home)
    model = build_vision_language_model(asked.settings)
    work = DescriptionWork.for_range(asked.settings, catalog, catalog.ranges[0], model)
    file = asked.asset.partition(KEY).published
    left_out = frozenset(work.left_out)

    def failing(left_out):
        limits = FailedShareLimits(error=0.5)
        outcomes = check_descriptions(file, work.ids, work.rows_schema(), limits, key=KEY, left_out=left_out)
        return [outcome.name for outcome in outcomes if not outcome.passed]

    assert failing(left_out) == []
    assert failing(left_out - {min(left_out)}) == ["where_holds"]
    assert failing(left_out | {min(set(work.ids) - left_out)}) == ["where_holds"]
    assert failing(None) == ["ids_conserved"], "a set without a condition asks all"


def test_the_cost_that_is_named_beforehand_is_that_of_those_who_are_asked(ask, monkeypatch):
    """Of a range that is not described yet, or not read, nobody knows: it is taken as the others are."""
    desk = ask("floors > 3")
    of_set = question_sets(desk.settings)[1].settings
    catalog = Catalog.open(desk.settings.home)
    assert asked_shares(of_set, catalog) == {range_.key: 3 / 8 for range_ in catalog.ranges}
    assert asked_shares(desk.settings, catalog) == {}
    monkeypatch.setattr("vlm_assets.assets.looked_at._SAMPLE", 0)
    assert set(asked_shares(of_set, catalog).values()) == {1.0}


def test_a_withdrawn_property_leaves_no_value_behind_and_is_no_property_that_is_not_asked(ask):
    """Its row says that it was withdrawn, and what is made of the answers that are left is what it was."""
    desk = ask("floors > 3")
    ids = ids_of(desk)
    asked_now(desk)
    for _ in withdraw(desk.settings, prepare_withdrawal(desk.settings, [ids[0], ids[5]])):
        pass
    assert ids[0] not in str(statuses(desk)) and ids[5] not in str(statuses(desk))
    assert asked_now(desk, config={"stale": "keep"}) == []
    assert sorted(statuses(desk).values()) == ["failed"] * 2 + [NOT_ASKED] * 4 + [OK] * 2
    assert state_of(desk).state is State.DONE
    audited = audit(desk.settings, Catalog.open(desk.settings.home), deep=True)
    assert audited.ok, audited.wrong


def test_finished_rows_outlive_a_withdrawal_while_what_it_looks_at_cannot_be_read(ask, monkeypatch):
    """Rows of other properties that were paid for are not thrown away with those of the withdrawn one."""
    desk = ask("floors > 3")
    ids = ids_of(desk)
    with monkeypatch.context() as patch:

        def full(*_):
            raise OSError("the disk is full")

        patch.setattr(Materialization, "publish", full)
        assert not desk.materialize(CONDITION).success
    assert sorted(Asking.asked[CONDITION]) == sorted(ids[:3])
    with monkeypatch.context() as patch:

        def unreadable(*_):
            raise WhereError("another schema made them")

        patch.setattr(LookedAt, "read", unreadable)
        for _ in withdraw(desk.settings, prepare_withdrawal(desk.settings, [ids[5]])):
            pass
    assert asked_now(desk) == []
