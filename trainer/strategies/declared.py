"""The built-in strategies as far as they are known before any process starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.errors import UserError
from trainer.strategies.base import Declaration


class Single(Declaration):
    """One process: the truth that the exact strategies are compared with."""

    worker = "trainer.strategies.single:Single"

    @property
    def exact(self) -> bool:
        return True

    def refuse(self, config: Mapping[str, Any], workers: int) -> list[UserError]:
        refused = super().refuse(config, workers)
        if workers > 1:
            refused.append(UserError(f"{workers} workers", "strategy=single is one process", "strategy=collective"))
        return refused


class Collective(Declaration):
    """Synchronous data parallelism: gradients are averaged over all workers at every update (torch's DDP)."""

    worker = "trainer.strategies.collective:Collective"

    @property
    def exact(self) -> bool:
        return True


class LocalSgd(Declaration):
    """Local SGD (Stich, 2019): workers train apart and average their parameters every ``k_steps`` updates."""

    worker = "trainer.strategies.local_sgd:LocalSgd"
    same_everywhere = False

    @property
    def exact(self) -> bool:
        """With k_steps=1 and an optimizer that is linear in the gradient (SGD, momentum)."""
        return bool(self.config["k_steps"] == 1)

    def refuse(self, config: Mapping[str, Any], workers: int) -> list[UserError]:
        refused = super().refuse(config, workers)
        if self.config.get("clip_norm") is not None and self.config["k_steps"] == 1 and workers > 1:
            refused.append(
                UserError(
                    f"strategy.clip_norm={self.config['clip_norm']}",
                    "local_sgd clips each worker's own gradient, so with k_steps=1 it is not what collective does",
                    "strategy=collective",
                )
            )
        return refused


AUTO = "trainer.strategies.declared.auto"
"""``strategy=auto``: replaced by single or collective, with its defaults, once the number of workers is known."""
