"""Runs a job whose hosts come and go (launch.nnodes=MIN:MAX): life after life, each with the hosts that are present.

Host 0 leads: it announces the hosts and the checkpoint of each life. The run ends with host 0, which keeps the store;
torchrun's c10d rendezvous has the same limit.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint import store
from trainer.checkpoint.store import CHECKPOINTS
from trainer.errors import PREEMPTED, AskedToLeave, Died, Interrupted, NotFinite, RunFailed, first_line
from trainer.host.addresses import free_port, with_port
from trainer.host.signals import undisturbed
from trainer.job.restarts import begin_again, updates_since, whence, workers_update
from trainer.launch.lobby import MARK, TERMS, Guest, Host, Life, Lobby, RunOver
from trainer.launch.lobby_store import open_lobby
from trainer.launch.terms import terms
from trainer.planning.launcher import Deaths, Starter, Supervision
from trainer.planning.resume import left_behind
from trainer.run_folder import lives
from trainer.run_folder.json_files import leave
from trainer.terminal.screen import say
from trainer.terminal.status import read_status
from trainer.wording import counted

if TYPE_CHECKING:
    from trainer.job.ready import Ready
    from trainer.job.result import Result
    from trainer.planning.plan import Plan
    from trainer.tracking.client import RecorderProcess

LATE = "the run was done before this host took part"


def start_on_hosts(start: Starter, ready: Ready, result: Result, tracker: RecorderProcess | None) -> dict[str, Any]:
    """Run the job's lives on the present hosts; returns the first local worker's result from this host's last life.

    Raises:
        RunFailed: as :func:`trainer.job.restarts.start_and_restart`; there were too few hosts for too long; or host 0
            is gone.
    """
    if ready.plan.topology.node_rank:
        with _guest(ready) as guest:
            return _follow(start, ready, guest)
    with _lobby(ready) as lobby:
        return _Leading(start, ready, result, tracker, lobby).to_the_end()


@contextmanager
def _lobby(ready: Ready) -> Iterator[Lobby]:
    """Host 0's lobby; at the end it tells the other hosts how the run ended."""
    run_dir = Path(ready.plan.paths.run_dir)
    mark = run_dir / f".hosts-{secrets.token_hex(8)}"
    board = open_lobby(ready.checked.config.launch)
    mark.touch()
    lobby = Lobby(board, ready.plan.topology.nnodes)
    board.set(TERMS, json.dumps(_terms(ready), default=str))
    board.set(MARK, mark.name)
    how, why = "failed", "host 0 has ended"
    try:
        yield lobby
        how, why = lobby.how, ""
    except BaseException as error:
        how = PREEMPTED if isinstance(error, AskedToLeave) else "failed"
        why = first_line(error)
        raise
    finally:
        try:
            with undisturbed():
                lobby.end(how, why)
        finally:
            mark.unlink(missing_ok=True)  # last, for a host that comes meanwhile


@contextmanager
def _guest(ready: Ready) -> Iterator[Guest]:
    """Another host in the lobby of host 0, until it leaves the run."""
    launch, most = ready.checked.config.launch, ready.plan.topology.nnodes
    guest = Guest(open_lobby(launch), launch.node_rank, with_port(launch.master_addr, launch.master_port), most)
    try:
        guest.come(Path(ready.plan.paths.run_dir), _terms(ready))
        yield guest
    finally:
        guest.leave()


def _terms(ready: Ready) -> dict[str, Any]:
    """The terms that must be equal on all hosts, without the checkpoint, which host 0 announces for each life."""
    return {**terms(ready.plan, ready.checked.config, ready.assignment), "the checkpoint": ""}


def _planned_for(ready: Ready, life: Life) -> Ready:
    """The job, planned for the hosts of a life."""
    of = ready.on_hosts(life.hosts, life.place, 0 if life.hosts == 1 else life.port)
    checkpoint = Path(ready.plan.paths.run_dir) / CHECKPOINTS / life.resume
    begun = store.about(checkpoint).lease_batches if life.resume else 0
    of = of.with_facts(ready.checked.facts).with_plan(
        batches={"lease_batches": begun or ready.plan.batches.lease_batches},
        objective={"class_weights": ready.plan.objective.class_weights},
    )
    return replace(of, digest=ready.digest)


def _described(life: Life, ready: Ready, most: Plan) -> str:
    """Describe a life in one line: hosts, batches, checkpoint, and updates if their number changed.

    Args:
        most: the plan for all hosts.
    """
    plan, workers = ready.plan, counted(ready.plan.topology.workers, "worker")
    where = f"from {Path(life.resume).name}" if life.resume else "from the beginning"
    together = plan.strategy.traits.lockstep
    share = (
        f"at most {plan.batches.size} of {counted(plan.batches.global_size, 'sample')} each"
        if together
        else f"batches of {counted(plan.batches.size, 'sample')}"
    )
    others = together and plan.length.total_steps != most.length.total_steps
    updates = (
        f"; {counted(plan.length.total_steps, 'update')} in total, not {most.length.total_steps}, and the learning "
        f"rate follows them"
        if others
        else ""
    )
    return f"life {life.number}: {life.names}, {workers} with {share}, {where}{updates}\n"


class _Leading:
    """Host 0: one life after the other."""

    def __init__(
        self, start: Starter, ready: Ready, result: Result, tracker: RecorderProcess | None, lobby: Lobby
    ) -> None:
        self.start, self.ready, self.result, self.tracker, self.lobby = start, ready, result, tracker, lobby
        self.launch = ready.checked.config.launch
        self.deaths = Deaths(self.launch.max_restarts)

    def to_the_end(self) -> dict[str, Any]:
        """The outcome of the last life.

        Raises:
            RunFailed: it failed, or there are too few hosts.
        """
        resume = self.ready.assignment.resume
        while True:
            outcome, error = self._live(resume)
            if outcome is not None and outcome.get("ended") != PREEMPTED:
                self.lobby.how = "done"
                outcome.pop("asked", "")  # it came too late
                return outcome
            others = self.lobby.settle(self.launch.timeout_s)
            if outcome is not None and self._all_leave(outcome, others):
                self.lobby.how = PREEMPTED
                return outcome
            if error is not None and error.asked:
                self._death(error, others)  # raises where the run cannot go on
                say(f"\nATTENTION: {first_line(error)}\n")
                self.lobby.how = PREEMPTED
                return _preempted(Path(self.ready.plan.paths.run_dir), error.asked)
            resume = self._between(error, others)

    def _live(self, resume: str) -> tuple[dict[str, Any] | None, RunFailed | None]:
        """One life: its outcome, or how it failed."""
        launch, run_dir = self.launch, Path(self.ready.plan.paths.run_dir)
        first = not self.lobby.life.number
        hosts = self.lobby.gather(
            self.ready.plan.topology.least_nnodes, launch.timeout_s, launch.join_s if first else 0.0
        )
        own = run_dir / CHECKPOINTS == Path(resume).parent
        life = self.lobby.begin(hosts, free_port(launch.master_addr), Path(resume).name if own else resume)
        ready = _planned_for(self.ready, life)
        lives.planned(run_dir, ready.plan.topology.workers)
        leave(run_dir / "plan.json", ready.plan.as_dict(), private=True)
        say(_described(life, ready, self.ready.plan))
        for what in left_behind(ready.plan, store.about(Path(resume))) if resume else ():
            say(f"not carried over: {what}\n")
        assignment = replace(ready.assignment, resume=resume, again=not first)
        try:
            return self.start(assignment, Supervision(watch=self.lobby.watch)), None
        except NotFinite:
            raise
        except (RunFailed, Interrupted) as error:
            return None, _failure(error)

    def _all_leave(self, outcome: dict[str, Any], others: Sequence[Host]) -> bool:
        """Whether all hosts were asked to leave. False if only some hosts were, or if a host waits for admission."""
        asked = outcome.pop("asked", "")
        return bool(asked) or not (self.lobby.resized or any(host.asked for host in others))

    def _between(self, error: RunFailed | None, others: Sequence[Host]) -> str:
        """Report and count the end of a life; returns the checkpoint from which the next life resumes.

        Raises:
            RunFailed: there is no next life.
        """
        update = int(read_status(Path(self.ready.plan.paths.run_dir)).get("step") or 0)
        how, why, which = PREEMPTED, "hosts came or left", "goes on with other hosts"
        if error is not None:
            death = self._death(error, others)
            update = max(update, 0 if death is None else workers_update(death))
            how, why = "failed", first_line(death or error)
            say(f"\nATTENTION: {death or why}")
            which = "goes on without hosts that have left" if death is None else self.deaths.restart(death)
            self.result.restarts += death is not None
        _, resume = begin_again(self.ready, self.tracker, how, update, why, 0)
        if error is not None:
            self.result.lost_updates += updates_since(Died(why, "", update), resume)
        say(f"{which}: all processes are started again, {whence(resume)}")
        return resume

    def _death(self, error: RunFailed, others: Sequence[Host]) -> Died | None:
        """The death that ended a life: of a process on any host, or of a host; None: hosts have left.

        Raises:
            RunFailed: the life failed by its own error.
        """
        if isinstance(error, Died):
            return error
        if died := next((host for host in others if host.how == "died"), None):
            death = Died(died.why, died.who, died.update)
            death.done = dict(died.done)
            return death
        parts, lost = self.lobby.parts(), self.lobby.lost()
        if not lost:
            raise error
        silent = [number for number in lost if not parts[number].gone]
        return self.lobby.death_of(silent) if silent else None


def _failure(error: RunFailed | Interrupted) -> RunFailed:
    """The error of a failed life. If another host was asked to leave before the first update, the run goes on without
    it.

    Raises:
        Interrupted: this host was asked to leave, or to end.
    """
    if isinstance(error, RunFailed):
        return error
    if isinstance(error, AskedToLeave) and error.elsewhere:
        return RunFailed(str(error))
    if isinstance(error.__cause__, RunFailed) and error.__cause__.asked:  # somebody has died after that
        return error.__cause__
    raise error


def _preempted(run_dir: Path, asked: str) -> dict[str, Any]:
    """The outcome of a host that was asked to leave, in a life that failed before all hosts had saved.

    Raises:
        AskedToLeave: there is no checkpoint yet.
    """
    newest = store.newest_whole(run_dir / CHECKPOINTS, verify=False)
    if newest is None:
        raise AskedToLeave(f"got {asked}")
    return {"ended": PREEMPTED, "steps": store.about(newest).done}


def _missed(last: int, now: int) -> str:
    """A line for a host that takes part again after lives without it; '' if it missed none.

    Args:
        last: its last life, 0 if none. now: the life that begins.
    """
    if not last or now == last + 1:
        return ""
    lives = f"life {last + 1}" if now == last + 2 else f"lives {last + 1} to {now - 1}"
    return (
        f"\nATTENTION: this host was lost to the others in life {last}: {lives} went on without it, and it takes "
        f"part again\n"
    )


def _follow(start: Starter, ready: Ready, guest: Guest) -> dict[str, Any]:
    """On every host but host 0: take part in each life that host 0 announces for it.

    Raises:
        RunFailed: the run failed, or host 0 is gone.
    """
    outcome: dict[str, Any] = {"ended": LATE}
    failure: RunFailed | None = None
    number = 0
    while True:
        life = guest.next_life(number)
        if isinstance(life, RunOver):
            if life.how == "failed":
                raise failure or RunFailed(life.why)
            if life.how == PREEMPTED and outcome.get("ended") != PREEMPTED:
                raise AskedToLeave(f"host 0 has ended the run: {life.why or 'it was asked to leave'}")
            return outcome
        if missed := _missed(number, life.number):
            say(missed)
        number, first = life.number, not number
        resume = str(Path(ready.plan.paths.run_dir) / CHECKPOINTS / life.resume) if life.resume else ""
        of = _planned_for(ready, life)
        say(_described(life, of, ready.plan))
        try:
            outcome, failure = start(replace(of.assignment, resume=resume, again=not first), Supervision()), None
        except Died as death:
            failure = death
            guest.tell(ended=number, how="died", why=str(death), who=death.who, update=death.update, done=death.done)
            continue
        except (RunFailed, AskedToLeave) as error:
            failure = _failure(error)
            guest.note(ended=number, how="failed", why=str(error), asked=failure.asked)
            if failure.asked:
                say(f"\nATTENTION: {first_line(failure)}\n")
                return _preempted(Path(ready.plan.paths.run_dir), failure.asked)
            guest.tell()
            continue
        asked = outcome.pop("asked", "")
        preempted = outcome.get("ended") == PREEMPTED
        guest.note(ended=number, how=PREEMPTED if preempted else "done", asked=asked)
        if asked or not preempted:
            return outcome  # ``leave`` writes the note, if host 0 still answers
        guest.tell()
