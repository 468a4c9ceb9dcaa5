"""How long a worker has waited at a time, and how long it may: its timeout, told a second time, and what was done to it
meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.simulation.scenario import TIMEOUT_S, Scenario
from tests.simulation.world import Violation
from trainer.strategies.pserver.protocol.messages import SAVES, Verb
from trainer.strategies.pserver.worker.client import Client

MARGIN_S = 5.0
"""A server's own patience shall end before that of a worker which waits for it."""
WRITES = 3.0
"""A part waits until the one before is written, and each write takes up to 1.2 times as long as the disk is slow."""
PARTS_S = 600.0
"""As trainer/worker/train.py: the first worker waits so long for parts of which nothing comes."""
ASK_S = 5.0
"""So long a worker waits for what the store says of servers: of those that are silent, and when it gives up."""
LOOKS = 2
"""So often it may ask at the end of a wait: at once after the other."""
FETCHING_S = 3600.0
"""Parts may take so long to come from other hosts."""
GOODBYE_S = 3.0
SLACK_S = 0.1


def longest(client: Client, scenario: Scenario) -> float:
    """So long a worker may wait for the answers to what is under way. For a checkpoint it waits as long as that takes
    in this run."""
    asked = {request.message.verb for request in client.under_way.values()}
    board_s = LOOKS * ASK_S * bool(scenario.places)
    if asked == {Verb.BYE}:
        return GOODBYE_S + board_s
    saves = Verb.SAVE in asked or (
        Verb.MEET in asked
        and any(r.message.verb == Verb.MEET and r.message.flags & SAVES for r in client.under_way.values())
    )
    more = FETCHING_S if any(scenario.hosts) else WRITES * scenario.disk_s
    more_s = (more + scenario.parted_s) * saves
    return TIMEOUT_S + MARGIN_S + more_s + board_s


def watched(take_until: Callable[..., None]) -> Callable[..., None]:
    """``Client._take_until``, and a look at the world's clock before and after it."""

    def instead(self: Any, done: Callable[[], bool], patience_s: float, meanwhile: Callable[[], None] | None) -> None:
        worker, elsewhere = self.connections.worker, 0.0
        world, limit = worker.world, longest(self, worker.scenario)
        began, extended = world.now - worker.stopped_s, worker.found_saving

        def timed() -> None:
            nonlocal elsewhere
            before = world.now - worker.stopped_s
            try:
                meanwhile()  # type: ignore[misc]
            finally:  # it may have waited in there, and failed
                elsewhere += world.now - worker.stopped_s - before

        try:
            take_until(self, done, patience_s, meanwhile and timed)
        finally:
            waited = world.now - worker.stopped_s - began - elsewhere
            if not worker.dead and waited > limit * (1 + worker.found_saving - extended) + SLACK_S:
                raise Violation(f"{worker.name} has waited for {waited:g} s, and may for {limit:g}")

    return instead
