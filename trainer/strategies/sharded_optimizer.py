"""strategy=sharded strategy.shard=optimizer: DDP whose workers each keep the optimizer's state of some parameters.

This is ZeRO-1 (Rajbhandari et al., 2020, arXiv:1910.02054) by whole parameters: each has one worker that updates it
(:mod:`trainer.strategies.owners`) and sends it to the others. All workers have the whole gradient, as DDP leaves it, so
that clipping, the loss scale and the checks for values that are not finite are those of ``strategy=collective``.

The optimizer is the run's own, with its groups and schedule. Before its step, hooks take away the gradients of
parameters that other workers update. A parameter without a gradient is left alone by torch's rules, and gets no state.
So the class, its fused kernels and the names in a checkpoint stay. torch's ZeroRedundancyOptimizer makes an optimizer
of its own from a class, and sends its state to the first worker as pickles before each checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.config.schema import CollectiveStrategy, ShardedStrategy
from trainer.host.sharded import Piece, each_tensor, order_in_memory
from trainer.optim.states import by_name, optimizer_state, put
from trainer.optim.updater import UpdaterState
from trainer.strategies.contract import MakeUpdater, Share
from trainer.strategies.in_ddp import InDdp
from trainer.strategies.owners import owners

BUCKET = 8 << 20
"""Bytes of small parameters that are sent together, from a copy; larger ones are sent from where they are."""


class ShardedOptimizer(InDdp):
    """A worker of strategy=sharded with ``shard=optimizer``.

    Attributes:
        place: of this worker in its shard group. owned: the names of the parameters that it updates.
        sent: parameters by the place of the worker that sends them. others: those that it does not update.
    """

    Options = ShardedStrategy
    options: ShardedStrategy

    def setup(self, model: nn.Module, make_updater: MakeUpdater) -> nn.Module:
        self.group.equal_start(model)
        self.updater = make_updater(model)
        halves = {"full": "none"}.get(self.options.reduce_dtype, self.options.reduce_dtype)
        settings = CollectiveStrategy(find_unused_parameters=self.options.find_unused_parameters, comm_hook=halves)
        forward = self.in_ddp(model, settings)
        size = self.options.shard_group or self.seat.size
        self.place = self.seat.rank % size
        with self.group.naming_the_missing("the division of the optimizer"):
            self.shards: Any = dist.group.WORLD if size == self.seat.size else self.group.subgroup_of(size)
        self._divide(size)
        return forward

    def _divide(self, size: int) -> None:
        """Give each parameter to one worker of the shard group."""
        named = dict(zip(self.updater.names, self.updater.parameters, strict=True))
        found = owners({name: p.numel() for name, p in named.items()}, size)
        self.owned = {name for name, place in found.items() if place == self.place}
        self.sent = [[_row(p.detach()) for name, p in named.items() if found[name] == place] for place in range(size)]
        self.others = [p for name, p in named.items() if name not in self.owned]
        self.updater.optimizer.register_step_pre_hook(lambda *_: self._leave_to_others())
        self.updater.optimizer.register_step_post_hook(lambda *_: self._exchange())
        self._forget_others()

    def _leave_to_others(self) -> None:
        for parameter in self.others:
            parameter.grad = None

    def _exchange(self) -> None:
        """Send the parameters that this worker has updated, and receive the others."""
        with self.group.naming_the_missing("the exchange of parameters"), torch.no_grad():
            for place, tensors in enumerate(self.sent):
                if tensors:
                    dist._broadcast_coalesced(self.shards, tensors, BUCKET, place)

    def _forget_others(self) -> None:
        """Drop state of other workers' parameters, which some optimizers make before their first step."""
        for parameter in self.others:
            self.updater.optimizer.state.pop(parameter, None)

    # --- state -----------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> Share:
        """The optimizer's state in pieces; the first worker also has the places of all others' pieces."""
        updater = UpdaterState(**self.updater.state())
        writes = self.seat.rank == self.place  # of the first shard group, for all
        state = each_tensor(optimizer_state(updater.optimizer).state, self._piece) if writes else {}
        with self.group.naming_the_missing("the pieces of the optimizer"):
            found = self.group.gather_objects(_without_tensors(state))
        for others in found[1:]:
            state |= others
        return Share({"updater": vars(replace(updater, optimizer={**updater.optimizer, "state": state}))})

    def _piece(self, tensor: torch.Tensor) -> Piece:
        return Piece(tensor, (self.seat.rank,), tuple(tensor.shape), tuple(order_in_memory(tensor)))

    def pieces(self, state: Any) -> Any:
        return state

    def load(self, folder: Path, share: Share) -> None:
        """Load the state of this worker's parameters alone."""
        updater = UpdaterState(**share.updater)
        states = by_name(updater.optimizer, updater.names)
        owned = {name: state for name, state in states.items() if name in self.owned}
        self.updater.load(**vars(replace(updater, optimizer=put(updater.optimizer, updater.names, owned))))
        self._forget_others()


def _row(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor as one row. torch sends a single tensor in place, and fails to copy it onto itself where
    its strides are others than those of its shape."""
    return tensor.permute(order_in_memory(tensor) or [*range(tensor.dim())]).view(-1)


def _without_tensors(node: Any) -> Any:
    """A nested state in which pieces have no tensors."""
    if isinstance(node, Piece):
        return replace(node, tensor=None)
    return {key: _without_tensors(one) for key, one in node.items()} if isinstance(node, Mapping) else node
