"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, text: str, private: bool = False) -> None:
    """Write a file so that a reader sees the old text or the new, never a part.

    Args:
        private: it holds a config, so it is for its owner's eyes alone (0600).
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)
    mode = 0o600 if private else 0o666
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8", errors="backslashreplace") as file:  # fmt: skip
        file.write(text)
    os.replace(part, path)
