"""Reads the JSON files in which a run reports its status, for screens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_status(run_dir: Path) -> dict[str, Any]:
    """Read a run's status.json; {} if it does not exist or cannot be read."""
    return read_json(run_dir / "status.json")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of a run; {} if it does not exist or cannot be read."""
    try:
        return json.loads(path.read_text())  # type: ignore[no-any-return]
    except (OSError, ValueError):
        return {}
