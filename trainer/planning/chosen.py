"""The settings by which a run computes and reads, as the plan has them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

BY_USER = " of the environment holds"
"""The end of a reason that names the user's own variable."""


@dataclass(frozen=True)
class GpuSettings:
    """Settings on GPUs.

    Attributes:
        tf32: matrix products and convolutions of fp32 round their inputs to 11 bits. expandable_segments: torch's
        allocator grows its blocks of memory. nccl_priority: exchanges go before other kernels. numa: each worker is
        bound to the cores of its GPU's node.
    """

    tf32: bool = False
    expandable_segments: bool = False
    nccl_priority: bool = False
    numa: bool = False


@dataclass(frozen=True)
class Compiling:
    """Whether and how the model is compiled.

    Attributes:
        mode: of torch.compile. regions: its repeated blocks are compiled, and not the whole.
    """

    compile: bool = False
    mode: str = "default"
    regions: bool = False


@dataclass(frozen=True)
class Chosen:
    """The settings by which the run computes and reads: precision, memory, threads, reading processes.
    ``auto`` is decided where the plan is for this machine.

    Attributes:
        precision: fp64, fp32, bf16 or fp16. threads: CPU threads per worker; num_workers: processes that read for each;
        prefetch: batches that each keeps ready. gpu, compiling: further settings. decode: where JPEGs are decoded,
        ``cpu`` or ``gpu``; empty: the data have no such key.
    """

    precision: str
    channels_last: bool
    keep_memory: bool
    threads: int | Literal["auto"]
    num_workers: int | Literal["auto"]
    prefetch: int | Literal["auto"]
    pin_memory: bool
    fused_optimizer: bool
    gpu: GpuSettings = field(default_factory=GpuSettings)
    compiling: Compiling = field(default_factory=Compiling)
    cuda_graph: bool = False
    decode: str = ""

    def flat(self) -> dict[str, Any]:
        """All settings by name."""
        values = {name: value for name, value in asdict(self).items() if name not in ("gpu", "compiling")}
        how = {"compile_mode": self.compiling.mode, "compile_regions": self.compiling.regions}
        compiled = {"compile": self.compiling.compile, **(how if self.compiling.compile else {})}
        return {**values, **asdict(self.gpu), **compiled}
