"""Whether a row's run comes to the same after a kill, and on another number of workers."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

import trainer
from tests.checkpoint.interrupting import AT
from tests.equality.cells import EQUAL, Cell, share
from tests.equality.rows import SHORT, Row
from trainer.errors import RunPreempted, UserError

RUN = (
    "+recipe=digits_lenet",
    *SHORT,
    "precision=fp64",
    "max_steps=20",
    "data.global_batch_size=18",
    "checkpoint.every_steps=4",
    "launch.max_restarts=1",
    "callbacks=[{_target_:tests.checkpoint.interrupting.Interrupting}]",
)
UPDATE = 10
"""The second worker is killed, or asked to leave, in the update after so many."""


def _run(folder: Path, row: Row, *more: str) -> dict[str, np.ndarray]:
    typed = {one.partition("=")[0]: one for one in (*RUN, *row.overrides, *more)}
    trainer.run([*typed.values(), f"hydra.run.dir={folder}"])
    return load_file(folder / "model.safetensors")


def after_a_kill(row: Row, folder: Path) -> tuple[Cell, Cell]:
    """How far the run ends from an undisturbed one: killed and restarted, and going on with three workers."""
    folder.mkdir(parents=True)
    try:
        plain = _run(folder / "plain", row)
    except UserError as error:
        refused = Cell("refused", str(error))
        return refused, refused
    (folder / AT).write_text(f"dies 1 training {UPDATE}")
    killed = _run(folder / "killed", row)
    (folder / AT).write_text(f"leaves 1 training {UPDATE}")
    with contextlib.suppress(RunPreempted):
        _run(folder / "other", row)
        raise AssertionError("the run was not asked to leave")
    workers = [f"launch.{'workers' if row.servers else 'nproc'}=3"]
    if row.servers and "strategy=pserver_sync" not in row.typed:  # work is handed out in blocks of batches
        workers += ["data.global_batch_size=null", "data.batch_size=9"]
    try:
        other = _run(folder / "other", row, *workers, "resume=auto")
    except UserError as error:
        return _cell(killed, plain), Cell("refused", str(error))
    return _cell(killed, plain), _cell(other, plain)


def _cell(found: dict[str, np.ndarray], plain: dict[str, np.ndarray]) -> Cell:
    apart = max(np.abs(found[name] - plain[name]).max() / np.abs(plain[name]).max() for name in plain)
    return Cell("equal" if apart <= EQUAL else "goes on", share(apart))
