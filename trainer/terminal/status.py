"""Reads the JSON files in which a run reports its status, for screens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.host import json_text


def read_status(run_dir: Path, name: str = "status.json") -> dict[str, Any]:
    """Read the status that a run reports to the terminal, status.json; {} if it does not exist or cannot be read.

    Args:
        name: of the file; workers without a common step have one each.
    """
    try:
        return json_text.read_object(run_dir / name)
    except (OSError, ValueError):
        return {}
