"""strategy: how gradients become shared parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, Optional  # OmegaConf reads them

from trainer.config.schema.declare import AUTO, LONG, LONGEST_S, key


def _declaration(target: str) -> Any:
    return key(target, "class, a trainer.strategies.contract.Declaration")


@dataclass
class GradientMerge:
    """strategy.gradient_merge: several batches make one update."""

    k_steps: int = key(1, "batches (of data.batch_size each) per update", "batches", ge=1)
    avg: bool = key(True, "average over the merged batches; false: their sum")


@dataclass
class StrategyConfig:
    """strategy: how the workers' gradients become shared parameters (Fleet's DistributedStrategy)."""

    _target_: str = _declaration("trainer.strategies.builtin.SingleDeclaration")
    gradient_merge: GradientMerge = key(GradientMerge, "several batches make one update")
    clip_norm: Optional[float] = key(None, "greatest L2 norm of the whole gradient of an update", gt=0)
    clip_value: Optional[float] = key(None, "greatest magnitude of each element of an update's gradient", gt=0)


@dataclass
class GroupStrategy(StrategyConfig):
    """strategy: keys of all strategies with a process group."""

    _target_: str = _declaration("???")
    timeout_s: float = key(600.0, "longest wait at a meeting point of the workers", "seconds", gt=0, le=LONGEST_S)
    init: str = key(
        "broadcast",
        "equal start: broadcast rank 0's parameters, or draw them from the same seed everywhere",
        choices=("broadcast", "same_seed"),
    )
    buffers: str = key(
        "rank0", "batch-norm statistics after a step: rank 0's, or their average", choices=("rank0", "average")
    )
    sync_batch_norm: bool = key(False, "batch-norm statistics over the global batch")


@dataclass
class PowerSgdOptions:
    """strategy.powersgd: PowerSGD's compression of gradients, with error feedback."""

    rank: int = key(1, "rank of the two factors that stand for a matrix of gradients", "columns", ge=1, le=1_000_000)
    start_step: int = key(10, "updates with whole gradients before compression begins", "updates", ge=2)


@dataclass
class DgcOptions:
    """strategy.dgc: deep gradient compression, the greatest of gathered gradients."""

    rampup_begin_step: int = key(0, "updates with whole gradients before compression begins", "updates", ge=0)
    rampup_step: int = key(
        1, "updates in which the shares of sparsity come in turn; the last one stays", "updates", ge=1
    )
    sparsity: List[float] = key([0.999], "shares of a large parameter's numbers that are not sent", ge=0, lt=1)
    clip_norm: Optional[float] = key(
        None, "greatest L2 norm of each large gradient; a worker's own is clipped at it / sqrt(workers)", gt=0
    )
    min_size: int = key(16_384, "numbers of a parameter from which on it is compressed", "numbers", ge=1)


@dataclass
class CollectiveStrategy(GroupStrategy):
    """strategy=collective: DDP, gradients averaged over all workers at every update."""

    _target_: str = _declaration("trainer.strategies.builtin.CollectiveDeclaration")
    bucket_cap_mb: float = key(
        25.0, "size of a gradient bucket that is reduced while backward goes on", "MiB", gt=0, le=1_000_000
    )
    find_unused_parameters: bool = key(False, "the model has parameters that a step may not use")
    static_graph: bool = key(False, "every step uses the same parameters, which DDP learns from the first")
    gradient_as_bucket_view: bool = key(
        True, "gradients lie in the buckets themselves; false: are copied there and back"
    )
    gradient_scale: str = key(
        "mean",
        "an update's gradient: the mean over all samples, or the workers' means added up",
        choices=("mean", "sum"),
    )
    comm_hook: str = key(
        "none",
        "what travels: gradients as they are, in 16 bits, PowerSGD's low-rank factors, or DGC's greatest values",
        choices=("none", "fp16", "bf16", "powersgd", "dgc"),
    )
    reduce_group: Optional[int] = key(
        None,
        "neighbours that add up gradients before the groups do (hierarchical all-reduce; null: one ring)",
        "workers",
        ge=2,
    )
    comm_streams: int = key(1, "process groups over which gradient buckets travel side by side", "groups", ge=1, le=8)
    powersgd: PowerSgdOptions = key(PowerSgdOptions, "with comm_hook=powersgd: how gradients are compressed")
    dgc: DgcOptions = key(DgcOptions, "with comm_hook=dgc: how gradients are compressed")


@dataclass
class AutoStrategy(CollectiveStrategy):
    """strategy=auto: single with one worker, else collective; typed: the fastest of the equal ones, as measured."""

    _target_: str = key("trainer.strategies.builtin.auto", "replaced when the number of workers is known")


@dataclass
class AdviseStrategy(CollectiveStrategy):
    """strategy=advise: short trainings with one and two workers, and a table of what each strategy would cost."""

    _target_: str = key("trainer.strategies.builtin.advise", "the command ends with the table, and trains nothing")


@dataclass
class ShardedStrategy(GroupStrategy):
    """strategy=sharded: each worker holds a shard of parameters, gradients and optimizer state (FSDP2)."""

    _target_: str = _declaration("trainer.strategies.builtin.ShardedDeclaration")
    shard: str = key(
        "parameters",
        "what workers hold in shards during an update: optimizer alone (ZeRO-1), gradients (2), or parameters too (3)",
        choices=("optimizer", "gradients", "parameters"),
    )
    shard_group: Optional[int] = key(
        None, "neighbouring workers that hold one model; groups hold replicas (null: all workers)", "workers", ge=1
    )
    wrap: Any = key(
        "auto",
        "modules whose parameters are gathered together: a name with *, a class name, or a list (auto: all blocks)",
        texts=True,
    )
    param_dtype: str = key(
        "full", "what the gathered parameters are: as they are, or 16 bits", choices=("full", "bf16", "fp16")
    )
    reduce_dtype: str = key(
        "full", "what gradients are reduced in: as they are, or 16 bits", choices=("full", "bf16", "fp16")
    )
    offload: bool = key(False, "on GPUs: keep shards and optimizer in the memory of the host")
    find_unused_parameters: bool = key(False, "with shard=optimizer: the model has parameters that a step may not use")

    @property
    def whole_model(self) -> bool:
        """Whether each worker holds the whole model, and a part of the optimizer's state."""
        return self.shard == "optimizer"


@dataclass
class OuterOptions:
    """strategy.outer: outer optimizer of DiLoCo, for the mean way of the workers between two averages."""

    lr: float = key(1.0, "share of the mean way in a step of the shared parameters", gt=0)
    momentum: float = key(0.0, "Nesterov's momentum of the mean ways", ge=0, lt=1)


@dataclass
class StreamingOptions:
    """strategy.streaming: streaming DiLoCo, parts of the model averaged in turn while the training goes on."""

    fragments: int = key(1, "parts of the model that are averaged in turn", "parts", ge=1)
    delay: int = key(0, "updates between the start of an average and its use", "updates", ge=0)
    mix: float = key(0.5, "share of a worker's own parameters that stays where an average comes late", ge=0, lt=1)


@dataclass
class LocalSgdStrategy(GroupStrategy):
    """strategy=local_sgd: workers train apart and average their parameters."""

    _target_: str = _declaration("trainer.strategies.builtin.LocalSgdDeclaration")
    k_steps: int = key(4, "updates between two averages of the parameters", "updates", ge=1)
    begin_step: int = key(0, "average after every update until this one", "updates", ge=0)
    begin: str = key(
        "parameters",
        "what is averaged until begin_step; gradients: post-local SGD, as collective",
        choices=("parameters", "gradients"),
    )
    adaptive: bool = key(False, "k_steps is the start, and then follows loss and learning rate, from 1 to 16")
    outer: OuterOptions = key(OuterOptions, "outer optimizer (DiLoCo)")
    exchange: str = key(
        "full", "what travels in an average: parameters as they are, or their ways", choices=("full", "bf16", "int8")
    )
    streaming: StreamingOptions = key(StreamingOptions, "parts of the model averaged in turn")


@dataclass
class Entry:
    """strategy.entry: when an id becomes a row of a sparse table."""

    count: int = key(1, "pushes of an id until it becomes a row; until then it reads as a fresh one", "pushes", ge=1)
    probability: float = key(1.0, "chance that a push of an absent id makes a row", gt=0, le=1)


@dataclass
class PserverStrategy(StrategyConfig):
    """strategy=pserver_*: keys of all parameter-server modes."""

    _target_: str = _declaration("???")
    timeout_s: float = key(600.0, "longest wait at a meeting point of the workers", "seconds", gt=0, le=LONGEST_S)
    transport: str = key(
        "auto",
        "tcp: encrypted; on one host ipc: Unix sockets; auto: these with shared memory, between hosts tcp",
        choices=("auto", "ipc", "tcp"),
    )
    lost_after_s: float = key(
        10.0, "silence after which a worker is ended and counts as lost", "seconds", gt=0, le=LONGEST_S
    )
    handshake_s: float = key(
        10.0,
        "time for a new connection to identify itself, after which the server closes it",
        "seconds",
        gt=0,
        le=LONGEST_S,
    )
    ledger: bool = key(False, "servers write each piece of work that they apply to ledger.N.tsv")
    on_nonfinite: str = key(
        "refuse",
        "NaN or infinity in a push or in the initial parameters: end the run, or apply it",
        choices=("refuse", "apply"),
    )
    split_method: str = key(
        "round_robin",
        "servers of the parameters that stay whole: in turn, or by a hash of the name",
        choices=("round_robin", "hash_name"),
    )
    slice_above: Optional[int] = key(
        8192, "larger parameters are cut evenly over all servers (null: none is)", "elements", ge=1
    )
    wire: str = key(
        "full", "values on the wire: as they are, bf16, or int8 with error feedback", choices=("full", "bf16", "int8")
    )
    buffers: str = key(
        "rank0", "batch-norm statistics: the first worker's, or their average", choices=("rank0", "average")
    )
    entry: Entry = key(Entry, "when an id becomes a row of a sparse table")
    evict_after: Optional[int] = key(
        None,
        "age at which untouched rows are dropped, at validations and at the end (null: never)",
        "steps or event time",
        ge=1,
        le=LONG,
    )
    evict_by: str = key(
        "steps",
        "the age of rows: steps of the worker that has done most, or the data's own time (inputs['time'])",
        choices=("steps", "event_time"),
    )
    load_from: Optional[str] = key(None, "folder of persistables that the servers start from")
    persistables: bool = key(True, "servers save tables, optimizer state and watermarks at the end")
    export_limit: int = key(200000000, "larger tables are left out of model.safetensors", "values", ge=0, le=LONG)


@dataclass
class PserverSyncStrategy(PserverStrategy):
    """strategy=pserver_sync: one global step of all workers, equal to one process on the global batch."""

    _target_: str = _declaration("trainer.strategies.builtin.PserverSyncDeclaration")
    on_lost_worker: str = key(
        "stop", "when a worker dies: end with an error, or go on with the other workers", choices=("stop", "continue")
    )


@dataclass
class FreeStrategy(PserverStrategy):
    """strategy=pserver_async, pserver_ssp and pserver_geo: workers have no common step."""

    launch_barrier: bool = key(True, "all workers begin their first step together")


@dataclass
class StaleStrategy(FreeStrategy):
    """strategy=pserver_async and pserver_ssp: pushes are applied when they come."""

    send_queue_size: int = key(
        4, "pushes under way per worker, on average over the servers", "pushes", ge=1, le=1_000_000
    )
    thread_pool_size: int = key(1, "ZeroMQ's I/O threads per worker", "threads", ge=1, le=1024)
    delay_compensation: float = key(
        0.0, "lambda of DC-ASGD, which corrects a gradient for later changes of the parameters", ge=0
    )
    staleness_power: float = key(0.0, "the learning rate is divided by (1 + staleness) to this power", ge=0, le=100)


@dataclass
class PserverAsyncStrategy(StaleStrategy):
    """strategy=pserver_async: servers apply each push at once."""

    _target_: str = _declaration("trainer.strategies.builtin.PserverAsyncDeclaration")
    max_merge_var_num: int = key(1, "gradients that are added up to one push while the queue is full", "batches", ge=1)
    send_wait_times: int = key(0, "batches for which a push that could go waits for more gradients", "batches", ge=0)
    independent_recv_thread: Any = key(
        "auto",
        "ask for the next batch's parameters before this one is computed (auto: for models with tables)",
        choices=AUTO,
    )
    min_send_grad_num_before_recv: int = key(1, "updates between two pulls of dense parameters", "updates", ge=1)


@dataclass
class PserverSspStrategy(StaleStrategy):
    """strategy=pserver_ssp: asynchronous with a bound."""

    _target_: str = _declaration("trainer.strategies.builtin.PserverSspDeclaration")
    staleness: int = key(4, "most steps between the fastest and the slowest worker", "steps", ge=0)


@dataclass
class PserverGeoStrategy(FreeStrategy):
    """strategy=pserver_geo: local training, differences exchanged."""

    _target_: str = _declaration("trainer.strategies.builtin.PserverGeoDeclaration")
    k_steps: int = key(100, "updates between two exchanges", "updates", ge=1)
    overlap: bool = key(True, "train while an exchange is under way; false: wait for it")
