"""What the recorder process answers to its parent, and how it calls an unreachable server."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from typing import Any

from trainer.config import redact

UNREACHED = re.compile(
    r"API request to https?://(?:[^/\s@]*@)?([^/\s]+)|HTTPS?ConnectionPool\(host='([^']+)', port=(\d+)\)"
)
NO_ANSWER = re.compile(r"\[Errno -?\d+\] ([^'\")\]]+)|((?:read |connect(?:ion)? )?timed out)", re.IGNORECASE)


def tell(message: dict[str, Any]) -> None:
    """Send an answer from the recorder process to its parent, which may be gone."""
    with contextlib.suppress(OSError):
        said = {k: redact.text(v) for k, v in message.items() if k in ("warning", "error")}
        print(json.dumps({**message, **said}), file=sys.__stdout__, flush=True)
