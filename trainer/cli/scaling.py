"""mode=scaling: short trainings with several numbers of workers, beside the same processes that exchange nothing."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli import compose
from trainer.cli.short_trainings import APART, short, start
from trainer.config.keys import key_of
from trainer.errors import RunFailed, UserError
from trainer.job.result import Result
from trainer.run_folder.points import read_points
from trainer.strategies.builtin import ADVISE
from trainer.wording import counted

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra
    from omegaconf import DictConfig

MODE, NPROC = "scaling", "launch.nproc"
REFERENCE, AT = 0.8, 32
"""Efficiency of the reference at 32 devices."""


@dataclass(frozen=True)
class Measured:
    """One number of workers.

    Attributes:
        rate: samples per second over all workers. apart: the same when the workers exchange nothing; None: one worker.
        base: ``rate`` of the smallest number of workers, and that number.
    """

    workers: int
    rate: float
    apart: float | None
    base: tuple[int, float]

    @property
    def speed_up(self) -> float:
        """How many times the rate of one worker, by the smallest number of workers."""
        return self.rate / self.base[1] * self.base[0]

    @property
    def efficiency(self) -> float:
        """The share of the ideal speed-up."""
        return self.speed_up / self.workers

    @property
    def allowed(self) -> float | None:
        """The efficiency of the same processes when they exchange nothing."""
        return None if self.apart is None else self.apart / self.base[1] * self.base[0] / self.workers

    @property
    def communication(self) -> float | None:
        """The share of time that the exchange takes: what is missing to the rate without it."""
        return None if self.apart is None else max(0.0, 1.0 - self.rate / self.apart)


def scaling(app: Hydra, overrides: Sequence[str], config_name: str, flags: Sequence[str] = ()) -> Result:
    """Measure how a training scales on this host; returns a result with the rates as metrics.

    Each training is a command of its own, with its folder below the run's.

    Raises:
        UserError: the numbers of workers are none, or a training would be refused. RunFailed: a training failed.
    """
    from trainer.job.claim_folder import claim
    from trainer.run_folder.json_files import leave
    from trainer.terminal.screen import Screen

    numbers = _numbers(overrides)
    rest = [o for o in overrides if key_of(o) not in ("mode", NPROC) and o != "strategy=auto"]  # no probes
    config = compose.compose(app, [*rest, f"mode={MODE}"], config_name)
    _check(config)
    updates = config.scaling.updates
    folder = claim(compose.named_folder(config, "hydra.run.dir"), any(key_of(o) == "hydra.run.dir" for o in rest))
    words = [o for o in rest if key_of(o) not in ("hydra.run.dir", "plan", "scaling.updates")]
    if config.plan:
        for workers in numbers:
            start([*flags, *words, *short(updates), f"{NPROC}={workers}", "plan=true"], None, f"mode={MODE}")
        return Result("planned", str(folder))
    rows: list[Measured] = []
    out = Screen()
    for workers in numbers:
        common = [*flags, *words, *short(updates), f"{NPROC}={workers}"]
        rate = _rate(common, folder / f"{workers}", updates)
        apart = _rate([*common, *APART], folder / f"{workers}-apart", updates) if workers > 1 else None
        rows.append(Measured(workers, rate, apart, (numbers[0], rows[0].rate if rows else rate)))
        leave(folder / "scaling.json", [_plain(row) for row in rows])
        out.print(f"{counted(workers, 'worker')}: {rate:.1f} samples/s")
    _show(rows, folder, str(config.name), config.data.get("global_batch_size") is not None, updates)
    metrics = {f"scaling/samples_per_s_{row.workers}": row.rate for row in rows}
    result = Result("done", str(folder), metrics=metrics, mode=MODE, validation=False)
    leave(folder / "result.json", asdict(result))
    return result


def _numbers(overrides: Sequence[str]) -> list[int]:
    """The numbers of workers, in rising order.

    Raises:
        UserError: they are no numbers.
    """
    typed = next((o.partition("=")[2] for o in reversed(overrides) if key_of(o) == NPROC), "")
    parts = typed.strip("[]'\"").split(",")
    if not typed or not all(part.strip().isdecimal() and int(part) for part in parts):
        raise UserError(f"mode={MODE}", f"needs numbers of workers ({NPROC}={typed})", f"mode={MODE} {NPROC}=1,2,4")
    return sorted({int(part) for part in parts})


def _check(config: DictConfig) -> None:
    from trainer.cli.submitters import submitter_of

    if submitter_of(config) is not None or config.launch.nnodes != 1:
        why = "measures the workers of one host, in commands that it starts there"
        raise UserError(f"mode={MODE}", why, "launch=local and launch.nnodes=1 (an engine's job may hold the command)")
    if config.strategy._target_ == ADVISE:
        raise UserError("strategy=advise", f"mode={MODE} measures one strategy", "strategy=advise without mode=scaling")
    if config.resume.path:
        raise UserError(f"resume.path={config.resume.path}", "trains afresh", "the command without it")


def _rate(words: Sequence[str], folder: Path, updates: int) -> float:
    """Run a training to its end; returns its samples per second after the first third, the median of its lines.

    Raises:
        UserError, RunFailed: it was refused, or failed.
    """
    start(words, folder, f"mode={MODE}")
    rates: list[float] = []
    for point in read_points(folder):
        rate = point["metrics"].get("perf/samples_per_s")
        if rate is not None and point["step"] > updates // 3:
            rates.append(rate)
    if not rates:
        raise RunFailed(f"mode={MODE}: {folder} has no samples per second after update {updates // 3}")
    return statistics.median(rates)


def _plain(row: Measured) -> dict[str, float | None]:
    return {
        "workers": row.workers,
        "samples_per_s": row.rate,
        "samples_per_s_apart": row.apart,
        "speed_up": row.speed_up,
        "efficiency": row.efficiency,
        "efficiency_apart": row.allowed,
        "communication": row.communication,
    }


def _show(rows: Sequence[Measured], folder: Path, name: str, fixed: bool, updates: int) -> None:
    """Print the table, and draw ``scaling.png``."""
    from trainer.cli.last_lines import shown
    from trainer.job.scaling_picture import draw
    from trainer.terminal.screen import Screen

    columns = ["workers", "samples/s", "speed-up", "efficiency", "exchanging nothing", "communication"]
    cells = [
        [
            str(row.workers),
            f"{row.rate:.1f}",
            f"{row.speed_up:.2f}",
            f"{row.efficiency:.2f}",
            "" if row.apart is None else f"{row.apart:.1f} ({row.allowed:.2f})",
            "" if row.communication is None else f"{row.communication:.0%}",
        ]
        for row in rows
    ]
    out = Screen()
    out.rows("Scaling", columns, cells, 0, [])
    out.print(
        "exchanging nothing: the same processes without any exchange, what this machine allows (and its efficiency)"
    )
    out.print(f"the batch is fixed {'for all workers together' if fixed else 'per worker'}; the ideal efficiency is 1")
    out.print(f"the reference's: {REFERENCE} at {AT} devices")
    if noisy := [str(row.workers) for row in rows if row.apart is not None and row.rate > 1.05 * row.apart]:
        out.print(
            f"ATTENTION: with {' and '.join(noisy)} workers the training was faster than without an exchange: other "
            f"work on this machine disturbed the measurement. scaling.updates={2 * updates} measures longer"
        )
    cores = len(os.sched_getaffinity(0))
    if rows[-1].workers > cores:
        out.print(f"ATTENTION: this machine has {counted(cores, 'core')}; on a CPU more workers share them")
    picture = draw(folder, name, [_plain(row) for row in rows], (AT, REFERENCE))
    out.print(f"results: {shown(folder)} (scaling.json, {picture.name})")
