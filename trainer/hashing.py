"""Hashes that are the same in every process, on every machine, in every version; of numpy alone."""

from __future__ import annotations

import hashlib

import numpy as np


def mixed(values: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer over uint64 (Steele, Lea & Flood, 2014): every bit of the input moves every bit out."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    last: np.ndarray = values ^ (values >> np.uint64(31))
    return last


def hash_of(text: str) -> int:
    """64 bits of a text; Python's own ``hash`` of a string is another one in each process."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")
