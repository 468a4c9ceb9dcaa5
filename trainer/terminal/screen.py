"""The console of this package, through rich."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich._wrap import divide_line
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from trainer.terminal.streams import clean, finish, unguarded

PIPED_WIDTH = 120


class Screen(Console):
    """The console of this package, through rich. Texts are never read as markup; styles are separate arguments.

    Lines are broken only between words, so that a path or a number can be copied. In a file or a pipe, lines are
    neither broken nor padded.
    """

    def __init__(self, width: int | None = None, **more: Any) -> None:
        finish(sys.stdout)
        file = unguarded(sys.stdout)
        self.seen = file.isatty()
        wide = width if width is not None or file.isatty() else PIPED_WIDTH
        super().__init__(file=file, width=wide, markup=False, emoji=False, highlight=False, **more)

    def render_str(self, text: str, **more: Any) -> Text:  # type: ignore[override]
        """Render a text, in table cells as well, without reading it as markup."""
        return super().render_str(clean(text), **more)

    def render(self, renderable: Any, options: Any = None) -> Any:
        """Render anything; texts with styles are cleaned as well."""
        if isinstance(renderable, Text) and (shown := clean(renderable.plain)) != renderable.plain:
            renderable = Text(
                shown,
                renderable.style,
                justify=renderable.justify,
                overflow=renderable.overflow,
                no_wrap=renderable.no_wrap,
                end=renderable.end,
            )
        return super().render(renderable, options)

    def print(self, *objects: Any, **more: Any) -> None:
        """Print like any rich console; a single text is broken between its words."""
        if all(isinstance(shown, (str, Text)) for shown in objects):
            more = {"soft_wrap": True} | more
            if self.seen and len(objects) == 1:
                objects = (self._wrapped(objects[0]),)
        super().print(*objects, **more)

    def _wrapped(self, shown: str | Text) -> Text:
        text = Text(clean(shown)) if isinstance(shown, str) else shown
        lines = [part for line in text.split("\n", allow_blank=True) for part in self._parts(line)]
        return Text("\n", end=text.end).join(lines)

    def _parts(self, line: Text) -> list[Text]:
        parts = list(line.divide(divide_line(line.plain, self.width, fold=False)))
        for part in parts[:-1]:
            part.rstrip()
        return parts

    def facts(self, title: str, rows: Iterable[tuple[str, str]]) -> None:
        """Print a title and rows of a name and a value; a long value continues in the second column."""
        self.print(Text(f"\n{title}", style="bold"))
        self.print("-" * len(title))
        rows = [(what, clean(str(value))) for what, value in rows]
        indent = max((len(what) for what, _ in rows), default=0) + 2
        for what, value in rows:
            self.fact(what, value, indent)

    def fact(self, what: str, value: str, indent: int = 10, style: str = "bold") -> None:
        """Print one row of a name and a value."""
        first, *rest = self.broken(value, indent)
        self.print(Text.assemble((f"{what:<{indent}}" if first else what, style), first), soft_wrap=True)
        for line in rest:
            self.print(line, soft_wrap=True)

    def command(self, what: str, words: Sequence[str], indent: int) -> None:
        """Print a command to copy; on a terminal it is broken between words, as a shell accepts it."""
        lines = [""]
        for word in words:
            fits = not self.seen or indent + cell_len(f"{lines[-1]} {word} \\") <= self.width
            if lines[-1] and not fits:
                lines.append(word)
            else:
                lines[-1] = f"{lines[-1]} {word}".lstrip()
        for number, line in enumerate(lines):
            more = " \\" if number < len(lines) - 1 else ""
            place = indent if not self.seen else max(0, min(indent, self.width - cell_len(line + more)))
            self.print(f"{what if not number else '':<{place}}{line}{more}", soft_wrap=True)

    def broken(self, text: str, indent: int) -> list[str]:
        """Break a text between words into lines; one line when piped.

        All lines but the first, which is printed after a name, have an indent, which is smaller for a very long word.
        """
        made: list[str] = []
        for line in text.splitlines() or [""]:
            place, current = indent, ""
            for piece in re.findall(r"\s*\S+", line):
                if not self.seen or place + cell_len(current + piece) <= self.width:
                    current += piece
                    continue
                made += [f"{' ' * place * bool(made)}{current}"] if current or not made else []
                current = piece.lstrip()
                place = max(0, min(indent, self.width - cell_len(current)))
            made.append(f"{' ' * place * bool(made)}{current}")
        return made

    def rows(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], wide: int, spare: Sequence[int] = ()
    ) -> list[str]:
        """Print a table; a column too wide for the terminal is printed under each row. Returns columns without room.

        Args:
            wide: number of the column that may be long, aligned to the left; all others are aligned to the right.
            spare: numbers of columns that can be left out, the least important first.
        """
        shown = [[clean(cell) for cell in row] for row in (columns, *rows)]
        widths = [max(cell_len(row[n]) for row in shown) for n in range(len(columns))]
        below = self.seen and sum(widths) + 2 * (len(widths) - 1) > self.width
        out = {wide} if below else set()
        for column in spare if below else ():
            left = [width for n, width in enumerate(widths) if n not in out]
            if sum(left) + 2 * (len(left) - 1) > self.width:
                out.add(column)
        self.print(Text(f"\n{title}", style="bold"))
        for number, row in enumerate(shown):
            cells = [
                f"{' ' * (width - cell_len(cell)) * (n != wide)}{cell}{' ' * (width - cell_len(cell)) * (n == wide)}"
                for n, (cell, width) in enumerate(zip(row, widths, strict=True))
                if n not in out
            ]
            self.print(Text("  ".join(cells).rstrip(), style="" if number else "bold"), soft_wrap=True)
            if below and number:
                self.fact("", row[wide], 4)
        return [columns[n] for n in sorted(out - {wide})]


def say(line: str) -> None:
    """Print a line on the screen."""
    Screen().print(line)
