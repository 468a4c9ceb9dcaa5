"""The TCPStore of the lobby where hosts of a run come and go, served by host 0's launcher at launch.master_port."""

from __future__ import annotations

import hashlib

from trainer.config.schema import LaunchConfig
from trainer.host.notes_board import SealedBoard
from trainer.host.patient_store import PatientStore
from trainer.launch.lobby import LOST_S
from trainer.launch.meeting_place import open_store
from trainer.launch.rendezvous import Rendezvous
from trainer.planning.run_secret import secret_of_hosts

PATIENCE_S = 3 * LOST_S
"""Longest wait for an answer of host 0, unless ``launch.timeout_s`` is longer."""


def open_lobby(launch: LaunchConfig) -> SealedBoard:
    """Connect this host's launcher to the lobby's store, which host 0 serves; returns it as a board.

    Notes carry a hash keyed with the user's secret. Without a secret, anybody who reaches the port can write them.

    Raises:
        RunFailed: host 0 does not answer, or cannot listen.
    """
    rendezvous = Rendezvous(launch.master_addr, launch.master_port, launch.node_rank, launch.nnodes, launch.timeout_s)
    by = f"launch.timeout_s, at least {PATIENCE_S:g} s"
    store = PatientStore(open_store(rendezvous), rendezvous.store, max(PATIENCE_S, launch.timeout_s), by=by)
    key = hashlib.blake2b((secret_of_hosts(launch) or "").encode(), person=b"lobby", digest_size=32).digest()
    return SealedBoard(store, key, "lobby/")
