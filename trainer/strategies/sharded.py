"""strategy=sharded: each worker holds a shard of parameters, gradients and optimizer state (torch's FSDP2).

What a worker holds between two updates is its shard alone (ZeRO, Rajbhandari et al., 2020, arXiv:1910.02054). Before a
block computes, its workers gather its parameters; after its backward they reduce its gradient and keep their shards.

    shard=parameters   a block's parameters are dropped after its forward, and gathered again for its backward (ZeRO-3)
    shard=gradients    they stay from the forward to the end of the backward (ZeRO-2)

With ``shard_group=N`` a model is sharded over N neighbouring workers; the groups hold replicas, whose gradients are
averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from trainer.config.schema import ShardedStrategy
from trainer.host.sharded import Piece, each_tensor, is_sharded, local, put, whole
from trainer.host.transfers import recorded
from trainer.models.blocks import chosen
from trainer.strategies.contract import MakeUpdater
from trainer.strategies.in_group import InGroup
from trainer.strategies.process_group import reduce_scatter

DTYPES = {"full": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class _FullNorm(nn.Module):
    """Comes before the class of a batch norm where parameters are gathered in 16 bits: torch wants them in the dtype of
    the running statistics, which keep theirs."""

    running_mean: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        gathered = self._parameters
        self._parameters = {n: p if p is None else p.to(self.running_mean.dtype) for n, p in gathered.items()}  # type: ignore[misc]
        try:
            normalised: torch.Tensor = super().forward(input)
            return normalised
        finally:
            self._parameters = gathered


class ReduceScatter:
    """FSDP's reduce-scatter where Gloo exchanges."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for an exchange."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Reduce the workers' inputs (workers * N,) into this worker's output (N,); ``op`` is SUM or AVG."""
        reduce_scatter(output_tensor, input_tensor, group)
        if op == dist.ReduceOp.AVG:
            output_tensor /= group.size()


class Sharded(InGroup):
    """A worker of strategy=sharded. The workers of a shard group meet in each forward and each backward."""

    Options = ShardedStrategy
    options: ShardedStrategy

    @property
    def sends_values(self) -> bool:
        """Whether the other workers need no values. (Offloaded shards and buffers would be made in two places.)"""
        return self.options.init == "broadcast" and not self.options.offload

    def setup(self, model: nn.Module, make_updater: MakeUpdater) -> nn.Module:
        if self.options.init != "broadcast":
            self.group.equal_start(model)
        for parameter in model.parameters():  # FSDP cuts rows of contiguous memory
            parameter.data = parameter.data.contiguous()
        values = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
        with self.group.naming_the_missing("the sharding of the model"):
            mesh = self._mesh()
            if DTYPES[self.options.param_dtype] is not None:
                _keep_norms_full(model)
            self.parts = [*chosen(model, self.options.wrap, "strategy.wrap")[::-1], model]  # inner ones first
            for block in self.parts:
                fully_shard(
                    block,
                    mesh=mesh,
                    reshard_after_forward=self.options.shard == "parameters",
                    mp_policy=MixedPrecisionPolicy(
                        param_dtype=DTYPES[self.options.param_dtype], reduce_dtype=DTYPES[self.options.reduce_dtype]
                    ),
                    offload_policy=CPUOffloadPolicy() if self.options.offload else OffloadPolicy(),
                )
                if not self.seat.device.startswith("cuda"):
                    block.set_custom_reduce_scatter(ReduceScatter())  # type: ignore[operator]
        if self.options.init == "broadcast":
            self._receive(model, values)
        self.shards = mesh.get_group(mesh.ndim - 1)
        self.model, self.updater = model, make_updater(model)
        self.updater.whole_norm = self._whole_norm
        return model

    def _receive(self, model: nn.Module, values: list[torch.Tensor]) -> None:
        """Give all workers the first one's values, tensor by tensor, so that no device holds more than one whole. They
        come into the same memory, because a thread of Gloo may hold its tensor a little longer than the exchange.

        Args:
            values: the tensors of this worker's model before it was cut.
        """
        device, first = torch.device(self.seat.device), self.seat.rank == 0
        with self.group.naming_the_missing("the equal start"), torch.no_grad():
            if any(tensor.is_meta for tensor in values):
                model.to_empty(device=device)
            rooms = {dtype: _room(values, dtype, device) for dtype in {own.dtype for own in values}}
            values.reverse()
            for live in (*model.parameters(), *model.buffers()):
                own = values.pop()
                sent = rooms[own.dtype][: own.numel()].view(own.shape)
                if first:
                    sent.copy_(own)
                dist.broadcast(sent, 0)
                put(live, sent)

    def _mesh(self) -> DeviceMesh:
        """The workers as one row, or as rows of ``shard_group`` workers, of which each holds a whole model."""
        device, size = torch.device(self.seat.device).type, self.seat.size
        group = self.options.shard_group or size
        if group == size:
            return init_device_mesh(device, (size,), mesh_dim_names=("shard",))
        return init_device_mesh(device, (size // group, group), mesh_dim_names=("replica", "shard"))

    def weight(self, denominator: float) -> float | torch.Tensor:
        """Return 1.0, or if they differ denominator * workers / all: FSDP averages the workers' mean gradients."""
        return self.group.weight(denominator)

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        with self.group.naming_the_missing("the exchange of parameters and gradients"):
            yield
            if not torch.is_grad_enabled():
                self._reshard()

    def _reshard(self) -> None:
        """Drop the parameters that a forward without a backward has gathered."""
        for part in self.parts:
            part.reshard()  # type: ignore[operator]

    def step(self, samples: int) -> None:
        self.updater.step()

    def _whole_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """The L2 norm of the whole gradient, from that of this worker's shards."""
        square = norm.square()
        dist.all_reduce(square, group=self.shards)
        return square.sqrt()

    def synchronize(self) -> None:
        self.group.agree_on_buffers(self.model)

    # --- state -----------------------------------------------------------------------------------------------------

    def gathered(self, state: Any) -> Any:
        with self.group.naming_the_missing("the gathering of the model"), torch.no_grad():
            self._reshard()
            found = each_tensor(state, self._gathered)
        if self.seat.device.startswith("cuda"):
            self.wait_for(recorded(torch.device(self.seat.device)))
        return found

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """One tensor after the other, so that no device holds more than one of them whole. From a GPU they come to
        pinned memory, and are waited for together."""
        if not is_sharded(tensor):
            return tensor
        there = whole(tensor.detach())
        if self.seat.rank:
            return there.new_empty(0)
        copy = torch.empty(there.shape, dtype=there.dtype, pin_memory=there.is_cuda)
        return copy.copy_(there, non_blocking=True)

    def pieces(self, state: Any) -> Any:
        self._reshard()
        return each_tensor(state, self._piece)

    def _piece(self, tensor: torch.Tensor) -> Piece | torch.Tensor:
        """The shard of a worker of the first shard group, which writes the model for all."""
        if not is_sharded(tensor):
            return tensor
        group = self.options.shard_group or self.seat.size
        own = local(tensor.detach()) if self.seat.rank < group else None
        return Piece(own, tuple(range(group)), tuple(tensor.shape))


def _keep_norms_full(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
            own = type(module)
            module.__class__ = type(own.__name__, (_FullNorm, own), {})


def _room(tensors: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for the largest of the tensors of a dtype."""
    most = max(tensor.numel() for tensor in tensors if tensor.dtype == dtype)
    return torch.empty(most, dtype=dtype, device=device)
