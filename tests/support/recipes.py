"""The recipes of docs/after.md, as they stand there."""

import re

from vlm_assets.config.settings import CHECKOUT

PAGE = (CHECKOUT / "docs" / "after.md").read_text()


def recipe(heading: str, number: int = 0) -> str:
    """A block of Python below a heading of the page."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)[number]
