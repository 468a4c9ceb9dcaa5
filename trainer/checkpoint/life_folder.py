"""The folder in which the processes of one life of a run write a checkpoint.

A host that is suspended while it writes may wake in the next life, in which others write the checkpoint of the same
update. It writes into a folder of the life before, which nobody completes.
"""

from __future__ import annotations

from pathlib import Path


def life_folder(final: Path, life: str) -> Path:
    """The folder for a checkpoint to come, which becomes ``final``.

    Args:
        life: its name, which all processes of this life know; empty: it is the only one that can be.
    """
    return final.with_name(f"{final.name}.{life}") if life else final


def final_folder(folder: Path) -> Path:
    """The folder that a folder of :func:`life_folder` becomes."""
    return folder.with_name(folder.name.partition(".")[0])
