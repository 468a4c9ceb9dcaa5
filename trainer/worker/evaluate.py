"""mode=eval: one worker's part of evaluating a file of weights, as at the end of a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.data.evaluated_split import TEST
from trainer.planning.assignment import Assignment
from trainer.strategies.contract import Seat
from trainer.weights import fit
from trainer.worker.final_test import measure
from trainer.worker.loop import evaluate
from trainer.worker.train import at_work, keep_findings


def evaluate_weights(seat: Seat, assignment: Assignment) -> dict[str, Any]:
    """Evaluate a file of weights as one worker, and return the outcome; ``samples`` in it counts all workers'."""
    split = assignment.config.eval.split
    with at_work(seat, assignment) as run:
        fit.load(Path(assignment.plan.model.weights), run.model)
        if split == TEST:
            run.examined = {"last": run.task.kept(measure(run, run.model, assignment.plan.model.weights))}
        else:
            evaluate(run, 0)
        if seat.rank == 0:
            keep_findings(run, Path(assignment.plan.paths.run_dir), split)
        return {**run.report.outcome(), "samples": int(run.examined["last"][-1].item())}
