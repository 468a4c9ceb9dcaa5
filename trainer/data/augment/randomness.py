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
