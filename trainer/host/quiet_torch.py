"""Imports torch into a launcher of several hosts without the log messages of its C++.

When host 0 is gone, torch's stores print two dozen stack frames each time. The launcher prints a sentence instead.
"""

from __future__ import annotations

import importlib
import os

LEVEL = "TORCH_CPP_LOG_LEVEL"
"""Torch reads this variable when it is imported."""


def import_quietly() -> None:
    """Import torch with the lowest log level; processes started later keep the usual one, or the user's."""
    if LEVEL in os.environ:
        return
    os.environ[LEVEL] = "FATAL"
    try:
        importlib.import_module("torch")
    finally:
        del os.environ[LEVEL]
