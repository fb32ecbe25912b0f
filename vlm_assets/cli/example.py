"""``vlm-assets example`` and ``vlm-assets demo``: the rendered example, which only a checkout has.

The package never needs the ``examples`` folder. This module is the only one that imports from it.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from vlm_assets.cli.ingest import shown_progress
from vlm_assets.cli.options import Home, app, chosen_settings
from vlm_assets.operate.terminal import CommandError, say
from vlm_assets.settings import CHECKOUT, EXAMPLE, PREFIX, require_models

if TYPE_CHECKING:
    from pathlib import Path

    from vlm_assets.settings import Settings

PROPERTIES = 240
RANGE_SIZE = 20
SEED = 7

_MOST_SLOTS = 4
"""Each is a run of its own with 0.7 GB."""

_EXAMPLES = CHECKOUT / "examples"

Properties = Annotated[int, typer.Option(min=1, help="Example properties to render.")]
RangeSize = Annotated[int | None, typer.Option(min=1, help="Properties a partition.")]
Seed = Annotated[int, typer.Option(help="Seed of the example properties.")]


@app.command(epilog="vlm-assets example --properties 60 --home /tmp/example")
def example(
    home: Home = None,
    properties: Properties = PROPERTIES,
    range_size: RangeSize = None,
    seed: Seed = SEED,
) -> None:
    """Render the example properties and take them into the catalogue. Nothing is described yet."""
    _take_in_example(chosen_settings(home), properties, range_size, seed)


@app.command(epilog="vlm-assets demo --exit --seed 9 --home /tmp/other")
def demo(
    home: Home = None,
    properties: Properties = PROPERTIES,
    range_size: RangeSize = None,
    seed: Seed = SEED,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the pages, on loopback.")] = 3000,
    exit_when_done: Annotated[
        bool, typer.Option("--exit", help="Stop when all is done; 0 only if all partitions are sound.")
    ] = False,
) -> None:
    """Start the Dagster UI and a backfill of everything that is missing.

    With VLM_ASSETS_SOURCE set, new properties of that source are taken in first. Without it, the command goes
    on with the home's catalogue; a home without a catalogue gets the example.
    """
    from vlm_assets.catalog.ingest import close_tail
    from vlm_assets.catalog.ingest import ingest as take_in
    from vlm_assets.operate.run import run_backfill
    from vlm_assets.resource_settings import build_gpu

    current = chosen_settings(home)
    of_example = current.source is None and _is_of_example(current.home)
    if of_example:
        _take_in_example(current, properties, range_size, seed)
        current = chosen_settings(home)
    elif current.source is None:
        say(f"{PREFIX}SOURCE is not set: nothing new is taken in. Going on with {current.home}.")
    require_models(current)
    if current.source is not None:
        with shown_progress() as progress:
            report = take_in(
                current.source,
                current.home,
                range_size=range_size or current.range_size,
                image_root=current.image_root,
                close=True,
                max_images=current.max_images,
                progress=progress,
                store=current.store,
            )
        for sentence in report.sentences():
            say(sentence)
    else:
        close_tail(current.home, current.store)
    if of_example:
        current = current.model_copy(update={"devices": _devices(current)})
    code = run_backfill(
        home=current.home,
        dagster_home=current.dagster_home,
        slots=len(build_gpu(current).find()),
        port=port,
        exit_when_done=exit_when_done,
        accuracy=lambda: _accuracy(current) if of_example else None,
        grace_seconds=current.grace_seconds,
        environment={f"{PREFIX}DEVICES": current.devices},
    )
    raise typer.Exit(code)


def _take_in_example(settings: Settings, properties: int, range_size: int | None, seed: int) -> None:
    _find_examples()
    if not _is_of_example(settings.home):
        raise CommandError(
            f"{settings.home} holds a catalogue of other properties, and the example would mix with them."
            " Give the example a home of its own: --home DIR."
        )
    from examples.rendered_properties import write_example
    from vlm_assets.catalog.ingest import ingest as take_in

    say(f"Example: {properties} properties with seed {seed} in {settings.home / EXAMPLE} ...")
    listing = write_example(settings.home, properties=properties, seed=seed)
    report = take_in(listing, settings.home, range_size=range_size or RANGE_SIZE, close=True)
    for sentence in report.sentences():
        say(sentence)


def _devices(settings: Settings) -> str:
    """The devices of the example: without a GPU a slot a core, four at most, where no setting says else.

    A partition of the example is start-up and little else, which keeps no more than one core busy.
    """
    from vlm_assets.resource_settings import build_gpu

    slots = max(len(found := build_gpu(settings).find()), min(len(os.sched_getaffinity(0)), _MOST_SLOTS))
    on_cpu = all(one.kind == "cpu" for one in found)
    return f"cpu:{slots}" if settings.devices == "auto" and on_cpu else settings.devices


def _accuracy(settings: Settings) -> str:
    _find_examples()
    from examples.accuracy import accuracy

    return accuracy(settings.home).report()


def _is_of_example(home: Path) -> bool:
    """Whether the home's catalogue is of the example, or there is none yet. Raises CatalogError."""
    from vlm_assets.catalog.catalog import Catalog, CatalogMissingError
    from vlm_assets.catalog.image_root import ImageRoot

    try:
        catalog = Catalog.open(home)
    except CatalogMissingError:
        return True
    return catalog.images.real == ImageRoot.at(home / EXAMPLE).real


def _find_examples() -> None:
    """Make the checkout's ``examples`` importable, from any working directory. Raises CommandError."""
    if not (_EXAMPLES / "rendered_properties.py").is_file():
        raise CommandError(
            "The example properties and the example model are part of a checkout of this project, not of the"
            " installed package. Run this command in a checkout, or use your own images:"
            f" set {PREFIX}SOURCE and {PREFIX}MODEL."
        )
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
