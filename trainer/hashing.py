"""Hashes that are the same in every process, on every machine and in every version; need numpy alone."""

from __future__ import annotations

import hashlib

import numpy as np


def mixed(values: np.ndarray) -> np.ndarray:
    """Mix the bits of uint64 values by splitmix64's finalizer (Steele, Lea & Flood, 2014): a good integer hash."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    last: np.ndarray = values ^ (values >> np.uint64(31))
    return last


def hash_of(text: str) -> int:
    """A 64-bit hash of a text, the same in every process (Python's own ``hash`` of strings is not)."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")
