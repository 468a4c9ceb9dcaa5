"""``python -m trainer --help``: groups, options and recipes with a line each, and every key, from where they are defined."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainer import schema
from trainer.compose import folder

USAGE = """trainer: declarative training for PyTorch

  python -m trainer +recipe=NAME [key=value ...]      train
  python -m trainer +recipe=NAME plan=true            print the plan and stop
  python -m trainer -m +recipe=NAME key=1,2,3         sweep
  python -m trainer +recipe=NAME --cfg job            show the composed config (--resolve, --info)
  python -m trainer --config-dir FOLDER ...           add your own options and recipes
  python -m trainer --shell-completion install=bash   completion for the command `trainer`
  mlflow ui                                           look at the runs
"""


def options(group: Path) -> Iterator[tuple[str, str]]:
    """Each option of a group's folder with the first comment line of its file."""
    for path in sorted(group.glob("*.yaml")):
        comments = [line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#")]
        yield path.stem, next((c for c in comments if not c.startswith("@package")), "")


def show_help() -> None:
    """Print it."""
    print(USAGE)
    print("Recipes")
    for name, line in options(folder("recipes") / "recipe"):
        print(f"  +recipe={name:<28} {line}")
    print("\nGroups (GROUP=OPTION)")
    for group in schema.GROUPS:
        for name, line in options(folder("conf") / group):
            print(f"  {group + '=' + name:<36} {line}")
    print("\nKeys (KEY=VALUE)")
    for key in schema.keys(schema.Config):
        if key.path not in schema.GROUPS:
            _print_key(key, "")
    for group, classes in schema.GROUPS.items():
        for cls in classes:
            title = (cls.__doc__ or "").split(":")[0].rstrip(".")
            print(f"\n {title if title.startswith(group) else group + ': ' + title}")
            for key in schema.keys(cls, own=True):
                _print_key(key, f"{group}.")


def _print_key(key: schema.Key, prefix: str) -> None:
    unit = f" [{key.unit}]" if key.unit else ""
    default = str(key.default).lower() if isinstance(key.default, bool) or key.default is None else key.default
    print(f"  {prefix + key.path:<36} {key.help}{unit}; {key.type}; default {default}")
