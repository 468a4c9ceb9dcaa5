"""How workers and parameter servers reach each other, as the plan shows it."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.config.run_config import RunConfig
from trainer.host import segments


def transport_of(config: RunConfig, roles: Mapping[str, int]) -> str:
    """How values travel between workers and servers, as the plan shows it; '' without servers."""
    told = config.node("strategy").get("transport")
    if "server" not in roles or told is None:
        return ""
    if told == "tcp" or config.launch.nnodes > 1:
        return "TCP, encrypted"
    if told == "ipc":
        return "Unix sockets"
    lacks = segments.what_lacks()
    return f"Unix sockets (no shared memory: {lacks})" if lacks else "Unix sockets, large values in shared memory"
