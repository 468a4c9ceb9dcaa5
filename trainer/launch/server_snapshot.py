"""Finds the checkpoint from which a parameter server that has died restarts by itself, while the workers go on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint import store
from trainer.launch.engine import Start
from trainer.weights.server_files import parts_of

LOOKS = 5
"""Checkpoints may be completed faster than one is read."""


@dataclass(frozen=True)
class ServerSnapshot:
    """The part of a checkpoint from which a dead parameter server restarts.

    Attributes:
        folder: of the checkpoint. lost: updates that the server had done since then.
    """

    folder: Path
    lost: int


def snapshot_of(start: Start, checkpoints: Path, done: int) -> ServerSnapshot | str:
    """Find the newest whole checkpoint for a dead server, or return why the server cannot restart by itself.

    Workers that go on complete checkpoints meanwhile and remove older ones; then it looks again.

    Args:
        start: what the server was told that has died. checkpoints: the run's. done: updates that the server had done.
    """
    why = ""
    for _ in range(LOOKS):
        there = store.found(checkpoints)
        found = _newest(start, checkpoints, done)
        if isinstance(found, ServerSnapshot):
            return found
        why = found
        if store.found(checkpoints) == there:
            break
    return why


def _newest(start: Start, checkpoints: Path, done: int) -> ServerSnapshot | str:
    folder = store.newest_whole(checkpoints)
    if folder is None:
        return "there is no checkpoint yet"
    parts = parts_of(folder)
    try:
        if len(parts) != start.role.size or not parts[start.rank].layout:
            return f"{folder.name} is not of this run's servers"
    except FileNotFoundError:
        return f"{folder.name} was removed just now"
    part, begun = parts[start.rank], start.payload.resume
    if part.life != start.life and (not begun or Path(begun).resolve() != folder.resolve()):
        # a life before has written this part, and it was completed after the present one had begun with an older one
        return f"{folder.name} has what its life before had saved"
    return ServerSnapshot(folder, max(0, done - part.version))
