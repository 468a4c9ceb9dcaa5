"""Imports torch into a launcher of several hosts without the words of its C++.

When host 0 is away or gone, its stores write two dozen stack frames each time. The launcher says it in a sentence.
"""

from __future__ import annotations

import importlib
import os

LEVEL = "TORCH_CPP_LOG_LEVEL"
"""Torch reads it when it is imported."""


def import_quietly() -> None:
    """Import torch here, and let processes that this one starts hear all of it. A level that the user has set
    counts."""
    if LEVEL in os.environ:
        return
    os.environ[LEVEL] = "FATAL"
    try:
        importlib.import_module("torch")
    finally:
        del os.environ[LEVEL]
