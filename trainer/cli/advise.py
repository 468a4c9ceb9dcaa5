"""strategy=advise and a typed strategy=auto: short trainings with one and two workers, and what strategies would cost.

Four trainings are measured, each a command of its own: one worker; two workers that exchange nothing, and then the
link between them; two workers with strategy=collective and with strategy=sharded, which tell what the exchange and the
blocks take of the cores.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.cli import compose
from trainer.cli.arguments import ADVISE, AUTO, typed_keys
from trainer.cli.short_trainings import APART, short, start
from trainer.config.keys import key_of
from trainer.config.schema import GROUPS
from trainer.errors import UserError
from trainer.host.engine_tasks import RUN_DIR, tasks_of
from trainer.job.result import Result
from trainer.planning import cost
from trainer.planning.cost import Cores, Link, Machine, Work
from trainer.wording import counted, sized

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra
    from omegaconf import DictConfig

    from trainer.job.advice import Case, Row
    from trainer.job.ready import Ready

MOST_WORKERS = 1_000_000
FILE, PROBE, PROBE_FILE = "advise.json", "trainer.worker.advice_probe.Probe", "probe.json"
OF_PROCESSES = ("launch.nproc", "launch.workers", "launch.nnodes", "launch.node_rank", "launch.servers", "launch.ips")
ASKED = ("hydra.run.dir", "plan", "resume", "resume.path", "mode", "verbosity", "max_steps", "epochs")
MEMORY_SHARE = 0.9
"""Of the free memory, that workers may take together."""


@dataclass(frozen=True)
class Probed:
    """What a short training has left in ``probe.json``: seconds of an update and of its parts, and of all-reduces by
    bytes. Without marks, as of a compiled model, a third of an update is the forward."""

    step: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0
    link: Sequence[tuple[int, float]] = ()

    @property
    def work(self) -> Work:
        """The parts of the update."""
        if not self.forward:
            return Work(self.step / 3, self.step * 2 / 3, 0.0)
        rest = self.step - self.forward - self.backward - self.update
        return Work(self.forward, self.backward, self.update, max(0.0, rest))

    @property
    def passes(self) -> float:
        """Seconds of forward and backward."""
        return self.work.forward + self.work.backward


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


def alone_here(config: DictConfig) -> bool:
    """Whether this command trains, with all workers on this host. Hosts that each measured could differ in what they
    choose, and so could the processes of an engine."""
    launch, env = config.launch, os.environ
    here = (launch.nnodes, launch.role, launch.ips) == (1, None, None) and launch.env != "paddle"
    return here and config.mode == "train" and not config.plan and RUN_DIR not in env and not tasks_of(env)


def advise(app: Hydra, overrides: Sequence[str], config_name: str, config: DictConfig, flags: Sequence[str]) -> Result:
    """Print the table of candidates, and train nothing. Without ``plan=true`` the run's folder gets files of it.

    Raises:
        UserError: there is nothing to compare, or a training would be refused. RunFailed: a training failed.
    """
    from trainer.job.claim_folder import claim

    _check(config)
    _numbers(config)
    folder = compose.named_folder(config, "hydra.run.dir")
    with _folder(None if config.plan else claim(folder, "hydra.run.dir" in typed_keys(overrides))) as place:
        advice = _measured(app, overrides, config_name, config, flags, place)
        if advice is None:
            raise UserError(ADVISE, "one worker has nobody to exchange with", f"{ADVISE} launch.nproc=2")
        _show(advice, config, "to type")
        if config.plan:
            return Result("planned", str(folder))
        leave(place, advice, config)
    metrics = {f"advise/step_s {row.candidate.name}": row.cost.step for row in advice.rows if row.cost is not None}
    return Result("done", str(place), metrics=metrics, mode="advise", validation=False)


def resolved(
    app: Hydra, overrides: Sequence[str], config_name: str, config: DictConfig, flags: Sequence[str]
) -> tuple[list[str], Advice | None, str]:
    """What to type instead of a typed ``strategy=auto``: the fastest candidate that is equal and fits.

    A run that resumes in its folder keeps its choice.

    Returns:
        The overrides, what was measured (None: nothing), and why.
    """
    kept = [o for o in overrides if o != AUTO]
    before = compose.named_folder(config, "hydra.run.dir") / FILE
    if config.resume.path and before.is_file():
        chosen = json.loads(before.read_text()).get("chosen")
        if chosen:
            return [*kept, *chosen], None, f"as before, by {FILE}"
    with _folder(None) as place:
        advice = _measured(app, overrides, config_name, config, flags, place)
    if advice is None:
        return [*kept, "strategy=single"], None, "one worker"
    best = advice.best
    if best is None or best.cost is None:
        refused = next((row.refused for row in advice.rows if row.refused), "none fits into memory")
        raise UserError(AUTO, f"no candidate that is equal can run ({refused})", "strategy=collective")
    why = f"{best.candidate.name}: {_seconds(best.cost.step)} an update predicted, the least of those that are equal"
    _show(advice, config, "chosen")
    return [*kept, *best.candidate.words], advice, why


@contextmanager
def _folder(own: Path | None) -> Iterator[Path]:
    """A folder for the trainings: the run's own, or one that is removed."""
    if own is not None:
        yield own
        return
    with tempfile.TemporaryDirectory(prefix="trainer-advise-") as made:
        yield Path(made)


def _check(config: DictConfig) -> None:
    from trainer.cli.submitters import submitter_of

    if submitter_of(config) is not None:
        why = "measures this machine, and the engine's job runs on others"
        raise UserError(ADVISE, why, "launch=local (an engine's job may hold the command)")
    if config.mode != "train":
        raise UserError(f"{ADVISE} mode={config.mode}", "compares trainings", f"{ADVISE} mode=train")
    if config.launch.nnodes != 1:
        why = "measures the workers of one host, in commands that it starts there"
        instead = "launch.nnodes=1 advise.workers=16 advise.per_host=8 advise.gbit=10"
        raise UserError(f"launch.nnodes={config.launch.nnodes}", why, instead)


def _numbers(config: DictConfig) -> list[int]:
    """The further numbers of workers.

    Raises:
        UserError: they are no numbers.
    """
    parts = str(config.advise.workers or "").strip("[]'\" ").split(",") if config.advise.workers else []
    if all(part.strip().isdecimal() and 2 <= int(part) <= MOST_WORKERS for part in parts):
        return sorted({int(part) for part in parts})
    why = f"takes numbers of workers from 2 to {MOST_WORKERS:,}"
    raise UserError(f"advise.workers={config.advise.workers}", why, "advise.workers=8,64,1024")


def _measured(
    app: Hydra, overrides: Sequence[str], config_name: str, config: DictConfig, flags: Sequence[str], place: Path
) -> Advice | None:
    """Plan the candidates, and measure what their costs follow from; None: the run has one worker."""
    from trainer.job import advice, memory_rows
    from trainer.terminal.screen import say

    plain = _planned(app, _words(overrides, config, advice.CANDIDATES[0].words), config_name, place)
    if isinstance(plain, UserError):
        raise plain
    workers = plain.plan.topology.workers
    if workers == 1:
        return None
    per_host = config.advise.per_host or workers
    declared = config.advise.gbit is not None or config.advise.latency_ms is not None
    if declared and per_host >= max([workers, *_numbers(config)]):
        why = f"all {workers} workers are on one host, so that no link between hosts is used"
        raise UserError(f"advise.gbit={config.advise.gbit}", why, "advise.per_host=1")
    case = advice.Case.of(plain)
    if config.verbosity != "quiet":
        say("measuring short trainings with one worker and with two")
    machine = _machine(overrides, config, flags, plain, case, place)
    free = _limit(plain, min(workers, per_host))
    batch, group = memory_rows.of_a_batch(plain), machine.group(workers)
    rows = []
    for candidate in advice.CANDIDATES:
        if candidate.served and not config.launch.servers:
            continue
        ready = _planned(app, _words(overrides, config, candidate.words, candidate.served), config_name, place)
        if isinstance(ready, UserError):
            rows.append(advice.Row(candidate, refused=f"{ready.what}: {ready.why}"))
        else:
            rows.append(advice.row(candidate, ready, case, group, batch, free))
    return Advice(advice.ordered(rows), machine, case, plain, free)


def _words(overrides: Sequence[str], config: DictConfig, words: Sequence[str], served: bool = False) -> list[str]:
    """The overrides with another strategy. Typed keys of the strategy stay where it has them."""
    name = words[0].partition("=")[2].replace("_", "")
    option = next(one for one in GROUPS["strategy"] if one.__name__.lower() == f"{name}strategy")
    known = {field.name for field in fields(option)}
    own = {key_of(word) for word in words}
    kept = []
    for o in overrides:
        key = key_of(o)
        head, _, rest = key.partition(".")
        if key == "strategy" or key in own or head == "advise" or key in ("plan", "hydra.run.dir"):
            continue
        if head == "strategy" and rest.partition(".")[0] not in known:
            continue
        if key == "launch.servers" and not served:
            continue
        kept.append(o)
    return [*kept, *words]


def _planned(app: Hydra, words: Sequence[str], config_name: str, place: Path) -> Ready | UserError:
    """The job of these words as ``plan=true`` has it, or why it cannot be composed."""
    from trainer.job.check import get_ready

    words = [o for o in words if key_of(o) not in ("resume", "resume.path")]
    words = [*words, "plan=true", "tracking=none", f"hydra.run.dir={place / 'planned'}"]
    try:
        config = compose.compose(app, words, config_name)
        return get_ready(compose.plain(config), typed_keys(words), str(place / "planned"))
    except UserError as error:
        return error


def _limit(ready: Ready, here: int) -> float:
    """Bytes of memory that each worker of a host can have."""
    from trainer.host import memory

    if ready.checked.device == "cuda":
        from trainer.host import hardware

        return MEMORY_SHARE * min((gpu.memory for gpu in hardware.gpus()), default=0)
    return MEMORY_SHARE * memory.free() / here


def _machine(
    overrides: Sequence[str], config: DictConfig, flags: Sequence[str], ready: Ready, case: Case, place: Path
) -> Machine:
    """Measure this machine with the run's model and batch."""
    from trainer.host import hardware
    from trainer.job import advice

    cuda, asked, plan = ready.checked.device == "cuda", config.advise, ready.plan
    per_host = asked.per_host or plan.topology.workers
    declared = Link.declared(asked.gbit, asked.latency_ms) if asked.gbit or asked.latency_ms is not None else None
    if cuda and len(hardware.gpus()) < 2:
        why = "this machine has one GPU, and the link is measured between two"
        raise UserError("launch.nproc", why, "a machine with two GPUs (or strategy=collective)")
    base = _short_words(overrides, config, ready)

    def probe(name: str, *words: str, link: bool = False, size: int = plan.batches.size) -> Probed:
        skipped, marks = asked.updates // 3, str(not config.compile).lower()
        call = f"callbacks=[{{_target_:{PROBE},skipped:{skipped},link:{str(link).lower()},marks:{marks}}}]"
        sizes = [f"data.batch_size={size}", "data.global_batch_size=null"]
        start([*flags, *base, *sizes, call, *words], place / name, ADVISE)
        return Probed(**json.loads((place / name / PROBE_FILE).read_text()))

    alone = probe("one", "launch.nproc=1", "strategy=single")
    beside = probe("two-apart", "launch.nproc=2", *APART, link=True)
    together = probe("two", "launch.nproc=2", "strategy=collective")
    try:
        cut = probe("two-sharded", "launch.nproc=2", "strategy=sharded")
    except UserError:  # the planner says why, in the table
        cut = Probed()
    passes = None
    size = plan.batches.size
    if asked.workers and ready.checked.config.data.global_batch_size is not None and size > 1:
        half = probe("one-half", "launch.nproc=1", "strategy=single", size=size // 2)
        passes = (float(size // 2), half.passes), (float(size), alone.passes)
    threads = config.execution.threads
    number = 0 if cuda else hardware.cores()
    cores = Cores(number, threads if isinstance(threads, int) else 0, alone.work, beside.work)
    link = cost.fitted(beside.link)
    machine = Machine(cores, link, per_host, declared, passes=passes, batch=float(size))
    return advice.calibrated(machine, case, together.step, cut.step)


def _short_words(overrides: Sequence[str], config: DictConfig, ready: Ready) -> list[str]:
    """The overrides of the short trainings, whatever their number of workers."""
    left = (*OF_PROCESSES, *ASKED, "data.batch_size", "data.global_batch_size", "callbacks")
    kept = [o for o in overrides if key_of(o) not in left and key_of(o).partition(".")[0] not in ("strategy", "advise")]
    merge = ready.plan.batches.merge
    more = [f"strategy.gradient_merge.k_steps={merge}"] if merge > 1 else []
    return [*kept, *short(config.advise.updates), *more]


def _show(advice: Advice, config: DictConfig, best: str) -> None:
    """Print the tables, the warnings, and the best candidate after the word ``best``."""
    from trainer.job.advice import concerns
    from trainer.terminal.screen import Screen

    out, workers = Screen(), advice.workers
    columns = ["candidate", "update", "computes", "waits", "samples/s", "memory", "sent", "the numbers"]
    cells = []
    for row in advice.rows:
        if row.cost is None:
            cells.append([row.candidate.name, *[""] * 6, row.changes])
            continue
        times = [_seconds(number) for number in (row.cost.step, row.cost.computation, row.cost.exposed)]
        rate = f"{advice.samples(workers) / row.cost.step:.1f}"
        cells.append([row.candidate.name, *times, rate, sized(row.memory), sized(row.cost.sent), row.changes])
    out.rows(f"Strategies for {counted(workers, 'worker')}, predicted", columns, cells, 7)
    _say_of_machine(out, advice, _numbers(config))
    if not config.launch.servers:
        out.print("parameter servers are compared with launch.servers=1")
    for said in filter(None, [advice.ready.plan.remarks.concern, *concerns(advice.rows, advice.limit)]):
        out.print(f"ATTENTION: {said}")
    if config.advise.workers:
        _show_workers(out, advice, sorted({1, workers, *_numbers(config)}))
    if advice.best is not None:
        out.print(f"{best}: {' '.join(advice.best.candidate.words)}", style="bold green")


def _say_of_machine(out: Any, advice: Advice, asked: Sequence[int]) -> None:
    """Say what was measured."""
    machine, cores = advice.machine, advice.machine.cores
    rate = f"{1 / machine.link.beta / 1e9:.2f} GB/s" if machine.link.beta else "no limit found"
    out.print(
        f"measured here: an update of one worker {_seconds(cores.alone.total)}, of two that exchange nothing "
        f"{_seconds(cores.beside.total)}; their link: {_seconds(machine.link.alpha)} a message, {rate}"
    )
    if machine.between is None and max([advice.workers, *asked]) > machine.per_host:
        out.print("between hosts: predicted as within this one, as no link is declared (advise.gbit=10)")
    if machine.between is not None:
        gbit = f"{8 / machine.between.beta / 1e9:g} Gbit/s" if machine.between.beta else "as fast as measured"
        out.print(
            f"declared between hosts of {counted(machine.per_host, 'worker')}: {gbit}, "
            f"{_seconds(machine.between.alpha)} a message"
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


def _seconds(value: float) -> str:
    """Seconds in a unit in which they can be read."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} us"


def leave(folder: Path, advice: Advice, config: DictConfig) -> None:
    """Write ``advise.json`` and ``advise.png`` into the run's folder."""
    from trainer.job.advice_picture import draw
    from trainer.run_folder.json_files import leave as write

    numbers = sorted({1, 2, advice.workers, *_numbers(config)})
    rates = {row.candidate.name: [advice.rate(row, number) for number in numbers] for row in advice.rows if row.cost}
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
        "samples_per_s": {"workers": numbers, **rates},
        "chosen": best.candidate.words if (best := advice.best) is not None else None,
    }
    write(folder / FILE, node)
    draw(folder, str(config.name), numbers, rates, [row.candidate.name for row in advice.rows if row.exact])
