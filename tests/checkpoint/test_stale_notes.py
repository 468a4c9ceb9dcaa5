"""What a first worker says that was stopped, taken for lost, and wakes, keeps nobody from saving later."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from trainer.config.schema import CheckpointConfig
from trainer.host.notes_board import SealedBoard
from trainer.worker.checkpoints import Checkpoints
from trainer.worker.training import Progress


def of_worker(rank: int, store: Any, folder: Path) -> Checkpoints:
    seat: Any = SimpleNamespace(rank=rank, size=2, local_size=2, store=store)
    told = CheckpointConfig(every_minutes=1e-9, every_epochs=None, background=False)
    return Checkpoints(folder, told, seat, True, 99, 9, {}, 0.0)


def at(step: int, index: int) -> Any:
    strategy = SimpleNamespace(members=lambda: (index, 2), next_meeting=lambda now: now + 2)
    return SimpleNamespace(progress=Progress(step=step), strategy=strategy, lockstep=True)


def test_an_update_that_is_past_is_waited_for_no_more(tmp_path: Path) -> None:
    store = SealedBoard(dist.HashStore(), b"secret")
    first, second = (of_worker(rank, store, tmp_path) for rank in (0, 1))
    first._ask(at(19, 0))
    second._ask(at(25, 1))
    assert (first.target, second.target) == (21, 21)
    second._ask(at(25, 1))
    assert second.target is None and second.asked == 1
    second._ask(at(26, 0))
    assert second.target == 28, "it leads now, and says when all save"


def test_who_was_lost_says_nothing(tmp_path: Path) -> None:
    store = SealedBoard(dist.HashStore(), b"secret")
    first = of_worker(0, store, tmp_path)
    store.set("fenced/worker/0", "nothing was heard of it for 10 s")
    first._ask(at(19, 0))
    assert first.target is None and not first.board.check(["after/0"])


def test_who_leads_next_takes_what_the_lost_one_has_said_last(tmp_path: Path) -> None:
    """The others have read it, and wait for that update; another note under its key would be read by nobody."""
    store = SealedBoard(dist.HashStore(), b"secret")
    first, second = (of_worker(rank, store, tmp_path) for rank in (0, 1))
    first._ask(at(19, 0))
    second._ask(at(20, 0))
    assert second.target == 21


def test_who_may_stop_all_next_does_not_say_it_twice(tmp_path: Path) -> None:
    """Without a common step: some may have read already what the lost one has said."""
    store = SealedBoard(dist.HashStore(), b"secret")
    second = of_worker(1, store, tmp_path)
    second.board.set("stop/0", "0 3")
    assert not second._may_write("stop/0") and second._may_write("stop/1")
