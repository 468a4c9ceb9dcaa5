"""mode=eval: one worker's part of evaluating weights from a file, as at the end of a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.strategies.contract import Seat
from trainer.weights import fit
from trainer.worker.loop import evaluate
from trainer.worker.train import at_work, keep_findings


def evaluate_weights(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """Evaluate as one worker; see ``trainer.worker.train.train``. ``samples`` are those that were evaluated, of all workers."""
    with at_work(seat, payload) as run:
        fit.load(Path(payload["config"]["weights"]), run.model)
        run.keep_best, run.ema, run.early_stop, run.plateau = _nothing, None, None, False
        evaluate(run, 0)
        if seat.rank == 0:
            keep_findings(run, Path(payload["run_dir"]))
        return {**run.report.outcome(), "samples": int(run.examined["last"][-1].item())}


def _nothing() -> None:
    """The best model is the one that was given."""
