"""The strategy contract: all that the loop, the launcher and the checks may ask of any strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, runtime_checkable

from trainer.config.run_config import RunConfig, typed
from trainer.config.schema import LaunchConfig, StrategyConfig
from trainer.errors import RunFailed, UserError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from trainer.host.notes_board import OwnBoard
    from trainer.optim.groups import Rate
    from trainer.optim.updater import Updater

Agreed = TypeVar("Agreed")

OF_SERVERS = {"server_endpoints": "null", "servers": "null", "server_hosts": "auto", "server_ports": "null"}
WAITS = "trainer/communication"
"""How a strategy marks in a profile that it waits for others, where torch does not say so itself."""


@dataclass(frozen=True)
class Traits:
    """The properties of a strategy that the loop, the launcher and the checks need to know.

    Attributes:
        exact: mathematically one process on the global batch (batch-norm statistics aside); a test proves it. lockstep:
        all workers take the same number of updates (the sampler pads) and may meet inside an epoch. same_everywhere:
        after every update all workers hold the same state, so that averaging what they hold changes nothing. alone:
        each worker's gradient is an update by itself, of the samples of that worker alone. survives: the others go on
        when a worker dies. leases: the worker is a :class:`LeasesWork`: work can be leased instead of split beforehand.
        scatters: the worker is a :class:`Scatters`: the first one can read everybody's batches. replicas: the worker is
        a :class:`trainer.strategies.replicas.HasReplicas`: other workers can begin with the mean of all. skips: the
        optimizer is in the worker, which can leave an update out (``skip``). tables_at_servers: sparse tables live in
        servers; workers never hold them whole, and ids may be unbounded.
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


class Declaration(ABC):
    """Base class of what a strategy declares before any process starts. Pure data: importing it imports nothing heavy.

    Args:
        config: the ``strategy`` node of the config, resolved.

    Attributes:
        options: the keys in it that the schema knows, as ``Options`` declares them; keys of one's own are in
            ``config``.
    """

    Options: ClassVar[type[StrategyConfig]] = StrategyConfig
    options: StrategyConfig

    worker: ClassVar[str]
    """``module:class`` of the :class:`Strategy` that runs in each worker."""

    entries: ClassVar[Mapping[str, str]] = {}
    """Roles besides ``worker`` and the ``module:function`` where each of their processes enters."""

    default_workers: ClassVar[int | None] = None
    """Workers where nobody says how many; None: one per GPU, else one."""

    def __init__(self, **config: Any) -> None:
        self.config = config
        self.options = typed(self.Options, config)

    @property
    def traits(self) -> Traits:
        """The strategy's :class:`Traits`; a class attribute will do if they do not depend on the options."""
        return Traits()

    def leased(self, config: RunConfig) -> bool:
        """Whether workers lease training data in blocks during an epoch, instead of splitting it beforehand."""
        return self.traits.leases and config.data.work in (("auto", "leased") if config.sampler.shard else ("leased",))

    def roles(self, workers: int, launch: LaunchConfig) -> dict[str, int]:
        """The number of processes of each role, for this many workers."""
        return {"worker": workers}

    def refuse_model(self, config: RunConfig, model: torch.nn.Module, optimizer: Any) -> list[UserError]:
        """Return every reason why this strategy cannot work with the built model and the config's optimizer."""
        unbounded = [n for n, m in model.named_modules() if getattr(m, "unbounded", False)]
        if unbounded and not self.traits.tables_at_servers:
            why = f"strategy={self.name} holds whole tables in its workers, and {unbounded[0]} takes any id"
            return [UserError("model.table_size=null", why, "strategy=pserver_async (or a number of rows)")]
        return []

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
class Address:
    """How the processes of the run reach a server of this host.

    Attributes:
        secret: the run's, 32 bytes, known to its processes alone. host: the server listens at this address. port: 0: a
        free one. folder: a private folder for Unix sockets; empty: the run spans hosts, or the path is too long.
    """

    secret: bytes = field(default=b"", repr=False)
    host: str = "127.0.0.1"
    port: int = 0
    folder: str = ""


@dataclass(frozen=True)
class Life:
    """This start of a process.

    Attributes:
        number: random; 0: none. returns: the process replaces one of its rank that has died while the others went on.
        pulse: file in which the process counts its updates for the launcher; empty: the launcher reads none.
    """

    number: int = 0
    returns: bool = False
    pulse: str = ""


@dataclass(frozen=True)
class Others:
    """What a worker knows of the other processes from the plan.

    Attributes:
        even: all workers have equally many samples in every update, and the loss is a mean over samples. servers:
        number of parameter servers. server_hosts: the host of each; empty: there is one host. by_host: messages name
        the hosts of workers.
    """

    even: bool = True
    servers: int = 0
    server_hosts: tuple[int, ...] = ()
    by_host: bool = True

    def server_name(self, number: int) -> str:
        """The name of a parameter server in messages, with its host if there are several."""
        return f"server {number}" + (f" (host {self.server_hosts[number]})" if self.server_hosts else "")


@dataclass(frozen=True)
class Seat:
    """The place of a process in the run: its role, rank, device, and how it reaches the others.

    Attributes:
        role, rank, size: the role, the number of the process within it over all hosts, and the role's processes.
        local_rank, local_size: the same on this host. device: e.g. ``cpu`` or ``cuda:0``. store: the run's board, on
        which its processes alone leave notes, such as endpoints. group_store: torch's, where process groups meet; None:
        there are no other processes.
    """

    role: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    device: str
    store: OwnBoard
    group_store: Store | None = None
    address: Address = field(default_factory=Address)
    life: Life = field(default_factory=Life)
    others: Others = field(default_factory=Others)

    def names(self, ranks: Iterable[int]) -> list[str]:
        """The names of processes of this role in messages, with their hosts if there are several."""
        spread = self.others.by_host and self.size > self.local_size
        return [f"{self.role} {r}" + (f" (host {r // self.local_size})" if spread else "") for r in ranks]


@dataclass(frozen=True)
class Lease:
    """A leased block of an epoch's work: its number, and the batch in it to start with.

    ``empty`` is called by who reads it and finds no batch: nothing will be pushed that could end the lease.
    """

    block: int
    start: int = 0
    empty: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Share:
    """A worker's share of a checkpoint, from its strategy: nested dicts and lists of plain values, tensors and arrays.

    Attributes:
        common: the same on all workers where the strategy is ``same_everywhere``, and then kept once.
        own: of this worker alone.
        files: of other processes in the checkpoint.
        workers: that take part in it; None: all.
    """

    common: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    files: Sequence[str] = ()
    workers: Sequence[int] | None = None


class MakeUpdater(Protocol):
    """Protocol of what a strategy makes its optimizers with."""

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
        options: the keys in it that the schema knows, as ``Options`` declares them; keys of one's own are in
        ``config``. updater: the optimizer, or where it runs elsewhere, its schedule alone; made in ``setup``. failed:
        this worker ends by an error, so that the others are not to take it for one that is done.
    """

    Options: ClassVar[type[StrategyConfig]] = StrategyConfig
    options: StrategyConfig
    updater: Updater
    failed = False

    def __init__(self, config: Mapping[str, Any], seat: Seat) -> None:
        self.config = config
        self.options = typed(self.Options, config)
        self.seat = seat

    @abstractmethod
    def setup(self, model: torch.nn.Module, make_updater: MakeUpdater) -> torch.nn.Module:
        """Give all workers equal parameters and make the optimizer; returns the module to call in training."""

    def weight(self, denominator: float) -> float | torch.Tensor:
        """The factor on this worker's mean loss of an update that makes the combined gradient the global batch's mean.
        Called before its first forward, with what the loss is divided by: its samples here, or with class weights the
        sum of theirs. 1.0: weights are applied elsewhere, or all are equal. A tensor () on the device is not waited
        for."""
        return 1.0

    def prepare(self, batch: Any) -> None:
        """Called before the forward of each batch: fetch what it needs (a server's parameters, a table's rows)."""

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

    def members(self) -> tuple[int, int]:
        """This worker's index among the workers that take part now, and their number, the same for all of them."""
        return self.seat.rank, self.seat.size

    def agree(self, action: Callable[[int, int], Agreed], settle: Callable[[], None] = lambda: None) -> Agreed:
        """Return the result of ``action(index, count)``, called with ``members`` after the collective call ``settle``,
        by which all know the same members; both again if one is lost meanwhile."""
        settle()
        return action(*self.members())

    @abstractmethod
    def synchronize(self) -> None:
        """Give every worker the agreed parameters and buffers (before evaluation, saving, export)."""

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        return self.updater.lr

    def next_meeting(self, step: int) -> int:
        """For lockstep strategies: the first update that nobody ends before all have begun the one after ``step``."""
        return step + 1

    halts: ClassVar[bool] = False
    """``halt`` and ``save`` wait for the other workers: none may leave a checkpoint out by itself."""

    def halt(self, step: int) -> int:
        """Stop all workers before ``save``: none goes on before all are here. Returns the greatest step of any."""
        return step

    def save(self, folder: Path) -> Share:
        """Return what is needed to resume besides the model. Called on all workers at once, between two updates.

        Args:
            folder: of the checkpoint to come, where other processes of the strategy write
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
        """Restore what :meth:`save` returned; called on all workers at once, when ``setup`` and the model are done."""
        self.updater.load(**share.common["updater"])

    def persist(self, folder: Path) -> None:
        """Write what servers hold into the folder. Called at the end of training, on all workers."""

    def close(self) -> None:
        """End this worker's membership; afterwards every process ends and every port is free."""


# What only some strategies can do. The loop asks for it by type.


@runtime_checkable
class LooksAhead(Protocol):
    """Protocol of a strategy that wants to know the next batch, so that the feed reads one ahead."""

    def expect(self, batch: Any) -> None:
        """Told of the batch after the one that ``prepare`` is called with next, to fetch what it needs meanwhile."""


@runtime_checkable
class LeasesWork(Protocol):
    """Protocol of a strategy that leases work to its workers during an epoch."""

    def leases(self, epoch: int, blocks: int) -> Iterator[Lease | None]:
        """Yield the leased blocks of the epoch's work that this worker gets.

        None: there is nothing just now; what was handed out is to be finished before the next is asked for.
        """


@runtime_checkable
class Scatters(Protocol):
    """Protocol of a strategy in which the first worker can send the others their batches."""

    def scatter(self, parts: list[Any] | None) -> Any:
        """Collective call: the first worker passes a part per worker, the others None; each gets its own part."""


@runtime_checkable
class GoesByValidations(Protocol):
    """Protocol of a strategy whose schedule may depend on validations (scheduler=plateau)."""

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in a validation, the same on all workers."""


@runtime_checkable
class Rehearses(Protocol):
    """Protocol of a strategy whose first backward lays out its exchange, so that later sums are rounded differently."""

    def rehearses(self) -> bool:
        """Whether a backward must be made and discarded before the run resumes from a checkpoint."""


@runtime_checkable
class HasGauges(Protocol):
    """Protocol of a strategy with values of its own for the log; only the first worker is asked."""

    def gauges(self) -> dict[str, float]:
        """The strategy's values at each line of the log; must not wait."""

    def last_gauges(self) -> dict[str, float]:
        """The values that are measured anew at the end of the training; may wait."""


@runtime_checkable
class FullModel(Protocol):
    """Protocol of a strategy whose workers do not hold all parameters of the model."""

    def whole(self) -> AbstractContextManager[Any]:
        """Context manager: the model holds all its parameters and can be saved."""


def whole(strategy: Strategy) -> AbstractContextManager[Any]:
    """Context manager of any strategy, a :class:`FullModel` or not: the model holds all its parameters and can be
    saved."""
    return strategy.whole() if isinstance(strategy, FullModel) else nullcontext()
