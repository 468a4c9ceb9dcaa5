"""Hides secrets in the command-line arguments of this process, which ``ps`` shows to every user of the machine."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from trainer.config.redact import starred

ARGUMENTS = slice(45, 47)
"""Fields after the name in /proc/self/stat: begin and end of the arguments in memory."""


def cover() -> None:
    """Overwrite the secrets in this process's command-line arguments with stars, where the system allows it.

    Before this call they were visible; a value from the environment (``${oc.env:NAME}``) never is.
    """
    try:
        start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[ARGUMENTS])
        before = Path("/proc/self/cmdline").read_bytes()
    except (OSError, ValueError):
        return
    after = b"\0".join(_starred(argument) for argument in before.split(b"\0"))
    if start > 0 and end - start == len(before) == len(after) and after != before:
        ctypes.memmove(start, after, len(after))


def _starred(argument: bytes) -> bytes:
    """An argument with stars for its secrets, of the same number of bytes."""
    return starred(os.fsdecode(argument), lambda hidden: "*" * len(os.fsencode(hidden))).encode(
        "utf-8", "surrogateescape"
    )
