"""Finds the folders of the user's own classes in a config, without importing them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainer.config.run_config import RunConfig

PACKAGE = Path(__file__).resolve().parents[1]
INSTALLED = ("site-packages", "dist-packages")


def own_code(config: RunConfig) -> list[str]:
    """The folders of ``sys.path`` that hold modules of the config's ``_target_``s, without installed packages."""
    searched = {os.path.realpath(entry or "."): None for entry in sys.path}
    found: dict[str, None] = {}
    for target in _targets(config.plain()):
        for folder in _folders(target.replace(":", ".").partition(".")[0]):
            if str(folder) in searched and folder != PACKAGE.parent and not set(INSTALLED).intersection(folder.parts):
                found[str(folder)] = None
    return list(found)


def _targets(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        if isinstance(node.get("_target_"), str):
            yield node["_target_"]
        for value in node.values():
            yield from _targets(value)
    elif isinstance(node, list):
        for value in node:
            yield from _targets(value)


def _folders(package: str) -> list[Path]:
    """The folders that hold a top-level module or package."""
    try:
        spec = find_spec(package) if package not in sys.stdlib_module_names else None
    except (ImportError, ValueError):  # a module without a spec, like __main__
        return []
    if spec is None:
        return []
    inside = [
        *(spec.submodule_search_locations or []),
        *([spec.origin] if spec.submodule_search_locations is None and spec.origin else []),
    ]
    return [Path(os.path.realpath(place)).parent for place in inside]
