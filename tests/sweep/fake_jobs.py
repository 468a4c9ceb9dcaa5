"""A search whose jobs are closed forms: no process, and no training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.cli.sweep_objective import Objective
from trainer.cli.sweep_search import Search
from trainer.cli.sweep_space import Choice, Interval
from trainer.config.schema.run import SweepConfig
from trainer.job.result import Result

SPACE = [Interval("optimizer.lr", 1e-4, 1.0, log=True), Choice("data.batch_size", ("16", "32"))]
LOSS = (Objective("val/loss", is_less_better=True),)


def search(folder: Path, objectives: tuple[Objective, ...] = LOSS, space: Any = SPACE, **keys: Any) -> Search:
    return Search(SweepConfig(search="optuna", **keys), space, objectives, ["epochs=9"], folder, 9)


def write(folder: Path, *points: dict[str, float]) -> None:
    """Write the validations of a job, one an epoch."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": epoch, "epoch": epoch, "metrics": metrics}) for epoch, metrics in enumerate(points)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def run_all(found: Search, value: Callable[[dict[str, str]], float], most: int = 100) -> list[tuple[str, ...]]:
    """Run jobs one after the other, at most so many; returns what each was."""
    ran: list[tuple[str, ...]] = []
    while len(ran) < most and (job := found.next()) is not None:
        folder = found.folder / job.subdir
        write(folder, {"val/loss": value(dict(word.split("=") for word in job.shown))})
        assert found.ended(job.number, Result("done", str(folder)), folder, died=False)
        ran.append(job.shown)
    return ran
