"""Virtual time, processes that stop and die, and a network that loses, doubles, delays and reorders messages."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from tests.simulation.scenario import Scenario

MOST_LOSSES = 4
"""A request and its answer are lost at most so often: a timeout shall always have a cause that is known."""


class Violation(AssertionError):
    """A promise of docs/protocol.md is broken."""


class World:
    """The clock, what is to happen, and what has happened.

    Args:
        seed: of everything that is drawn here.
        tracing: keep a line for each event.
    """

    def __init__(self, seed: int, tracing: bool = False) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.number = itertools.count()
        self.over = False
        self.moved = 0.0
        """When a batch was computed, a part of a checkpoint written or fetched, or a stop of all was over."""
        self.injected: Counter[str] = Counter()
        self.tracing = tracing
        self.trace: list[str] = []

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        """Do that at a time, after everything that was asked for that time before."""
        heapq.heappush(self.events, (time if time > self.now else self.now, next(self.number), action, arguments))

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Do that so much later."""
        heapq.heappush(self.events, (self.now + seconds, next(self.number), action, arguments))

    def run(self, until: float) -> None:
        """Let everything happen in its order, until somebody says that it is over.

        Raises:
            Violation: it is not over by then.
        """
        events, first = self.events, heapq.heappop
        while not self.over:
            if not events or events[0][0] > until:
                raise Violation(f"the run does not end within {until:g} s")
            self.now, _, action, arguments = first(events)
            action(*arguments)

    def begin_again(self) -> None:
        """Nothing that was to happen happens."""
        self.events.clear()
        self.over, self.moved = False, self.now

    def say(self, what: str) -> None:
        """A line of the trace."""
        if self.tracing:
            self.trace.append(f"{self.now:10.4f}  {what}")


class Process:
    """A process of the run: it may be stopped, suspended with its host, and killed; its clock may jump.

    Args:
        name: in the trace.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.dead = self.ended = False
        self.stopped_until = self.stopped_s = 0.0
        self.lag = 0.0  # what its clock is behind (suspended) or ahead of the world's

    def clock(self) -> float:
        """Its own monotonic clock: it goes on while the process is stopped, and stands while its host is suspended."""
        return self.world.now - self.lag

    @property
    def stopped(self) -> bool:
        """It does nothing for a while."""
        return self.world.now < self.stopped_until

    def when_it_goes_on(self, action: Callable[[], None]) -> None:
        """Now, or when it goes on."""
        if self.stopped:
            self.world.at(self.stopped_until, action)
        else:
            action()

    def stop(self, seconds: float, suspended: bool = False) -> None:
        """It does nothing for so long; with its host its clock stands, too."""
        self.world.say(f"{self.name} {'is suspended' if suspended else 'stops'} for {seconds:g} s")
        begins = max(self.world.now, self.stopped_until)
        self.stopped_until = max(self.stopped_until, self.world.now + seconds)
        more = max(0.0, self.stopped_until - begins)
        self.stopped_s += more
        if suspended:
            self.lag += more
        self.world.at(self.stopped_until, self.goes_on)

    def goes_on(self) -> None:
        """It was stopped."""

    def jump(self, seconds: float) -> None:
        """Its clock jumps ahead."""
        self.world.say(f"the clock of {self.name} jumps by {seconds:g} s")
        self.lag -= seconds


class Network:
    """Ways between workers and servers.

    Args:
        scenario: chances of a message to be lost, doubled and late, and how late.
    """

    def __init__(self, world: World, scenario: Scenario) -> None:
        self.world, self.scenario = world, scenario
        self.cut_until: dict[tuple[int, int], float] = {}
        self.parted_until: dict[tuple[int, int], float] = {}
        self.resets: dict[tuple[int, int], int] = {}
        self.losses: dict[Any, int] = {}
        self.draw = world.random.random

    def cut(self, worker: int, server: int) -> bool:
        """Whether nothing passes between them now."""
        way = worker, server
        return self.world.now < max(self.cut_until.get(way, 0.0), self.parted_until.get(way, 0.0))

    def part(self, ways: Iterable[tuple[int, int]], seconds: float) -> None:
        """All these ways are cut at once. What is sent meanwhile is lost, or comes when they are there again."""
        for way in ways:
            self.parted_until[way] = max(self.parted_until.get(way, 0.0), self.world.now + seconds)

    def send(self, way: tuple[int, int], which: Any, arrive: Callable[..., None], *message: Any) -> None:
        """A message goes its way: it arrives once, several times, late, after later ones, or never.

        Args:
            way: (worker, server). which: tells sendings of one message from those of others. arrive: takes the message,
                and more.
        """
        world, draw, told = self.world, self.draw, self.scenario
        if (self.cut_until or self.parted_until) and self.cut(*way):
            world.injected["cut off"] += 1
            if (until := self.parted_until.get(way, 0.0)) > world.now and draw() < 0.5:
                world.at(until + 3.0 * draw(), self._arrive, way, self.resets.get(way, 0), arrive, message)
            return
        if draw() < told.drop and (losses := self.losses.get(which, 0)) < MOST_LOSSES:
            self.losses[which] = losses + 1
            world.injected["lost"] += 1
            if world.tracing:
                world.say(f"lost: {which}")
            return
        copies = 1
        if draw() < told.double:
            copies = 2
            world.injected["doubled"] += 1
        connection = self.resets.get(way, 0)
        for _ in range(copies):
            seconds = told.latency_s * (0.1 + draw())
            if draw() < told.late:
                seconds += told.slow_s * draw() ** 3
                world.injected["late"] += 1
            world.after(seconds, self._arrive, way, connection, arrive, message)

    def _arrive(
        self, way: tuple[int, int], connection: int, arrive: Callable[..., None], message: tuple[Any, ...]
    ) -> None:
        if self.resets.get(way, 0) == connection:
            arrive(*message)
        else:
            self.world.injected["lost by a reset"] += 1

    def reset(self, worker: int, server: int) -> None:
        """The connection is reset: what is under way is lost."""
        self.resets[worker, server] = self.resets.get((worker, server), 0) + 1
        self.world.say(f"connection of worker {worker} to server {server} is reset")
