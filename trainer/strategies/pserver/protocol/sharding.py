"""Which server keeps what: dense parameters in pieces, table rows in buckets. Pure functions, the same in every
process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from trainer.hashing import hash_of, mixed

BUCKETS = 1024  # a power of two; rows move between servers by whole buckets when the number of servers changes
BUCKET_BITS = 10
SLICE_ABOVE = 8192  # elements

SplitMethod = Literal["round_robin", "hash_name"]


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``stop`` (excluded) of a flattened parameter, kept by one server."""

    name: str
    start: int
    stop: int
    server: int


def place(
    parameters: Sequence[tuple[str, int]],
    servers: int,
    split_method: SplitMethod = "round_robin",
    slice_above: int | None = SLICE_ABOVE,
) -> list[Piece]:
    """Shard the parameters: cut them into pieces for the servers, every element once, in the order of the parameters.

    Args:
        parameters: (name, elements) each.
        servers: how many keep them, at least 1.
        split_method: where parameters go that stay whole: ``round_robin`` in their order, so that the servers' numbers
            of them differ by one at most; ``hash_name`` by a hash of the name, whatever else there is.
        slice_above: parameters of more elements than that are cut evenly over all servers; None: none is.

    Raises:
        ValueError: no server, or an unknown split method.
    """
    if servers < 1:
        raise ValueError(f"at least 1 server, not {servers}")
    if split_method not in ("round_robin", "hash_name"):
        raise ValueError(f"split_method must be round_robin or hash_name, not {split_method}")
    pieces: list[Piece] = []
    turn = 0
    for name, size in parameters:
        if slice_above is not None and size > slice_above:
            pieces += _slices(name, size, servers)
        elif split_method == "hash_name":
            pieces.append(Piece(name, 0, size, hash_of(name) % servers))
        else:
            pieces.append(Piece(name, 0, size, turn % servers))
            turn += 1
    return pieces


def _slices(name: str, size: int, servers: int) -> list[Piece]:
    """Even cuts: the sizes differ by one at most. A parameter of fewer elements than servers leaves some without."""
    cuts = [size * server // servers for server in range(servers + 1)]
    return [Piece(name, cuts[n], cuts[n + 1], n) for n in range(servers) if cuts[n] < cuts[n + 1]]


def bucket_key(table: str) -> np.uint64:
    """The number that the buckets of a table's rows follow from: of its name alone, whatever the seed of a run."""
    return np.uint64(hash_of(table))


def buckets_of(table_key: np.uint64, ids: np.ndarray) -> np.ndarray:
    """(N,) int64 buckets 0..1023 of a table's row ids (N,) of 0..2^63-1.

    The high bits of the hash decide, since :class:`HashIndex` uses the low ones: were they the same bits, the rows of
    one server would crowd together in its index.
    """
    return (mixed(ids.astype(np.uint64) + table_key) >> np.uint64(64 - BUCKET_BITS)).astype(np.int64)


@cache
def server_of_bucket(servers: int) -> np.ndarray:
    """(1024,) int64, read-only: the server of each bucket, in runs whose lengths differ by one at most.

    Raises:
        ValueError: no server, or more than there are buckets.
    """
    if not 1 <= servers <= BUCKETS:
        raise ValueError(f"1 to {BUCKETS} servers, not {servers}")
    homes = np.arange(BUCKETS, dtype=np.int64) * servers // BUCKETS
    homes.flags.writeable = False
    return homes
