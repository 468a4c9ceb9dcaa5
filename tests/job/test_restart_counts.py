"""What a run tells of restarts and of updates that were lost, however it ends."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.errors import Died, Interrupted, NotFinite, RunFailed
from trainer.job import restarts
from trainer.job.restarts import start_and_restart, still_lost
from trainer.job.result import Result
from trainer.launch import server_snapshot
from trainer.launch.server_snapshot import ServerSnapshot, snapshot_of
from trainer.planning.assignment import Assignment
from trainer.planning.deaths import Deaths, LostAtServer
from trainer.weights import server_files


def ready(folder: Path, most: int = 3) -> Any:
    config, plan = (
        SimpleNamespace(on_nonfinite="rewind", max_rewinds=3),
        SimpleNamespace(topology=SimpleNamespace(restarts=most), paths=SimpleNamespace(run_dir=str(folder))),
    )
    assignment = Assignment(None, plan)  # type: ignore[arg-type]
    return SimpleNamespace(plan=plan, assignment=assignment, checked=SimpleNamespace(config=config))


@pytest.mark.parametrize(
    ("error", "back", "lost"),
    [
        (None, 0, 5),
        (RunFailed("a full disk"), 0, 5),
        (Interrupted("got SIGTERM"), 0, 5),
        (NotFinite("the loss is NaN", 9, 0, 8), 8, 5),
        (NotFinite("the loss is NaN", 9, 0, 8), 4, 0),
        (Died("worker 0 died", "worker 0"), 4, 0),
    ],
)
def test_what_came_back_and_what_was_lost_is_told_however_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None, back: int, lost: int
) -> None:
    goes_on = isinstance(error, (NotFinite, Died))
    again = Assignment(None, None, resume=str(tmp_path / "checkpoints" / f"step-{back:09d}"))  # type: ignore[arg-type]
    monkeypatch.setattr(restarts, "_again", lambda *told: again)
    monkeypatch.setattr(server_files, "parts_of", lambda folder: [SimpleNamespace(server=1, life=12)])
    lives = []

    def start(assignment: Assignment) -> dict[str, Any]:
        deaths = assignment.deaths
        assert deaths is not None
        lives.append(deaths.count())
        deaths.returned.append(f"server 1 died, {len(lives)}")
        if len(lives) == 1:
            deaths.lost.append(LostAtServer(1, 11, tmp_path / "checkpoints" / "step-000000004", 5))
        if error is not None and len(lives) == 1:
            raise error
        return {"steps": 9}

    result = Result("failed", str(tmp_path))
    if error is None or goes_on:
        assert start_and_restart(start, ready(tmp_path), result, None) == {"steps": 9}
    else:
        with pytest.raises(type(error)):
            start_and_restart(start, ready(tmp_path), result, None)
    assert result.returned == [f"server 1 died, {n + 1}" for n in range(len(lives))]
    assert (result.restarts, result.lost_at_servers) == (len(lives) + isinstance(error, Died), lost)


@dataclass(frozen=True)
class Part:
    """A server's part of a checkpoint: the updates that are in it."""

    server: int
    life: int
    has: tuple[int, ...]
    layout: str = "a layout"

    @property
    def version(self) -> int:
        return len(self.has)


class World:
    """Servers that apply every update, die, are started again from the newest checkpoint, or go back to it all
    together.

    Attributes:
        done: updates of the run so far. has: by server, those that its parameters have.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.draw, self.folder = random.Random(seed), folder
        self.size = self.draw.randint(1, 3)
        self.done, self.has = 0, [list[int]() for _ in range(self.size)]
        self.whole: dict[Path, list[Part]] = {}
        self.pending: tuple[Path, list[Part]] | None = None
        self.deaths, self.born = Deaths(10**6), 0
        self.lives = [self.life() for _ in range(self.size)]
        self.begun = [""] * self.size
        self.kept = 0

    def life(self) -> int:
        self.born += 1
        return self.born

    def newest(self, checkpoints: Path) -> Path | None:
        return max(self.whole, default=None)

    def found(self, checkpoints: Path) -> list[Path]:
        return [*self.whole]

    def update(self) -> None:
        for applied in self.has:
            applied.append(self.done)
        self.done += 1

    def begin(self) -> None:
        folder = self.folder / f"step-{self.done:09d}"
        if folder not in self.whole:
            parts = [Part(n, life, tuple(has)) for n, (life, has) in enumerate(zip(self.lives, self.has, strict=True))]
            self.pending = folder, parts

    def complete(self) -> None:
        if self.pending is not None:
            self.whole[self.pending[0]] = self.pending[1]
            self.pending = None

    def server_dies(self) -> None:
        server = self.draw.randrange(self.size)
        role, payload = SimpleNamespace(size=self.size), SimpleNamespace(resume=self.begun[server])
        start: Any = SimpleNamespace(role=role, rank=server, life=self.lives[server], payload=payload)
        found = snapshot_of(start, self.folder, len(self.has[server]))
        if isinstance(found, str):
            return self.all_go_back()
        self.deaths.lost.append(LostAtServer(server, start.life, found.folder, found.lost))
        self.begun[server], self.lives[server] = str(found.folder), self.life()
        self.has[server] = list(self.whole[found.folder][server].has)
        return None

    def all_go_back(self) -> None:
        """The updates since then are done again, by all servers."""
        folder, self.pending = self.newest(self.folder), None
        self.deaths.lost = still_lost(self.deaths.lost, str(folder or ""))
        self.kept += bool(self.deaths.lost)
        self.done = restarts.store.step_of(folder.name) if folder is not None else 0
        for server in range(self.size):
            self.has[server] = list(self.whole[folder][server].has) if folder is not None else []
            self.begun[server], self.lives[server] = str(folder or ""), self.life()

    def step(self) -> None:
        what: list[Callable[[], None]] = [self.update, self.begin, self.complete, self.server_dies, self.all_go_back]
        self.draw.choices(what, (10, 3, 3, 2, 1))[0]()


@pytest.mark.parametrize("part", range(4))
def test_updates_that_are_told_as_lost_are_those_that_a_server_lacks(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = 0
    for seed in range(250 * part, 250 * (part + 1)):
        world = World(seed, tmp_path)
        monkeypatch.setattr(server_files, "parts_of", world.whole.__getitem__)
        monkeypatch.setattr(server_snapshot, "parts_of", world.whole.__getitem__)
        monkeypatch.setattr(server_snapshot, "store", SimpleNamespace(newest_whole=world.newest, found=world.found))
        for _ in range(60):
            world.step()
            lacks = sum(world.done - len(has) for has in world.has)
            assert sum(loss.updates for loss in world.deaths.lost) == lacks, f"seed {seed}"
        kept += world.kept
    assert kept, "some losses are in the checkpoint that all go back to"


@pytest.mark.parametrize("first", [None, Path("step-1")], ids=["while it is read", "before its parts are read"])
def test_a_checkpoint_that_the_workers_have_replaced_meanwhile_is_not_the_last_word(
    first: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest, there, second = iter([first, Path("step-2")]), iter([["step-1"], ["step-2"], ["step-2"]]), Path("step-2")
    looked_at = SimpleNamespace(newest_whole=lambda _: next(newest), found=lambda _: next(there))
    monkeypatch.setattr(server_snapshot, "store", looked_at)
    monkeypatch.setattr(server_snapshot, "parts_of", {Path("step-1"): [], second: [Part(0, 1, (0, 1))]}.__getitem__)
    start: Any = SimpleNamespace(role=SimpleNamespace(size=1), rank=0, life=1, payload=SimpleNamespace(resume=""))
    assert snapshot_of(start, Path(), 5) == ServerSnapshot(second, 3)


def test_a_process_that_died_too_often_is_told_with_those_that_came_back(tmp_path: Path) -> None:
    def start(assignment: Assignment) -> dict[str, Any]:
        assert assignment.deaths is not None
        assignment.deaths.count()
        assignment.deaths.returned.append("worker 1 died")
        raise Died("server 0 died", "server 0")

    result = Result("failed", str(tmp_path))
    with pytest.raises(RunFailed, match="after 1 restart within an hour"):
        start_and_restart(start, ready(tmp_path, most=1), result, None)
    assert (result.restarts, result.returned) == (1, ["worker 1 died"])
