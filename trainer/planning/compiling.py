"""Decides whether the model is compiled, and how: ``compile=auto``, ``execution.compile_mode``, repeated blocks."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.keys import spelled
from trainer.config.run_config import RunConfig
from trainer.config.schema import ShardedStrategy
from trainer.errors import UserError
from trainer.host import hardware
from trainer.planning.chosen import Compiling
from trainer.planning.precision import BIG_MODEL, VOLTA

LEAST_UPDATES = 1000
"""Updates that win back a minute of compiling."""
SHARE = 0.75
"""Share of the parameters that repeated blocks hold, from which they alone are compiled."""
WITH_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
"""Modes that record CUDA graphs, and the same without."""


@dataclass(frozen=True)
class CompileCase:
    """What compiling depends on.

    Attributes:
        parameters: without those of tables; in_tables: those. in_blocks: share of the parameters that is in blocks
        which come again. batch_norm: the model has batch norms. capability: of the weakest GPU; None: not known here.
        updates: of the run. ddp: strategy=collective wraps the model. servers: parameter servers make the updates.
    """

    device: str
    parameters: int
    in_tables: int
    in_blocks: float
    batch_norm: bool
    capability: tuple[int, int] | None
    updates: int
    ddp: bool = False
    servers: bool = False


def compiling(config: RunConfig, case: CompileCase) -> tuple[Compiling, dict[str, str]]:
    """Choose how the model is compiled; returns it, and the reasons of what ``auto`` decided.

    Raises:
        UserError: ``execution.compile_mode`` cannot be.
    """
    execution, why = config.execution, dict[str, str]()
    compiles = config.compile
    if compiles == "auto":
        reason = _why_not(config, case)
        compiles = not reason
        why = {"compile": reason or f"{case.parameters:,} parameters: fused kernels move less memory"}
    if not compiles:
        return Compiling(), why
    _check_mode(config, case)
    regions = execution.compile_regions
    if regions == "auto":
        regions = case.in_blocks >= SHARE
        shown = f"{case.in_blocks:.0%} of the parameters are in blocks that come again"
        why |= {"compile_regions": f"{shown}: each kind is compiled once" if regions else f"only {shown}"}
    return Compiling(True, str(execution.compile_mode), bool(regions)), why


def _why_not(config: RunConfig, case: CompileCase) -> str:
    """Why ``auto`` does not compile; empty: it does."""
    if config.mode != "train":
        return "nothing is trained"
    if case.device == "cpu":
        return "on a CPU it pays for some models only: compile=true tries it"
    if case.servers or case.in_tables:
        return "the rows of tables are looked up outside of a compiled graph"
    if isinstance(config.strategy, ShardedStrategy) and not config.strategy.whole_model:
        return "parameters are gathered between the parts that torch would compile as one"
    if config.recompute != "none":
        return f"recompute={spelled(config.recompute)} decides what is computed again, which a compiler does itself"
    if case.capability is not None and case.capability < VOLTA:
        return "Triton needs a GPU of compute capability 7.0"
    if case.parameters < BIG_MODEL:
        return f"with {case.parameters:,} parameters, below {BIG_MODEL:,}, it does not pay"
    if case.updates < LEAST_UPDATES:
        return f"{case.updates:,} updates are too few to win back about a minute of compiling"
    if config.execution.compile_backend == "inductor" and (lacks := lacks_for_kernels(case.device)):
        return lacks
    try:
        from trainer.host.cache import check_code

        check_code()
    except UserError as error:
        return f"compiled code cannot be kept: {error.why}"
    return ""


def lacks_for_kernels(device: str) -> str:
    """What compiled kernels of a device lack on this machine; empty: nothing."""
    if device == "cpu" and hardware.cpp_compiler() is None:
        return "there is no C++ compiler on this machine (g++ or clang++)"
    if device == "cuda" and hardware.c_compiler() is None:
        return "there is no C compiler on this machine (gcc or clang), which Triton needs"
    if not (header := hardware.python_header()).is_file():
        return f"there is no {header}, which compiled kernels include: install Python's development files"
    return ""


def _check_mode(config: RunConfig, case: CompileCase) -> None:
    """Refuse a mode that cannot be.

    Raises:
        UserError: it cannot.
    """
    mode, backend = str(config.execution.compile_mode), str(config.execution.compile_backend)
    key = f"execution.compile_mode={mode}"
    if mode != "default" and backend != "inductor":
        why = f"is for inductor, and execution.compile_backend={backend} writes no kernels"
        raise UserError(key, why, "execution.compile_mode=default")
    if mode == "reduce-overhead" and case.device == "cpu":
        raise UserError(key, "records CUDA graphs, and this run trains on CPUs", "execution.compile_mode=default")
    if mode in WITH_GRAPHS and case.device == "cuda" and case.ddp and case.batch_norm:
        why = "records CUDA graphs, in which batch norm under DDP goes wrong (pytorch#139207)"
        raise UserError(key, why, f"execution.compile_mode={WITH_GRAPHS[mode]}")
