"""The folder in which the processes of one life of a run write a checkpoint.

A host that is suspended while it writes may wake in the next life, while others write the checkpoint of the same
update. The woken host still writes into the folder of its own life, which no process completes.
"""

from __future__ import annotations

from pathlib import Path


def life_folder(final: Path, life: str) -> Path:
    """The folder in which one life writes the checkpoint ``final``.

    Args:
        life: name of the life, which all its processes know; empty: the run can have one life only.
    """
    return final.with_name(f"{final.name}.{life}") if life else final


def final_folder(folder: Path) -> Path:
    """The checkpoint that a folder of :func:`life_folder` becomes."""
    return folder.with_name(folder.name.partition(".")[0])
