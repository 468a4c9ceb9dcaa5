"""Writes JSON files of a run, without secrets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.config import redact
from trainer.host.files import replace_file


def leave(path: Path, node: Any, private: bool = False) -> None:
    """Write a JSON file into the run's folder without its secrets."""
    replace_file(path, json.dumps(redact.hide(node), indent=1), private)
