"""``python -m tests.null_gpu.servers DEPTH``: what a worker on a GPU exchanges with two parameter servers.

The answer has the waits and the kernels of each step, without the servers: what they answer is zeros.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.null_gpu import fakes
from tests.null_gpu.count import Phases
from tests.null_gpu.machine import leave
from tests.null_gpu.stack import Stack
from tests.null_gpu.waits import Waits
from trainer.strategies.pserver.worker.agreement import agree_on
from trainer.strategies.pserver.worker.clipping import clip_factor, clip_values
from trainer.strategies.pserver.worker.remote_model import DenseMap

SERVERS = 2


def exchanged(depth: int) -> dict[str, Any]:
    """Waits and kernels of the parts of an update."""
    waits = Waits()
    phases = Phases(waits)
    with fakes.in_place(1, waits), FakeTensorMode(allow_non_fake_inputs=True), waits:
        model = Stack(4, depth).to("cuda")
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        dense = DenseMap(list(model.named_parameters()), SERVERS, "round_robin", None)
        with phases.phase("clip"):
            clip_values(model.parameters(), {}, 1.0)
            factor = clip_factor(model.parameters(), {}, 1.0)
        for server in range(SERVERS):
            answer = torch.zeros(dense.size(server))
            with phases.phase("push"):
                dense.gradients(server, factor / 2)
            with phases.phase("pull"):
                dense.write(server, answer)
        with phases.phase("buffers"):
            agree_on(list(model.buffers()), lambda values: values, True, True)
    return {
        name: {
            "waits": sum(times for (phase, _, _), times in waits.found.items() if phase == name),
            "kernels": sum(times for (phase, _), times in waits.kernels.items() if phase == name),
        }
        for name in phases.times
    }


if __name__ == "__main__":
    leave(exchanged(json.loads(sys.argv[1])))
