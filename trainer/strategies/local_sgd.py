"""strategy=local_sgd: each worker takes its own steps, and every k_steps updates the parameters are averaged.

Until ``begin_step`` workers average after every update: their parameters, or their gradients (post-local SGD, Lin et
al., 2020, arXiv:1808.07217). Afterwards they average every ``k_steps`` updates, or as often as the loss says: adaptive.
An average replaces the parameters, or is a step of an outer optimizer (DiLoCo). With fragments, parts of the model are
averaged in turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.checkpoint.tensor_tree import on_device
from trainer.config.schema import LocalSgdStrategy
from trainer.config.schema.strategy import OuterOptions, StreamingOptions
from trainer.strategies.adaptive_steps import AdaptiveSteps
from trainer.strategies.contract import MakeUpdater, Share
from trainer.strategies.in_group import InGroup
from trainer.strategies.outer_optimizer import OuterOptimizer, Wait
from trainer.strategies.seat import Seat

SINCE, ADAPTIVE, OUTER = "since", "adaptive", "outer"
"""In a worker's share of a checkpoint: updates so far; since the last average updates, and the loss's denominators; and
the states of what options need."""


@dataclass
class Fragment:
    """Parameters that are averaged together.

    Attributes:
        names: of the parameters. since, denominator: since their last average updates, which all workers make, also
        where one has no sample in them, and the loss's denominators. due: update after which their exchange under way
        is used. arriving: that exchange.
    """

    names: Sequence[str]
    since: int = 0
    denominator: float = 0.0
    due: int = 0
    arriving: Wait | None = None

    def state(self) -> dict[str, Any]:
        """What the next averages depend on, for :meth:`restore`. An exchange under way is waited for."""
        mean = None if self.arriving is None else self.arriving()
        own = {"names": self.names, "since": self.since, "denominator": self.denominator}
        return {**own, "due": self.due, "mean": mean}

    def restore(
        self, names: Sequence[str], since: int, denominator: float, due: int, mean: torch.Tensor | None
    ) -> None:
        """Restore the state of a fragment of a checkpoint, if it has the same parameters."""
        if list(names) == list(self.names):
            self.since, self.denominator, self.due = since, denominator, due
            self.arriving = None if mean is None else lambda: mean


class LocalSgd(InGroup):
    """A worker of strategy=local_sgd (Stich, 2019, arXiv:1805.09767).
    The average is weighted by the samples behind each replica, or with class weights by the sum of theirs."""

    Options = LocalSgdStrategy
    options: LocalSgdStrategy

    def __init__(self, config: Mapping[str, Any], seat: Seat) -> None:
        super().__init__(config, seat)
        self.updates = 0
        self.coming: float | None = None
        self.adaptive: AdaptiveSteps | None = None
        self.outer: OuterOptimizer | None = None

    def setup(self, model: nn.Module, make_updater: MakeUpdater) -> nn.Module:
        options, streaming = self.options, self.options.streaming
        self.group.equal_start(model)
        self.model, self.updater = model, make_updater(model)
        self.parameters: dict[str, torch.Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.fragments = [Fragment(names) for names in divided(self.parameters, streaming.fragments)]
        if (options.outer, options.exchange, streaming) != (OuterOptions(), "full", StreamingOptions()):
            outer = options.outer
            self.outer = OuterOptimizer(self.parameters, outer.lr, outer.momentum, options.exchange)
        if options.adaptive:
            self.adaptive = AdaptiveSteps(options.k_steps, options.begin_step, self.seat.device, self.wait_for)
        return model

    # --- an update ---------------------------------------------------------------------------------------------------

    @property
    def _shares_gradients(self) -> bool:
        """Whether workers average the gradients of the current update (post-local SGD)."""
        return self.options.begin == "gradients" and self.updates < self.options.begin_step

    def weight(self, denominator: float) -> float | torch.Tensor:
        self.coming = denominator
        if self.adaptive is not None:
            self.adaptive.begin(self.lr)
        return self.group.weight(denominator) if self._shares_gradients else 1.0

    def backward(self, loss: torch.Tensor) -> None:
        if self.adaptive is not None:
            self.adaptive.add(loss)
        super().backward(loss)

    def step(self, samples: int) -> None:
        if self._shares_gradients:
            self._average_gradients()
        self.updater.step()
        self._done(samples)

    def skip(self, samples: int) -> None:
        self.updater.skip()
        self._done(samples)

    def _done(self, samples: int) -> None:
        """An update is over, after which the workers may exchange."""
        shared_gradients = self._shares_gradients
        self.updates += 1
        if self.adaptive is not None:
            self.adaptive.end()
        for fragment in self.fragments:
            fragment.since += not shared_gradients
            fragment.denominator += 0.0 if shared_gradients else samples if self.coming is None else self.coming
        if self.updates <= self.options.begin_step:
            if not shared_gradients:
                self._average(self.fragments)
            if self.outer is not None and self.updates == self.options.begin_step:
                self.outer.agree()
            return
        self._use([fragment for fragment in self.fragments if fragment.arriving and fragment.due <= self.updates])
        if due := self._due(self.updates):
            if self.adaptive is not None:
                with self.group.naming_the_missing("the average of the losses"):
                    [share] = self._shares_of_average(due)
                    self.adaptive.exchanged(self.updates, self.lr, share, _summed)
            self._exchange(due, self.options.streaming.delay)

    def _due(self, update: int) -> list[Fragment]:
        """What workers exchange after an update; of several fragments each in turn."""
        if self.adaptive is not None:
            return self.fragments if self.adaptive.due(update) else []
        every, count = self.options.k_steps, len(self.fragments)
        return [f for n, f in enumerate(self.fragments) if update % every == n * every // count % every]

    def next_meeting(self, step: int) -> int:
        following = step + 1
        if following <= self.options.begin_step:
            return following
        if self.adaptive is not None:
            return max(following, self.adaptive.next())
        while not self._due(following):
            following += 1
        return following + self.options.streaming.delay  # who has used an exchange knows that all have begun it

    # --- averages ----------------------------------------------------------------------------------------------------

    def _exchange(self, fragments: Sequence[Fragment], delay: int = 0) -> None:
        """Average fragments of the parameters.

        Args:
            delay: updates until the average is used.
        """
        if self.outer is None:
            self._average(fragments)
            return
        with self.group.naming_the_missing("the average of the parameters"):
            for fragment, share in zip(fragments, self._shares_of_average(fragments), strict=True):
                fragment.arriving, fragment.due = self.outer.begin(fragment.names, share), self.updates + delay
                fragment.since, fragment.denominator = 0, 0.0
        if not delay:
            self._use(fragments)

    def _use(self, fragments: Sequence[Fragment]) -> None:
        """Wait for exchanges under way, and take the outer steps."""
        keep = self.options.streaming.mix
        for fragment in fragments:
            assert fragment.arriving is not None and self.outer is not None
            with self.group.naming_the_missing("the average of the parameters"):
                mean = fragment.arriving()
            self.outer.step(fragment.names, mean, keep if fragment.since else 0.0)
            fragment.arriving = None

    @torch.no_grad()
    def _average(self, fragments: Sequence[Fragment]) -> None:
        """Replace my parameters by the mean over workers, weighted by the denominators since the last average."""
        own = [[self.parameters[name] for name in fragment.names] for fragment in fragments]
        with self.group.naming_the_missing("the average of the parameters"):
            shares = self._shares_of_average(fragments)
            # In logical order: in memory the elements of channels_last weights lie otherwise, and `view` refuses them.
            parts = [
                torch.cat([p.reshape(-1) for p in some]).mul_(share) for some, share in zip(own, shares, strict=True)
            ]
            weighted = _summed(torch.cat(parts) if len(parts) > 1 else parts[0])
        live = [p for some in own for p in some]
        mean = weighted.split([p.numel() for p in live])
        torch._foreach_copy_(live, [part.view(p.shape) for part, p in zip(mean, live, strict=True)])
        for fragment in fragments:
            fragment.since, fragment.denominator = 0, 0.0

    @torch.no_grad()
    def _average_gradients(self) -> None:
        """Replace my gradients by the mean over workers. A parameter that no worker has used stays without one."""
        live = [*self.parameters.values()]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in live]
        with self.group.naming_the_missing("the exchange of gradients"):
            mean = _summed(torch.cat([g.reshape(-1) for g in gradients]) / self.seat.size)
        for p, own, part in zip(live, gradients, mean.split([p.numel() for p in live]), strict=True):
            if p.grad is not None or part.any():
                p.grad = own.copy_(part.view(p.shape))

    def _shares_of_average(self, fragments: Sequence[Fragment]) -> Sequence[float | torch.Tensor]:
        """This worker's share of each fragment's mean. Shares that differ stay on the device: reading would wait."""
        if self.seat.others.even:
            return [1.0 / self.seat.size] * len(fragments)
        behind = [f.denominator for f in fragments]
        own = torch.cat([torch.full((1,), one, dtype=torch.float64, device=self.seat.device) for one in behind])
        everybody = _summed(own.clone())
        return [*torch.where(everybody > 0, own / everybody, 1.0 / self.seat.size)]

    def synchronize(self) -> None:
        self._use([fragment for fragment in self.fragments if fragment.arriving])
        if behind := [fragment for fragment in self.fragments if fragment.since]:
            self._exchange(behind)
        self.group.agree_on_buffers(self.model)

    # --- state -------------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> Share:
        farthest = max(self.fragments, key=lambda fragment: fragment.since)
        own: dict[str, Any] = {SINCE: (self.updates, farthest.since, farthest.denominator)}
        if self.adaptive is not None:
            own |= {ADAPTIVE: self.adaptive.state()}
        if self.outer is not None:
            own |= {OUTER: self.outer.state(), "fragments": [fragment.state() for fragment in self.fragments]}
        return Share({"updater": self.updater.state()}, own)

    def load(self, folder: Path, share: Share) -> None:
        super().load(folder, share)
        own = on_device(share.own, self.seat.device)
        self.updates, since, denominator = own[SINCE]
        for fragment in self.fragments:
            fragment.since, fragment.denominator, fragment.arriving = since, denominator, None
            for one in own.get("fragments") or ():
                fragment.restore(**one)
        if self.adaptive is not None and ADAPTIVE in own:
            self.adaptive.load(own[ADAPTIVE])
        if self.outer is not None:
            self._load_outer(own.get(OUTER))

    def _load_outer(self, saved: Mapping[str, Any] | None) -> None:
        """Restore the outer optimizer; where the run had none, workers begin with their average."""
        assert self.outer is not None
        if saved is not None:
            self.outer.load(**saved)
            return
        self._average(self.fragments)
        self.outer.agree()

    def weights(self, own: Sequence[Mapping[str, Any]]) -> list[float]:
        behind = [one[SINCE][-1] for one in own]
        return [one / sum(behind) if any(behind) else 1 / len(behind) for one in behind]

    def averaged(self, own: Mapping[str, Any]) -> dict[str, Any]:
        fragments = [{**one, "since": 0, "denominator": 0.0} for one in own.get("fragments") or ()]
        return {**own, SINCE: (own[SINCE][0], 0, 0.0), "fragments": fragments}

    # --- values for the log ------------------------------------------------------------------------------------------

    def gauges(self) -> dict[str, float]:
        return {} if self.adaptive is None else {"comm/k_steps": self.adaptive.steps}

    def last_gauges(self) -> dict[str, float]:
        return {}


def _summed(values: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(values)
    return values


def divided(parameters: Mapping[str, torch.Tensor], count: int) -> list[list[str]]:
    """Divide the names of parameters into fragments of neighbours with about equally many numbers; empty ones are left
    out."""
    total, before = max(1, sum(p.numel() for p in parameters.values())), 0
    found: list[list[str]] = [[] for _ in range(count)]
    for name, parameter in parameters.items():
        middle = before + parameter.numel() / 2
        found[min(count - 1, int(middle * count / total))].append(name)
        before += parameter.numel()
    return [names for names in found if names]
