"""What workers of several hosts learn of each other's folder."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from trainer.checkpoint import durable_folder, store
from trainer.checkpoint.durable_folder import life_folder
from trainer.host.notes_board import SealedBoard
from trainer.worker.shared_folder import is_shared, life_of


def life(folder: Path) -> set[str]:
    """The names that two workers on two hosts have for one life of their run."""
    board = SealedBoard(dist.HashStore(), b"secret")
    seats: list[Any] = [SimpleNamespace(rank=rank, size=2, local_size=1, store=board) for rank in range(2)]
    with ThreadPoolExecutor() as pool:
        assert all(pool.map(lambda seat: is_shared(folder, seat, 60.0), seats))
    assert not list(folder.iterdir())
    return {life_of(seat) for seat in seats}


def test_all_processes_of_a_life_on_several_hosts_have_one_name_for_it_and_the_next_life_has_another(
    tmp_path: Path,
) -> None:
    (first,), (second,) = life(tmp_path), life(tmp_path)
    assert first != second
    left = life_folder(store.folder_of(tmp_path, 10), first)
    durable_folder.write(left, "worker-1.safetensors", lambda path: path.write_text("part"))
    store.forget_unfinished(tmp_path)
    assert not list(tmp_path.iterdir()), "what a life before has left is known by its name"


def test_folder_that_one_worker_does_not_see_is_shared_for_none(tmp_path: Path) -> None:
    board, folders = SealedBoard(dist.HashStore(), b"secret"), [tmp_path / name for name in ("one", "one", "other")]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    seats: list[Any] = [SimpleNamespace(rank=rank, size=3, local_size=1, store=board) for rank in range(3)]
    with ThreadPoolExecutor() as pool:
        assert [*pool.map(lambda folder, seat: is_shared(folder, seat, 60.0), folders, seats)] == [False] * 3
    assert not list(folders[0].iterdir())


def test_a_life_on_one_host_needs_no_name() -> None:
    alone: Any = SimpleNamespace(rank=1, size=2, local_size=2, store=None)
    assert life_of(alone) == ""
