"""The slots of this host: its GPUs, the cores that this process may use, and its memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.service.queue import Run


@dataclass(frozen=True)
class Slots:
    """What is free or taken.

    Attributes:
        cores: their numbers. gpus: what ``CUDA_VISIBLE_DEVICES`` takes for each. memory: bytes.
    """

    cores: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()
    memory: int = 0

    def without(self, taken: Iterable[Mapping[str, Any]]) -> Slots:
        """Return what is left beside the slots of some runs."""
        cores, gpus, memory = set(self.cores), set(self.gpus), self.memory
        for slots in taken:
            cores -= set(slots.get("cores", ()))
            gpus -= set(slots.get("gpus", ()))
            memory -= sum(slots.get("memory", ()))
        return Slots(
            tuple(core for core in self.cores if core in cores), tuple(gpu for gpu in self.gpus if gpu in gpus), memory
        )

    def lacks(self, run: Run) -> str:
        """Return what a run needs and these slots do not have, such as ``2 of 4 GPUs``; '': nothing."""
        missing = [
            f"{have} of {need} {name}"
            for need, have, name in (
                (run.gpus, len(self.gpus), "GPUs"),
                (run.cores, len(self.cores), "cores"),
                (run.memory >> 20, max(0, self.memory) >> 20, "MiB of memory"),
            )
            if have < need
        ]
        return ", ".join(missing)

    def taken_by(self, run: Run) -> dict[str, list[Any]]:
        """Return the slots for a run that these are enough for."""
        return {"cores": list(self.cores[: run.cores]), "gpus": list(self.gpus[: run.gpus]), "memory": [run.memory]}


@dataclass
class Plan:
    """Which runs to start now, and which to ask to make room.

    Attributes:
        start: the slots of each run, by number. stop: numbers of runs. reasons: why each other run waits.
    """

    start: dict[int, dict[str, list[Any]]] = field(default_factory=dict)
    stop: list[int] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)


def decide(host: Slots, waiting: list[Run], alive: list[Run]) -> Plan:
    """Decide what the runner does next.

    Runs start in their order: by priority, then by number. The first one that lacks slots keeps those that are free for
    itself, so that a run that needs many is not overtaken for ever; runs of lower priority make room for it if that is
    enough.

    Args:
        host: all slots. waiting: runs in their order. alive: runs that have slots.
    """
    plan, free = Plan(), host.without(run.slots for run in alive)
    at_a_time: dict[int, int] = {}
    for run in alive:
        if run.sweep is not None:
            at_a_time[run.sweep] = at_a_time.get(run.sweep, 0) + 1
    blocked = False
    for place, run in enumerate(waiting):
        if never := host.lacks(run):
            plan.reasons[run.number] = f"this host has {never}"
        elif run.sweep is not None and 0 < run.parallel <= at_a_time.get(run.sweep, 0):
            plan.reasons[run.number] = f"{run.parallel} of its sweep run"
        elif blocked:
            plan.reasons[run.number] = f"{place} before it"
        elif lacks := free.lacks(run):
            blocked, plan.reasons[run.number] = True, f"free: {lacks}"
            plan.stop = _room_for(run, free, alive)
        else:
            plan.start[run.number] = free.taken_by(run)
            free = free.without([plan.start[run.number]])
            if run.sweep is not None:
                at_a_time[run.sweep] = at_a_time.get(run.sweep, 0) + 1
    return plan


def _room_for(run: Run, free: Slots, alive: list[Run]) -> list[int]:
    """The runs of lower priority that make room for a run: the fewest, lowest and youngest first; [] if all are not
    enough."""
    lower = sorted((one for one in alive if one.priority < run.priority), key=lambda one: (one.priority, -one.number))
    stop: list[Run] = []
    for one in lower:
        if not _grown(free, stop).lacks(run):
            break
        stop.append(one)
    return [one.number for one in stop] if stop and not _grown(free, stop).lacks(run) else []


def _grown(free: Slots, stop: list[Run]) -> Slots:
    cores = (*free.cores, *(core for one in stop for core in one.slots.get("cores", ())))
    gpus = (*free.gpus, *(gpu for one in stop for gpu in one.slots.get("gpus", ())))
    return Slots(cores, gpus, free.memory + sum(sum(one.slots.get("memory", ())) for one in stop))


def of_this_host() -> Slots:
    """Return the slots of this host: the cores of this process's affinity, the GPUs that it sees, the memory."""
    import os

    import psutil

    from trainer.host import hardware

    gpus = tuple(gpu.uuid or str(number) for number, gpu in enumerate(hardware.gpus()))
    return Slots(tuple(sorted(os.sched_getaffinity(0))), gpus, psutil.virtual_memory().total)
