"""The advice of strategy=advise: its tables on the screen, and its files in the run's folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError
from trainer.planning.cost import Machine
from trainer.wording import counted, sized

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from trainer.job.advice import Case, Row
    from trainer.job.ready import Ready

FILE, MOST_WORKERS = "advise.json", 1_000_000


@dataclass(frozen=True)
class Advice:
    """What the trainings have shown: the candidates, best first, and what each machine was predicted from."""

    rows: list[Row]
    machine: Machine
    case: Case
    ready: Ready
    limit: float

    @property
    def workers(self) -> int:
        """Workers of the run."""
        return self.ready.plan.topology.workers

    @property
    def best(self) -> Row | None:
        """The fastest candidate that is equal to the plain average of gradients and fits into memory."""
        from trainer.job.advice import best_of

        return best_of(self.rows)

    def samples(self, workers: int) -> int:
        """Samples of an update with so many workers."""
        batches = self.ready.plan.batches
        together = self.ready.checked.config.data.global_batch_size is not None
        return batches.global_size if together else batches.size * batches.merge * workers

    def rate(self, row: Row, workers: int) -> float | None:
        """Samples per second of a candidate with so many workers; None: there are fewer samples than workers."""
        from trainer.job.advice import cost_of

        batch = self.samples(workers) / workers / self.ready.plan.batches.merge
        if row.options is None or batch < 1:
            return None
        if workers == 1:
            return self.samples(1) / self.machine.group(1, batch).work.total
        return self.samples(workers) / cost_of(row.options, self.case, self.machine.group(workers, batch)).step


def numbers_of(config: DictConfig) -> list[int]:
    """The further numbers of workers.

    Raises:
        UserError: they are no numbers.
    """
    parts = str(config.advise.workers or "").strip("[]'\" ").split(",") if config.advise.workers else []
    if all(part.strip().isdecimal() and 2 <= int(part) <= MOST_WORKERS for part in parts):
        return sorted({int(part) for part in parts})
    why = f"takes numbers of workers from 2 to {MOST_WORKERS:,}"
    raise UserError(f"advise.workers={config.advise.workers}", why, "advise.workers=8,64,1024")


def show(advice: Advice, config: DictConfig, best: str) -> None:
    """Print the tables, the warnings, and the best candidate after the word ``best``."""
    from trainer.job.advice import concerns
    from trainer.terminal.screen import Screen

    out, workers, further = Screen(), advice.workers, numbers_of(config)
    columns = ["candidate", "update", "computes", "waits", "samples/s", "memory", "sent", "the numbers"]
    cells = []
    for row in advice.rows:
        if row.cost is None:
            cells.append([row.candidate.name, *[""] * 6, row.changes])
            continue
        times = [seconds(number) for number in (row.cost.step, row.cost.computation, row.cost.exposed)]
        rate = f"{advice.samples(workers) / row.cost.step:.1f}"
        cells.append([row.candidate.name, *times, rate, sized(row.memory), sized(row.cost.sent), row.changes])
    out.rows(f"Strategies for {counted(workers, 'worker')}, predicted", columns, cells, 7)
    _say_of_machine(out, advice, further)
    if advice.case.tables:
        out.print("rows of sparse tables are not counted")
    if any(row.cost is not None and not row.exact for row in advice.rows):
        out.print("not counted: what rounding computes to 8 bits, and to 16 with shards")
    if not config.launch.servers:
        out.print("parameter servers are compared with launch.servers=1")
    for said in filter(None, [advice.ready.plan.remarks.concern, *concerns(advice.rows, advice.limit)]):
        out.print(f"ATTENTION: {said}")
    if further:
        _show_workers(out, advice, sorted({1, workers, *further}))
    if advice.best is not None:
        out.print(f"{best}: {' '.join(advice.best.candidate.words)}", style="bold green")


def _say_of_machine(out: Any, advice: Advice, asked: Sequence[int]) -> None:
    """Say what was measured."""
    machine, cores = advice.machine, advice.machine.cores
    rate = f"{1 / machine.link.beta / 1e9:.2f} GB/s" if machine.link.beta else "no limit found"
    out.print(
        f"measured here: an update of one worker {seconds(cores.alone.total)}, of two that exchange nothing "
        f"{seconds(cores.beside.total)}; their link: {seconds(machine.link.alpha)} a message, {rate}"
    )
    if cores.alone.total > cores.beside.total:
        out.print("ATTENTION: one worker was slower than two: other work on this machine disturbed the measurement")
    if machine.between is None and max([advice.workers, *asked]) > machine.per_host:
        out.print("between hosts: predicted as within this one, as no link is declared (advise.gbit=10)")
    if machine.between is not None:
        gbit = f"{8 / machine.between.beta / 1e9:g} Gbit/s" if machine.between.beta else "as fast as measured"
        out.print(
            f"declared between hosts of {counted(machine.per_host, 'worker')}: {gbit}, "
            f"{seconds(machine.between.alpha)} a message"
        )
    here = len(os.sched_getaffinity(0))
    if cores.number and min(advice.workers, machine.per_host) > here:
        out.print(f"ATTENTION: this machine has {counted(here, 'core')}, which more workers share")


def _show_workers(out: Any, advice: Advice, numbers: Sequence[int]) -> None:
    """Print samples per second of the candidates for further numbers of workers."""
    columns = ["candidate", *[f"{number}" for number in numbers]]
    cells = []
    for row in advice.rows:
        if row.cost is not None:
            rates = [advice.rate(row, number) for number in numbers]
            cells.append([row.candidate.name, *["-" if rate is None else f"{rate:,.1f}" for rate in rates]])
    title = f"Samples per second by workers, {advice.machine.per_host} on a host (predicted; measured: 1 and 2 workers)"
    out.rows(title, columns, cells, 0)


def seconds(value: float) -> str:
    """Seconds in a unit in which they can be read."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} us"


def leave(folder: Path, advice: Advice, config: DictConfig, why: str = "") -> None:
    """Write ``advise.json`` and ``advise.png`` into the run's folder; ``why``: the reason of strategy=auto."""
    from trainer.job.advice_picture import draw
    from trainer.run_folder.json_files import leave as write

    workers = sorted({1, 2, advice.workers, *numbers_of(config)})
    rates = {row.candidate.name: [advice.rate(row, number) for number in workers] for row in advice.rows if row.cost}
    rows = [
        {
            "name": row.candidate.name,
            "overrides": row.candidate.words,
            "numbers": row.changes,
            "equal": row.exact,
            "memory": row.memory,
            **({**asdict(row.cost), "step": row.cost.step} if row.cost is not None else {}),
        }
        for row in advice.rows
    ]
    node = {
        "measured": asdict(advice.machine),
        "workers": advice.workers,
        "candidates": rows,
        "samples_per_s": {"workers": workers, **rates},
        "chosen": best.candidate.words if (best := advice.best) is not None else None,
        "why": why,
    }
    write(folder / FILE, node)
    draw(folder, str(config.name), workers, rates, [row.candidate.name for row in advice.rows if row.exact])
