"""Callback of strategy=advise: measures the parts of an update, and with two workers the link between them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trainer.host.files import replace_file
from trainer.worker.callbacks import TrainEnd, TrainStart, UpdateEnd

PROBE = "probe.json"
SIZES = tuple(4**n for n in range(5, 13))
"""Bytes of the all-reduces: 1 KiB to 16 MiB."""
TIMES = 5
"""Of each size, after one that is not counted."""
PARTS = ("forward", "backward", "update")


class Probe:
    """Times an update's forward, backward and optimizer by marks, and leaves them in ``probe.json``.

    On a GPU each mark waits for it. Of all updates the lower quartile counts: other work on the machine only adds time.

    Args:
        skipped: updates at the beginning that are not counted. link: measure the link at the end. marks: time the
        parts; a compiled model has no place for marks.
    """

    def __init__(self, skipped: int, link: bool = False, marks: bool = True) -> None:
        self.skipped, self.link, self.marked = skipped, link, marks
        self.marks: dict[str, float] = {}
        self.steps: list[float] = []
        self.parts: dict[str, list[float]] = {}
        self.device = torch.device("cpu")
        self.hooks: list[Any] = []

    def on_train_start(self, event: TrainStart) -> None:
        """Set the marks."""
        self.device = next(event.model.parameters()).device
        if not self.marked:
            return
        self.hooks = [
            event.model.register_forward_pre_hook(self._marking("begin")),
            event.model.register_forward_hook(self._marking("forward")),
            register_optimizer_step_pre_hook(self._marking("backward")),
            register_optimizer_step_post_hook(self._marking("update")),
        ]

    def _marking(self, name: str) -> Callable[..., None]:
        """A hook that sets a mark, and changes nothing."""

        def hook(*_: Any) -> None:
            self._mark(name)

        return hook

    def _mark(self, name: str) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.marks[name] = now = time.perf_counter()
        return now

    def on_update_end(self, event: UpdateEnd) -> None:
        """Note the times of an update."""
        before, now = self.marks.get("end"), self._mark("end")
        if before is not None and event.step > self.skipped:
            self.steps.append(now - before)
            for since, part in zip(("begin", *PARTS), PARTS, strict=False):
                if (begun := self.marks.get(since)) is not None and (ended := self.marks.get(part)) is not None:
                    self.parts.setdefault(part, []).append(max(0.0, ended - begun))

    def on_train_end(self, event: TrainEnd) -> None:
        """Leave the times, and measure the link. Workers measure it together, and the first one writes."""
        for hook in self.hooks:
            hook.remove()
        found: dict[str, Any] = {part: usual(times) for part, times in self.parts.items()}
        link = self._link() if self.link and dist.is_initialized() else []
        found |= {"step": usual(self.steps), "link": link}
        if not event.rank:
            replace_file(event.run_dir / PROBE, json.dumps(found))

    def _link(self) -> list[tuple[int, float]]:
        """Bytes and seconds of all-reduces."""
        return [(size, self._all_reduce(size)) for size in SIZES]

    def _all_reduce(self, size: int) -> float:
        numbers, seconds = torch.zeros(size // 4, device=self.device), []
        for _ in range(TIMES + 1):
            dist.barrier()
            since = self._mark("sent")
            dist.all_reduce(numbers)
            seconds.append(self._mark("sent") - since)
        return usual(seconds[1:])


def usual(seconds: Sequence[float]) -> float:
    """The lower quartile of some measured times."""
    return sorted(seconds)[(len(seconds) - 1) // 4]
