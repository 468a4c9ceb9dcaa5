"""How numbers of things are written: 1 worker, 2 workers."""

from __future__ import annotations

IRREGULAR = {"batch": "batches", "class": "classes", "process": "processes", "entry": "entries"}


def counted(number: int, thing: str, form: str = "") -> str:
    """A number and its noun: ``1 epoch``, ``0 epochs``, ``2 batches``; of several words the last is inflected.

    Args:
        form: how the number is written, as of ``format``: ``,`` groups thousands.
    """
    head, gap, last = thing.rpartition(" ")
    return f"{number:{form}} {head}{gap}{last if number == 1 else IRREGULAR.get(last, f'{last}s')}"
