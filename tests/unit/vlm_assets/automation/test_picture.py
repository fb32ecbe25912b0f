"""The picture of all partitions: told apart by eye, small, whatever their number."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace

import pytest
from PIL import Image

from tests.support.shares import share_of
from vlm_assets.assets.partition_state import State
from vlm_assets.automation.picture import (
    FAILED,
    INTERRUPTED,
    LEGEND,
    MOST_BARS,
    NOT_STARTED,
    STYLES,
    WIDTH,
    _line,
    _line_of_node,
    progress_picture,
    throughput,
)
from vlm_assets.services.status import DeviceStatus, PartitionStatus
from vlm_durable.state.rate import Stretch

WORK = [Stretch(f"gpu-{number}", 0, 5900, 900) for number in range(3)]
DEVICES = [
    DeviceStatus("gpu-0", True, None, 5, 0.5, None),
    DeviceStatus("gpu-1", True, None, 5, 0.4, "It failed."),
    DeviceStatus("x" * 60, False, None, 0, None, None),
]


def partitions(states: list[State], asset: str = "property_descriptions") -> list[PartitionStatus]:
    return [PartitionStatus(asset, f"{number:09d}", state, 5, 10) for number, state in enumerate(states)]


def colours_of(png: bytes) -> Counter[str]:
    """Pixels of each colour."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    assert image.width == WIDTH
    counted = image.getcolors(image.width * image.height)
    return Counter({f"#{bytes(colour).hex()}": count for count, colour in counted})


@pytest.mark.parametrize("count", share_of([1, 12, 1350, 10_000], 2))
def test_every_look_is_seen_and_the_picture_is_small(count: int) -> None:
    """Each partition is there in its colour, and the event log keeps it for ever: 16 KB at most."""
    assert set(STYLES) == set(State)
    looks = [State.DONE, State.RUNNING, State.INTERRUPTED, State.FAILED, State.NOT_STARTED]
    states = [looks[number % len(looks)] for number in range(count)]
    both = partitions(states) + partitions(states, "property_embeddings")
    png = progress_picture(both, DEVICES, WORK)
    assert len(png) < 16_000
    seen = colours_of(png)
    for colour in LEGEND:
        assert seen[colour] >= 2 * (count // len(looks)) + 1, colour


def test_nothing_done_and_nothing_known_is_a_picture_too() -> None:
    """A fresh home: all grey, no chart, no device."""
    png = progress_picture(partitions([State.NOT_STARTED] * 3), [], [])
    assert colours_of(png)[NOT_STARTED] > 3 * 20 * 20


@pytest.mark.parametrize("nodes", share_of([1, 4, 40], 3))
def test_temperatures_and_silent_nodes_stand_in_the_picture(nodes: int) -> None:
    """Whoever opens the page sees which machine is silent; of many nodes each has one line, and all fit."""
    work = [Stretch(f"GPU-{n}-0", 0, 5900, 900) for n in range(nodes)]
    of = [(n, gpu) for n in range(nodes) for gpu in range(1 if nodes == 1 else 4 if nodes == 4 else 8)]

    def picture(trouble: str = "", temperature: int | None = None) -> bytes:
        devices = [
            DeviceStatus(
                f"GPU-{n}-{gpu}",
                True,
                None,
                5,
                0.5,
                None,
                f"node-{n}",
                temperature,
                trouble if n == 0 else "",
            )
            for n, gpu in of
        ]
        return progress_picture(partitions([State.DONE] * 12), devices, work)

    plain, hot = picture(), picture(temperature=71)
    silent = picture("silent for 31 s: it counts as dead, and its runs go on elsewhere", 71)
    assert plain != hot
    assert colours_of(silent)[FAILED] > colours_of(hot)[FAILED] + 20
    assert len(silent) < {1: 16_000, 4: 24_000, 40: 40_000}[nodes]
    assert Image.open(io.BytesIO(silent)).height < 1200


def test_what_is_wrong_is_said_in_few_words() -> None:
    """A sentence of the driver or of a pause does not fit beside a bar; ids stand there already."""
    device = replace(DEVICES[0], node="one")

    def said(trouble: str, *, node: bool = False) -> str:
        some = [replace(device, trouble=trouble), replace(device, id="gpu-1")]
        return (_line_of_node("one", some) if node else _line(some[0])).wrong

    assert said("silent for 31 s: it counts as dead, and its runs go on elsewhere") == "silent for 31 s"
    assert said("gpu-0 is throttled (at 88 °C): look at its cooling.") == "throttled"
    assert said("the node one is paused since 2026-01-01 10:00; `x`") == "paused since 2026-01-01 10:00"
    assert said("gpu-0 is throttled (at 88 °C): look at it.", node=True) == "1 of 2 throttled"


def test_a_pause_stands_above_all_else() -> None:
    """Whoever opens the page sees that somebody wanted nothing to run, however long the reason."""
    done = partitions([State.DONE] * 12)
    plain = progress_picture(done, DEVICES, WORK)
    tall = {}
    for reason in ("because of a new kernel", "because " + "of a new kernel " * 60):
        png = progress_picture(done, DEVICES, WORK, paused=f"Paused since 2026-01-01 10:00 {reason}")
        tall[reason] = Image.open(io.BytesIO(png)).height
        banner = colours_of(png)[INTERRUPTED] - colours_of(plain)[INTERRUPTED]
        assert banner > WIDTH * 20
        assert len(png) < 16_000
    assert Image.open(io.BytesIO(plain)).height < min(tall.values()) < max(tall.values()) < 800


@pytest.mark.parametrize("text", ["$$", r"for $\bad{$"])
def test_a_text_with_dollar_signs_is_no_formula(text: str) -> None:
    """A reason for a pause, or a device's name, ended each drawing where matplotlib read a formula in it."""
    named = replace(DEVICES[0], id=text, trouble=text)
    assert progress_picture(partitions([State.DONE]), [named], [], paused=text)


def test_throughput_keeps_every_row_and_fits() -> None:
    """A month or a minute of work is cut into as many bars as fit; an idle time stays empty."""
    day = 86_400.0
    work = [Stretch("a", day * n, day * n + 590, 100) for n in (0, 1, 29)] + [Stretch("b", 0, 0, 7)]
    done = throughput(work)
    assert list(done.bars) == ["a", "b"]
    assert len(done.bars["a"]) <= MOST_BARS
    assert round(sum(rows.sum() for rows in done.bars.values()), 6) == 307
    assert done.bars["a"][10] == done.bars["b"][10] == 0.0
    minute = throughput([Stretch("a", 1000, 1060, 60)])
    assert (minute.width, len(minute.bars["a"])) == (10, 7)
    assert throughput([]).bars == {}
