"""HELLO, BYE and lost workers: who is present at a server, and what a loss means for the others."""

# How a worker is lost:
#   heard -> silent -> ended -> lost       Nothing was heard for lost_after_s: a note asks the launcher to end its
#                                          process. The launcher ends it and leaves a note; this server reads that and
#                                          loses it.
#                   -> heard               It was heard again in time: the note is emptied.
#                   -> lost                The launcher did not end it within ENDING_S.
# A server also loses a worker because of a FENCE, of the launcher's note, or of another server's note.
#
# What must always hold:
# - Others do the work of a worker only after its process was ended, or cannot be: else it might wake and go on.
# - All servers give the same reason, and agree who is lost: the note `fenced/worker/N/LIFE` spreads a loss.
# - Whatever a lost life sends later is answered FAILED, fenced. Its blocks go to others, its part of open sums is
#   dropped.
# - A loss ends the run where it must: in sync with on_lost_worker=stop, and of worker 0 before the start.

from __future__ import annotations

import numpy as np

from trainer.errors import Missing, RunFailed
from trainer.host.notes_board import Board
from trainer.strategies.lost_workers import ADMITTED, SILENT, note_of
from trainer.strategies.pserver.protocol.messages import COMES, Kind, Malformed, Message, Record, Verb
from trainer.strategies.pserver.server.answers import failed
from trainer.strategies.pserver.server.epoch_blocks import Leases
from trainer.strategies.pserver.server.meetings import Meetings
from trainer.strategies.pserver.server.members import Member, Members
from trainer.strategies.pserver.server.parameters import Parameters
from trainer.strategies.pserver.server.request_queue import RequestQueue

ENDING_S = 3.0
"""Time for the launcher of a silent worker to end it; afterwards the worker is lost all the same."""


class Liveness:
    """The server's handlers of HELLO and BYE, and the rule by which workers are declared lost.

    Args:
        board: where launchers and servers leave notes for each other. ``lost/worker/N``: its process has failed.
            ``lost/worker/N/LIFE``: that life has, and another one comes. ``done/worker/N``: it has ended well.
            ``fenced/worker/N`` and ``fenced/worker/N/LIFE``: a server has declared it lost.
            ``silent/worker/N/LIFE``: its launcher is to end it, or, empty, not any more.
        stops: the run ends when a worker is lost.
        most_bytes: the longest frame that is taken, which workers are told.
    """

    def __init__(
        self,
        members: Members,
        parameters: Parameters,
        leases: Leases,
        requests: RequestQueue,
        meetings: Meetings,
        board: Board,
        stops: bool,
        most_bytes: int,
    ) -> None:
        self.members, self.parameters, self.leases, self.requests = members, parameters, leases, requests
        self.meetings = meetings
        self.board, self.stops, self.most_bytes = board, stops, most_bytes
        self.asked: dict[int, str] = {}
        """Notes of this server about workers that are silent, by rank."""
        self.asked_at = 0.0
        """When it left the last of them."""

    def hello(self, message: Message) -> Message:
        """HELLO: a worker comes. Answers its incarnation, its pushes that are applied, the longest frame that is
        taken."""
        rank, life = message.rank, message.sequence
        if self._is_over(rank, life):
            return failed(f"worker {rank} was started again, or declared lost", fenced=True)
        before, coming = self.members.all[rank].incarnation, bool(message.flags & COMES)
        if coming and (cause := self._without_start(rank)):
            raise RunFailed(f"worker {rank} was lost: its process ended ({cause})")
        member = self.members.hello(rank, life, coming)
        member.watermark.begin(message.clock)
        if member.incarnation > before:
            if before or coming:  # this server may never have heard of the life before, and keeps blocks for it
                self._forget_life_before(rank, message)
            if coming:
                self.board.set(f"fenced/worker/{rank}", "its process ended")
                self._changed()
            print(f"worker {rank} has come, life {member.incarnation}, {member.watermark.done} pushes done", flush=True)
        numbers = np.array([self.most_bytes, member.watermark.greatest], dtype=np.float64)
        return Message(
            Verb.DONE,
            incarnation=member.incarnation,
            sequence=member.watermark.done,
            clock=self.parameters.version,
            records=[Record(Kind.NUMBERS, numbers)],
        )

    def _is_over(self, rank: int, life: int) -> bool:
        """Whether that life is over, by the notes: this server may never have heard of it. A first message may arrive
        after those of the next life, and must not end the next life."""
        notes = f"lost/worker/{rank}/{life}", f"fenced/worker/{rank}/{life}"
        return self.members.over(rank, life) or any(self.board.check([note]) for note in notes)

    def _forget_life_before(self, rank: int, hello: Message) -> None:
        self.requests.drop(rank, f"worker {rank} was started again", besides=hello)
        self.leases.lose(rank)
        if self.parameters.rule is not None:
            self.parameters.rule.forget(rank)

    def admit(self, message: Message) -> Message:
        """ADMIT: the first worker admits a worker that was lost and has come back; the clock is 1 if it takes part."""
        rank, life = message.clock, message.sequence
        if not 0 <= rank < len(self.members.all):
            raise Malformed(f"there is no worker {rank}")
        member = self.members.all[rank]
        if member.life == life and member.coming and life not in member.fenced:
            member.coming = False
            self.members.heard(rank)
            self.parameters.opened()[1].rests_until_it_wakes(rank)
            self.meetings.forget(rank)
            self.board.set(f"fenced/worker/{rank}", "")
            self.board.set(ADMITTED.format(rank, life), str(message.rank))
            print(f"worker {rank} takes part again, life {member.incarnation}", flush=True)
        return Message(Verb.DONE, clock=int(member.life == life and member.present))

    def bye(self, message: Message) -> Message:
        """BYE: a worker has finished and leaves."""
        self._leave(self.members.all[message.rank])
        return Message(Verb.DONE)

    def _leave(self, member: Member) -> None:
        if member.present:
            member.left = True
            self.leases.lose(member.rank)
            self._changed()

    def check_workers(self) -> None:
        """Ask launchers to end silent workers. Declare workers lost whose process failed or that another server lost. A
        worker whose process ended well counts as left."""
        silent = self.members.silent()
        for rank in [rank for rank in self.asked if rank not in silent]:
            self.board.set(self.asked.pop(rank), "")
        for rank in silent:
            self._have_ended(
                rank, f"nothing was heard of it for {self.members.lost_after_s:g} s (strategy.lost_after_s)"
            )
        for rank in self.members.present():
            member, worker = self.members.all[rank], f"worker/{rank}"
            fenced = f"fenced/{worker}/{member.life}" if member.life else f"fenced/{worker}"
            if self.board.check([f"done/{worker}"]):
                self._leave(member)
                continue
            notes = (note_of(self.board, key) for key in (f"lost/{worker}/{member.life}", f"lost/{worker}", fenced))
            if why := next(filter(None, notes), ""):
                self.lose(rank, why)

    def _have_ended(self, rank: int, why: str) -> None:
        """Ask the launcher of a silent worker to end it, and declare the worker lost if the launcher does not. A
        stopped worker that woke later might go on with work that others have by then."""
        if len(self.members.present()) == 1 or self._cannot_go_on(rank):
            self.lose(rank, why)
        elif rank in self.asked:
            # its launcher has had time, also where this server has looked late
            if rank in self.members.silent(ENDING_S) and self.members.now() - self.asked_at >= ENDING_S / 2:
                self.lose(rank, why)
        else:
            print(f"worker {rank} is silent: {why}", flush=True)
            self.asked_at = self.members.now()
            self.asked[rank] = SILENT.format(rank, self.members.all[rank].life)
            self.board.set(self.asked[rank], why)

    def lose(self, rank: int, why: str) -> None:
        """Declare a worker lost: its messages are refused, its work goes to others. If another server lost that life
        first, or asked to end its process, its reason counts: a consequence of a loss is not its cause.

        Raises:
            Missing: the run cannot go on without it.
        """
        life = self.members.all[rank].life
        fenced = f"fenced/worker/{rank}/{life}"
        why = note_of(self.board, fenced) or note_of(self.board, SILENT.format(rank, life)) or why
        self.asked.pop(rank, None)
        print(f"worker {rank} is lost: {why}", flush=True)
        self.members.lose(rank, why)
        self.board.set(fenced, why)
        self.board.set(f"fenced/worker/{rank}", why)  # its launcher ends it when nothing else runs
        self.leases.lose(rank)
        if cause := self._cannot_go_on(rank):
            self.requests.fail_all(rank, f"worker {rank} was lost: {why}")
            raise Missing(f"worker {rank} was lost: {why} ({cause})", [f"worker {rank}"])
        self.requests.drop(rank, f"worker {rank} was declared lost: {why}")
        self._changed()

    def _cannot_go_on(self, rank: int) -> str:
        rule = self.parameters.rule
        if self.stops and rule is not None and rule.lockstep:
            return "strategy.on_lost_worker=stop"
        return self._without_start(rank)

    def _without_start(self, rank: int) -> str:
        return "the start was its to make" if rank == 0 and not self.parameters.ready else ""

    def _changed(self) -> None:
        if self.parameters.rule is not None:
            self.parameters.rule.changed()
        self.requests.try_again()
