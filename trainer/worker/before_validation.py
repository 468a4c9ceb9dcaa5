"""What a validation alters of a worker, as it was before: a run that is asked to leave in a validation saves that, and
validates again in its next life."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainer.worker.state import device_of, put_randomness, randomness
from trainer.worker.training import Training


class BeforeValidation:
    """The random generators and, of several workers, the buffers of the model, on which they have not agreed yet.

    All else stays as it is until a validation is done, or is the same when it is done twice: what the workers agree on
    are parameters, which are then equal, and the averaged weights, whose mean is taken in float64.
    """

    def __init__(self, run: Training, alone: bool) -> None:
        self.randomness = randomness(device_of(run))
        self.buffers = [] if alone else [buffer.detach().clone() for buffer in run.model.buffers()]

    @contextmanager
    def restored(self, run: Training) -> Iterator[None]:
        """Context manager: the worker is as it was, to be saved. Of what goes on afterwards nothing has begun."""
        put_randomness(device_of(run), **self.randomness)
        with _own_weights(run):
            with torch.no_grad():
                for buffer, before in zip(run.model.buffers(), self.buffers, strict=False):
                    buffer.copy_(before)
            yield


@contextmanager
def _own_weights(run: Training) -> Iterator[None]:
    """Context manager: the model has its own weights, and not the averaged or the best ones that are being measured."""
    run.final_test.restore_trained(run.model)
    if run.watchers.ema is not None and run.watchers.ema.placed:
        with run.watchers.ema.in_place():  # which changes places once more
            yield
    else:
        yield
