"""The plan: all processes, roles, devices, endpoints, batches, steps and paths of a run. Pure data, printable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from trainer.data.source import Facts
from trainer.planning.auto import Buckets, Chosen
from trainer.planning.processes import Process
from trainer.strategies.contract import Traits

MOST_PROCESSES_SHOWN = 16


@dataclass(frozen=True)
class Predicted:
    """What mode=predict reads: ``samples`` in the folder ``input``, each an ``image`` or a ``row``.
    And the ``output`` that was given."""

    input: str
    samples: int
    each: str
    output: str | None


MAYBE = {"predict": Predicted, "buckets": Buckets}
"""Parts of a plan that only some have."""


@dataclass(frozen=True)
class Plan:
    """The plan of a run: everything that is decided before the first process starts, as pure data.

    Attributes:
        traits: of the strategy; leased: training data is handed out while an epoch lasts, in blocks of
            ``lease_batches`` batches (0: the data have blocks of their own). drops_lost: a lost worker's blocks are
            dropped, and do not go to others.
        weights: the file that is evaluated or predicts; empty in training. batch_size: samples per worker and batch, at
        most; merge: batches per update; global_batch_size: samples per update. steps_per_epoch, total_steps: updates.
        val_batch_size: samples per worker and evaluation batch. facts: of the data. preprocessing: what validation does
        to an image, see ``DataSource.image_preprocessing``; empty: samples are none. chosen: precision, channels_last,
        ... as used; why: reasons of those that ``auto`` chose. lr: optimizer.lr as it is used, scaled to the batch
        where that is asked for; None: the optimizer has no such key. lr_factor: what it is scaled by; update_batch: for
        how many samples per update. best: the validation metric that marks the best model; empty: none does, because
        nothing is validated. tests: test samples are measured at the end of the training. limit_val: batches of a split
        that a worker measures; 0: all. lower: of the user's own metrics whose class says so, whether less is better.
        endpoint: where the processes meet. environment: the variables of each role's first process, by which it knows
        the others of its role. lacks: why this would not run as it is, each reason a sentence; empty for a plan that
        can. left_out: what was given for a sweep and this point of it has no use for, each with the reason. buckets: of
        gradients, which workers exchange; None: there are none, or only the training tells. predict: of mode=predict,
        what it looks at. launcher: the class that starts the processes; empty: the usual one. concern: a warning about
        settings that run but are probably a mistake; usually empty. stream: how the training data are read, where they
        are a stream; else empty. restarts: how often within an hour the processes are started again when one of them
        dies. insecure: servers take any program that reaches the launcher's store for a process of the run. by_role:
        each process is started by a command of its own, and is a host for itself. least_nnodes: hosts may come and go,
        while so many are there; 0: all stay to the end. whole_path: the user named the run's folder by a path from the
        root: so are its copies at ``checkpoint.to``. transport: how workers and parameter servers reach each other;
        empty: there are no servers. denominator: what the loss of a batch is divided by, so that it is a mean over
        batches, too; loss: the same in words, or empty. class_weights: those that are ``balanced`` in the config, by
        key of ``loss``. started_in: the working folder, from which the config's relative paths lead. taken: which part
        of the file of weights is taken; empty: all of it, or there is none. own_code: folders of the module search path
        that hold the user's own classes. labels: for each label of the data, the output of the weights that has its
        name; empty: the one of its number.
    """

    name: str
    mode: str
    weights: str
    strategy: str
    strategy_worker: str
    traits: Traits
    leased: bool
    entries: dict[str, str]
    roles: dict[str, int]
    nnodes: int
    node_rank: int
    processes: list[Process]
    device: str
    endpoint: str
    batch_size: int
    merge: int
    global_batch_size: int
    val_batch_size: int
    epochs: int
    steps_per_epoch: int
    total_steps: int
    lr: float | None
    lr_factor: float
    update_batch: int
    best: str
    parameters: int
    facts: Facts
    preprocessing: dict[str, Any]
    chosen: Chosen
    why: dict[str, str]
    run_dir: str
    tracking: str
    environment: dict[str, dict[str, str]]
    lacks: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    concern: str = ""
    insecure: bool = False
    lower: dict[str, bool] = field(default_factory=dict)
    buckets: Buckets | None = None
    predict: Predicted | None = None
    launcher: str = ""
    restarts: int = 0
    stream: str = ""
    by_role: bool = False
    least_nnodes: int = 0
    lease_batches: int = 0
    drops_lost: bool = False
    transport: str = ""
    labels: list[int] = field(default_factory=list)
    tests: bool = False
    limit_val: int = 0
    whole_path: bool = False
    started_in: str = ""
    taken: str = ""
    own_code: list[str] = field(default_factory=list)
    denominator: str = "samples"
    class_weights: dict[str, list[float]] = field(default_factory=dict)
    loss: str = ""

    @property
    def own_folder(self) -> Path:
        """The folder where this host's launcher writes; the run's folder, which hosts may share, is host 0's."""
        run_dir = Path(self.run_dir)
        return run_dir / f"host.{self.node_rank}" if self.node_rank else run_dir

    @property
    def here(self) -> list[Process]:
        """The processes of this host."""
        return [process for process in self.processes if process.node == self.node_rank]

    @property
    def whose(self) -> str:
        """Whose updates this host's result counts, where each worker takes its own, as many as it gets work for: `` of
        worker N``."""
        first = min((process.rank for process in self.here if process.role == "worker"), default=0)
        return f" of worker {first}" if self.leased else ""

    @property
    def workers(self) -> int:
        """The number of workers over all hosts."""
        return self.roles["worker"]

    def nodes_of(self, role: str) -> list[int]:
        """The host number of each process of a role, by the process's rank."""
        return [process.node for process in self.processes if process.role == role]

    def as_dict(self) -> dict[str, Any]:
        """Return this plan as plain data, as in plan.json."""
        plain = asdict(self)
        return {**plain, **plain.pop("traits"), **{name: plain[name] or {} for name in ("predict", "buckets")}}

    @staticmethod
    def of(plain: Mapping[str, Any]) -> Plan:
        """Make a plan of what :meth:`as_dict` returned, after JSON."""
        traits = {trait.name for trait in fields(Traits)}
        made = {
            "traits": Traits(**{name: plain[name] for name in traits}),
            "facts": Facts.of(plain["facts"]),
            "chosen": Chosen(**plain["chosen"]),
            "processes": [Process(**process) for process in plain["processes"]],
            **{name: kind(**plain[name]) if plain[name] else None for name, kind in MAYBE.items()},
        }
        return Plan(**{name: value for name, value in plain.items() if name not in traits} | made)
