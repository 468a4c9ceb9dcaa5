"""Reads JSON that may be damaged: every error in it is a ValueError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MOST = 1 << 28
"""Most bytes of a file."""


def loads(text: str | bytes | bytearray) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: it is no JSON, not UTF-8, or nested too deeply for Python.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def read(path: Path) -> Any:
    """Parse a JSON file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON, or has more than 256 MiB.
    """
    with path.open("rb") as file:
        text = file.read(MOST + 1)
    if len(text) > MOST:
        raise ValueError(f"it has more than {MOST} bytes")
    return loads(text)


def read_object(path: Path) -> dict[str, Any]:
    """Parse a JSON file that holds an object.

    Raises:
        OSError, ValueError: as :func:`read`; or it holds something else.
    """
    found = read(path)
    if not isinstance(found, dict):
        raise ValueError(f"it holds a JSON {type(found).__name__} and no object")
    return found
