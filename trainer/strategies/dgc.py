"""Deep gradient compression (Lin et al., 2018, arXiv:1712.01887): ``strategy.comm_hook=dgc``.

From ``rampup_begin_step`` on a worker sends, of each large parameter, only the greatest of what it has gathered. With
its gradient g, the weight decay in it, and the optimizer's momentum m:

    u = m u + g         momentum correction: each worker has a momentum of its own, and the optimizer has none any more
    v = v + u           what was not sent so far
    send v where |v| is greatest, and set v and u to 0 there (u: momentum factor masking)

Where all is sent (sparsity 0) nothing is late, u stays, and an update is that of momentum. A parameter of fewer than
``min_size`` numbers goes as it is. Each worker sends as many numbers, with their places, to all others.
"""

# No `from __future__ import annotations` here: DDP compares a hook's annotations with the types themselves.

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from trainer.config.schema.strategy import DgcOptions
from trainer.host import transfers
from trainer.optim.updater import Updater
from trainer.strategies.comm_hook_checks import PLACE_BYTES


class Dgc:
    """What this worker has not sent yet, and its momentum.

    Args:
        named: the model's parameters by name.
        updater: its optimizer is torch's SGD.
        workers: their number.
    """

    def __init__(
        self, named: Iterable[tuple[str, torch.nn.Parameter]], options: DgcOptions, updater: Updater, workers: int
    ) -> None:
        self.options, self.updater, self.workers = options, updater, workers
        self.names = {id(p): name for name, p in named if p.numel() >= options.min_size}
        self.groups: tuple[Any, dict[int, Mapping[str, Any]]] = (None, {})
        self.momenta: dict[str, torch.Tensor] = {}
        self.kept: dict[str, torch.Tensor] = {}
        self.whole_bytes = self.sent_bytes = 0

    @property
    def compression(self) -> float:
        """Bytes of gradients divided by bytes sent, over all compressed updates so far; 0 if there are none."""
        return self.whole_bytes / self.sent_bytes if self.sent_bytes else 0.0

    @property
    def sparsity(self) -> float | None:
        """The share that is not sent in the current update; None: gradients go as they are."""
        options, step = self.options, self.updater.steps - self.options.rampup_begin_step
        return None if step < 0 else sparsity_at(options, step)

    def state(self) -> dict[str, Any]:
        """This worker's momenta, what it has kept, and bytes so far, for :meth:`load`."""
        return {
            "momenta": self.momenta,
            "kept": self.kept,
            "whole_bytes": self.whole_bytes,
            "sent_bytes": self.sent_bytes,
        }

    def load(
        self, momenta: Mapping[str, torch.Tensor], kept: Mapping[str, torch.Tensor], whole_bytes: int, sent_bytes: int
    ) -> None:
        """Restore what :meth:`state` returned."""
        self.momenta, self.kept = dict(momenta), dict(kept)
        self.whole_bytes, self.sent_bytes = whole_bytes, sent_bytes

    def forget(self) -> None:
        """Begin anew."""
        self.load({}, {}, 0, 0)

    def chosen(
        self, parameter: torch.Tensor, gradient: torch.Tensor, sparsity: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a gradient in, and return the values to send and their places.

        Args:
            gradient: flat, as the backward has it.
        """
        name, group = self.names[id(parameter)], self._group_of(parameter)
        m, decay = group.get("momentum", 0.0), group.get("weight_decay", 0.0)
        if self.options.clip_norm is not None:
            limit = self.options.clip_norm * self.workers**-0.5
            gradient = gradient * (limit / (gradient.norm() + 1e-6)).clamp_max(1.0)
        if decay:
            gradient = gradient + decay * parameter.detach().reshape(-1)
        if name not in self.momenta:  # the optimizer's momentum so far, which is the same on all workers
            before = self.updater.optimizer.state[parameter].pop("momentum_buffer", None)
            own = torch.zeros_like(gradient) if before is None else before.reshape(-1).clone()
            self.momenta[name], self.kept[name] = own, torch.zeros_like(gradient)
        u, v = self.momenta[name], self.kept[name]
        u.mul_(m).add_(gradient)
        v.add_(gradient.add(u, alpha=m) if group.get("nesterov") else u)
        count = max(1, int(len(v) * (1 - sparsity)))
        places = v.abs().topk(count, sorted=False).indices if count < len(v) else torch.arange(len(v), device=v.device)
        values = v[places]
        v[places] = 0.0
        if count < len(v):
            u[places] = 0.0
        self.whole_bytes += gradient.nbytes
        self.sent_bytes += values.nbytes + PLACE_BYTES * count
        return values, places

    def step(self) -> None:
        """Apply the update: SGD for what was compressed, the optimizer for all else."""
        sums = {}
        if self.sparsity is not None:
            sums = {p: p.grad for p in self.updater.parameters if id(p) in self.names and p.grad is not None}
        for parameter in sums:
            parameter.grad = None
        self.updater.step()
        with torch.no_grad():
            for parameter, total in sums.items():
                parameter.sub_(total, alpha=self._group_of(parameter).get("lr"))

    def _group_of(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        """The optimizer's group of a parameter. An optimizer that loads its state makes new groups."""
        known, by_parameter = self.groups
        if known is not (groups := self.updater.optimizer.param_groups):
            by_parameter = {id(p): group for group in groups for p in group.get("params", ())}
            self.groups = groups, by_parameter
        return by_parameter[id(parameter)]


def sparsity_at(options: DgcOptions, step: int) -> float:
    """The share that is not sent, by the number of updates since compression began."""
    index = step * len(options.sparsity) // options.rampup_step
    return float(options.sparsity[min(index, len(options.sparsity) - 1)])


def sparse_exchange(state: Dgc, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's hook: exchange the bucket's large parameters by their greatest values, and the others as they are.

    The exchanges of a bucket end before those of the next one begin, as those of PowerSGD do on Gloo.
    """
    buffer, sparsity = bucket.buffer(), state.sparsity
    pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
    large = [pair for pair in pairs if sparsity is not None and id(pair[0]) in state.names]
    others = [pair for pair in pairs if not any(pair[0] is p for p, _ in large)]
    for some, exchange in ((others, _as_they_are), (large, lambda some: _by_values(state, some, sparsity or 0.0))):
        if some:
            exchange(some)
    return transfers.answer(buffer)


Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Parameters and their gradients, which are parts of a bucket."""


def _as_they_are(pairs: Pairs) -> None:
    flat = torch.cat([gradient.reshape(-1) for _, gradient in pairs])
    dist.all_reduce(flat.div_(dist.get_world_size()))
    for (_, gradient), part in zip(pairs, flat.split([g.numel() for _, g in pairs]), strict=True):
        gradient.copy_(part.view(gradient.shape))


def _by_values(state: Dgc, pairs: Pairs, sparsity: float) -> None:
    chosen = [state.chosen(p, gradient.reshape(-1), sparsity) for p, gradient in pairs]
    values = torch.cat([value for value, _ in chosen])
    places = torch.cat([place for _, place in chosen]).int()
    all_values, all_places = _gathered(values), _gathered(places)
    counts = [len(value) for value, _ in chosen]
    for (_, gradient), *parts in zip(pairs, *(one.split(counts, 1) for one in (all_values, all_places)), strict=True):
        total = torch.zeros_like(gradient.reshape(-1))
        for value, place in zip(*parts, strict=True):
            total.index_add_(0, place, value)
        gradient.copy_(total.div_(state.workers).view(gradient.shape))


def _gathered(own: torch.Tensor) -> torch.Tensor:
    """The tensors (N,) of all workers, as (workers, N)."""
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return torch.stack(parts)
