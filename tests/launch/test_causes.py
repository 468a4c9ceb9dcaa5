"""What a run's end is put down to, over random histories of deaths, returns and errors that processes tell."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.launch.test_supervisor import Scripted
from tests.notes import Notes
from trainer.errors import Died, RunFailed
from trainer.launch import first_failure
from trainer.launch.process import Failure
from trainer.launch.started_process import Role, StartedProcess
from trainer.launch.supervisor import LINGER_S, Supervisor
from trainer.strategies.lost_workers import ADMITTED

NEVER = 10**9
LATE_NS = -int(2 * LINGER_S * 1e9)


class History:
    """A run whose processes die, come back and are let in, until one tells the error that ends it.

    Attributes:
        open: workers that the run went on without and that are not made good, the latest last; killed: those of them
        that were. own, names: the error that ends the run, and the workers that it names as its cause. last: the worker
        after whose end all that are left wait to be let in; with it the run ends.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.draw, self.folder, self.notes = random.Random(seed), folder, Notes()
        self.size, self.servers = self.draw.randint(2, 4), self.draw.randint(1, 2)
        self.roles = {
            "worker": Role("worker", self.size, "none:none", ["cpu"] * self.size, apart=True),
            "server": Role("server", self.servers, "none:none", ["cpu"] * self.servers),
        }
        self.lives, self.open, self.killed, self.own = 0, list[str](), set[str](), ""
        self.names, self.last = list[str](), ""
        self.left = self.draw.randint(0, 6)
        self.now = {
            str(m): m
            for m in [self._new("worker", n) for n in range(self.size)]
            + [self._new("server", n) for n in range(self.servers)]
        }
        self.first = list(self.now.values())
        self.waits: dict[str, int] = {}

    def _new(self, role: str, rank: int, returns: bool = False) -> StartedProcess:
        self.lives += 1
        handle = Scripted(self.folder / f"{role}{rank}.{self.lives}", after=NEVER)
        return StartedProcess(self.roles[role], rank, handle, self.lives, returns)

    def _handle(self, who: str) -> Scripted:
        handle = self.now[who].handle
        assert isinstance(handle, Scripted)
        return handle

    def again(self, member: StartedProcess, death: RunFailed) -> StartedProcess | None:
        self.waits.pop(str(member), None)
        if member.role.apart:
            self.open = [*(name for name in self.open if name != str(member)), str(member)]
            (self.killed.add if isinstance(death, Died) else self.killed.discard)(str(member))
        if not isinstance(death, Died) or (member.role.apart and self.draw.random() < 0.4):
            del self.now[str(member)]
            return None
        other = self._new(member.role.name, member.rank, returns=True)
        self.now[str(member)] = other
        if member.role.apart:
            self.waits[str(member)] = other.life
        return other

    def wait(self, signs: list[object], seconds: float) -> None:
        """The next thing that happens."""
        workers = [name for name in self.now if name.startswith("worker") and self._handle(name).failure is None]
        if not self.left:
            return self._error(workers)
        self.left -= 1
        what = self.draw.choice(("kill a worker", "fence a worker", "let in", "kill a server"))
        if what.endswith("a worker") and len(workers) > 1:
            who = self.draw.choice(workers)
            if not [name for name in workers if name != who and name not in self.waits]:
                if len(workers) < sum(name.startswith("worker") for name in self.now):
                    return None  # another one has failed, and lingers: both would be the last
                self.last = who
            if what == "kill a worker":
                self._kill(who)
            else:
                self._tells(who, f"{who} was declared lost", ends_run=False)
            if self.last:
                (self.killed.add if what == "kill a worker" else self.killed.discard)(who)
        if what == "let in" and self.waits:
            who, life = self.waits.popitem()
            self.open.remove(who)
            self.notes.set(ADMITTED.format(who.split()[1], life), "0")
        if what == "kill a server":
            self._kill(f"server {self.draw.randrange(self.servers)}")
        return None

    def _kill(self, who: str) -> None:
        handle = self._handle(who)
        handle.code, handle.after = -9, 0

    def _error(self, workers: list[str]) -> None:
        server, named = f"server {self.draw.randrange(self.servers)}", f"worker {self.draw.randrange(self.size)}"
        every = "; ".join(f"worker {n}: its process ended" for n in range(self.size))
        who, words, told, follows, names = self.draw.choice(
            [
                (server, "OSError: No space left on device, worker 0", False, False, []),
                (server, "its folder is gone", True, False, []),
                (server, f"{named} was lost: its process ended (the start was its to make)", True, False, [named]),
                (server, f"no worker is left ({every})", True, False, [f"worker {n}" for n in range(self.size)]),
                (self.draw.choice(workers), f"{named} was lost: its process ended", True, True, [named]),
                (self.draw.choice(workers), f"the loss is not a number, as that of {named}", True, False, []),
            ]
        )
        self._tells(who, words, told, follows)
        self.own, self.names = f"{who}:{' ' if told else chr(10)}{words}", names

    def cause(self) -> tuple[str, bool]:
        """How the error begins that the run is to end with, and whether it is a death."""
        causes = [self.last] if self.last else [name for name in self.open if name in self.names]
        if not causes:
            return self.own, False
        died = causes[-1] in self.killed
        return f"{causes[-1]} was killed by SIGKILL" if died else f"{causes[-1]}: {causes[-1]} was declared lost", died

    def _tells(self, who: str, words: str, told: bool = True, follows: bool = False, ends_run: bool = True) -> None:
        """The process fails in these words; now and then it does not end."""
        handle, lingers = self._handle(who), self.draw.random() < 0.3
        at = time.monotonic_ns() + (LATE_NS if lingers else 0)
        handle.failure = Failure(at, words, told, ends_run, follows=follows)
        handle.code, handle.after = 1, NEVER if lingers else 0


@pytest.mark.parametrize("part", range(4))
def test_run_ends_with_the_latest_death_that_is_not_made_good_or_with_the_error_that_is_told(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_failure, "POLL_S", 0.0)
    seen = set()
    for seed in range(500 * part, 500 * (part + 1)):
        history = History(seed, tmp_path)
        with pytest.raises(RunFailed) as ended:
            Supervisor(history.first, [history.notes], history.wait, restart=history.again).watch()
        told = f"seed {seed}: {history.open}, {ended.value}"
        begins, died = history.cause()
        assert str(ended.value).startswith(begins) and isinstance(ended.value, Died) == died, told
        seen.add(died)
    assert seen == {True, False}
