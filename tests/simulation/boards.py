"""The launchers' board as processes of several hosts reach it: the product's own sealed notes, in a store on host 0
that may not answer."""

from __future__ import annotations

from collections.abc import Callable

from tests.notes import Notes
from tests.simulation.scenario import TIMEOUT_S
from tests.simulation.world import World
from trainer.host.notes_board import NoNote, SealedBoard

FIRST = 0
"""The host of the store."""
PATIENCE_S = TIMEOUT_S
"""As the launcher hands it to trainer/host/patient_store.py: strategy.timeout_s."""
SECRET = b"of a simulated run"
SLOWEST_S = 8.0
"""An answer of a slow store comes after that at most, mostly much earlier."""
AGAIN_S = 3.0
"""When a way is there again, what was sent in vain is sent again by TCP within that."""


class Store:
    """The store on host 0, and when it can be reached.

    Attributes:
        notes: what lies there. away_until: it answers nobody. slow_until: each answer takes a while. cut_until: by
        host, nothing passes between that host and this one.
    """

    def __init__(self, world: World) -> None:
        self.world, self.notes = world, Notes()
        self.away_until = self.slow_until = 0.0
        self.cut_until: dict[int, float] = {}

    def comes_back(self, host: int) -> float:
        """When that host can reach it again; in the past: it can."""
        return max(self.away_until, self.cut_until.get(host, 0.0) if host != FIRST else 0.0)

    def disturbed(self, host: int, at: float) -> bool:
        """Whether an answer takes time."""
        return at < max(self.comes_back(host), self.slow_until)

    def seconds(self, host: int, at: float) -> float:
        """So long an answer to that host takes, if it asks at that time."""
        if not self.disturbed(host, at):
            return 0.0
        if (left := self.comes_back(host) - at) > 0.0:
            return left + AGAIN_S * self.world.random.random()
        return SLOWEST_S * self.world.random.random() ** 4


class FarStore:
    """A process's connection to the store, as trainer/host/patient_store.py: its process waits for each answer, but not
    for ever.

    Args:
        now: the time at which the process is. waits: has it wait for so long.
    """

    def __init__(
        self,
        store: Store,
        host: int,
        now: Callable[[], float],
        waits: Callable[[float], None],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.store, self.host, self.now, self.waits, self.patience_s = store, host, now, waits, patience_s
        self.in_all = False
        self.mine: dict[str, str] = {}
        """What is on its way to the store."""

    @property
    def changes(self) -> int:
        """So many notes were left."""
        return self.store.notes.changes

    @property
    def disturbed(self) -> bool:
        """Whether an answer takes time now."""
        return self.store.disturbed(self.host, self.now())

    def within(self, seconds: float) -> FarStore:
        """The same connection, for questions that are asked now and have so much patience together."""
        told = FarStore(self.store, self.host, self.now, self.waits, min(self.patience_s, seconds))
        told.mine, told.in_all = self.mine, True
        return told

    def set(self, key: str, value: str) -> None:
        """A note; where nothing passes it arrives later, even if its process has given up."""
        seconds = self.store.seconds(self.host, self.now())
        arrives = self.now() + seconds
        if arrives <= self.store.world.now:
            self.store.notes.set(key, value)
            return
        self.mine[key] = value  # its process may be ahead of the world, in the middle of what takes time
        self.store.world.at(arrives, self._arrives, key, value)
        if seconds:
            self._wait(seconds)

    def _arrives(self, key: str, value: str) -> None:
        self.store.notes.set(key, value)
        if self.mine.get(key) == value:
            del self.mine[key]

    def check(self, keys: list[str]) -> bool:
        """Whether all these notes are there."""
        self._ask()
        return all(key in self.mine or key in self.store.notes for key in keys)

    def get(self, key: str) -> bytes:
        """Read a note."""
        self._ask()
        return (self.mine.get(key) or self.store.notes[key]).encode()

    def _ask(self) -> None:
        if seconds := self.store.seconds(self.host, self.now()):
            self._wait(seconds)

    def _wait(self, seconds: float) -> None:
        self.store.world.injected["answer of the board is late"] += 1
        patience_s = self.patience_s
        if self.in_all:
            self.patience_s = max(0.0, patience_s - seconds)
        self.waits(min(seconds, patience_s))
        if seconds > patience_s:
            self.store.world.injected["no answer of the board"] += 1
            raise NoNote(f"the store of host 0 did not answer within {patience_s:g} s (strategy.timeout_s)")


class FarBoard(SealedBoard):
    """A process's board between hosts."""

    store: FarStore

    def __init__(self, store: FarStore) -> None:
        super().__init__(store, SECRET)

    @property
    def changes(self) -> int:
        """So many notes were left."""
        return self.store.changes

    @property
    def disturbed(self) -> bool:
        """Whether an answer takes time now."""
        return self.store.disturbed
