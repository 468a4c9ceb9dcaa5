"""The folder in which the processes of one life of a run write a checkpoint.

A host that is suspended while it writes may wake in the next life, in which others write the checkpoint of the same
update. It writes into a folder of the life before, which nobody completes.
"""

from __future__ import annotations

from pathlib import Path


def of_life(place: Path, life: str) -> Path:
    """The folder for a checkpoint to come, which becomes ``place``.

    Args:
        life: its name, which all processes of this life know; empty: it is the only one that can be.
    """
    return place.with_name(f"{place.name}.{life}") if life else place


def place_of(folder: Path) -> Path:
    """What a folder of :func:`of_life` becomes."""
    return folder.with_name(folder.name.partition(".")[0])
