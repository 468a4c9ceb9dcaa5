"""Which runs get which slots: GPUs, cores and memory of the hosts of a queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from trainer.service.queue import Run, Slots, Submission
from trainer.wording import counted


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


def lacks(slots: Slots, run: Submission) -> str:
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


def enough(slots: Slots, run: Submission) -> Slots:
    """Return as many of these slots as a run needs on a host."""
    return Slots(slots.cores[: run.cores], slots.gpus[: run.gpus], run.memory)


def fitting(hosts: Mapping[str, Slots], run: Submission) -> list[str]:
    """Return the hosts that lack nothing for a run, or for its part of a host, by name."""
    return [name for name, slots in hosts.items() if not lacks(slots, run)]


@dataclass
class Plan:
    """Which runs to start now, and which to ask to make room.

    Attributes:
        start: the slots of each run by host, by number of the run. stop: numbers of runs.
        reasons: why each other run waits.
    """

    start: dict[int, dict[str, Slots]] = field(default_factory=dict)
    stop: list[int] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)


def decide(hosts: Mapping[str, Slots], waiting: Sequence[Run], alive: Sequence[Run]) -> Plan:
    """Decide what the runners do next.

    Runs start by priority. Among equals the user goes first whose runs hold the smallest share of the hosts, and of a
    user's runs the one with the lowest number. The first one that lacks slots keeps those that are free for itself, so
    that a run that needs many is not overtaken for ever; runs of lower priority make room for it if that is enough. A
    run of several hosts gets slots on all of them, or on none.

    Args:
        hosts: all slots of each. waiting: runs by priority, then by number. alive: runs that have slots.
    """
    plan, free, blocked = Plan(), _free(hosts, alive), 0
    shares = _Shares(hosts, alive)
    at_a_time: dict[int, int] = {}
    for run in alive:
        if run.sweep is not None:
            at_a_time[run.sweep] = at_a_time.get(run.sweep, 0) + 1
    able = []
    for run in waiting:
        if len(fitting(hosts, run)) < run.hosts:
            plan.reasons[run.number] = never(hosts, run)
        else:
            able.append(run)
    for run in shares.in_turn(able):
        if run.sweep is not None and 0 < run.parallel <= at_a_time.get(run.sweep, 0):
            plan.reasons[run.number] = (
                f"{counted(run.parallel, 'job')} of its sweep {'runs' if run.parallel == 1 else 'run'}"
            )
            continue
        if blocked:
            plan.reasons[run.number] = f"{blocked} before it"
            blocked += 1
        elif len(chosen := fitting(free, run)[: run.hosts]) < run.hosts:
            blocked, plan.reasons[run.number] = 1, _lacking(free, run)
            plan.stop = _room_for(run, free, alive)
        else:
            slots = plan.start[run.number] = {name: enough(free[name], run) for name in chosen}
            free |= {name: without(free[name], [part]) for name, part in slots.items()}
            if run.sweep is not None:
                at_a_time[run.sweep] = at_a_time.get(run.sweep, 0) + 1
        shares.add(run)
    return plan


class _Shares:
    """What each user's runs hold: the largest of its shares of all cores, all GPUs and all memory (dominant share:
    Ghodsi et al., NSDI 2011)."""

    def __init__(self, hosts: Mapping[str, Slots], alive: Iterable[Run]) -> None:
        everything = list(hosts.values())
        self.all = (
            sum(len(slots.gpus) for slots in everything),
            sum(len(slots.cores) for slots in everything),
            sum(slots.memory for slots in everything),
        )
        self.held: dict[str, list[int]] = {}
        for run in alive:
            self.add(run)

    def add(self, run: Run) -> None:
        """Count what a run holds, or would."""
        held = self.held.setdefault(run.user, [0, 0, 0])
        for place, need in enumerate((run.gpus, run.cores, run.memory)):
            held[place] += need * run.hosts

    def of(self, user: str) -> float:
        """Return a user's share, from 0 to 1."""
        return max(
            (held / whole for held, whole in zip(self.held.get(user, ()), self.all, strict=False) if whole), default=0
        )

    def in_turn(self, runs: Sequence[Run]) -> Iterator[Run]:
        """Yield runs, which come by priority and number, in the order in which they may start. A run that is added
        before the next one is asked for counts for its user."""
        for _, equal in groupby(runs, key=lambda run: run.priority):
            of_user: dict[str, deque[Run]] = {}
            for run in equal:
                of_user.setdefault(run.user, deque()).append(run)
            while of_user:
                user = min(of_user, key=lambda name: (self.of(name), of_user[name][0].number))
                yield of_user[user].popleft()
                if not of_user[user]:
                    del of_user[user]


def _free(hosts: Mapping[str, Slots], alive: Iterable[Run]) -> dict[str, Slots]:
    held: dict[str, list[Slots]] = {}
    for run in alive:
        for name, part in run.parts.items():
            held.setdefault(name, []).append(part.slots)
    return {name: without(slots, held.get(name, ())) for name, slots in hosts.items()}


def never(hosts: Mapping[str, Slots], run: Submission) -> str:
    """Return why a run does not start on these hosts, even if they are free."""
    if not hosts:
        return "no runner is there"
    if len(hosts) == run.hosts == 1:
        return f"this host has {lacks(next(iter(hosts.values())), run)}"
    return f"{len(fitting(hosts, run))} of {counted(run.hosts, 'host')} with {_needs(run)}"


def _lacking(free: Mapping[str, Slots], run: Submission) -> str:
    if len(free) == run.hosts == 1:
        return f"free: {lacks(next(iter(free.values())), run)}"
    return f"free: {len(fitting(free, run))} of {counted(run.hosts, 'host')} with {_needs(run)}"


def _needs(run: Submission) -> str:
    gpus = f"{counted(run.gpus, 'GPU')}, " if run.gpus else ""
    return f"{gpus}{counted(run.cores, 'core')}{f', {run.memory >> 20} MiB of memory' if run.memory else ''}"


def _room_for(run: Run, free: Mapping[str, Slots], alive: Sequence[Run]) -> list[int]:
    """The runs of lower priority that make room for a run: lowest and youngest first, and none that would not help; []
    if all are not enough, or those that end already are."""
    ending = [one for one in alive if one.asked]
    lower = [one for one in alive if one.priority < run.priority and not one.asked]
    stop: list[Run] = []
    for one in sorted(lower, key=lambda one: (one.priority, -one.number)):
        if _fits(run, free, [*ending, *stop]):
            break
        stop.append(one)
    if not _fits(run, free, [*ending, *stop]):
        return []
    for one in stop[:-1]:
        if _fits(run, free, [*ending, *(other for other in stop if other is not one)]):
            stop.remove(one)
    return [one.number for one in stop]


def _fits(run: Run, free: Mapping[str, Slots], ended: Iterable[Run]) -> bool:
    """Whether a run has its slots once these have ended."""
    grown = dict(free)
    for one in ended:
        for name, part in one.parts.items():
            if name in grown:
                now, more = grown[name], part.slots
                grown[name] = Slots((*now.cores, *more.cores), (*now.gpus, *more.gpus), now.memory + more.memory)
    return len(fitting(grown, run)) >= run.hosts


def of_this_host() -> Slots:
    """Return the slots of this host: the cores of this process's affinity, the GPUs that it sees, the memory."""
    import os

    import psutil

    from trainer.host import hardware

    gpus = tuple(gpu.uuid or str(number) for number, gpu in enumerate(hardware.gpus()))
    return Slots(tuple(sorted(os.sched_getaffinity(0))), gpus, psutil.virtual_memory().total)
