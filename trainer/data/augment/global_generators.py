"""Seeds the process-wide random generators of torch, Python and numpy for an augmentation, and restores them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def own_randomness() -> Iterator[None]:
    """Context manager: an augmentation may use torch's, Python's and numpy's generators, which are then restored."""
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
    """Seed the global CPU generators of torch, Python and numpy, for user code that draws from them."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def seed_for_sample(seed: int, epoch: int, sample: int) -> None:
    """Seed the global generators of torch, Python and numpy from (seed, epoch, sample) alone."""
    seed_cpu(hash((seed, epoch, sample)) & 0x7FFFFFFFFFFFFFFF)
