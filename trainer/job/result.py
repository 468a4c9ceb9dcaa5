"""The result of a run: as it is returned, and read from ``result.json``."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from trainer.host import json_text
from trainer.metrics.best import TESTED
from trainer.planning.plan import Plan, Resume


@dataclass
class Result:
    """The result of a run, as ``trainer.run`` returns it and ``result.json`` holds it.

    Attributes:
        status: ``done``, ``failed``, ``killed``, ``preempted`` or ``planned``. run_dir: its folder. run_id,
        experiment_id: of MLflow, or None.
        tracking: by tracker, how the run ended there (id, address, unsent lines of metrics.jsonl, error).
        metrics, best: last and best values by name. best_step: the update of checkpoints/best.safetensors.
        validation: False: no validations were made, and there is no best model.
        ended: ``all updates done``, or the reason of an early stop or of a callback's request.
        steps: updates (if work is leased: of worker 0). samples: training samples over all workers. seconds: from
            start to end.
        chosen, why: the choices of ``auto``, and their reasons.
        class_weights: weights of the loss that were computed from the training data, by key of ``loss``.
        data_source: the data that were used. mode: train, eval or predict. unreadable: with ``predict``, the first
            files that could not be read.
        restarts: how often processes were started again after a death. returned: the deaths of processes that were
            started again while the others went on.
        lost_updates: updates after the last checkpoint that were done again after a death.
        skipped: updates that were left out because they were not finite. rewinds: how often the run went back.
        lost_workers: the deaths of workers, by rank, that the run went on without.
        not_copied: checkpoints that are not at ``checkpoint.to``.
        not_printed: standard streams that were closed before the end, and why.
        made_with: fingerprints of trainer's own sources (``code``) and of the data (``data``; empty: not taken), and
            ``versions`` of packages.
    """

    status: str
    run_dir: str
    run_id: str | None = None
    experiment_id: str | None = None
    tracking: dict[str, dict[str, Any]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    best_step: int = 0
    validation: bool = True
    ended: str = ""
    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    training_seconds: float = 0.0
    data_wait_seconds: float = 0.0
    chosen: dict[str, Any] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    class_weights: dict[str, list[float]] = field(default_factory=dict)
    data_source: str = ""
    mode: str = "train"
    unreadable: list[str] = field(default_factory=list)
    stand_in: str = ""
    lost_workers: dict[str, str] = field(default_factory=dict)
    not_copied: list[str] = field(default_factory=list)
    restarts: int = 0
    returned: list[str] = field(default_factory=list)
    lost_updates: int = 0
    skipped: int = 0
    rewinds: int = 0
    not_printed: str = ""
    made_with: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def planned(plan: Plan) -> Result:
    """The result of a command that only shows the plan; ``error``: why the run would be refused."""
    return Result("planned", plan.paths.run_dir, error="\n".join(plan.remarks.lacks))


def tested_before(resume: Resume) -> tuple[int, dict[str, float]]:
    """The last update and the test metrics of a finished run that is resumed unchanged; (0, {}): there are none."""
    if not resume.here or resume.matters or resume.harmless or resume.lost:
        return 0, {}
    before = read_result(str(resume.source), "failed", "")
    tested = {name: value for name, value in before.metrics.items() if name.startswith(TESTED)}
    return (before.steps, tested) if before.status == "done" and tested else (0, {})


def read_result(run_dir: str, status: str, error: str) -> Result:
    """Read a job's result from its folder; if there is none, make one of the status and the error."""
    try:
        written = json_text.read(Path(run_dir) / "result.json")
        return Result(**{field.name: written[field.name] for field in fields(Result) if field.name in written})
    except (OSError, ValueError, TypeError):
        return Result(status, run_dir, error=error)
