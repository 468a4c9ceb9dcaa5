"""Imports for a process that forks."""

from __future__ import annotations

import importlib
import pkgutil


def import_all_of(package: str) -> None:
    """Import all modules of a package but those that are commands: what a fork lacked, hundreds of others would import
    again."""
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if not module.name.endswith(".__main__"):
            importlib.import_module(module.name)
