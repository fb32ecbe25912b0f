"""The console of tables, progress and live views: it escapes their text, as ``say`` does for sentences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from vlm_assets.operate.terminal import visible, with_home


class TerminalConsole(Console):
    """A rich console that shows control and bidirectional characters escaped, whatever is printed."""

    def render_str(self, text: str, **options: Any) -> Text:
        """A string as it is laid out: escaped before its width is measured."""
        return super().render_str(visible(with_home(text)), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The pieces of anything printed. Only rich's own control segments steer the cursor."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))
