"""``python -m trainer --help``: prints all groups, options, recipes and keys, with a line on each."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.cli.compose import folder
from trainer.config import keys, schema

WIDTH = 120
USAGE = """trainer: declarative training for PyTorch

  python -m trainer +recipe=NAME [key=value ...]      train
  python -m trainer +recipe=NAME plan=true            print the plan and stop
  python -m trainer -m +recipe=NAME key=1,2,3         sweep
  python -m trainer eval RUN [DATA] [key=value ...]   metrics of a run's weights; RUN: its folder, or its MLflow run id
  python -m trainer predict RUN INPUT [key=value ...] classes of the images in a folder, or clicks of a file of rows
  python -m trainer +recipe=NAME --cfg job            show the composed config (--resolve; -p GROUP: a part of it)
  python -m trainer +recipe=NAME --info defaults      where it comes from (config, defaults-tree, searchpath, plugins)
  python -m trainer --config-dir FOLDER ...           add your own options and recipes
  eval "$(trainer --shell-completion install=bash)"   completion for the command `trainer` (zsh, fish)
  mlflow ui                                           look at the runs

An option of a group: GROUP=OPTION. A key: KEY=VALUE, null where it is allowed. An argument of a constructor that is not
in the config yet: +GROUP.KEY=VALUE.
"""


def options(group: str, config_dir: str | None = None) -> Iterator[tuple[str, str]]:
    """Each option of a config group (or each recipe), with its description: the first comment line of its file."""
    own = [Path(config_dir) / group] if config_dir else []
    for place in (folder("recipes" if group == "recipe" else "conf") / group, *own):
        for path in sorted(place.glob("*.yaml")):
            comments = [line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#")]
            yield path.stem, next((c for c in comments if not c.startswith("@package")), "")


def show_help(argv: Sequence[str] = ()) -> None:
    """Print ``--help``; with ``--config-dir`` among the arguments, the user's own options are listed, too."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config-dir", "-cd")
    config_dir = finder.parse_known_args(list(argv))[0].config_dir
    print(USAGE)
    print("Recipes")
    for name, line in options("recipe", config_dir):
        _print_row(f"+recipe={name}", line)
    print("\nGroups")
    for group in schema.GROUPS:
        for name, line in options(group, config_dir):
            _print_row(f"{group}={name}", line)
    print("\nKeys, with their defaults")
    for section in keys.sections():
        print(f"\n {section.title}")
        for key in section.keys:
            unit = f", {key.unit}" if key.unit else ""
            _print_row(f"{key.path}={keys.spelled(key.default)}", f"{key.help} [{key.type}{unit}]")


def _print_row(left: str, right: str) -> None:
    """Print two columns; long texts continue in the second one."""
    column = 40
    lines = textwrap.wrap(right, WIDTH - column, break_on_hyphens=False) or [""]
    if len(left) > column - 4:
        print(f"  {left}")
        left = ""
    print(f"  {left:<{column - 3}} {lines[0]}".rstrip())
    for line in lines[1:]:
        print(" " * column + line)
