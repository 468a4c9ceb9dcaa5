"""A config that has passed the checks with their findings, or the reasons why a run would be refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.config.run_config import RunConfig
from trainer.data.source import DataSource, Facts
from trainer.errors import UserError
from trainer.host import torchrun
from trainer.planning.class_names import Classes
from trainer.strategies.contract import Declaration


class Lacks(list[str]):
    """Collects the reasons why a run would be refused: a plan lists them all, a run ends with the first.

    Args:
        plan: only the plan is asked for.
    """

    def __init__(self, plan: bool) -> None:
        super().__init__()
        self.plan = plan
        self.errors: list[UserError] = []

    def __enter__(self) -> Lacks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if not self.plan or not isinstance(error, UserError):
            return False
        if str(error) not in self:
            self.append(str(error))
            self.errors.append(error)
        return True


@dataclass(frozen=True)
class Checked:
    """A config that has passed all checks, with what they found out.

    Attributes:
        config: ``strategy`` is never ``auto``, ``data.batch_size`` never null. auto_strategy: why a strategy was chosen
        for ``strategy=auto``; else empty. workers: over all hosts; nproc: of them on each host. device: ``cpu`` or
        ``cuda``. merge: batches per update. lacks: why a run would be refused, where only its plan is asked for.
        elsewhere: the plan is for other machines than this one. files: what mode=predict looks at, in the order of its
        rows, relative to predict.input, which is a folder then. samples: images or about how many rows there are in
        these files. searches: the largest batch that fits is to be found before the training; until then
        ``data.batch_size`` is a guess. classes: what the outputs of the model mean; head: why the head of pretrained
        weights is not taken. auto_task: why a task was chosen for ``task=auto``; else empty.
    """

    config: RunConfig
    declaration: Declaration
    source: DataSource
    facts: Facts
    auto_strategy: str
    workers: int
    nproc: int
    device: str
    merge: int
    lacks: Lacks = field(default_factory=lambda: Lacks(False))
    elsewhere: bool = False
    files: tuple[str, ...] = ()
    samples: int = 0
    searches: bool = False
    classes: Classes = field(default_factory=Classes)
    head: str = ""
    auto_task: str = ""

    def class_names(self) -> Sequence[str]:
        """The names of the classes in the order of the model's outputs; empty if they have none."""
        return self.classes.names or self.source.class_names(self.facts)

    @property
    def restartable(self) -> bool:
        """Whether all processes can be started again together: they are on this host, or hosts can come and go.
        torchrun restarts its ranks itself, and srun's do not come back."""
        ours = self.config.launch.nnodes == 1 or self.config.launch.least_nnodes is not None
        return self.config.mode == "train" and ours and not torchrun.is_rank()

    @property
    def leased(self) -> bool:
        """Whether workers lease the training data in blocks during an epoch, instead of splitting it beforehand."""
        return self.declaration.leased(self.config)

    @property
    def sees_pictures(self) -> bool:
        """Whether mode=predict looks at images, each a file, and not at rows of files."""
        return bool(self.files) and self.source.row_reader() is None

    @property
    def update_batch(self) -> int:
        """The samples in one update: the global batch, or the worker's own if gradients are applied alone."""
        return self.config.batch_size * self.merge if self.declaration.traits.alone else self.global_batch_size

    @property
    def lr_factor(self) -> float:
        """The factor on optimizer.lr that adapts it to another batch size (Goyal et al., 2017)."""
        node = self.config.optimizer
        power = {"linear": 1.0, "sqrt": 0.5}.get(str(node.get("lr_scaling", "none")))
        return 1.0 if power is None else float((self.update_batch / node["lr_base_batch"]) ** power)

    @property
    def global_batch_size(self) -> int:
        """The samples in one update, over all workers."""
        together = self.config.data.global_batch_size if self.config.mode == "train" else None
        return together or self.config.batch_size * self.workers * self.merge
