"""A worker's requests to all servers: repeated until they are answered, and waited for with a deadline.

No socket, no thread and no clock is here (they are the connections'), so the same client runs in the simulator of
tests/simulation.
"""

# States of a request: under way -> answered | failed. `ask` sends it and notes it in `under_way`; its answer removes
# it. A request without an answer is sent again after 2, 4, 8 and then every 16 s, as the same bytes. So a server may
# get it several times, and answers each.
# Who moves it: `take` takes in answers, and is called by all that waits. Nothing happens between two calls.
#
# What must always hold:
# - Numbers of requests and of pushes only rise within a life. The pushes of a life begin after the greatest number that
#   any server knows of the lives before.
# - The buffers of a request do not change before it is answered.
# - A wait ends by the answer, by a failure, or after its patience with the names of those that did not answer. Time in
#   which this process was stopped, or did something else meanwhile, does not count; a server that writes its part of a
#   checkpoint gets more, SAVE_S in all.

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from torch.profiler import record_function

from trainer.errors import Missing, RunFailed
from trainer.strategies.contract import WAITS
from trainer.strategies.lost_workers import new_life
from trainer.strategies.pserver.protocol.messages import (
    COMES,
    MARGIN_S,
    MOST_RECORDS,
    SAVE_S,
    SAVES,
    TEXT_LIMIT,
    Kind,
    Message,
    Verb,
    pack,
    within,
)
from trainer.strategies.pserver.worker.connections_contract import ROOM_S, Connections
from trainer.strategies.pserver.worker.requests import Fenced, Request, failure_of
from trainer.strategies.pserver.worker.silent_servers import SilentServers

AGAIN_S = 2.0
"""Wait before an unanswered request is sent again; each wait is twice the last one."""
AGAIN_MOST = 8.0
"""The longest such wait, in units of the first: several losses in a row must not use up a deadline."""
BYE_S = 3.0
MEANWHILE_S = 0.1
"""Time between two calls of ``meanwhile`` in a wait."""
AWAY_S = 1.0
"""Delay of a wait's end that shows that this process was stopped; it does not count against a server."""


class Client:
    """Sends a worker's requests to all servers of a run, and waits for the answers.

    Args:
        rank: the worker.
        connections: to the servers, and the clock.
        timeout_s: longest wait at a meeting point.
        names: of the servers, in messages.
        life: random number of this life; 0: it is drawn here. comes: this worker waits for admission by the others.
    """

    def __init__(
        self,
        rank: int,
        connections: Connections,
        timeout_s: float,
        names: Sequence[str] = (),
        life: int = 0,
        comes: bool = False,
    ) -> None:
        self.rank, self.connections, self.timeout_s = rank, connections, timeout_s
        self.life, self.comes = life or new_life(), comes
        self.servers = range(connections.count)
        self.names = names or [f"server {number}" for number in self.servers]
        self.incarnations = [0] * connections.count
        self.most_bytes = self.sequence = self.number = 0
        self.meetings = self.stops = 0
        self.under_way: dict[int, Request] = {}
        self.waited = 0.0
        self.silent = SilentServers(connections, rank, self.names, timeout_s)
        try:
            self.hello()
        except BaseException:
            self.close()
            raise

    def hello(self) -> None:
        """Begin a life: learn which pushes of this worker servers have applied, and count on after the last one."""
        answers = self._hello(0)
        self.watermarks = [a.sequence for a in answers]
        limits = [a.need(Kind.NUMBERS) for a in answers]
        self.most_bytes = int(min(n[0] for n in limits))
        self.sequence = int(max(n[1] for n in limits))
        if self.comes and {*self.watermarks} != {self.sequence}:  # some server lacks a push, which never comes
            self._hello(self.sequence)

    def _hello(self, begins: int) -> list[Message]:
        """Say hello to all servers: this life's pushes begin after that number."""
        flags = COMES if self.comes else 0
        hellos = [Message(Verb.HELLO, sequence=self.life, clock=begins, flags=flags) for _ in self.servers]
        answers = self.wait([self.ask(server, hello) for server, hello in enumerate(hellos)])
        self.incarnations = [answer.incarnation for answer in answers]
        return answers

    def _hand_over(self, request: Request, now: float) -> None:
        """Send a request as it is packed, and note when it is sent again."""
        if self.connections.send(request.server, request.frames):
            request.again, request.every = now + request.every, min(2 * request.every, AGAIN_MOST * AGAIN_S)
        else:
            request.again = now + ROOM_S

    # --- requests ----------------------------------------------------------------------------------------------------

    def ask(self, server: int, message: Message, then: Callable[[Message], None] | None = None) -> Request:
        """Send a request to one server; its buffers must not change until it is answered.

        Args:
            then: called with the answer, by the next call that waits for anything.

        Raises:
            RunFailed: it is larger than servers take.
        """
        self._refuse_large(server, message)
        self.number += 1
        message.rank, message.number = self.rank, self.number
        if message.verb != Verb.HELLO:
            message.incarnation = self.incarnations[server]
        now = self.connections.now()
        request = Request(server, message, pack(message), now, now, then, AGAIN_S)
        self.under_way[self.number] = request
        self._hand_over(request, now)
        return request

    def _refuse_large(self, server: int, message: Message) -> None:
        """A server would close the connection, or forget the message, without an answer."""
        if len(message.records) > MOST_RECORDS:
            what = f"{message.verb.name} of worker {self.rank} to {self.names[server]}"
            raise RunFailed(
                f"{what} has {len(message.records):,} records, and servers take {MOST_RECORDS:,}: a model of "
                f"fewer tensors would fit"
            )
        for record in message.records:
            size, limit = record.array.nbytes, TEXT_LIMIT if record.kind == Kind.TEXT else self.most_bytes
            if size <= limit:
                continue
            what = f"{message.verb.name} of worker {self.rank} to {self.names[server]}"
            part = f"{size:,} bytes of {record.kind.name}" + (f" of table {record.table}" if record.table else "")
            instead = (
                "a model of fewer tensors, or a larger strategy.slice_above"
                if record.kind == Kind.TEXT
                else (
                    "more launch.servers, or fewer rows at once: data.batch_size, in pserver_async "
                    "strategy.max_merge_var_num, in pserver_geo strategy.k_steps"
                )
            )
            raise RunFailed(f"{what} has {part} in one frame, and servers take {limit:,}. What helps: {instead}")

    def push(self, messages: Sequence[Message], then: Callable[[Message], None] | None = None) -> list[Request]:
        """Send the next push: one message to each server, all with the same sequence number."""
        self.sequence += 1
        for message in messages:
            message.sequence = self.sequence
        return [self.ask(server, message, then) for server, message in enumerate(messages)]

    def meet(self, message: Message, meanwhile: Callable[[], None] | None) -> Message:
        """Ask server 0 for a sum over the workers, and wait for it; longer if the servers save before it.

        Raises:
            RunFailed: as ``wait``.
        """
        patience_s = self.timeout_s + MARGIN_S + (SAVE_S if message.flags & SAVES else 0.0)
        [answer] = self.wait([self.ask(0, message)], patience_s, meanwhile)
        return answer

    def take(self) -> None:
        """Take in all answers that have arrived, without waiting.

        Raises:
            RunFailed: the first failure among them.
        """
        failures = []
        for message in self.connections.receive():
            try:
                self._answered(message)
            except RunFailed as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    def pause(self, seconds: float) -> None:
        """Sleep for some seconds, taking in answers meanwhile."""
        self.connections.sleep(seconds)
        self.take()
        self._send_again()

    def _answered(self, message: Message) -> None:
        request = self.under_way.pop(message.number, None)
        if request is None:
            return  # the answer to a request that was sent twice
        request.answer = message
        self.silent.heard(request.server)
        if message.verb == Verb.FAILED:
            request.failure = failure_of(message.text())
            if request.settles and not isinstance(request.failure, Fenced):
                return
            raise request.failure
        if request.then is not None:
            request.then(message)

    def wait(
        self, requests: Iterable[Request], patience_s: float | None = None, meanwhile: Callable[[], None] | None = None
    ) -> list[Message]:
        """Wait for the answers of all these requests and return them.

        Args:
            meanwhile: called repeatedly; its time does not count as waiting.

        Raises:
            Missing: a server does not answer in time, or names workers that did not come.
            RunFailed: a server refuses, with its reason.
        """
        requests = list(requests)
        open_ones = requests.copy()

        def answered() -> bool:
            while open_ones and open_ones[-1].answer is not None:
                open_ones.pop()
            return not open_ones

        self.until(answered, patience_s, meanwhile)
        if failures := [r.failure for r in requests if r.failure is not None]:
            raise failures[0]
        return [r.answer for r in requests if r.answer is not None]

    def settle(self, requests: Sequence[Request], patience_s: float | None = None) -> list[Message]:
        """As ``wait``, but raise a failure only after all requests are answered, and forget the unanswered ones.

        A server may still do what a forgotten request asks; its answer is ignored.
        """
        for request in requests:
            request.settles = True
        try:
            return self.wait(requests, patience_s)
        finally:
            for request in requests:
                self.under_way.pop(request.message.number, None)

    def until(
        self, done: Callable[[], bool], patience_s: float | None = None, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Take in answers until ``done()`` holds.

        Raises:
            RunFailed: as ``wait``.
        """
        self.take()
        if done():
            return
        with record_function(WAITS):
            self._take_until(done, self.timeout_s + MARGIN_S if patience_s is None else patience_s, meanwhile)

    def _take_until(self, done: Callable[[], bool], patience_s: float, meanwhile: Callable[[], None] | None) -> None:
        began = self.connections.now()
        deadline = began + patience_s
        self.silent.begin()
        while not done():
            now = self.connections.now()
            if now > deadline and now - began < SAVE_S and self._some_server_saves():
                deadline = now + patience_s
            if now > deadline:
                silent = min(self.under_way.values(), key=lambda r: r.sent, default=None)
                who = [self.names[silent.server]] if silent else []
                what = f"{who[0]} did not answer {silent.message.verb.name}" if silent else "no answer"
                limit = within(patience_s, self.timeout_s)
                raise Missing(f"{what} of worker {self.rank} {limit}", who)
            again = min([*(r.again for r in self.under_way.values()), deadline])
            seconds = max(0.0, again - now) if meanwhile is None else min(max(0.0, again - now), MEANWHILE_S)
            self.connections.wait(seconds)
            late = self.connections.now() - now - seconds
            if late > AWAY_S:
                deadline += late
                self.silent.away(late)
            self.take()
            for server in self.silent.check(self.under_way.values(), patience_s):
                self.ask(server, Message(Verb.STATS))
            if late >= 0.0:
                self._send_again()
            if meanwhile is not None:
                before = self.connections.now()
                meanwhile()
                deadline += self.connections.now() - before
                self.silent.away(self.connections.now() - before)
        self.waited += self.connections.now() - began

    def _some_server_saves(self) -> bool:
        """Whether a request waits at a server that writes its part of a checkpoint."""
        return bool(self.silent.write({r.server for r in self.under_way.values()}))

    def _send_again(self) -> None:
        now = self.connections.now()
        for request in self.under_way.values():
            if now >= request.again:
                self._hand_over(request, now)

    def bye(self) -> None:
        """Say goodbye to all servers, without waiting long for one that is gone already."""
        self.under_way.clear()
        with suppress(RunFailed):
            self.wait([self.ask(server, Message(Verb.BYE)) for server in self.servers], BYE_S)

    def close(self) -> None:
        """Close the connections to all servers."""
        self.connections.close()
