"""Lets all hosts of a run use the folder that host 0 has claimed, where its name is made of the time.

Each host composes the name by its own clock. Without host 0's name the hosts would write into different folders, and no
checkpoint would be whole.
"""

from __future__ import annotations

import datetime
import re
import time
from pathlib import Path

import torch.distributed as dist

from trainer.config.run_config import RunConfig
from trainer.errors import RunFailed, first_line
from trainer.launch.meeting_place import open_store
from trainer.launch.start import rendezvous_of
from trainer.planning.plan import Plan
from trainer.terminal.screen import say

KEY = "hosts/folder"
SEEN_S = 10.0
"""So long a shared disk may take to show a new folder on another host."""


def leave_folder(config: RunConfig, plan: Plan, folder: Path) -> dist.Store:
    """On host 0: open the store of the hosts, and leave the folder's name there. The hosts meet in the same store.

    Raises:
        RunFailed: the store's address or port cannot be used.
    """
    store = open_store(rendezvous_of(config, plan))
    store.set(KEY, str(folder))
    return store


def take_folder(config: RunConfig, plan: Plan, own: Path) -> tuple[Path, dist.Store]:
    """On another host: wait for host 0's name; returns this host's folder of that name, and the store.

    Only the numbers in the path are taken from host 0, because anybody who reaches the store could write there.

    Raises:
        RunFailed: host 0 did not come in time.
    """
    rendezvous = rendezvous_of(config, plan)
    store = open_store(rendezvous)
    try:
        store.wait([KEY], datetime.timedelta(seconds=rendezvous.timeout_s))
        named = Path(store.get(KEY).decode(errors="replace"))
    except dist.DistError as error:
        why = f"{rendezvous.label(0)} has not named the run's folder within {rendezvous.timeout_s:g} s"
        raise RunFailed(f"{why}: {first_line(error)}") from error
    folder = with_numbers_of(own, named)
    if not _seen(folder):
        say(
            f"ATTENTION: {rendezvous.label(0)} has the run's folder {named}, which is not there on this host. A run "
            f"resumes on all hosts only from a folder on a disk that they share: hydra.run.dir=FOLDER"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder, store


def with_numbers_of(own: Path, named: Path) -> Path:
    """``own`` with the digits of ``named`` in those parts, from the end, that differ in digits alone."""
    parts, other = list(own.parts), list(named.parts)
    for back in range(1, min(len(parts), len(other)) + 1):
        unnumbered = re.sub(r"-\d{1,3}$", "", other[-back])  # of NAME-1: another run of host 0 has NAME
        if _shape(parts[-back]) not in (_shape(other[-back]), _shape(unnumbered)):
            break
        parts[-back] = other[-back]
    return Path(*parts)


def _shape(part: str) -> str:
    return re.sub(r"\d", "0", part)


def _seen(folder: Path) -> bool:
    until = time.monotonic() + SEEN_S
    while not folder.is_dir() and time.monotonic() < until:
        time.sleep(SEEN_S / 50)
    return folder.is_dir()
