"""Sparse optimizers: update gathered rows of a table, and their optimizer state, by a gradient.

Each gives the numbers of its namesake in ``torch.optim`` for a sparse gradient without repeated rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Kernel(Protocol):
    """Protocol of the sparse optimizers of table rows."""

    @property
    def name(self) -> str:
        """The name by which :func:`kernel` finds this optimizer."""

    @property
    def initial(self) -> float:
        """The initial value of a new row's state columns."""

    def state_columns(self, dim: int) -> int:
        """The number S of state columns that the optimizer keeps beside a row of ``dim`` columns."""

    def apply(self, values: torch.Tensor, state: torch.Tensor, gradients: torch.Tensor, lr: float, step: int) -> None:
        """Update values (U, D) and state (U, S), which are copies of their rows, in place by gradients (U, D).

        Args:
            lr: learning rate of this update.
            step: number of this update of the whole table by this optimizer, from 1.
        """


@dataclass(frozen=True)
class Sgd:
    """``torch.optim.SGD`` without momentum: v -= lr * g."""

    name = "sgd"
    initial = 0.0

    def state_columns(self, dim: int) -> int:
        return 0

    def apply(self, values: torch.Tensor, state: torch.Tensor, gradients: torch.Tensor, lr: float, step: int) -> None:
        values.add_(gradients, alpha=-lr)


@dataclass(frozen=True)
class Adagrad:
    """``torch.optim.Adagrad`` without weight decay (Duchi et al., 2011): s += g^2; v -= lr * g / (sqrt(s) + eps).

    With ``lr_decay`` the learning rate of a step is divided by 1 + (step - 1) * lr_decay.
    """

    eps: float = 1e-10
    initial_accumulator_value: float = 0.0
    lr_decay: float = 0.0
    name = "adagrad"

    @property
    def initial(self) -> float:
        return self.initial_accumulator_value

    def state_columns(self, dim: int) -> int:
        return dim

    def apply(self, values: torch.Tensor, state: torch.Tensor, gradients: torch.Tensor, lr: float, step: int) -> None:
        state.addcmul_(gradients, gradients)
        lr /= 1 + (step - 1) * self.lr_decay
        values.addcdiv_(gradients, state.sqrt().add_(self.eps), value=-lr)


@dataclass(frozen=True)
class RowwiseAdagrad:
    """Adagrad with one accumulator per row: s += mean(g^2) over the columns, as in FBGEMM and DLRM.

    It takes 1/D of the memory of :class:`Adagrad`'s state.
    """

    eps: float = 1e-10
    initial_accumulator_value: float = 0.0
    name = "rowwise_adagrad"

    @property
    def initial(self) -> float:
        return self.initial_accumulator_value

    def state_columns(self, dim: int) -> int:
        return 1

    def apply(self, values: torch.Tensor, state: torch.Tensor, gradients: torch.Tensor, lr: float, step: int) -> None:
        state.add_(gradients.square().mean(dim=1, keepdim=True))
        values.addcdiv_(gradients, state.sqrt().add_(self.eps), value=-lr)


@dataclass(frozen=True)
class Adam:
    """``torch.optim.SparseAdam`` (lazy Adam): moments of rows without a gradient stay; the bias correction goes on.

    The correction is by the table's step, not by how often the row itself was updated (Kingma & Ba, 2015).
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    name = "adam"
    initial = 0.0

    def state_columns(self, dim: int) -> int:
        return 2 * dim

    def apply(self, values: torch.Tensor, state: torch.Tensor, gradients: torch.Tensor, lr: float, step: int) -> None:
        beta1, beta2 = self.betas
        mean, square = state.split(values.shape[1], dim=1)  # views: what changes them changes the state
        mean.lerp_(gradients, 1 - beta1)
        square.lerp_(gradients.square(), 1 - beta2)
        step_size = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        values.addcdiv_(mean, square.sqrt().add_(self.eps), value=-step_size)


def kernel(name: str, **hyperparameters: Any) -> Kernel:
    """Make the kernel of that name: a sparse optimizer for gathered rows of a table, with the user's hyperparameters.

    Args:
        name: sgd, adagrad, rowwise_adagrad or adam.
        hyperparameters: the user's optimizer node: ``betas``, ``eps``, ``initial_accumulator_value``, ``lr_decay``.

    Raises:
        ValueError: an unknown name.
    """

    def own(*keys: str) -> dict[str, Any]:
        return {key: float(hyperparameters[key]) for key in keys if key in hyperparameters}

    if name == "sgd":
        return Sgd()
    if name == "adagrad":
        return Adagrad(**own("eps", "initial_accumulator_value", "lr_decay"))
    if name == "rowwise_adagrad":
        return RowwiseAdagrad(**own("eps", "initial_accumulator_value"))
    if name == "adam":
        beta1, beta2 = hyperparameters.get("betas", Adam.betas)
        return Adam(betas=(float(beta1), float(beta2)), **own("eps"))
    raise ValueError(f"a table's optimizer is sgd, adagrad, rowwise_adagrad or adam, not {name}")
