"""What DDP's workers send instead of whole gradients: fp16 or bf16 halves, PowerSGD's low-rank factors, or DGC's
greatest values."""

# No `from __future__ import annotations` here: DDP compares a hook's annotations with the types themselves.

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from trainer.config.schema import CollectiveStrategy
from trainer.optim.updater import Updater
from trainer.strategies.dgc import Dgc, sparse_exchange
from trainer.strategies.routes import Routes, by_its_way

Layout = dict[int, list[tuple[int, int]]]
"""For each bucket, (number, elements) of its parameters."""
Exchanged = torch.futures.Future[torch.Tensor]
RANK = "matrix_approximation_rank"
OPTIONS = (RANK, "start_powerSGD_iter")
FACTORS = ("p_memory_dict", "q_memory_dict")
"""Of torch's PowerSGDState: what the config sets, and the factors of a rank."""


def _halved_to_bf16(state: object, bucket: dist.GradBucket) -> Exchanged:
    """torch's bf16 hook under a name of our own, because DDP refuses it by name if torch was built without CUDA."""
    return bf16_compress_hook(state, bucket)  # type: ignore[arg-type]


HALVES = {"fp16": fp16_compress_hook, "bf16": _halved_to_bf16}


class PowerSgd:
    """PowerSGD (Vogels et al., 2019, arXiv:1905.13727) by torch's hook, with error feedback and warm start.

    What a worker's factors leave out of its gradient is added to its next one. These errors are its own. torch keeps
    them by bucket; they are kept apart by parameter where DDP's buckets change.

    Args:
        parameters: the model's, in their order.
        rank: of the factors; start_step: updates with whole gradients before.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], rank: int, start_step: int) -> None:
        self.numbers = {id(p): number for number, p in enumerate(parameters)}
        # A column of zeros (of a parameter that a step does not use) is divided by its norm.
        self.torch = PowerSGDState(None, rank, start_step, orthogonalization_epsilon=1e-8)
        self.layout: Layout = {}
        self.apart: dict[int, torch.Tensor] = {}

    @property
    def compression(self) -> float:
        """Gradient elements divided by elements sent, over all compressed updates so far; 0 if there are none."""
        return float(self.torch.compression_stats()[0])

    def state(self) -> dict[str, Any]:
        """PowerSGD's errors, factors and counts so far, for :meth:`load`."""
        kept = {
            name: getattr(self.torch, name) for name in self.torch.__slots__ if name not in ("process_group", "rng")
        }
        return {"layout": self.layout, "apart": self.apart, "memory": kept, "rng": self.torch.rng.get_state()}

    def load(self, layout: Layout, apart: dict[int, torch.Tensor], memory: Mapping[str, Any], rng: Any) -> None:
        """Restore what :meth:`state` returned; of another rank without the factors. The config's own options stay."""
        self.layout, self.apart = dict(layout), dict(apart)
        other_rank = memory[RANK] != self.torch.matrix_approximation_rank
        for name, value in memory.items():
            if name not in OPTIONS and not (other_rank and name in FACTORS):
                setattr(self.torch, name, value)
        self.torch.rng.set_state(rng)

    def lay_out(self, index: int, layout: list[tuple[int, int]]) -> None:
        """Fit PowerSGD's memory of a bucket to the (number, elements) of its current parameters."""
        if self.layout.get(index) == layout:
            return
        memory = self.torch
        if index in self.layout:
            for old, members in self.layout.items():
                if old in memory.error_dict:
                    pieces = memory.error_dict[old].split([elements for _, elements in members])
                    self.apart |= {number: piece for (number, _), piece in zip(members, pieces, strict=True)}
            self.layout.clear()
            for kept in (memory.error_dict, memory.p_memory_dict, memory.q_memory_dict):
                kept.clear()
        self.layout[index] = layout
        if any(number in self.apart for number, _ in layout):
            some = next(iter(self.apart.values()))
            memory.error_dict[index] = torch.cat([self.apart.get(n, some.new_zeros(size)) for n, size in layout])


def _low_rank(state: PowerSgd, bucket: dist.GradBucket) -> Exchanged:
    """torch's PowerSGD hook, with memory that :meth:`PowerSgd.lay_out` has fitted to the bucket.

    It sums three times, each time from the answer to the sum before. Gloo answers on threads of its own, so that two
    buckets' sums (or one's and DDP's own) would meet in another order on another worker, and break the run: there a
    bucket is waited for before the next one begins. NCCL keeps the order of the calls.
    """
    state.lay_out(bucket.index(), [(state.numbers[id(p)], p.numel()) for p in bucket.parameters()])
    exchanged = powerSGD_hook(state.torch, bucket)
    if not bucket.buffer().is_cuda:
        exchanged.wait()
    return exchanged


def register(
    ddp: DistributedDataParallel, options: CollectiveStrategy, updater: Updater, routes: Routes | None = None
) -> PowerSgd | Dgc | None:
    """Register the hook of ``strategy.comm_hook`` or of these ways with DDP.

    Returns:
        The state of PowerSGD or DGC, or None.
    """
    if routes is not None:
        ddp.register_comm_hook(routes, by_its_way)
    if options.comm_hook in HALVES:
        ddp.register_comm_hook(None, HALVES[options.comm_hook])
    if options.comm_hook == "dgc":
        gathered = Dgc(ddp.module.named_parameters(), options.dgc, updater, dist.get_world_size())
        ddp.register_comm_hook(gathered, sparse_exchange)
        return gathered
    if options.comm_hook != "powersgd":
        return None
    memory = PowerSgd(ddp.module.parameters(), options.powersgd.rank, options.powersgd.start_step)
    ddp.register_comm_hook(memory, _low_rank)
    return memory
