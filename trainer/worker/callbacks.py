"""A user's callbacks: the events that they get, and how one asks the run to stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.config.instantiate import call_target
from trainer.errors import Interrupted, RunFailed, failed
from trainer.metrics.exchange import Total, exchanged
from trainer.planning.user_class_checks import callback_name

HOOKS = ("on_train_start", "on_update_end", "on_validation_end", "on_train_end", "on_exception")
"""Methods that a callback may have, each called with one event."""
STOP = "stop"
"""Beside the callbacks' states: what they have asked for, and the reason that all workers have agreed on."""


@dataclass(frozen=True)
class Event:
    """Base class of the events that callbacks get, with what is true of the run then.

    Attributes:
        rank, world_size: this worker's number, and how many began.
        run_dir: the run's folder, shared by all workers of a host: write to it from one rank, or to a file for each.
        epoch: from 0. step: updates done (where work is leased, of this worker). total_steps: as planned.
        lr: of the update that was made last.
        model: the module itself, on its device. With tables on parameter servers it holds no rows of theirs.
        requests: filled by ``stop``.
    """

    rank: int
    world_size: int
    run_dir: Path
    epoch: int
    step: int
    total_steps: int
    lr: float
    model: nn.Module
    requests: list[str] = field(repr=False)

    def stop(self, reason: str) -> None:
        """Ask the run to end early; all workers end together, at the next log line or validation. GPUs end at the log
        line after the next one, because nobody waits for its numbers."""
        self.requests.append(str(reason))


@dataclass(frozen=True)
class TrainStart(Event):
    """The event before the first update: the model is built and equal on all workers."""


@dataclass(frozen=True)
class UpdateEnd(Event):
    """The event after an update; the model is in training mode.

    Attributes:
        samples: this worker's in the update.
        loss: this worker's mean loss of the update's last batch, a tensor () on the device; ``item()`` waits for a GPU.
    """

    samples: int
    loss: torch.Tensor


@dataclass(frozen=True)
class ValidationEnd(Event):
    """The event after a validation: the model is the agreed one, in evaluation mode, and gradients are off.

    Attributes:
        metrics: ``val/...`` and, with ``ema.decay``, ``val_ema/...``, the same on all workers.
        improved: the first worker has kept this model as the best so far; False on the others.
    """

    metrics: Mapping[str, float]
    improved: bool


@dataclass(frozen=True)
class TrainEnd(Event):
    """The event after the last validation, before the model is saved.

    Attributes:
        metrics: of the last validation; ended: empty, or why the run ends early.
    """

    metrics: Mapping[str, float]
    ended: str


@dataclass(frozen=True)
class Failed(Event):
    """The event of a failing or interrupted training on this worker; ``error`` is raised again afterwards."""

    error: BaseException


class Callbacks:
    """Calls all callbacks of one worker, in order.

    Args:
        made: the callbacks, with what each is called in messages.
        rank, size, run_dir, total_steps, model: see :class:`Event`.
    """

    def __init__(
        self, made: Sequence[tuple[str, Any]], rank: int, size: int, run_dir: Path, total_steps: int, model: nn.Module
    ) -> None:
        self.common = {"rank": rank, "world_size": size, "run_dir": run_dir, "total_steps": total_steps, "model": model}
        self.rank, self.size = rank, size
        self.lr = 0.0
        self.requests: list[str] = []
        self.agreed = ""
        self.hooks: dict[str, list[tuple[str, Callable[[Any], Any]]]] = {
            hook: [(name, getattr(one, hook)) for name, one in made if hasattr(one, hook)] for hook in HOOKS
        }
        self.remembering = {
            name: one for name, one in made if hasattr(one, "state_dict") and hasattr(one, "load_state_dict")
        }
        self.after_update = bool(self.hooks["on_update_end"])

    def __bool__(self) -> bool:
        return any(self.hooks.values())

    def state(self) -> dict[str, Any]:
        """The states of callbacks that have ``state_dict`` and ``load_state_dict``, by name, and what they have asked
        for."""
        states = {name: one.state_dict() for name, one in self.remembering.items()}
        return {**states, STOP: {"requests": list(self.requests), "agreed": self.agreed}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned. Older checkpoints have no requests."""
        for name, one in self.remembering.items():
            if name in state:
                one.load_state_dict(state[name])
        asked = state.get(STOP, {})
        self.requests[:] = asked.get("requests", [])  # the list that events are handed
        self.agreed = asked.get("agreed", "")

    def forget_stop(self) -> None:
        """Forget the requests to stop, because callbacks with other arguments made them."""
        self.requests.clear()
        self.agreed = ""

    def train_start(self, lr: float) -> None:
        """Call the callbacks before the first update, whose learning rate will be ``lr``."""
        self.lr = lr
        self._tell("on_train_start", TrainStart, 0, 0)

    def update_end(self, epoch: int, step: int, lr: float, samples: int, loss: torch.Tensor) -> None:
        """Call the user's callbacks after an update."""
        self.lr = lr
        self._tell("on_update_end", UpdateEnd, epoch, step, samples=samples, loss=loss.detach())

    def validation_end(self, epoch: int, step: int, metrics: Mapping[str, float], improved: bool) -> None:
        """Call the user's callbacks after a validation."""
        self._tell("on_validation_end", ValidationEnd, epoch, step, metrics=dict(metrics), improved=improved)

    def train_end(self, epoch: int, step: int, metrics: Mapping[str, float], ended: str) -> None:
        """Call the user's callbacks at the end of the training."""
        self._tell("on_train_end", TrainEnd, epoch, step, metrics=dict(metrics), ended=ended)

    def exception(self, epoch: int, step: int, error: BaseException) -> None:
        """Call the callbacks when the training fails; an error in one is printed and does not hide the failure."""
        try:
            self._tell("on_exception", Failed, epoch, step, error=error)
        except RunFailed as another:
            print(another, flush=True)

    def asked(self) -> torch.Tensor:
        """Return a vector (size,) float64 with 1 at this worker's rank if one of its callbacks asks to stop. Summed
        over workers."""
        flags = torch.zeros(self.size, dtype=torch.float64)
        flags[self.rank] = float(bool(self.requests))
        return flags

    def why(self, step: int, total: Total) -> str:
        """The reason why callbacks end the run, as the sum of ``asked`` over the workers says.
        The same on all workers but for ``step``. A collective call."""
        request = self.requests[0] if self.requests else ""
        reasons = [reason for reason in exchanged(total, self.rank, self.size, request.encode()) if reason]
        self.agreed = f"stopped by a callback at update {step}: {reasons[0].decode() if reasons else ''}"
        return self.agreed

    def _tell(self, hook: str, kind: type[Event], epoch: int, step: int, **more: Any) -> None:
        if not self.hooks[hook]:
            return
        event = kind(**self.common, epoch=epoch, step=step, lr=self.lr, requests=self.requests, **more)  # type: ignore[arg-type]
        for name, call in self.hooks[hook]:
            try:
                call(event)
            except (RunFailed, Interrupted):
                raise
            except (Exception, SystemExit) as error:
                raise failed(name, hook, call, error) from error


def made(
    nodes: Sequence[Mapping[str, Any]], rank: int, size: int, run_dir: Path, total_steps: int, model: nn.Module
) -> Callbacks | None:
    """Instantiate the callbacks of these config nodes; None if there are none."""
    called = [(callback_name(n, node), call_target(node, f"callbacks[{n}]")) for n, node in enumerate(nodes)]
    return Callbacks(called, rank, size, run_dir, total_steps, model) if called else None
