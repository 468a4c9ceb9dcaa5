"""The plan: all processes, devices, batches, steps and paths of a run, decided before the first process starts.

A plan is pure data, printable and frozen. It is made by :func:`trainer.planning.make_plan.make_plan`, which is called
again when a fact changes. It travels to the processes in an :class:`trainer.planning.launcher.Assignment`, and lies
in the run's folder as ``plan.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from trainer.data.source import Facts
from trainer.host import json_text
from trainer.planning.auto import Buckets
from trainer.planning.chosen import Chosen
from trainer.planning.processes import Process
from trainer.strategies.contract import Traits

MOST_PROCESSES_SHOWN = 16
GEO = "pserver_geo"
"""The strategy whose workers each have a replica of the servers' parameters."""


@dataclass(frozen=True)
class StrategyPlan:
    """How workers share what they learn.

    Attributes:
        worker: the strategy's class in a worker. entries: the function with which a process of each role
        begins; a worker's depends on the mode (``make_plan.ENTRIES``).
        transport: how workers and parameter servers reach each other; empty: there are no servers. buckets: of
        gradients that workers exchange; None: there are none, or only the training shows. exchange: what workers
        exchange and when, in words; empty: nothing to say.
    """

    name: str
    worker: str
    traits: Traits
    entries: dict[str, str]
    transport: str = ""
    exchange: str = ""
    buckets: Buckets | None = None


@dataclass(frozen=True)
class Topology:
    """Which processes there are, on which hosts, and where they meet.

    Attributes:
        roles: how many processes each role has. nnodes: hosts; node_rank: number of this host. least_nnodes: hosts may
        come and go, while so many are there; 0: all stay to the end. device: of the workers. endpoint: where the
        processes meet. environment: the variables of each role's first process, by which it finds the others of its
        role. launcher: the class that starts the processes; empty: the usual one. restarts: how often within an hour
        the processes are started again when one of them dies. by_role: each process is started by a command of its own,
        and is a host for itself. insecure: servers take any program that reaches the launcher's store for a process of
        the run.
    """

    roles: dict[str, int]
    processes: list[Process]
    device: str
    endpoint: str
    environment: dict[str, dict[str, str]]
    nnodes: int = 1
    node_rank: int = 0
    least_nnodes: int = 0
    launcher: str = ""
    restarts: int = 0
    by_role: bool = False
    insecure: bool = False

    @property
    def workers(self) -> int:
        """The number of workers over all hosts."""
        return self.roles["worker"]

    @property
    def here(self) -> list[Process]:
        """The processes of this host."""
        return [process for process in self.processes if process.node == self.node_rank]

    def nodes_of(self, role: str) -> list[int]:
        """The host number of each process of a role, by the process's rank."""
        return [process.node for process in self.processes if process.role == role]


@dataclass(frozen=True)
class Batches:
    """How many samples a batch and an update have, how workers get them, and the learning rate scaled to them.

    Attributes:
        size: samples per worker and batch, at most; val_size: per worker and evaluation batch. merge: batches per
        update; global_size: samples per update over all workers. leased: training data are handed out while an epoch
        lasts, in blocks of ``lease_batches`` batches (0: the data have blocks of their own). drops_lost: a lost
        worker's blocks are dropped, and do not go to others. update_size: samples of the update for which the learning
        rate is scaled: the global batch, or a worker's own. lr: optimizer.lr as it is used, scaled by ``lr_factor``;
        None: the optimizer has no such key.
    """

    size: int
    merge: int
    global_size: int
    val_size: int
    update_size: int
    lr: float | None
    lr_factor: float
    leased: bool = False
    lease_batches: int = 0
    drops_lost: bool = False


@dataclass(frozen=True)
class Length:
    """Epochs, updates of an epoch, and updates of the whole training; of an evaluation, batches of each worker."""

    epochs: int
    steps_per_epoch: int
    total_steps: int


@dataclass(frozen=True)
class Predicted:
    """What mode=predict reads: ``samples`` in the folder ``input``, each an ``image`` or a ``row``.
    And the ``output`` that was given."""

    input: str
    samples: int
    each: str
    output: str | None


@dataclass(frozen=True)
class DataPlan:
    """What is read, and how.

    Attributes:
        preprocessing: what validation does to an image, see ``DataSource.image_preprocessing``; empty: samples are no
        images. stream: how the training data are read, where they are a stream; else empty. labels: for each label of
        the data, the output of the weights that has its name; empty: the one of its number. predict: of mode=predict,
        what it reads.
    """

    facts: Facts
    preprocessing: dict[str, Any] = field(default_factory=dict)
    stream: str = ""
    labels: list[int] = field(default_factory=list)
    predict: Predicted | None = None


@dataclass(frozen=True)
class ModelPlan:
    """The model and the weights with which it begins.

    Attributes:
        parameters: their number. weights: the file that is evaluated or predicts; empty in training. part: which part
        of a file of weights is taken; empty: all of it, or there is none. rules: which parameters the optimizer updates
        by which rule; empty: all by one.
    """

    parameters: int
    weights: str = ""
    part: str = ""
    rules: str = ""


@dataclass(frozen=True)
class Objective:
    """What is minimised and what is measured.

    Attributes:
        task: what is learnt of the labels. best: the validation metric that marks the best model; empty: nothing is
        validated. lower: of metrics that say so, whether less is better. tests: test samples are measured when the
        training ends. limit_val: batches of a split that a worker measures; 0: all. denominator: what the loss of a
        batch is divided by, so that it is a mean over batches, too; loss: the same in words, or empty. class_weights:
        those that are ``balanced`` in the config, by key of ``loss``.
    """

    task: str
    best: str
    lower: dict[str, bool] = field(default_factory=dict)
    tests: bool = False
    limit_val: int = 0
    denominator: str = "samples"
    loss: str = ""
    class_weights: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Paths:
    """Where a run writes, and where its modules and relative paths lead from.

    Attributes:
        name: of the run. tracking: address of the tracking store; empty: none. whole_path: the user named the run's
        folder by a path from the root: so are its copies at ``checkpoint.to``. started_in: the working folder.
        own_code: folders of the module search path that hold the user's own classes.
    """

    run_dir: str
    name: str = ""
    tracking: str = ""
    whole_path: bool = False
    started_in: str = ""
    own_code: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Remarks:
    """What the plan says besides.

    Attributes:
        why: reasons of what ``auto`` chose. lacks: why this would not run as it is, each reason a sentence; empty for a
        plan that can. left_out: what was given for a sweep and this point of it has no use for, each with the reason.
        concern: a warning about settings that run but are probably a mistake; usually empty.
    """

    why: dict[str, str] = field(default_factory=dict)
    lacks: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    concern: str = ""


@dataclass(frozen=True)
class Resume:
    """The checkpoint from which a run resumes, and how the run differs from the one that wrote it.

    Attributes:
        folder: of the checkpoint. here: it lies in the run's own folder, which then is not cleared. step: updates of
        the reporting worker at the checkpoint. matters: differences that change the training, each a line; there are
        none without ``resume.allow_changes``. harmless: other differences of the config, each a line. lost: what the
        checkpoint has and this run cannot take over, each a line. versions: packages with another version, each a line.
    """

    folder: str
    here: bool
    step: int
    matters: list[str] = field(default_factory=list)
    harmless: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)

    @property
    def source(self) -> Path:
        """The folder of the run that wrote the checkpoint."""
        return Path(self.folder).parent.parent


@dataclass(frozen=True)
class Plan:
    """The plan of a run, in parts. ``chosen``: precision, channels_last, ... as used. ``resume``: the checkpoint from
    which the run resumes; None: it begins."""

    mode: str
    strategy: StrategyPlan
    topology: Topology
    batches: Batches
    length: Length
    chosen: Chosen
    data: DataPlan
    model: ModelPlan
    objective: Objective
    paths: Paths
    remarks: Remarks = field(default_factory=Remarks)
    resume: Resume | None = None

    @property
    def own_folder(self) -> Path:
        """The folder where this host's launcher writes; the run's folder, which hosts may share, is host 0's."""
        run_dir, host = Path(self.paths.run_dir), self.topology.node_rank
        return run_dir / f"host.{host}" if host else run_dir

    @property
    def updates_of(self) -> str:
        """`` of worker N`` if work is leased: each worker does another number of updates, and the result counts those
        of worker N. Empty otherwise."""
        first = min((process.rank for process in self.topology.here if process.role == "worker"), default=0)
        return f" of worker {first}" if self.batches.leased else ""

    def changed(self, **changes: Any) -> Plan:
        """Return a copy of this plan with other values; of a part, only the given values change."""
        values = {
            name: replace(getattr(self, name), **value) if isinstance(value, Mapping) else value
            for name, value in changes.items()
        }
        return replace(self, **values)

    def as_dict(self) -> dict[str, Any]:
        """Return this plan as plain data, as in plan.json."""
        return asdict(self)

    @staticmethod
    def of(plain: Mapping[str, Any]) -> Plan:
        """Make a plan of what :meth:`as_dict` returned, after JSON."""
        hints = get_type_hints(Plan)
        return Plan(**{name: _made(hints[name], value) for name, value in plain.items()})


def _made(kind: Any, plain: Any) -> Any:
    """Make an object of type ``kind`` from plain data: dataclasses, also in lists, are made; other values stay."""
    if kind is Facts:
        return Facts.of(plain)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: _made(hints[name], value) for name, value in plain.items()})  # type: ignore[operator]
    inner = next((part for part in get_args(kind) if is_dataclass(part)), None)
    if inner is None or plain is None:
        return plain
    return [_made(inner, one) for one in plain] if isinstance(plain, list) else _made(inner, plain)


def read_plan(run: Path) -> Plan:
    """Read the plan that a run has left in its folder.

    Raises:
        OSError: it cannot be read. ValueError: it is damaged, or no plan.
    """
    plain = json_text.read_object(run / "plan.json")
    try:
        return Plan.of(plain)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError("it is no plan of a run") from error


def measured_by(run: Path) -> dict[str, Any]:
    """What a run measured of its training data (``Facts.measured``); empty if its plan cannot be read."""
    try:
        return read_plan(run).data.facts.measured
    except (OSError, ValueError):
        return {}
