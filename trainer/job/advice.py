"""The strategies that strategy=advise compares: what each would cost in a run, and which are equal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trainer.config import schema
from trainer.errors import UserError
from trainer.job import memory_rows
from trainer.job.ready import Ready
from trainer.planning import cost
from trainer.planning.cost import Cost, Group, Machine
from trainer.strategies.comm_hook_checks import PLACE_BYTES
from trainer.wording import sized

OPTIONS = {
    "collective": schema.CollectiveStrategy,
    "sharded": schema.ShardedStrategy,
    "local_sgd": schema.LocalSgdStrategy,
    "pserver_sync": schema.PserverSyncStrategy,
    "pserver_async": schema.PserverAsyncStrategy,
    "pserver_ssp": schema.PserverSspStrategy,
    "pserver_geo": schema.PserverGeoStrategy,
}
"""The options of the strategies that are compared, by their names."""


@dataclass(frozen=True)
class Candidate:
    """A strategy with options as they are typed, and what it changes in the numbers of a training (empty: nothing)."""

    name: str
    words: tuple[str, ...]
    changes: str = ""

    @property
    def options(self) -> type[schema.StrategyConfig]:
        """The class of the strategy's options."""
        return OPTIONS.get(self.words[0].removeprefix("strategy="), schema.StrategyConfig)

    @property
    def served(self) -> bool:
        """Whether it needs servers."""
        return issubclass(self.options, schema.PserverStrategy)


def _collective(hook: str, *more: str, changes: str) -> Candidate:
    return Candidate(hook, ("strategy=collective", f"strategy.comm_hook={hook}", *more), changes)


def _served(mode: str, *more: str, changes: str = "") -> Candidate:
    return Candidate(f"pserver_{mode}", (f"strategy=pserver_{mode}", *more), changes)


def _local(name: str, steps: int, *more: str, changes: str) -> Candidate:
    return Candidate(name, ("strategy=local_sgd", f"strategy.k_steps={steps}", *more), changes)


_16_BITS = ("strategy.param_dtype=bf16", "strategy.reduce_dtype=bf16")
_DILOCO = ("strategy.exchange=int8", "strategy.outer.lr=0.7", "strategy.outer.momentum=0.9")

CANDIDATES = (
    Candidate("collective", ("strategy=collective",)),
    Candidate("comm_streams=4", ("strategy=collective", "strategy.comm_streams=4")),
    Candidate("sharded optimizer", ("strategy=sharded", "strategy.shard=optimizer")),
    Candidate("sharded gradients", ("strategy=sharded", "strategy.shard=gradients")),
    Candidate("sharded parameters", ("strategy=sharded", "strategy.shard=parameters")),
    _served("sync"),
    _collective("bf16", changes="gradients rounded to 16 bits"),
    _collective("fp16", changes="gradients rounded to 16 bits"),
    _collective("powersgd", changes="gradients of low rank, the rest later"),
    _collective("dgc", changes="the greatest gradients, the rest later"),
    Candidate("sharded bf16", ("strategy=sharded", *_16_BITS), "parameters and gradients rounded to 16 bits"),
    _local("local_sgd k=4", 4, changes="parameters averaged every 4 updates"),
    _local("local_sgd k=16", 16, changes="parameters averaged every 16 updates"),
    _local("DiLoCo int8 k=16", 16, *_DILOCO, changes="outer steps every 16 updates, in 8 bits"),
    _served("async", changes="late gradients"),
    _served("ssp", changes="late gradients, at most 4 steps"),
    _served("geo", changes="differences every 100 updates"),
)
"""In the order in which equally fast ones are listed."""

_KINDS = {"sharded parameters": "sharded", "bf16": "bf16", "powersgd": "powersgd", "dgc": "dgc"}
OWN_WORK = {kind: one for one in CANDIDATES if (kind := _KINDS.get(one.name))}
"""Kinds of strategies that compute something of their own, and the candidate that is trained to measure it."""
AT_ONCE = {
    "powersgd": ("strategy.powersgd.start_step=2",),
    "dgc": ("strategy.dgc.rampup_begin_step=0", "strategy.dgc.rampup_step=1"),
}
"""By the candidate's name: overrides by which its compression begins at once, so that a short training has it."""

NO_CANDIDATES = {
    "strategy=single": "with one worker there is no choice",
    "strategy=auto": "chooses one of the candidates",
    "strategy=advise": "lists the candidates",
    "strategy.begin=gradients": "how local_sgd begins, and not what an update costs later",
    "strategy.exchange=bf16": "lies between full and int8",
    "strategy.param_dtype=fp16": "needs precision=fp16, and costs what bf16 costs",
    "strategy.reduce_dtype=fp16": "needs precision=fp16, and costs what bf16 costs",
    "strategy.gradient_scale=sum": "another factor on the same exchange",
    "strategy.reduce_group": "pays where hosts are linked worse than their workers, and one link is measured",
}
"""Options that are not compared, and why."""
TIE = 0.05
"""Share of an update by which a candidate has to be faster than a simpler one."""


@dataclass(frozen=True)
class Case:
    """The sizes of a run's model.

    Attributes:
        each: bytes of a number. buckets: bytes of DDP's. blocks: numbers of each block, what is in none first. sizes,
        shapes: of each parameter that learns. tables: numbers in sparse tables; their rows are not counted.
    """

    each: int
    buckets: tuple[float, ...]
    blocks: tuple[float, ...]
    sizes: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    servers: int = 1
    tables: int = 0

    @staticmethod
    def of(ready: Ready) -> Case:
        """The case of a run that is planned with strategy=collective."""
        from trainer.worker import batch_memory  # imports torch

        plan, model, config = ready.plan, ready.model, ready.checked.config
        each, buckets = 8 if plan.chosen.precision == "fp64" else 4, plan.strategy.buckets
        whole, *blocks = batch_memory.of_blocks(config, "auto")
        rest = max(0, whole - sum(blocks))
        shapes = tuple(shape for name, shape in model.shapes.items() if name not in model.frozen)
        found = (
            tuple(map(float, buckets.sizes)) if buckets and buckets.sizes else _equal_buckets(sum(model.sizes) * each)
        )
        servers, tables = config.launch.servers or 1, model.in_tables
        return Case(each, found, tuple(map(float, [rest, *blocks])), model.sizes, shapes, servers, tables)


def _equal_buckets(size: float) -> tuple[float, ...]:
    """Buckets of about 25 MiB, where the plan does not know them."""
    number = max(1, math.ceil(size / (25 * 2**20)))
    return (size / number,) * number


def cost_of(options: schema.StrategyConfig, case: Case, group: Group) -> Cost:
    """What an update of the group costs with these options of a strategy."""
    return _exchange(options, case, group).with_cores(group.gamma, group.own.get(kind_of(options), 0.0))


def kind_of(options: schema.StrategyConfig) -> str:
    """The key in ``OWN_WORK`` of such a strategy, or ""."""
    if isinstance(options, schema.ShardedStrategy):
        return "" if options.whole_model else "sharded"
    if isinstance(options, schema.CollectiveStrategy) and options.comm_hook != "none":
        return "bf16" if options.comm_hook == "fp16" else options.comm_hook
    return ""


def calibrated(
    machine: Machine, case: Case, averaging: float, others: Sequence[tuple[schema.StrategyConfig, float]]
) -> Machine:
    """The machine with what two workers were measured to need beside what the link explains.

    Args:
        averaging: seconds of an update with strategy=collective. others: options of strategies with own work, and
        seconds of an update.
    """
    two = replace(machine, per_host=2)
    plain = cost_of(schema.CollectiveStrategy(), case, two.group(2))
    gamma = max(0.0, averaging - plain.step) / max(1.0, plain.sent)
    group = replace(two, gamma=gamma).group(2)
    own = {kind_of(options): max(0.0, took - cost_of(options, case, group).step) for options, took in others}
    return replace(machine, gamma=gamma, own=own)


def _exchange(options: schema.StrategyConfig, case: Case, group: Group) -> Cost:
    work, ring, size = group.work, group.ring, float(sum(case.sizes) * case.each)
    if isinstance(options, schema.ShardedStrategy):
        return _sharded(options, case, group)
    if isinstance(options, schema.LocalSgdStrategy):
        share = {"full": case.each, "bf16": 2, "int8": 1}[options.exchange] / case.each
        return cost.averaged_parameters(work, ring, size * share, options.k_steps, options.exchange == "int8")
    if isinstance(options, schema.PserverStrategy):
        size -= case.tables * case.each
    if isinstance(options, schema.PserverGeoStrategy):
        return cost.served_now_and_then(work, group.link, group.size, case.servers, size, options.k_steps)
    if isinstance(options, schema.StaleStrategy):
        return cost.served_apart(work, group.link, group.size, case.servers, size)
    if isinstance(options, schema.PserverStrategy):
        return cost.served(work, group.link, group.size, case.servers, size)
    assert isinstance(options, schema.CollectiveStrategy)
    if options.comm_hook == "powersgd":
        return cost.after_backward(work, ring, _low_rank(options.powersgd.rank, case), 3 * len(case.buckets))
    if options.comm_hook == "dgc":
        large = [numbers for numbers in case.sizes if numbers >= options.dgc.min_size]
        values = sum(max(1, int(numbers * (1 - options.dgc.sparsity[-1]))) for numbers in large)
        sent = cost.after_backward(work, ring, values * (case.each + PLACE_BYTES), len(case.buckets), to_all=True)
        whole = cost.after_backward(work, ring, size - sum(large) * case.each, len(case.buckets))
        return Cost(work.total, sent.exposed + whole.exposed, sent.sent + whole.sent)
    share = 2 / case.each if options.comm_hook in ("bf16", "fp16") else 1.0
    return cost.averaged_gradients(work, ring, [bucket * share for bucket in case.buckets], options.comm_streams)


def _sharded(options: schema.ShardedStrategy, case: Case, group: Group) -> Cost:
    bytes_of = {"full": case.each, "bf16": 2, "fp16": 2}
    reduced = bytes_of[options.reduce_dtype]
    if options.whole_model:
        buckets = [bucket * reduced / case.each for bucket in case.buckets]
        return cost.sharded_optimizer(group.work, group.ring, buckets, sum(case.sizes) * case.each)
    blocks = [numbers * bytes_of[options.param_dtype] for numbers in case.blocks if numbers]
    gradients = [numbers * reduced for numbers in case.blocks if numbers]
    return cost.sharded(group.work, group.ring, blocks, gradients, 1 if options.shard == "gradients" else 2)


def _low_rank(rank: int, case: Case) -> float:
    """Bytes of PowerSGD's two factors of each matrix where these are less, and of all that is no matrix."""
    numbers = 0
    for shape in case.shapes:
        whole, rows = math.prod(shape), shape[0] if shape else 1
        factors = rank * (rows + whole // max(1, rows))
        numbers += factors if len(shape) > 1 and factors < whole else whole
    return float(numbers * case.each)


@dataclass(frozen=True)
class Row:
    """A candidate in the run's own size.

    Attributes:
        options: of the strategy; None: it is refused. exact: equal to the plain average of gradients. memory: bytes of
        a worker. fits: into the memory that there is. refused: why, in few words. concern: a warning of its plan.
    """

    candidate: Candidate
    options: schema.StrategyConfig | None = None
    cost: Cost | None = None
    exact: bool = False
    memory: float = 0.0
    fits: bool = True
    refused: str = ""
    concern: str = ""

    @property
    def changes(self) -> str:
        """What the last column of the table says."""
        if self.refused:
            return f"refused: {self.refused}"
        said = "equal" if self.exact else self.candidate.changes or "another scale of the gradients"
        return said if self.fits else f"{said}; NOT ENOUGH MEMORY"


def row(candidate: Candidate, ready: Ready, case: Case, group: Group, batch: int, limit: float) -> Row:
    """A candidate that the planner accepts or refuses.

    Args:
        batch: bytes that a worker's batch takes. limit: of the memory of a worker.
    """
    if ready.checked.lacks.errors:
        error = ready.checked.lacks.errors[0]
        return Row(candidate, refused=in_words(error))
    options, exact = ready.checked.config.strategy, ready.plan.strategy.traits.exact
    memory, concern = memory_rows.of_a_worker(ready) + batch, ready.checked.declaration.concern(ready.model.sizes)
    found = cost_of(options, case, group)
    return Row(candidate, options, found, exact, memory, memory <= limit, concern=concern)


def in_words(error: UserError) -> str:
    """Why a candidate is refused, without what to type instead."""
    return error.why if error.why.startswith(error.what) else f"{error.what}: {error.why}"


def ordered(rows: Sequence[Row]) -> list[Row]:
    """The rows, best first: those that are equal and fit, equal ones that do not, those that change the numbers, and
    refused ones."""

    def place(one: Row) -> tuple[int, float]:
        if one.cost is None:
            return 3, 0.0
        return (0 if one.fits else 1) if one.exact else 2, one.cost.step

    return sorted(rows, key=place)


def best_of(rows: Sequence[Row]) -> Row | None:
    """The fastest candidate that is equal and fits; of those within ``TIE`` the first in the order of ``CANDIDATES``,
    because no prediction is finer."""
    able = [(one.cost.step, one) for one in rows if one.exact and one.fits and one.cost is not None]
    least = min((step for step, _ in able), default=0.0)
    close = [one for step, one in able if step <= (1 + TIE) * least]
    return min(close, key=lambda one: CANDIDATES.index(one.candidate), default=None)


def concerns(rows: Sequence[Row], limit: float) -> Iterator[str]:
    """Yield by numbers what people would wait for in vain."""
    made = {one.candidate.name: one for one in rows if one.cost is not None}
    plain = made.get("collective")
    if plain is None or plain.cost is None:
        return
    if plain.cost.share < cost.HIDDEN:
        yield (
            f"collective waits for its exchange in {plain.cost.share:.1%} of an update: powersgd, dgc, 16 bits, int8 "
            f"and local_sgd cannot save more than that"
        )
    shards = made.get("sharded parameters")
    if shards is not None and shards.cost is not None and plain.memory < limit / 2 < math.inf:
        slower = shards.cost.step / plain.cost.step - 1
        if slower > TIE:
            yield (
                f"sharding takes {slower:.0%} longer, and the model fits without it: a worker of collective needs "
                f"{sized(plain.memory)} of {sized(limit)}"
            )
    yield from dict.fromkeys(one.concern for one in rows if one.concern)
