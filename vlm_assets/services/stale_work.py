"""What is stale, why, and what making it anew takes: the one answer, in the same words everywhere.

``status``, ``run``, ``ingest --update`` and the page of ``dataset_progress`` ask it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from vlm_assets.assets.fingerprint import CATALOGUE_SLICE, OF_UPSTREAM, Meanings, settings_digest
from vlm_assets.assets.partition_state import PartitionState, PartitionStates, State
from vlm_assets.config.settings import Settings
from vlm_assets.services.expected_cost import SetProgress, read_progress
from vlm_catalog.catalog import Catalog
from vlm_durable.commands import command
from vlm_durable.versions.verified_files import VerifiedFiles
from vlm_durable.wording import counted, duration


@dataclass(frozen=True)
class StaleWork:
    """Partitions that were made with other settings or images than now.

    keys: those that are, in any asset. properties: to be asked again, of ``described`` partitions; no more
    than that, for rows of earlier versions are kept where they fit. A partition that is stale in several
    question sets counts once: they look at its images together. embedded: further partitions, of which only
    the vectors are stale. why: what changed, in words. share: of the properties, those that the set which
    takes longest has asked until now. seconds: of the same share; None where no rate was measured. cost: None
    where there is no price. has_other_fields: whether the descriptions' schema is another. settings: of
    each asset, the digest of the settings of now.
    """

    home: str
    keys: tuple[str, ...] = ()
    described: int = 0
    properties: int = 0
    embedded: int = 0
    why: tuple[str, ...] = ()
    rate: float | None = None
    share: float = 1.0
    seconds: float | None = None
    devices: int = 1
    cost: float | None = None
    has_other_fields: bool = False
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)

    def sentences(self) -> list[str]:
        """All of it for people; nothing where nothing is stale."""
        if not self.keys:
            return []
        partitions = counted(len(self.keys), "partitions are stale", "partition is stale")
        anew = counted(self.properties, "properties")
        if self.embedded:
            vectors = f"the vectors of {counted(self.embedded, 'partitions')}"
            anew = f"{anew}, and {vectors}" if self.properties else f"only {vectors}"
        sentences = [
            f"{partitions}, made with other settings or images than now. To be made anew: {anew}.",
            *(f"What changed: {reason}." for reason in self.why),
        ]
        if self.properties:
            price = "" if self.cost is None else f" Cost: {self.cost:,.2f}."
            sentences.append(f"{self._time()}{price}")
        if self.has_other_fields:
            sentences.append(
                "Or keep these answers, and ask for the new fields alone:"
                f" {command('questions', 'add', 'NAME')} makes them a question set of their own."
            )
        sentences.append(
            "The old answers stay readable until the new ones of a partition are complete. The two versions"
            f" before stay in {self.home}/.versions: going back to their settings computes nothing."
        )
        return sentences

    def _time(self) -> str:
        if self.seconds is None or self.rate is None:
            return "How long that takes is not known: nothing was described here yet at a rate to measure."
        on = "" if self.devices == 1 else f" of {self.devices} devices"
        pace = f"{self.rate:.2g}/s" if self.rate < 1 else f"{self.rate:.1f}/s"
        if_alike = "" if self.share == 1.0 else f", if `where` asks {self.share:.0%} of them, as until now"
        return f"That takes {duration(self.seconds)} at the measured rate{on} ({pace}){if_alike}."


def stale_work(
    settings: Settings,
    states: Collection[PartitionState],
    progress: Mapping[str, SetProgress],
    meanings: Meanings,
) -> StaleWork:
    """What of these partitions, of all assets, is stale. progress: as measured here, of each question set."""
    # What other assets published is followed without asking: little work, and it belongs to no answer of now.
    stale = [
        state for state in states if state.state is State.STALE and not OF_UPSTREAM.issuperset(state.changed)
    ]
    anew: dict[str, dict[str, int]] = {}
    for state in stale:
        if state.asset in progress:
            anew.setdefault(state.asset, {})[state.key] = _anew(state)
    described = set[str]().union(*anew.values())
    properties = sum(max(of_set.get(key, 0) for of_set in anew.values()) for key in described)
    slowest = max(
        ((progress[asset], sum(of_set.values())) for asset, of_set in anew.items()),
        key=lambda work: (_seconds(*work) is None, _seconds(*work) or 0.0),
        default=(progress[settings.descriptions.name], 0),
    )
    rate, share, seconds = slowest[0].rate, slowest[0].share, _seconds(*slowest)
    devices = max(1, len(rate.by_device))
    price = settings.price_per_hour
    return StaleWork(
        home=str(settings.home),
        keys=tuple(sorted({state.key for state in stale})),
        described=len(described),
        properties=properties,
        embedded=len({state.key for state in stale} - described),
        why=_why(stale),
        rate=rate.per_second,
        share=share,
        seconds=seconds,
        devices=devices,
        cost=None if seconds is None or price is None else seconds / 3600.0 * devices * price,
        has_other_fields=any(
            "schema" in state.changed and state.asset == settings.descriptions.name for state in stale
        ),
        settings={
            asset: settings_digest(meaning.parts)
            for asset, meaning in meanings.by_asset.items()
            if meaning.parts
        },
    )


def stale_among(settings: Settings, catalog: Catalog, keys: Collection[str]) -> StaleWork:
    """What of these partitions is stale now. Raises CatalogError, OSError, ControlStateError."""
    reader = PartitionStates(settings, catalog, verified=VerifiedFiles(settings.state_directory, seconds=0.0))
    states = [reader.read(asset, key) for asset in settings.computed_assets for key in keys]
    return stale_work(settings, states, read_progress(settings, catalog), reader.meanings)


def _seconds(progress: SetProgress, properties: int) -> float | None:
    """All devices work at it: in partitions of any size, for what a price is paid stays the same."""
    devices = max(1, len(progress.rate.by_device))
    return progress.rate.seconds_left([progress.share * properties / devices] * devices)


def _anew(state: PartitionState) -> int:
    """Properties of a partition to be described again, at most."""
    only_images = set(state.changed) - OF_UPSTREAM == {CATALOGUE_SLICE} and state.new_images is not None
    return state.new_images or 0 if only_images else state.expected


def _why(stale: Collection[PartitionState]) -> tuple[str, ...]:
    """What changed, the most common first; of how many partitions, where not of all."""
    reasons = Counter(reason for state in stale for reason in dict.fromkeys(state.why))
    keys = len({state.key for state in stale})
    changes = []
    for reason, count in reasons.most_common():
        changes.append(reason if count >= keys else f"{reason} ({counted(count, 'partitions')})")
    moved = [state for state in stale if CATALOGUE_SLICE in state.changed]
    if moved and all(state.new_images is not None for state in moved):
        properties = sum(state.new_images or 0 for state in moved)
        changes.append(f"images of {counted(properties, 'properties')}")
    elif moved:
        changes.append(f"images of properties in {counted(len(moved), 'partitions')}")
    return tuple(changes)
