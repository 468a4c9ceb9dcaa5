"""What a run has told of itself in JSON, for screens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_status(run_dir: Path) -> dict[str, Any]:
    """status.json of a run; empty while there is none that can be read."""
    return read_json(run_dir / "status.json")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of a run; empty while there is none that can be read."""
    try:
        return json.loads(path.read_text())  # type: ignore[no-any-return]
    except (OSError, ValueError):
        return {}
