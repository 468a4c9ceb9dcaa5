"""Workers that train nothing: mode=eval and mode=predict."""

from __future__ import annotations

from torch import nn

from trainer.strategies.contract import MakeUpdater
from trainer.strategies.process_group import GroupMember


class Evaluators(GroupMember):
    """A worker of a process group that adds up sums; each has read the same weights, so there is nothing to agree on."""

    def setup(self, model: nn.Module, make_updater: MakeUpdater) -> nn.Module:
        self.model = model
        return model

    def synchronize(self) -> None:
        pass
