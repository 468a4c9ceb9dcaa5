"""Writes docs/config.md from trainer/config/schema/ and conf/: ``python docs/generate.py``; ``--check`` fails when it
is stale."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from trainer.cli.help import options
from trainer.config import keys

PAGE = Path(__file__).with_name("config.md")
HEAD = """# Every key of the configuration

<!-- written by docs/generate.py from trainer/config/schema/, conf/ and recipes/; `make docs` writes it again -->

    python -m trainer --help                        # this list in the terminal
    python -m trainer +recipe=NAME --cfg job        # the config of a command line
    python -m trainer +recipe=NAME KEY=VALUE        # set a key

`GROUP=OPTION` chooses an option of a group. `KEY=VALUE` sets a key. In the groups model, loss and optimizer (and where
`_target_` is a class of your own), `+GROUP.KEY=VALUE` hands a further argument to the constructor. `???` has no
default and must be set. `${...}` takes its value from another key or from the environment."""


def page() -> str:
    """The whole page."""
    lines = [HEAD, "", "## Recipes", "", *_table(("recipe", "what it is"), _options("recipe", "+recipe"))]
    for group, sections in itertools.groupby(keys.sections(), lambda section: section.group):
        lines += ["", f"## {group or 'The whole run'}"]
        if group:
            lines += ["", *_table(("option", "what it is"), _options(group, group))]
        for section in sections:
            lines += ["", *([f"**{section.title}**", ""] if group else []), *_keys(section.keys)]
    return "\n".join(lines) + "\n"


def _options(group: str, typed: str) -> Iterator[tuple[str, ...]]:
    for name, line in options(group):
        yield f"`{typed}={name}`", line


def _keys(documented: Iterable[keys.Key]) -> list[str]:
    rows = ((f"`{k.path}`", _words(k.type), f"`{keys.spelled(k.default)}`", k.unit, k.help) for k in documented)
    return _table(("key", "type", "default", "unit", "what it is"), rows)


def _words(kind: str) -> str:
    """What a key takes, without the `|` that a table on the site would show with its backslash."""
    words, null, _ = kind.partition(" or null")
    return ", ".join(f"`{word}`" for word in words.split("|")) + (" or `null`" if null else "")


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [head, ("---",) * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def main(argv: list[str]) -> int:
    """Write the page, or with ``--check`` say whether it is what would be written; returns the exit code."""
    written = page()
    if "--check" not in argv:
        PAGE.write_text(written)
        return 0
    if PAGE.is_file() and PAGE.read_text() == written:
        return 0
    print(f"{PAGE} is not what the schema says; write it again: python docs/generate.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
