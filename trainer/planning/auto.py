"""Chooses what ``auto`` stands for: the fastest safe setting for this device and model, each with its reason."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from trainer.config import schema
from trainer.config.keys import is_of, spelled
from trainer.config.run_config import RunConfig
from trainer.data.prefetch import ready_each
from trainer.errors import UserError
from trainer.host import hardware
from trainer.host.hardware import AboutGpus
from trainer.optim.state_transfer import StateKeys
from trainer.planning.chosen import Chosen, Compiling, GpuSettings
from trainer.planning.precision import Case, choose_precision
from trainer.planning.reading import choose_decoder, choose_readers, rate_said, taken_by
from trainer.strategies.builtin import AUTO
from trainer.wording import counted

if TYPE_CHECKING:
    from trainer.host.numa import Nodes
    from trainer.host.visible_gpus import Gpu

ONE_CORE_WORK = 1 << 25
"""Multiply-adds of a batch's forward pass up to which several threads wait for each other longer than they save."""
AUTOMATIC = "auto"


@dataclass(frozen=True)
class Buckets:
    """The buckets in which DDP exchanges the gradients.
    ``sizes`` in bytes, in their order; ``tables`` whose gradients go by row, each in a bucket of its own."""

    sizes: list[int]
    tables: int = 0


@dataclass(frozen=True)
class ModelFacts:
    """What is known of the built model: numbers of trainable and of all parameters, whether it has 2-d convolutions.

    Attributes:
        concern: what is odd about it on these data, though it can run; empty as a rule.
        work: multiply-adds of one sample's forward pass, at most; 0: not known.
        lower: of the user's own metrics whose class says so, whether less is better.
        buckets: of gradients; None: there are none, or only the training tells.
        trained: parameters that the optimizer moves.
        in_tables: parameters in sparse tables.
        shapes: of all parameters, by name. frozen: names of those that the optimizer does not move.
        optimizer: of a run that resumes, what the optimizer will keep of each parameter that it moves; None: it begins.
        denominator: what a batch's loss is divided by, as ``trainer.metrics.criterion.kind_of`` found.
        part: which part of the file of weights it begins with is taken; empty: all of it, or there is none.
        flops: floating-point operations of one sample's forward pass, counted; 0: not counted.
        reads: training samples that one reading process gives in a second, measured; 0: not measured.
        unfused: why its optimizer cannot be fused; empty: it can. unfused_by_auto: why ``auto`` leaves it unfused.
        norms: kinds of its norm layers, e.g. ``BatchNorm2d``.
        in_blocks: share of its parameters in blocks that come again; 0 where nothing is compiled.
        loss_by_sample: the loss can tell the loss of each sample.
        speeds: samples per second by precision, as measured on this machine's GPU; empty: not measured.
        precision_before: that of the checkpoint from which the run resumes, and its name; empty: the run begins.
        rules: which parameters the optimizer updates by which rule, in words; empty: all by one.
    """

    parameters: int
    convolutional: bool
    concern: str = ""
    work: int = 0
    lower: dict[str, bool] = field(default_factory=dict)
    buckets: Buckets | None = None
    trained: int = 0
    in_tables: int = 0
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    optimizer: StateKeys | None = None
    denominator: str = "samples"
    part: str = ""
    unfused: str = ""
    unfused_by_auto: str = ""
    flops: float = 0.0
    reads: float = 0.0
    norms: tuple[str, ...] = ()
    in_blocks: float = 0.0
    loss_by_sample: bool = True
    speeds: dict[str, float] = field(default_factory=dict)
    precision_before: tuple[str, str] = ("", "")
    rules: str = ""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of each parameter that the optimizer moves."""
        return tuple(math.prod(shape) for name, shape in self.shapes.items() if name not in self.frozen)


@dataclass(frozen=True)
class Machine:
    """What the plan's choices depend on: cores of each host (None: unknown), flags of its CPU, its GPUs.

    Attributes:
        nodes: its NUMA nodes; None: not known. variables: of the user, that set what ``auto`` would; they matter with a
        GPU. windows: it is Windows' subsystem.
    """

    cores: int | None
    cpu_flags: frozenset[str]
    gpus: tuple[Gpu, ...]
    about_gpus: AboutGpus = field(default_factory=AboutGpus)
    nodes: Nodes | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    windows: bool = False

    @staticmethod
    def here() -> Machine:
        """This machine's cores, CPU flags, GPUs and NUMA nodes, and the user's variables."""
        names: list[str] = []
        if hardware.gpus():
            from trainer.planning.gpu_settings import VARIABLES

            names = [name for some in VARIABLES.values() for name in some]
        return Machine(
            hardware.cores(),
            hardware.cpu_flags(),
            hardware.gpus(),
            hardware.about_gpus(),
            hardware.numa_nodes(),
            {name: os.environ[name] for name in names if name in os.environ},
            hardware.is_windows_subsystem(),
        )


def choose(
    config: RunConfig,
    device: str,
    model: ModelFacts,
    machine: Machine,
    workers_here: int,
    slow_data: bool,
    batch_size: int = 0,
    servers: bool = False,
    undecodable: str = "the samples are no JPEGs",
    without_fp16: str = "",
) -> tuple[Chosen, dict[str, str]]:
    """Choose how the run computes and reads, with reasons for ``auto``. With ``servers`` they update; ``without_fp16``
    says why fp16 is not possible.

    Args:
        undecodable: why a GPU cannot decode the samples; empty: it can.

    Raises:
        UserError: a key of ``execution`` or ``data.decode`` asks for what is not possible.
    """
    why: dict[str, str] = {}
    execution, data = config.execution, config.data
    if config.device == "auto":
        why["device"] = listed(machine.gpus) or machine.about_gpus.why or "no GPU"
    precision = config.precision
    if precision == "auto":
        case = precision_case(config, device, model, machine, workers_here, without_fp16)
        precision, why["precision"] = choose_precision(case)
    channels_last = execution.channels_last
    if channels_last == "auto":
        channels_last = model.convolutional and precision in ("bf16", "fp16")
        if channels_last:
            why["channels_last"] = "convolutions in 16 bits are fastest on (N, H, W, C)"
        else:
            why["channels_last"] = "pays for convolutions in 16 bits"
    keep_memory = execution.keep_memory
    if keep_memory == "auto":
        keep_memory = device == "cpu"
        why["keep_memory"] = (
            "giving freed blocks back to the kernel costs CPU steps" if keep_memory else "for CPUs only"
        )
    gpu, reasons, own = _on_gpu(config, device, precision, machine, workers_here, servers)
    why |= reasons
    threads: int | Literal["auto"] | None = execution.threads
    if threads is None:
        threads, why["threads"] = _threads(device, model, machine, workers_here, batch_size)
        if own and threads != "auto" and own < threads:
            threads, why["threads"] = own, f"{counted(own, 'core')} of its NUMA node for each worker there"
    num_workers: Any = data.num_workers
    takes, why_readers = taken_by(machine.gpus[:workers_here], precision, model.flops), ""
    if num_workers in (None, "auto"):
        num_workers, why_readers = choose_readers(device, machine.cores, workers_here, slow_data)
    decode, why_there = choose_decoder(config, device, undecodable, num_workers, takes, machine.cores is None)
    if why_readers and decode != "gpu":
        why_readers += rate_said(num_workers, model.reads, takes)
    why |= {"num_workers": why_readers, "decode": why_there}
    prefetch: Any = data.prefetch
    if num_workers == "auto":
        why |= {"prefetch": "from num_workers"} if prefetch == "auto" else {}
    elif not num_workers:
        prefetch, why["prefetch"] = 0, "no process reads ahead (data.num_workers)"
    elif prefetch == "auto":
        prefetch = ready_each(num_workers)
        why["prefetch"] = f"{prefetch * num_workers} batches are ready where one takes longer"
    pin_memory = data.pin_memory
    if pin_memory == "auto":
        pin_memory = device == "cuda"
        why["pin_memory"] = "faster copies to the GPU" if pin_memory else "no GPU"
    fused, why["fused_optimizer"] = _fused_optimizer(config, device, model, servers)
    values = (precision, bool(channels_last), bool(keep_memory), threads, num_workers, prefetch, bool(pin_memory))
    return Chosen(*values, fused, gpu, decode=decode), {name: reason for name, reason in why.items() if reason}


def compiled(
    config: RunConfig, device: str, model: ModelFacts, machine: Machine, workers_here: int, updates: int, servers: bool
) -> tuple[Compiling, dict[str, str]]:
    """Choose how the model is compiled in a run of so many updates, with reasons for ``auto``.

    Raises:
        UserError: a key asks for what is not possible.
    """
    if not config.compile:
        return Compiling(), {}
    from trainer.planning.compiling import CompileCase, compiling

    case = CompileCase(
        device=device,
        parameters=model.parameters - model.in_tables,
        in_tables=model.in_tables,
        in_blocks=model.in_blocks,
        batch_norm=any(kind.startswith(("BatchNorm", "SyncBatchNorm")) for kind in model.norms),
        capability=min((gpu.capability for gpu in machine.gpus[:workers_here]), default=None),
        updates=updates,
        ddp=_in_ddp(config.strategy),
        servers=servers,
    )
    return compiling(config, case)


def _in_ddp(strategy: schema.StrategyConfig) -> bool:
    """Whether torch's DDP wraps the model."""
    sharded = isinstance(strategy, schema.ShardedStrategy) and strategy.whole_model
    return sharded or strategy._target_ == schema.CollectiveStrategy._target_


def _on_gpu(
    config: RunConfig, device: str, precision: str, machine: Machine, workers_here: int, servers: bool
) -> tuple[GpuSettings, dict[str, str], int]:
    """The further settings on GPUs, the reasons, and how many cores a worker has that is bound to a NUMA node (0: none
    is)."""
    names = asdict(GpuSettings())
    if device != "cuda" and not any(getattr(config.execution, name) is True for name in names):
        return GpuSettings(), {name: "for GPUs" for name in names if getattr(config.execution, name) == AUTOMATIC}, 0
    from trainer.planning.gpu_settings import GpuCase, cores_of_a_worker, gpu_settings

    case = GpuCase(
        device=device,
        precision=precision,
        typed=config.precision != AUTOMATIC,
        workers_here=workers_here,
        capability=min((gpu.capability for gpu in machine.gpus[:workers_here]), default=None),
        several=workers_here * config.launch.nnodes > 1,
        servers=servers,
        variables=machine.variables,
        nodes=machine.nodes,
        elsewhere=machine.cores is None or not machine.gpus,
        windows=machine.windows,
    )
    chosen, why = gpu_settings(config, case)
    return chosen, why, cores_of_a_worker(case) if chosen.numa else 0


def _threads(
    device: str, model: ModelFacts, machine: Machine, workers_here: int, batch_size: int
) -> tuple[int | Literal["auto"], str]:
    one = machine.cores is not None and machine.cores // workers_here <= 1
    if device == "cpu" and not one and 0 < model.work * batch_size <= ONE_CORE_WORK:
        return 1, "a batch is so little work that threads would wait for each other"
    if machine.cores is None:
        return "auto", f"cores of each host / {counted(workers_here, 'worker')}"
    share = f"{counted(machine.cores, 'core')} / {counted(workers_here, 'worker')}"
    return max(1, machine.cores // workers_here), share


def _fused_optimizer(config: RunConfig, device: str, model: ModelFacts, servers: bool) -> tuple[bool, str]:
    """Whether the optimizer is fused, by ``optimizer.fused`` or this key; with ``auto`` also why."""
    key, asked, typed = "execution.fused_optimizer", config.execution.fused_optimizer, config.optimizer.get("fused")
    trains, fused = config.mode == "train", asked if typed is None else bool(typed)
    if asked not in ("auto", fused):
        raise UserError(f"{key}={spelled(asked)}", f"optimizer.fused={spelled(typed)} says otherwise", f"{key}=auto")
    if fused == "auto":
        why = "" if trains else "nothing is trained"
        why = why or ("" if device == "cuda" else "pays on GPUs")
        why = why or ("parameter servers make the updates, on CPUs" if servers else "")
        why = why or model.unfused or model.unfused_by_auto
        return not why, why or "one kernel moves all parameters, and skips an update without a wait in fp16"
    if fused and trains and servers and typed is None:
        why = "parameter servers make the updates, which take optimizer.fused"
        raise UserError(f"{key}=true", why, f"{key}=auto +optimizer.fused=true")
    if fused and trains and not servers and model.unfused:
        own, instead = (key, "auto") if typed is None else ("optimizer.fused", "false")
        raise UserError(f"{own}=true", model.unfused, f"{own}={instead}")
    return fused, f"optimizer.fused={spelled(typed)}" if asked == "auto" else ""


def listed(gpus: Sequence[Gpu]) -> str:
    """The GPUs in words, in their order: ``2 x NVIDIA H100 80GB HBM3``; empty: there is none."""
    alike = groupby(gpu.name for gpu in gpus)
    return ", ".join(f"{number} x {name}" if (number := len(list(same))) > 1 else name for name, same in alike)


def precision_case(
    config: RunConfig, device: str, model: ModelFacts, machine: Machine, workers_here: int, without_fp16: str = ""
) -> Case:
    """What ``precision=auto`` goes by."""
    gpus = machine.gpus[:workers_here]
    fused = config.optimizer.get("fused") or not (model.unfused or model.unfused_by_auto) or config.mode != "train"
    together = bool(config.node("strategy").get("sync_batch_norm"))  # computed by torch's own kernels in any precision
    return Case(
        device=device,
        capability=min((gpu.capability for gpu in gpus), default=None),
        bf16_units=sorted(machine.cpu_flags & {"amx_bf16", "avx512_bf16"}),
        parameters=model.parameters - model.in_tables,
        convolutional=model.convolutional,
        batch_norm=not together and any(kind.startswith("BatchNorm") for kind in model.norms),
        without_fp16=without_fp16,
        waits_in_fp16="" if fused else "with an optimizer that is not fused each update would wait for the GPU",
        speeds=model.speeds,
        before=model.precision_before,
    )


def with_strategy(config: RunConfig, workers: int, typed: Collection[str] = ()) -> tuple[RunConfig, str]:
    """Return the config with ``strategy=auto`` replaced, for this many workers, and the reason; '' if none was.

    Raises:
        UserError: a key of collective is given, and one worker has no use for it.
    """
    if config.strategy._target_ != AUTO:
        return config, ""
    chosen = schema.StrategyConfig if workers == 1 else schema.CollectiveStrategy
    options, usual = asdict(chosen()), asdict(schema.AutoStrategy())
    node = config.node("strategy")
    for name in node.keys() - options.keys():
        keys = [key for key in typed if is_of(key, [f"strategy.{name}"])]
        if keys or node[name] != usual.get(name):
            what = keys[0] if keys else f"strategy.{name}={spelled(node[name])}"
            why = "strategy=auto is single with one worker, which has no such key"
            raise UserError(what, why, "launch.nproc=2 (or strategy=collective)", keys)
    why = "one worker" if workers == 1 else f"{workers} workers"
    kept = {name: node.get(name, value) for name, value in options.items() if name != "_target_"}
    return config.replaced("strategy", {"_target_": chosen._target_, **kept}), why
