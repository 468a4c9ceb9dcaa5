"""mode=eval: one worker's part of evaluating a file of weights, as at the end of a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.data.evaluated_split import TEST
from trainer.planning.launcher import Assignment
from trainer.strategies.seat import Seat
from trainer.weights import fit
from trainer.worker.final_test import measure
from trainer.worker.train import at_work, keep_findings
from trainer.worker.validation import validate


def evaluate_weights(seat: Seat, assignment: Assignment) -> dict[str, Any]:
    """Evaluate a file of weights as one worker, and return the outcome. Its ``samples`` are those of all workers."""
    split = assignment.config.eval.split
    with at_work(seat, assignment) as run:
        fit.load(Path(assignment.plan.model.weights), run.model)
        if split == TEST:
            run.progress.val_sums["last"] = run.task.kept(measure(run, run.model, assignment.plan.model.weights))
        else:
            validate(run)
        if seat.rank == 0:
            keep_findings(run, Path(assignment.plan.paths.run_dir), split)
        return {**run.reporting.report.outcome(), "samples": int(run.progress.val_sums["last"][-1].item())}
