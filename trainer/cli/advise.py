"""strategy=advise and a typed strategy=auto: short trainings with one and two workers, and what strategies would cost.

Each measured training is a command of its own: one worker; two workers that exchange nothing, and then the link between
them; two workers with strategy=collective, which tell what the exchange takes of the cores; and two with each kind of
strategy that computes something of its own.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli import compose
from trainer.cli.advice_table import FILE, Advice, leave, numbers_of, seconds, show
from trainer.cli.arguments import ADVISE, AUTO, typed_keys
from trainer.cli.short_trainings import APART, short, start
from trainer.config.keys import key_of
from trainer.errors import RunFailed, UserError
from trainer.host.engine_tasks import RUN_DIR, tasks_of
from trainer.job.result import Result
from trainer.planning import cost
from trainer.planning.cost import Cores, Link, Machine, Work

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra
    from omegaconf import DictConfig

    from trainer.job.advice import Candidate, Case
    from trainer.job.ready import Ready

PROBE, PROBE_FILE = "trainer.worker.advice_probe.Probe", "probe.json"
OF_PROCESSES = ("launch.nproc", "launch.workers", "launch.nnodes", "launch.node_rank", "launch.servers", "launch.ips")
OF_THE_RUN = ("hydra.run.dir", "plan", "mode", "verbosity", "max_steps", "epochs")
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


def alone_here(config: DictConfig) -> bool:
    """Whether this command trains, with all workers on this host. Hosts that each measured could differ in what they
    choose, and so could the processes of an engine."""
    launch, env = config.launch, os.environ
    here = (launch.nnodes, launch.role, launch.ips) == (1, None, None) and launch.env != "paddle"
    return here and config.mode == "train" and not config.plan and RUN_DIR not in env and not tasks_of(env)


@dataclass(frozen=True)
class Asked:
    """A command that asks for advice: its overrides, and the config that Hydra has composed of them."""

    app: Hydra
    overrides: Sequence[str]
    config_name: str
    config: DictConfig
    flags: Sequence[str]

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return compose.named_folder(self.config, "hydra.run.dir")

    def planned(self, candidate: Candidate) -> Ready | UserError:
        """The job with a candidate as ``plan=true`` has it, or why it cannot be composed."""
        from trainer.job.check import get_ready

        left = ("advise", "resume", "plan", "hydra")
        words = [o for o in with_candidate(self.overrides, candidate) if key_of(o).partition(".")[0] not in left]
        words = [*words, "plan=true", "tracking=none"]
        try:
            config = compose.compose(self.app, words, self.config_name)
            return get_ready(compose.plain(config), typed_keys(words), str(self.folder))
        except UserError as error:
            return error


def advise(asked: Asked) -> Result:
    """Print the table of candidates, and train nothing. Without ``plan=true`` the run's folder gets files of it.

    Raises:
        UserError: there is nothing to compare, or a training would be refused. RunFailed: a training failed.
    """
    from trainer.job.claim_folder import claim
    from trainer.run_folder.json_files import leave as write

    config, folder = asked.config, asked.folder
    _check(config)
    if (plain := _plain(asked)) is None:
        raise UserError(ADVISE, "one worker has nobody to exchange with", f"{ADVISE} launch.nproc=2")
    with _folder(None if config.plan else claim(folder, "hydra.run.dir" in typed_keys(asked.overrides))) as place:
        advice = _measured(asked, plain, place)
        show(advice, config, "to type")
        if config.plan:
            return Result("planned", str(folder))
        leave(place, advice, config)
        metrics = {f"advise/step_s {row.candidate.name}": row.cost.step for row in advice.rows if row.cost is not None}
        result = Result("done", str(place), metrics=metrics, mode="advise", validation=False)
        write(place / "result.json", asdict(result))
    return result


def resolved(asked: Asked) -> tuple[list[str], Advice | None, str]:
    """What to type instead of a typed ``strategy=auto``: the fastest candidate that is equal and fits.

    A run that resumes in its folder keeps its choice.

    Returns:
        The overrides, what was measured (None: nothing), and why.
    """
    from trainer.job.advice import CANDIDATES, Candidate

    before = asked.folder / FILE
    if asked.config.resume.path and before.is_file():
        left = json.loads(before.read_text())
        known = next((one for one in CANDIDATES if [*one.words] == left.get("chosen")), None)
        if known is not None:
            return with_candidate(asked.overrides, known), None, str(left.get("why"))
    if (plain := _plain(asked)) is None:
        return with_candidate(asked.overrides, Candidate("single", ("strategy=single",))), None, "one worker"
    with _folder(None) as place:
        advice = _measured(asked, plain, place, equal_only=True)
    best = advice.best
    if best is None or best.cost is None:
        refused = next((row.refused for row in advice.rows if row.refused), "none fits into memory")
        raise UserError(AUTO, f"no candidate that is equal can run ({refused})", "strategy=collective")
    why = f"{best.candidate.name}: {seconds(best.cost.step)} an update predicted, the least of those that are equal"
    show(advice, asked.config, "chosen")
    return with_candidate(asked.overrides, best.candidate), advice, why


def with_candidate(overrides: Sequence[str], candidate: Candidate) -> list[str]:
    """The overrides with a candidate as strategy. Typed keys of the strategy stay where it has them."""
    known, own = {field.name for field in fields(candidate.options)}, {key_of(word) for word in candidate.words}

    def stays(key: str) -> bool:
        head, _, rest = key.partition(".")
        if head == "strategy":
            return bool(rest) and key not in own and rest.partition(".")[0] in known
        return key != "launch.servers" or candidate.served

    return [*(o for o in overrides if stays(key_of(o))), *candidate.words]


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


def _plain(asked: Asked) -> Ready | None:
    """The job with strategy=collective; None: it has one worker.

    Raises:
        UserError: it would be refused, or keys of advise make no sense with it.
    """
    from trainer.host import hardware
    from trainer.job.advice import CANDIDATES

    config, plain = asked.config.advise, asked.planned(CANDIDATES[0])
    if isinstance(plain, UserError):
        raise plain
    workers = plain.plan.topology.workers
    if workers == 1:
        return None
    most = max([workers, *numbers_of(asked.config)])
    for key, value in (("gbit", config.gbit), ("latency_ms", config.latency_ms)):
        if value is not None and (config.per_host or workers) >= most:
            why = f"all {most} workers are on one host, so that no link between hosts is used"
            raise UserError(f"advise.{key}={value:g}", why, "advise.per_host=1")
    for error in plain.checked.lacks.errors:
        raise error
    if plain.checked.device == "cuda" and len(hardware.gpus()) < 2:
        why = "this machine has one GPU, and the link is measured between two"
        raise UserError(ADVISE, why, "a machine with two GPUs (or strategy=collective)")
    if plain.checked.searches:
        why = "the short trainings have the batch of a worker, which is not known yet"
        raise UserError("data.batch_size=auto", why, "data.batch_size=32 (or strategy=collective)")
    return plain


def _measured(asked: Asked, plain: Ready, place: Path, equal_only: bool = False) -> Advice:
    """Measure short trainings, and what the candidates' costs are by them."""
    from trainer.job import advice, memory_rows

    case, config, workers = advice.Case.of(plain), asked.config, plain.plan.topology.workers
    compared = [
        (one, asked.planned(one))
        for one in advice.CANDIDATES
        if (config.launch.servers or not one.served) and not (equal_only and one.changes)
    ]
    able = {
        one: ready for one, ready in compared if not isinstance(ready, UserError) and not ready.checked.lacks.errors
    }
    machine, failed = _machine(asked, plain, case, place, able)
    free = _limit(plain, min(workers, machine.per_host))
    batch, group, rows = memory_rows.of_a_batch(plain), machine.group(workers), []
    for candidate, ready in compared:
        if isinstance(ready, UserError):
            rows.append(advice.Row(candidate, refused=advice.in_words(ready)))
        elif candidate in able and (why := failed.get(advice.kind_of(ready.checked.config.strategy))):
            rows.append(advice.Row(candidate, refused=why))
        else:
            rows.append(advice.row(candidate, ready, case, group, batch, free))
    return Advice(advice.ordered(rows), machine, case, plain, free)


def _limit(ready: Ready, here: int) -> float:
    """Bytes of memory that each worker of a host can have."""
    from trainer.host import memory

    if ready.checked.device == "cuda":
        from trainer.host import hardware

        return MEMORY_SHARE * min((gpu.memory for gpu in hardware.gpus()), default=0) or math.inf  # 0: it does not say
    return MEMORY_SHARE * memory.free() / here


def _machine(
    asked: Asked, ready: Ready, case: Case, place: Path, able: Mapping[Candidate, Ready]
) -> tuple[Machine, dict[str, str]]:
    """Measure this machine with the run's model and batch.

    Args:
        able: candidates that are not refused, with their plans.

    Returns:
        The machine, and why trainings of some kinds of strategies failed.
    """
    from trainer.host import hardware
    from trainer.job import advice
    from trainer.terminal.screen import say

    cuda, keys, plan = ready.checked.device == "cuda", asked.config.advise, ready.plan
    per_host = keys.per_host or plan.topology.workers
    declared = (
        Link.declared(keys.gbit, keys.latency_ms, gloo=not cuda) if keys.gbit or keys.latency_ms is not None else None
    )
    base = _short_words(asked, ready)
    halved = bool(keys.workers) and ready.checked.config.data.global_batch_size is not None and plan.batches.size > 1
    own = {kind: one for kind, one in advice.OWN_WORK.items() if one in able}
    number, total = itertools.count(1), 3 + halved + len(own)

    def probe(what: str, *words: str, link: bool = False, size: int = plan.batches.size) -> Probed:
        if asked.config.verbosity != "quiet":
            say(f"short training {next(number)} of {total}: {what}")
        folder, marks = place / what.replace(", ", "-").replace(" ", "-"), str(not asked.config.compile).lower()
        call = f"callbacks=[{{_target_:{PROBE},skipped:{keys.updates // 3},link:{str(link).lower()},marks:{marks}}}]"
        sizes = [f"data.batch_size={size}", "data.global_batch_size=null"]
        start([*asked.flags, *base, *sizes, call, *words], folder, ADVISE)
        return Probed(**json.loads((folder / PROBE_FILE).read_text()))

    alone = probe("one worker", "launch.nproc=1", "strategy=single")
    beside = probe("two workers, no exchange", "launch.nproc=2", *APART, link=True)
    together = probe("two workers, collective", "launch.nproc=2", *of_strategy(asked, advice.CANDIDATES[0]))
    others, failed = [], {}
    for kind, candidate in own.items():
        try:
            took = probe(f"two workers, {candidate.name}", "launch.nproc=2", *of_strategy(asked, candidate)).step
            others.append((able[candidate].checked.config.strategy, took))
        except (UserError, RunFailed) as error:
            failed[kind] = str(error).partition(f"{ADVISE}: ")[2]  # what is refused, the planner says itself
    passes = None
    size = plan.batches.size
    if halved:
        half = probe("one worker, half a batch", "launch.nproc=1", "strategy=single", size=size // 2)
        passes = (float(size // 2), half.passes), (float(size), alone.passes)
    threads = asked.config.execution.threads
    cores = Cores(0 if cuda else hardware.cores(), threads if isinstance(threads, int) else 0, alone.work, beside.work)
    link = replace(cost.fitted(beside.link), gloo=not cuda)
    machine = Machine(cores, link, per_host, declared, passes=passes, batch=float(size))
    return advice.calibrated(machine, case, together.step, others), failed


def of_strategy(asked: Asked, candidate: Candidate) -> list[str]:
    """The overrides of the strategy with a candidate; its compression begins at once."""
    from trainer.job.advice import AT_ONCE

    early = AT_ONCE.get(candidate.name, ())
    replaced = {key_of(word) for word in early}
    typed = [o for o in with_candidate(asked.overrides, candidate) if key_of(o).partition(".")[0] == "strategy"]
    return [*(o for o in typed if key_of(o) not in replaced), *early]


def _short_words(asked: Asked, ready: Ready) -> list[str]:
    """The overrides of the short trainings, whatever their number of workers."""
    left = (*OF_PROCESSES, *OF_THE_RUN, "data.batch_size", "data.global_batch_size", "callbacks")
    groups, merge = ("strategy", "advise", "resume"), ready.plan.batches.merge
    kept = [o for o in asked.overrides if key_of(o) not in left and key_of(o).partition(".")[0] not in groups]
    more = [f"strategy.gradient_merge.k_steps={merge}"] if merge > 1 else []
    return [*kept, *short(asked.config.advise.updates), *more]
