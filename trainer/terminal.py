"""The terminal, through rich: the one console of this package."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from trainer.streams import clean, unguarded

PIPED_WIDTH = 120


class Screen(Console):
    """The terminal. No text is ever markup: styles are given beside it (``style=``, ``rich.text.Text``)."""

    def __init__(self, width: int | None = None, **more: Any) -> None:
        sys.stdout.flush()
        file = unguarded(sys.stdout)
        wide = width if width is not None or file.isatty() else PIPED_WIDTH
        super().__init__(file=file, width=wide, markup=False, emoji=False, highlight=False, **more)

    def render_str(self, text: str, **more: Any) -> Text:  # type: ignore[override]
        """Every text that rich is given, in cells of tables as well."""
        return super().render_str(clean(text), **more)

    def render(self, renderable: Any, options: Any = None) -> Any:
        """Texts that were styled elsewhere are cleaned too; one that needs it loses its inner styles."""
        if isinstance(renderable, Text) and (shown := clean(renderable.plain)) != renderable.plain:
            renderable = Text(
                shown, renderable.style, justify=renderable.justify, overflow=renderable.overflow,
                no_wrap=renderable.no_wrap, end=renderable.end,
            )  # fmt: skip
        return super().render(renderable, options)
