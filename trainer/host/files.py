"""Writes files that appear complete or not at all."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PART = re.compile(r"^\.(.+)\.\d+-[0-9a-f]{8}$")
"""What a file is called until it takes its place; a process that was killed leaves it."""
PRIVATE, COMMON = 0o600, 0o666
"""Modes of new files: for their owner's eyes alone; for whomever the umask allows."""


@contextmanager
def replacing(path: Path, mode: int = COMMON) -> Iterator[Path]:
    """Context manager: yields a new empty file to write, which replaces ``path`` unless an error occurs.

    A reader sees the old file or the new, never a part. A link that lies at the path is replaced, not followed.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode))
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def replace_file(path: Path, text: str, private: bool = False) -> None:
    """Write a text file that replaces the old one as a whole.

    Args:
        private: it holds a config, so it is for its owner's eyes alone (0600).
    """
    with replacing(path, PRIVATE if private else COMMON) as part:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")


def yaml_text(data: Any, allow_unicode: bool = False) -> str:
    """Return data as YAML like ``yaml.safe_dump``, keys in their order.
    By libyaml, which takes a tenth of the time, where PyYAML was built with it."""
    import yaml

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return str(yaml.dump(data, Dumper=dumper, sort_keys=False, allow_unicode=allow_unicode))
