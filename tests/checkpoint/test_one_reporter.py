"""At a checkpoint one worker alone goes on reporting: two would mix their points in metrics.jsonl."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from trainer.config.schema import CheckpointConfig
from trainer.host.notes_board import SealedBoard
from trainer.run_folder.report import Report
from trainer.strategies.contract import Share
from trainer.worker import checkpoints as module
from trainer.worker.checkpoints import Checkpoints
from trainer.worker.training import Progress, Reporting


def of_worker(rank: int, board: Any, run_dir: Path) -> tuple[Checkpoints, Any]:
    seat: Any = SimpleNamespace(rank=rank, size=2, local_size=2, store=board)
    kept = Checkpoints(
        run_dir / "checkpoints", CheckpointConfig(background=False), seat, False, 99, 9, {"data": ""}, 0.1
    )
    report = Report(None, 100)
    report.step = 7 - rank
    strategy = SimpleNamespace(members=lambda: (rank, 2), halt=lambda step: step, halts=True, evaluated=nullcontext)
    run = SimpleNamespace(
        lockstep=False,
        over=False,
        progress=Progress(update=7, step=7 - rank),
        reporting=Reporting(report, window=None, run_dir=run_dir),  # type: ignore[arg-type]
        strategy=strategy,
    )
    return kept, run


def test_who_is_no_longer_the_first_stops_reporting_at_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "check_parameters", lambda run: None)
    monkeypatch.setattr(module, "read_line", lambda run: None)
    monkeypatch.setattr(module, "save_state", lambda *arguments: SimpleNamespace())
    board = SealedBoard(dist.HashStore(), b"secret")
    (first, its_run), (second, other_run) = (of_worker(rank, board, tmp_path) for rank in (0, 1))
    other_run.strategy.save = lambda folder: Share(workers=(1,))  # worker 0 is lost, and comes back at this very stop
    second._copy(other_run, 0)
    assert (its_run.reporting.report.run_dir, other_run.reporting.report.run_dir) == (None, tmp_path)
    its_run.progress.step = other_run.progress.step = 12
    for kept, run in ((first, its_run), (second, other_run)):
        run.strategy.save = lambda folder: Share(workers=(0, 1))
        kept._copy(run, 0)
    assert (its_run.reporting.report.run_dir, other_run.reporting.report.run_dir) == (tmp_path, None)
    assert other_run.reporting.report.points is None
