"""Checkpoints of a run that does nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from trainer.checkpoint import durable_folder, store, tensor_tree
from trainer.checkpoint.writer import write_part
from trainer.config.schema import CheckpointConfig
from trainer.host.notes_board import SealedBoard
from trainer.worker.checkpoints import Checkpoints

RUN: Any = SimpleNamespace(reporting=SimpleNamespace(report=SimpleNamespace(unwritten=lambda: "")))
"""A run whose points are all written."""


def about(step: int, value: float | None = None) -> str:
    """checkpoint.json."""
    told = store.About(
        step=step,
        epoch=0,
        update=step,
        samples=step,
        points=0,
        watched=store.BestMetric("val/acc1", value, False),
        config={"seed": 1},
        strategy="collective",
        workers=1,
        global_batch_size=1,
        total_steps=99,
        versions={},
        precision="fp32",
    )
    return json.dumps(asdict(told))


def state(step: int, life: int, worker: int = 0) -> dict[str, Any]:
    """A worker's part."""
    return {"step": step, "life": life, "worker": worker, "w": torch.full((5,), float(step))}


def saver(checkpoints: Path, workers: int = 1, keep_last: int = 1, keep_best: int = 0) -> Checkpoints:
    """The first worker's."""
    seat: Any = SimpleNamespace(
        rank=0, size=workers, local_size=workers, store=SealedBoard(dist.HashStore(), b"secret")
    )
    told = CheckpointConfig(keep_last=keep_last, keep_best=keep_best, background=False)
    return Checkpoints(checkpoints, told, seat, True, 9, 9, {}, 0.0)


def save(
    checkpoints: Path,
    step: int,
    life: int = 1,
    workers: int = 1,
    keep_last: int = 1,
    keep_best: int = 0,
    value: float | None = None,
    beside: Sequence[str] = (),
) -> None:
    """As all workers of a run save after an update.

    Args:
        beside: the files of servers and the best weights.
    """
    folder = store.folder_of(checkpoints, step)
    for number, name in enumerate([*map(store.part_of, range(1, workers)), *beside], 1):
        write_part(folder, name, tensor_tree.Packed(state(step, life, number)))
    first = saver(checkpoints, workers, keep_last, keep_best)
    parts = [*map(store.part_of, range(workers)), *(name for name in beside if name.startswith("server"))]
    first._write(RUN, folder, tensor_tree.Packed(state(step, life)), about(step, value), parts, 0.0)


def read(folder: Path) -> tuple[int, int]:
    """The update and the life that a checkpoint is of, if all its parts are of that."""
    names = [name for name in durable_folder.files(folder, store.FORMAT) if name != store.ABOUT]
    parts = [tensor_tree.read(folder / name) for name in names]
    assert (
        len({(part["step"], part["life"]) for part in parts}) == 1 and parts[0]["w"].tolist() == [parts[0]["step"]] * 5
    )
    assert store.about(folder).step == parts[0]["step"]
    return parts[0]["step"], parts[0]["life"]


def save_model(folder: Path, target: str, model: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> None:
    """A checkpoint of one worker with that model."""
    told = json.loads(about(1)) | {"config": {"model": {"_target_": target}}}
    part = {"model": model, "buffers": buffers, "ema": None, "own": {}}
    durable_folder.write(folder, store.part_of(0), tensor_tree.Packed(part).write)
    durable_folder.write(folder, store.ABOUT, lambda path: path.write_text(json.dumps(told)))
    store.complete(folder, [store.part_of(0)])
