"""What the pictures of the documentation may show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, expect

FADING_IN = """
<style>@keyframes fade { from { opacity: 0 } } #box { animation: fade 1s; background: black }</style>
<div id="box" style="position: fixed; left: 0; top: 0; width: 50px; height: 50px"></div>
<p style="margin-top: 60px">FOLDER/property_descriptions/000000000-000000005.parquet</p>
"""


def test_a_screenshot_names_no_folder_of_this_machine_and_shows_nothing_half_faded(
    desk, page: Page, screenshot: Callable[[str], Path]
) -> None:
    """The home is taken out of what is shown, and what fades in is waited for."""
    page.set_content(FADING_IN.replace("FOLDER", str(desk.home)))
    taken = screenshot("probe")

    expect(page.locator("p")).to_have_text("property_descriptions/000000000-000000005.parquet")
    with Image.open(taken) as image:
        assert image.convert("RGB").getpixel((25, 25)) == (0, 0, 0)
