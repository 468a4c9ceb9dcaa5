"""The versions of Python and of packages, without importing any of them."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Sequence

OF_A_CHECKPOINT = ("trainer", "torch", "torchvision", "numpy", "mlflow")
"""Packages whose versions a checkpoint records."""


def installed() -> dict[str, str]:
    """The versions that a checkpoint records, by name."""
    return {"python": platform.python_version(), **of(OF_A_CHECKPOINT)}


def of(packages: Sequence[str]) -> dict[str, str]:
    """The versions of packages, by name; without those that are not installed.

    For an imported package it is ``__version__``, which names the build of torch and torchvision as well.
    """
    found = {}
    for package in packages:
        version = getattr(sys.modules.get(package), "__version__", None)
        try:
            found[package] = str(version or importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def differences(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """One line for each version that differs, of packages in both; builds of a version (``+cu132``) are equal."""
    names = [name for name in before if name in now and _public(before[name]) != _public(now[name])]
    return [f"{name} was {before[name]}, is {now[name]}" for name in names]


def _public(version: str) -> str:
    return version.partition("+")[0]
