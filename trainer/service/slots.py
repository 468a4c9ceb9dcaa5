"""The slots of this host: its GPUs, the cores that this process may use, and its memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from trainer.service.queue import Run, Slots


def without(host: Slots, of_runs: Iterable[Slots]) -> Slots:
    """Return what is left of a host's slots beside those of some runs."""
    of_runs = tuple(of_runs)
    cores = {core for slots in of_runs for core in slots.cores}
    gpus = {gpu for slots in of_runs for gpu in slots.gpus}
    return Slots(
        tuple(core for core in host.cores if core not in cores),
        tuple(gpu for gpu in host.gpus if gpu not in gpus),
        host.memory - sum(slots.memory for slots in of_runs),
    )


def lacks(slots: Slots, run: Run) -> str:
    """Return what a run needs and these slots do not have, such as ``2 of 4 GPUs``; '': nothing."""
    missing = [
        f"{have} of {need} {name}"
        for need, have, name in (
            (run.gpus, len(slots.gpus), "GPUs"),
            (run.cores, len(slots.cores), "cores"),
            (run.memory >> 20, max(0, slots.memory) >> 20, "MiB of memory"),
        )
        if have < need
    ]
    return ", ".join(missing)


def enough(slots: Slots, run: Run) -> Slots:
    """Return as many of these slots as a run needs."""
    return Slots(slots.cores[: run.cores], slots.gpus[: run.gpus], run.memory)


@dataclass
class Plan:
    """Which runs to start now, and which to ask to make room.

    Attributes:
        start: the slots of each run, by number. stop: numbers of runs. reasons: why each other run waits.
    """

    start: dict[int, Slots] = field(default_factory=dict)
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
    plan, free = Plan(), without(host, (run.slots for run in alive))
    at_a_time: dict[int, int] = {}
    for run in alive:
        if run.sweep is not None:
            at_a_time[run.sweep] = at_a_time.get(run.sweep, 0) + 1
    blocked = False
    for place, run in enumerate(waiting):
        if never := lacks(host, run):
            plan.reasons[run.number] = f"this host has {never}"
        elif run.sweep is not None and 0 < run.parallel <= at_a_time.get(run.sweep, 0):
            plan.reasons[run.number] = f"{run.parallel} of its sweep run"
        elif blocked:
            plan.reasons[run.number] = f"{place} before it"
        elif missing := lacks(free, run):
            blocked, plan.reasons[run.number] = True, f"free: {missing}"
            plan.stop = _room_for(run, free, alive)
        else:
            slots = plan.start[run.number] = enough(free, run)
            free = without(free, [slots])
            if run.sweep is not None:
                at_a_time[run.sweep] = at_a_time.get(run.sweep, 0) + 1
    return plan


def _room_for(run: Run, free: Slots, alive: list[Run]) -> list[int]:
    """The runs of lower priority that make room for a run: the fewest, lowest and youngest first; [] if all are not
    enough."""
    lower = sorted((one for one in alive if one.priority < run.priority), key=lambda one: (one.priority, -one.number))
    stop: list[Run] = []
    for one in lower:
        if not lacks(_grown(free, stop), run):
            break
        stop.append(one)
    return [one.number for one in stop] if stop and not lacks(_grown(free, stop), run) else []


def _grown(free: Slots, stop: list[Run]) -> Slots:
    cores = (*free.cores, *(core for run in stop for core in run.slots.cores))
    gpus = (*free.gpus, *(gpu for run in stop for gpu in run.slots.gpus))
    return Slots(cores, gpus, free.memory + sum(run.slots.memory for run in stop))


def of_this_host() -> Slots:
    """Return the slots of this host: the cores of this process's affinity, the GPUs that it sees, the memory."""
    import os

    import psutil

    from trainer.host import hardware

    gpus = tuple(gpu.uuid or str(number) for number, gpu in enumerate(hardware.gpus()))
    return Slots(tuple(sorted(os.sched_getaffinity(0))), gpus, psutil.virtual_memory().total)
