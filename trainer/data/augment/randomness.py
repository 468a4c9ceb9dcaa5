"""The process-wide random generators, left as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def own_randomness() -> Iterator[None]:
    """While it lasts, an augmentation may use torch's, Python's and numpy's global randomness; afterwards the
    generators are as before."""
    torch_state, python_state, numpy_state = (
        torch.default_generator.get_state(),
        random.getstate(),
        np.random.get_state(),
    )
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def seed_cpu(seed: int) -> None:
    """Seed the generators of torch, Python and numpy before code of a user's runs, which may ask any of them."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def seed_for_sample(seed: int, epoch: int, sample: int) -> None:
    """Seed these generators with what follows from the run's seed, the epoch and the sample's number alone."""
    seed_cpu(hash((seed, epoch, sample)) & 0x7FFFFFFFFFFFFFFF)
