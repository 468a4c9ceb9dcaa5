"""The strategy contract: all that the loop, the launcher and the checks may ask of any strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, runtime_checkable

from trainer.config.own_keys import OwnKeys
from trainer.config.run_config import RunConfig, typed
from trainer.config.schema import LaunchConfig, StrategyConfig
from trainer.errors import RunFailed, UserError
from trainer.strategies.seat import Seat

if TYPE_CHECKING:
    import torch

    from trainer.optim.groups import Rate
    from trainer.optim.updater import Updater

Agreed = TypeVar("Agreed")

OF_SERVERS = {"server_endpoints": "null", "servers": "null", "server_hosts": "auto", "server_ports": "null"}
WAITS = "trainer/communication"
"""Name in a profile of the time in which a strategy waits for other processes."""


@dataclass(frozen=True)
class Traits:
    """The properties of a strategy that the loop, the launcher and the checks need to know.

    Attributes:
        exact: equal to one process on the global batch (but for batch-norm statistics); a test proves it. lockstep: all
        workers take the same number of updates (the sampler pads), and may meet inside an epoch. same_everywhere: after
        every update all workers hold the same state. alone: the gradient of one worker's samples is an update by
        itself. survives: the run goes on when a worker dies. leases: the worker is a :class:`LeasesWork`. scatters: the
        worker is a :class:`Scatters`. replicas: the worker is a :class:`trainer.strategies.replicas.HasReplicas`.
        skips: the worker has the optimizer, and can leave an update out (``skip``). tables_at_servers: sparse tables
        are at servers; workers never hold them whole, and ids may be unbounded. shards: the worker is a
        :class:`HoldsShards`.
    """

    exact: bool = False
    lockstep: bool = True
    same_everywhere: bool = True
    alone: bool = False
    survives: bool = False
    leases: bool = False
    scatters: bool = False
    skips: bool = False
    replicas: bool = False
    tables_at_servers: bool = False
    shards: bool = False


class Declaration(ABC):
    """Base class of what a strategy declares before any process starts. Pure data: importing it imports nothing heavy.

    Args:
        config: the ``strategy`` node of the config, resolved.

    Attributes:
        options: the keys of ``config`` that ``Options`` declares.
    """

    Options: ClassVar[type[StrategyConfig]] = StrategyConfig
    options: StrategyConfig

    worker: str
    """``module:class`` of the :class:`Strategy` that runs in each worker."""

    entries: ClassVar[Mapping[str, str]] = {}
    """Roles besides ``worker`` and the ``module:function`` where each of their processes enters."""

    default_workers: ClassVar[int | None] = None
    """Workers if the config sets no number; None: one per GPU, else one."""

    def __init__(self, **config: Any) -> None:
        self.config = OwnKeys("strategy", config)
        self.options = typed(self.Options, config)

    @property
    def traits(self) -> Traits:
        """The strategy's :class:`Traits`; a class attribute will do if they do not depend on the options."""
        return Traits()

    def leased(self, config: RunConfig) -> bool:
        """Whether workers lease training data in blocks during an epoch, instead of splitting it beforehand."""
        return self.traits.leases and config.data.work in (("auto", "leased") if config.sampler.shard else ("leased",))

    def exchange(self, sizes: Sequence[int], size: int) -> str:
        """What the workers exchange and when, in words for the plan; empty: nothing to say.

        Args:
            sizes: numbers of each trained parameter of the model. size: bytes of a number.
        """
        return ""

    def concern(self, sizes: Sequence[int]) -> str:
        """A warning about a model with these parameters, which can run; usually empty."""
        return ""

    def roles(self, workers: int, launch: LaunchConfig) -> dict[str, int]:
        """The number of processes of each role, for this many workers."""
        return {"worker": workers}

    def refuse_model(self, config: RunConfig, model: torch.nn.Module, optimizer: Any) -> list[UserError]:
        """Return every reason why this strategy cannot work with the built model and the config's optimizer."""
        unbounded, refused = [n for n, m in model.named_modules() if getattr(m, "unbounded", False)], list[UserError]()
        if unbounded and not self.traits.tables_at_servers:
            why = f"strategy={self.name} holds whole tables in its workers, and {unbounded[0]} takes any id"
            refused.append(UserError("model.table_size=null", why, "strategy=pserver_async (or a number of rows)"))
        if all(callable(getattr(optimizer, mode, None)) for mode in ("eval", "train")):  # it trains other weights
            kind = f"optimizer ({type(optimizer).__name__})"
            if self.traits.replicas or not self.traits.skips:
                why = f"it keeps an average of its steps, which strategy={self.name} does not exchange"
                refused.append(UserError(kind, why, "strategy=collective (or optimizer=adamw)"))
            if config.ema.decay is not None:
                why = f"{kind} averages the weights itself"
                refused.append(UserError(f"ema.decay={config.ema.decay}", why, "ema.decay=null"))
        return refused

    def refuse_inputs(self, names: Collection[str], source: str) -> list[UserError]:
        """Return every reason why this cannot work with these inputs (none: a single one) from that source."""
        return []

    def refuse(self, config: RunConfig, workers: int) -> list[UserError]:
        """Return every reason why this cannot work with a config and this many workers, with the nearest that works."""
        refused = []
        if config.data.work == "leased" and not self.traits.leases:
            why = f"strategy={self.name} needs the same batches in every update, so its work is split beforehand"
            refused.append(UserError("data.work=leased", why, "data.work=static", ["data.work"]))
        if config.data.read == "scatter" and not self.traits.scatters:
            why = f"strategy={self.name} has no group of workers in which the first could send the others their batches"
            refused.append(UserError("data.read=scatter", why, "data.read=each", ["data.read"]))
        refused += [
            UserError(
                f"launch.{key}={value}",
                f"strategy={self.name} has no servers",
                f"launch.{key}={usual}",
                [f"launch.{key}"],
            )
            for key, usual in OF_SERVERS.items()
            if "server" not in self.entries and (value := getattr(config.launch, key)) != getattr(LaunchConfig, key)
        ]
        return refused

    @property
    def name(self) -> str:
        """The name by which users choose the strategy: by default the class's in snake_case, without "Declaration"."""
        letters = type(self).__name__.removesuffix(Declaration.__name__)
        return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(letters))


@dataclass(frozen=True)
class Lease:
    """A leased block of an epoch's work.

    Attributes:
        block: its number. start: the first batch to train. empty: called by the reader if the block holds no batch,
        because no push will end the lease.
    """

    block: int
    start: int = 0
    empty: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Share:
    """A worker's share of a checkpoint, from its strategy: nested dicts and lists of plain values, tensors and arrays.

    Attributes:
        common: equal on all workers if the strategy is ``same_everywhere``; then the checkpoint has it once.
        own: of this worker alone.
        files: names of the files that other processes write into the checkpoint.
        workers: ranks of the workers in the checkpoint; None: all.
    """

    common: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    files: Sequence[str] = ()
    workers: Sequence[int] | None = None

    @property
    def updater(self) -> dict[str, Any]:
        """The state of the optimizer, as :meth:`trainer.optim.updater.Updater.state` returned it."""
        return self.common["updater"]  # type: ignore[no-any-return]


class MakeUpdater(Protocol):
    """Protocol of the function with which a strategy makes its optimizers."""

    def __call__(self, module: torch.nn.Module) -> Updater:
        """The optimizer of a module's parameters, with its schedule, clipping and loss scale."""

    def rates(self, module: torch.nn.Module) -> Mapping[str, Rate]:
        """The rate of each parameter of the module by name, for a strategy whose optimizer runs elsewhere."""


class Strategy(ABC):
    """Base class of a strategy's worker side; methods are in the order in which the loop calls them.

    Args:
        config: the ``strategy`` node, resolved.
        seat: this worker's place among the others.

    Attributes:
        options: the keys of ``config`` that ``Options`` declares. updater: the optimizer, made in ``setup``; only its
        schedule if servers have the optimizer. failed: this worker ends by an error; the others must not count it as
        done.
    """

    Options: ClassVar[type[StrategyConfig]] = StrategyConfig
    options: StrategyConfig
    updater: Updater
    failed = False

    def __init__(self, config: Mapping[str, Any], seat: Seat) -> None:
        self.config = OwnKeys("strategy", config)
        self.options = typed(self.Options, config)
        self.seat = seat

    @abstractmethod
    def setup(self, model: torch.nn.Module, make_updater: MakeUpdater) -> torch.nn.Module:
        """Give all workers equal parameters and make the optimizer; returns the module to call in training."""

    def weight(self, denominator: float) -> float | torch.Tensor:
        """The factor on this worker's mean loss that makes the combined gradient the mean over the global batch.

        Called before the first forward of an update. A tensor () on the device is not waited for.

        Args:
            denominator: the loss of this worker is divided by it: its samples, or with class weights the sum of theirs.
        """
        return 1.0

    def prepare(self, batch: Any) -> None:
        """Called before the forward of each batch: fetch parameters and rows from servers."""

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        """Context manager around forward and backward of a batch; only an update's last one exchanges gradients."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward of one batch's (weighted) loss, scaled if fp16 needs it."""
        self.updater.backward(loss)

    @abstractmethod
    def step(self, samples: int) -> None:
        """Turn the accumulated gradients into new parameters; ``samples``: this worker's in the whole update."""

    def skip(self, samples: int) -> None:
        """Drop an update's gradients in place of ``step``, if ``Traits.skips``; the schedule alone goes on."""
        self.updater.skip()

    @abstractmethod
    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over workers of a float64 vector; a collective call."""

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Wait until the GPU has come to an event. A strategy whose workers exchange on GPUs raises an error that names
        those who do not come (:meth:`trainer.strategies.process_group.ProcessGroup.wait_for`)."""
        event.synchronize()

    def members(self) -> tuple[int, int]:
        """This worker's index among the workers that take part now, and their number, the same for all of them."""
        return self.seat.rank, self.seat.size

    def agree(self, action: Callable[[int, int], Agreed], settle: Callable[[], None] = lambda: None) -> Agreed:
        """Return the result of ``action(index, count)``, called with :meth:`members`.

        Args:
            settle: a collective call before it, after which all workers know the same members. If a worker is lost
                meanwhile, both are called again.
        """
        settle()
        return action(*self.members())

    @abstractmethod
    def synchronize(self) -> None:
        """Give every worker the agreed parameters and buffers (before evaluation, saving, export)."""

    def evaluated(self) -> AbstractContextManager[None]:
        """Context manager: the model has the weights that count, where the optimizer trains others (schedule_free)."""
        return self.updater.evaluated() if hasattr(self, "updater") else nullcontext()

    def evaluate(self) -> None:
        """The same at the end of the training, for good."""
        if hasattr(self, "updater"):
            self.updater.evaluate()

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        return self.updater.lr

    def next_meeting(self, step: int) -> int:
        """For lockstep strategies: the next update after ``step`` at which all workers synchronise."""
        return step + 1

    halts: ClassVar[bool] = False
    """``halt`` and ``save`` wait for the other workers, so that no worker can leave out a checkpoint alone."""

    def halt(self, step: int) -> int:
        """Wait until all workers have stopped, before ``save``; returns the greatest step among them."""
        return step

    def save(self, folder: Path) -> Share:
        """Return what a resumed run needs besides the model. Called on all workers at once, between two updates.

        Args:
            folder: of the new checkpoint, into which other processes of the strategy write
                (``trainer.checkpoint.durable_folder``).

        Raises:
            RunFailed: the optimizer is elsewhere, and this method is not the strategy's own.
        """
        if not hasattr(self, "updater"):
            name = f"{type(self).__module__}.{type(self).__qualname__}"
            raise RunFailed(
                f"{name} has no optimizer of its own (self.updater) and no method save, so no checkpoint can "
                f"be made. Write save and load, or type checkpoint=none"
            )
        return Share({"updater": self.updater.state()})

    def load(self, folder: Path, share: Share) -> None:
        """Restore what :meth:`save` returned. Called on all workers at once, after ``setup`` and after the model."""
        self.updater.load(**share.updater)

    def persist(self, folder: Path) -> None:
        """Write the servers' parameters into the folder. Called at the end of training, on all workers."""

    def close(self) -> None:
        """Leave the other processes; then every process can end, and every port is free."""


# Abilities of some strategies. The loop asks for them by type.


@runtime_checkable
class ExpectsBatches(Protocol):
    """Protocol of a strategy that fetches rows for the next batch; the feed then reads one batch ahead."""

    def expect(self, batch: Any) -> None:
        """Fetch the rows of a batch that follows the one of the next ``prepare``."""


@runtime_checkable
class LeasesWork(Protocol):
    """Protocol of a strategy that leases work to its workers during an epoch."""

    def leases(self, epoch: int, blocks: int) -> Iterator[Lease | None]:
        """Yield the blocks of the epoch that this worker leases; None if no block is free now.

        The worker finishes its blocks before it asks for the next one.
        """


@runtime_checkable
class Scatters(Protocol):
    """Protocol of a strategy in which the first worker can send the others their batches."""

    def scatter(self, parts: list[Any] | None) -> Any:
        """Collective call: the first worker passes a part per worker, the others None; each gets its own part."""


@runtime_checkable
class ObservesValidations(Protocol):
    """Protocol of a strategy with a schedule that may depend on validations (scheduler=plateau)."""

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Give the metrics of a validation to the schedule; they are equal on all workers."""


@runtime_checkable
class Rehearses(Protocol):
    """Protocol of a strategy that lays out its buckets in its first backward; later sums are rounded otherwise."""

    def rehearses(self) -> bool:
        """Whether a resumed run must make and discard a backward before its first update."""


@runtime_checkable
class HasGauges(Protocol):
    """Protocol of a strategy with values of its own for the log, from the first worker."""

    def gauges(self) -> dict[str, float]:
        """The values of the strategy for a line of the log; must not wait."""

    def last_gauges(self) -> dict[str, float]:
        """The values at the end of the training; may wait."""


@runtime_checkable
class FullModel(Protocol):
    """Protocol of a strategy with workers that do not hold all parameters of the model."""

    def whole(self) -> AbstractContextManager[Any]:
        """Context manager: the model holds all its parameters, and can be saved."""


@runtime_checkable
class HoldsShards(Protocol):
    """Protocol of a strategy whose workers hold shards of each parameter. They meet in every forward, so all must run
    as many of them."""

    sends_values: bool
    """``setup`` sends the values of the first worker's model to all, whose models may be on torch's meta device."""

    def gathered(self, state: Any) -> Any:
        """Return a nested state (dicts, lists, tensors) with its sharded tensors whole, on the CPU of the first worker;
        the others have empty ones. Collective."""


@runtime_checkable
class SavesPieces(Protocol):
    """Protocol of a strategy whose workers each write what they hold of the model or the optimizer into their own part
    of a checkpoint."""

    def pieces(self, state: Any) -> Any:
        """Return a nested state with a :class:`trainer.host.sharded.Piece` for each tensor that this worker does not
        hold whole. Nothing is exchanged."""


def whole(strategy: Strategy) -> AbstractContextManager[Any]:
    """Context manager: the model of any strategy holds all its parameters, and can be saved."""
    return strategy.whole() if isinstance(strategy, FullModel) else nullcontext()
