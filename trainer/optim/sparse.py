"""Optimizers for the rows of embedding tables, beside the optimizer of all other parameters.

Adam, momentum and their like move every row in every step, also those without a gradient. A table of millions of rows
is updated lazily instead: only the rows that a batch has touched. ``weight_decay`` never applies to tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainer.errors import UserError
from trainer.optim.states import trains_others

RULES = ("sgd", "adagrad", "rowwise_adagrad", "adam")
"""Values of ``optimizer.sparse`` besides ``auto``; servers use the same names."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adagrad": {"lr_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10},
    "rowwise_adagrad": {"initial_accumulator_value": 0.0, "eps": 1e-10},
    "adam": {"betas": (0.9, 0.999), "eps": 1e-8},
}
"""Each rule's numbers besides ``lr``; those of the optimizer replace them if it is of the same family."""

FAMILIES: dict[type, str] = {
    torch.optim.SGD: "sgd",
    torch.optim.Adagrad: "adagrad",
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adam",
    torch.optim.SparseAdam: "adam",
}


class RowwiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one accumulator per row: the mean over columns of the squared gradient (as in DLRM and FBGEMM).

    For a row with gradient g (D,): ``a += mean(g^2)``, then ``row -= lr * g / (sqrt(a) + eps)``. Takes sparse gradients
    of tables (N, D), and dense ones, where every row counts as touched.

    Raises:
        ValueError: a number is negative.
    """

    def __init__(
        self, params: Any, lr: float = 0.01, initial_accumulator_value: float = 0.0, eps: float = 1e-10
    ) -> None:
        if lr < 0 or initial_accumulator_value < 0 or eps < 0:
            raise ValueError("lr, initial_accumulator_value and eps must not be negative")
        defaults = {"lr": lr, "initial_accumulator_value": initial_accumulator_value, "eps": eps}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the rows that have gradients."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is not None:
                    self._update(table, table.grad, group)
        return loss

    def _update(self, table: torch.Tensor, grad: torch.Tensor, group: Mapping[str, Any]) -> None:
        if "sum" not in self.state[table]:
            start = group["initial_accumulator_value"]
            self.state[table]["sum"] = torch.full((len(table),), start, dtype=table.dtype, device=table.device)
        if grad.is_sparse:
            grad = grad.coalesce()
            rows, values = grad.indices()[0], grad.values()
        else:
            rows, values = torch.arange(len(table), device=table.device), grad
        total = self.state[table]["sum"]
        total.index_add_(0, rows, values.square().mean(1))
        step = values / (total[rows].sqrt() + group["eps"]).unsqueeze(1)
        table.index_add_(0, rows, step, alpha=-group["lr"])


CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": RowwiseAdagrad,
    "adam": torch.optim.SparseAdam,
}


@dataclass(frozen=True)
class SparseRule:
    """How rows of tables are updated: ``name`` (of ``RULES``), ``numbers`` (of ``DEFAULTS``), ``lr`` (base rate)."""

    name: str
    lr: float
    numbers: Mapping[str, Any]

    def rate(self, factor: float) -> float:
        """The learning rate of a table with this factor, before the schedule's factor."""
        return self.lr * factor


def rule_of(node: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> SparseRule:
    """The update rule for sparse embedding rows that matches the config's optimizer.

    Args:
        node: the ``optimizer`` node of the config.
        optimizer: made from it, with any parameters.

    Raises:
        UserError: ``optimizer.sparse=auto``, and the optimizer has no counterpart that updates touched rows alone.
    """
    configured = str(node.get("sparse", "auto"))
    family = FAMILIES.get(type(optimizer), getattr(optimizer, "of_tables", ""))
    lazy = family and not optimizer.defaults.get("momentum") and not optimizer.defaults.get("amsgrad")
    if configured == "auto" and not lazy:
        raise UserError(
            f"optimizer ({_spelled(node)})",
            (
                "has no counterpart for embedding tables with sparse gradients, of which a step moves the touched "
                "rows alone"
            ),
            f"optimizer.sparse=adagrad (or {', '.join(r for r in RULES if r != 'adagrad')})",
        )
    rule = family if configured == "auto" else configured
    related = rule == family or (rule == "rowwise_adagrad" and family == "adagrad")
    own = {k: optimizer.defaults[k] for k in DEFAULTS[rule] if related and k in optimizer.defaults}
    return SparseRule(rule, float(optimizer.defaults["lr"]), {**DEFAULTS[rule], **own})


def sparse_optimizer(
    rule: SparseRule, tables: Iterable[torch.Tensor], factors: Iterable[float] = ()
) -> torch.optim.Optimizer:
    """Make the optimizer of an update rule for the weights of these tables.

    Args:
        factors: of each table, on the learning rate; none: 1 for all.
    """
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default; torch warns unless it is set
    tables = list(tables)
    by_factor: dict[float, list[torch.Tensor]] = {}
    for table, factor in zip(tables, list(factors) or [1.0] * len(tables), strict=True):
        by_factor.setdefault(factor, []).append(table)
    groups = [{"params": some, "lr": rule.rate(factor)} for factor, some in by_factor.items()]
    return CLASSES[rule.name](groups, **{"lr": rule.lr, **rule.numbers})


def _spelled(node: Mapping[str, Any]) -> str:
    target, name = str(node["_target_"]), node.get("name")
    if name:
        return f"torch.optim.{name}"
    momentum = node.get("momentum")
    return f"{target}, momentum={momentum}" if momentum else target


class DenseAndSparse(torch.optim.Optimizer):
    """Wraps two optimizers that step as one, so that a loss scaler skips both or none.

    Both share its parameter groups, so a learning rate that is set here holds for them. ``rule`` is the rule of the
    tables.
    """

    def __init__(self, dense: torch.optim.Optimizer, sparse: torch.optim.Optimizer, rule: SparseRule) -> None:
        self.rule = rule
        super().__init__([*dense.param_groups, *sparse.param_groups], {})
        self.parts = {"dense": dense, "sparse": sparse}
        for part in self.parts.values():
            own = {id(p) for group in part.param_groups for p in group["params"]}
            part.param_groups = [g for g in self.param_groups if id(g["params"][0]) in own]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Run one step of the dense and the sparse optimizer."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part in self.parts.values():
            part.step()
        return loss

    def eval(self) -> None:
        """Put the weights that count into the model, of parts with such a method."""
        for part in filter(trains_others, self.parts.values()):
            part.eval()  # type: ignore[attr-defined]

    def train(self) -> None:
        """Put the trained weights back."""
        for part in filter(trains_others, self.parts.values()):
            part.train()  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """The states of the dense and the sparse optimizer, by name."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        for name, part in self.parts.items():
            part.load_state_dict(state_dict[name])
        self.param_groups = [group for part in self.parts.values() for group in part.param_groups]
