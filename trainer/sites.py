"""Whether a site on the internet answers, asked before anything depends on it."""

from __future__ import annotations

import urllib.request

PATIENCE_S = 3


def unreachable(address: str) -> str:
    """Why nothing can be fetched from there; empty when it answers."""
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=PATIENCE_S):
            return ""
    except OSError as error:
        return f"no answer from its site: {getattr(error, 'reason', error)}"
