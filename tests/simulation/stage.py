"""What of the product has a stand-in while runs are simulated. It is put in place once, for many runs."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import marshal
from collections.abc import Iterator
from os.path import normpath
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.optim import Optimizer

from tests.simulation.disks import Disks
from tests.simulation.waits import watched
from tests.simulation.world import World
from trainer.strategies.pserver.protocol import messages, snapshot, snapshot_parts
from trainer.strategies.pserver.server import machine, parameters, saving
from trainer.strategies.pserver.worker import client as client_module
from trainer.strategies.pserver.worker import export
from trainer.strategies.pserver.worker import worker as worker_module

IMPORT_THE_COMPILER = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
"""Methods of torch's optimizers that import its compiler when they are first called, and ask it each time."""
NO_RECORD: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class Stage(io.TextIOBase):
    """Where one run after the other is played.

    Attributes:
        world, disks: of the run that is played now.
        codec: its messages travel in frames. Else they are handed over as they are, which takes less time.
    """

    world: World
    disks: Disks
    codec = False
    set_up = False

    def write(self, told: str) -> int:
        """What the product prints goes into the trace."""
        if self.world.tracing and told.strip():
            self.world.say(f"    {told.strip()}")
        return len(told)

    def dumps(self, value: Any) -> Any:
        """As ``json.dumps``."""
        return json.dumps(value) if self.codec else Text(marshal.dumps(value))

    def loads(self, told: bytes) -> Any:
        """As ``json.loads``."""
        return json.loads(told) if self.codec else marshal.loads(told)

    def life(self) -> int:
        """As ``lost_workers.new_life``: drawn from the seed."""
        return self.world.random.getrandbits(62) | 1

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """While it lasts, runs can be played here."""
        if self.set_up:
            yield
            return
        with contextlib.ExitStack() as stack:
            for one in self._stand_ins():
                stack.enter_context(one)
            self.set_up = True
            try:
                yield
            finally:
                self.set_up = False

    def _stand_ins(self) -> list[Any]:
        return [
            patch.object(messages, "json", self),
            patch.object(messages, "json_text", self),
            patch.object(client_module, "pack", lambda message: message),
            patch.object(client_module, "record_function", lambda name: NO_RECORD),
            patch.object(client_module, "MEANWHILE_S", 1.0),  # a tenth of the looks and requests, to the same effect
            patch.object(worker_module, "LEASE_LOOK_S", 0.2),
            patch.object(client_module, "new_life", self.life),
            patch.object(client_module.Client, "_take_until", watched(client_module.Client._take_until)),
            patch.object(torch.autograd.profiler, "record_function", lambda name: NO_RECORD),
            patch.object(torch.compiler, "disable", lambda function: function),  # nothing is compiled
            patch.multiple(
                Optimizer, **{name: inspect.unwrap(getattr(Optimizer, name)) for name in IMPORT_THE_COMPILER}
            ),
            patch.object(torch.optim.SGD, "step", _step),
            patch.multiple(snapshot, **{name: self._on_disks(name) for name in ("begin", "write_part", "complete")}),
            patch.multiple(
                snapshot_parts,
                **{
                    name: self._on_disks(name)
                    for name in ("mark", "is_shared", "piece", "forget", "receive", "leave_failure", "begin_anew")
                },
            ),
            patch.object(export, "leave_failure", self._on_disks("save_failed")),
            patch.object(
                Path, "resolve", lambda path: path if ".." not in path.parts else Path(normpath(path))
            ),  # no disk has links
            patch.object(machine, "parts_of", self._on_disks("parts_of")),
            patch.object(parameters, "parts_of", self._on_disks("parts_of")),
            patch.object(saving, "kept_by", lambda node: "SGD"),  # to know that, a real one takes a step
            contextlib.redirect_stdout(self),  # type: ignore[type-var]
        ]

    def _on_disks(self, name: str) -> Any:
        def instead(*arguments: Any) -> Any:
            return getattr(self.disks, name)(*arguments)

        return instead


class Text(bytes):
    """A value that travels as it is, where JSON is expected."""

    def encode(self) -> bytes:
        """Itself."""
        return self


def _step(optimizer: Optimizer) -> None:
    """SGD's step, of vectors so short that NumPy takes a fraction of the time."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                values = parameter.detach().numpy()
                values -= group["lr"] * parameter.grad.numpy()


_step.hooked = True  # type: ignore[attr-defined]  # torch wraps it no more

STAGE = Stage()
