"""What is stale, why, and what making it anew takes: one answer in the same words."""

import pytest

from vlm_assets.assets.fingerprint import Meanings
from vlm_assets.assets.partition_state import PartitionState, State
from vlm_assets.config.question_sets import question_sets
from vlm_assets.services.expected_cost import SetProgress
from vlm_assets.services.stale_work import stale_among, stale_work
from vlm_assets.services.status import read_status
from vlm_catalog.catalog import Catalog
from vlm_durable.state.rate import Rate

RATE = Rate(rows=10.0, seconds=20.0, by_device={"cuda:0": 5.0, "cuda:1": 5.0})


def of(settings, *states, rate=RATE, share=1.0):
    progress = {settings.descriptions.name: SetProgress(rate, {}, share)}
    return stale_work(settings, states, progress, Meanings.from_settings(settings))


@pytest.fixture
def stale():
    """Makes the state of a stale partition of so many rows."""

    def make(asset, key, rows, changed, why=(), images=0):
        path = asset.partition(key).published
        return PartitionState(
            asset.name, key, path, State.STALE, rows, rows, changed=changed, why=why, new_images=images
        )

    return make


def test_what_changed_counts_with_time_and_price(dataset, stale):
    """All rows where settings changed; where only images did, the properties that have other ones."""
    settings = dataset.settings.model_copy(update={"price_per_hour": 2.0})
    all_of_it = stale(settings.descriptions, "a", 1000, ("model",), ("model: m -> n",))
    some = stale(settings.descriptions, "b", 1000, ("catalogue_slice",), images=200)
    vectors = stale(settings.embeddings, "c", 1000, ("embedding_model",), ("embedding model: e -> f",))
    texts_alone = stale(settings.embeddings, "d", 1000, ("texts",))
    work = of(settings, all_of_it, some, vectors, texts_alone)
    assert (work.keys, work.properties, work.embedded) == (("a", "b", "c"), 1200, 1)
    said = " ".join(work.sentences())
    assert "3 partitions are stale" in said
    assert "1,200 properties, and the vectors of 1 partition." in said
    assert "What changed: model: m -> n (1 partition)." in said
    assert "What changed: images of 200 properties." in said
    assert "That takes 40.0 minutes at the measured rate of 2 devices (0.5/s). Cost: 2.67." in said
    assert f"{settings.home}/.versions" in said


def test_a_partition_that_is_stale_in_two_sets_counts_once(two_sets, stale):
    """They look at its images together: the larger work of the two is what it takes, at the slower rate."""
    settings = two_sets.settings
    first, second = (asked.asset for asked in question_sets(settings))
    slow = Rate(rows=10.0, seconds=80.0, by_device={"cuda:0": 1.25})
    all_of_it, half = stale(first, "a", 1000, ("model",)), stale(second, "a", 500, ("prompt",))
    progress = {first.name: SetProgress(RATE, {}), second.name: SetProgress(slow, {})}
    work = stale_work(settings, [all_of_it, half], progress, Meanings.from_settings(settings))
    assert (work.keys, work.described, work.properties) == (("a",), 1, 1000)
    assert (work.rate, work.seconds) == (slow.per_second, 4000.0)


def test_the_time_of_a_set_with_a_condition_is_that_of_its_share(dataset, stale):
    """A property that ``where`` leaves out takes no device and no time, and it is said what was assumed."""
    state = stale(dataset.settings.descriptions, "a", 1000, ("where",))
    work = of(dataset.settings, state, share=0.1)
    assert work.seconds == 200.0
    assert "(0.5/s), if `where` asks 10% of them, as until now." in " ".join(work.sentences())


def test_nothing_is_guessed_where_nothing_was_measured_or_priced(dataset, stale):
    """No rate, no time; no price, no cost; nothing stale, no word."""
    one = stale(dataset.settings.descriptions, "a", 10, ("model",))
    said = " ".join(of(dataset.settings, one, rate=Rate()).sentences())
    assert "How long that takes is not known" in said
    assert "Cost" not in said
    assert of(dataset.settings).sentences() == []


def test_status_and_an_update_of_the_catalogue_say_the_same(dataset):
    """The images of one property were replaced: its partition alone is stale, and both say so."""
    report = dataset.replace_images("p7")
    catalog = Catalog.open(dataset.settings.home)
    after_update = stale_among(dataset.settings, catalog, [one.key for one in report.stale_ranges])
    assert after_update.keys == (dataset.keys[2],)
    assert after_update.sentences() == read_status(dataset.settings, catalog).stale.sentences()
