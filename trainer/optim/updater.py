"""Applies one update to the parameters: unscale, clip, set the learning rate, step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from trainer.optim.schedules import Plateau
from trainer.optim.state_loading import kind_of, load_by_name
from trainer.optim.states import added, groups_by_name, trains_others


@dataclass(frozen=True)
class UpdaterState:
    """The state of an :class:`Updater`, as :meth:`Updater.state` returns it."""

    steps: int
    kind: str
    optimizer: dict[str, Any]
    made_with: list[dict[str, Any]]
    scaler: dict[str, Any] | None
    plateau: dict[str, Any] | None
    names: list[str]


class Updater:
    """An optimizer with its learning-rate schedule, gradient clipping and fp16 loss scale.

    Args:
        optimizer: its parameter groups' ``lr`` is what the schedule multiplies.
        factor: the schedule, update number -> factor.
        clip_norm: greatest L2 norm of the whole gradient, that of sparse tables included, or None.
        loss_scaling: dynamic loss scaling, for fp16: an update with an inf or nan gradient is skipped.
        clip_value: greatest magnitude of each element of the gradient, or None.
        plateau: the schedule, if it depends on validations.
        lr: base of the property ``lr``, before the schedule; None: the first parameter group's.
        names: of the parameters, in the order of the optimizer's groups.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        factor: Callable[[int], float],
        clip_norm: float | None = None,
        loss_scaling: bool = False,
        clip_value: float | None = None,
        plateau: Plateau | None = None,
        lr: float | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self.optimizer = optimizer
        self.factor = factor
        self.clip_norm, self.clip_value = clip_norm, clip_value
        self.plateau = plateau
        self.names = list(names)
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self.base_lr = self.base_lrs[0] if lr is None else lr
        device = self.parameters[0].device.type if self.parameters else "cpu"
        self.scaler = torch.amp.GradScaler(device) if loss_scaling else None
        self.whole_norm: Callable[[torch.Tensor], torch.Tensor] | None = None
        """L2 norm of this worker's part of the gradient -> that of the whole; None: it has the whole."""
        self.steps = 0
        self.evaluates = False
        """The model has the weights that count, where the optimizer trains others."""
        self.made_with = self._settings()
        self._train()

    @property
    def sparse_start(self) -> float:
        """The initial optimizer state of a table's row that has not been updated."""
        return float(self.optimizer.param_groups[-1].get("initial_accumulator_value", 0.0))

    @property
    def lr(self) -> float:
        """The learning rate of the next update, for parameters with factor 1."""
        return self.base_lr * self.factor(self.steps)

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in the validation after ``step`` updates, for schedules that depend on it."""
        if self.plateau is not None:
            self.plateau.observe(step, metrics)

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward of a loss, scaled if fp16 needs it."""
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Apply the gradients and clear them. A step skipped by the loss scaler still counts for the schedule."""
        self.set_rates()
        self.apply()
        self.steps += 1

    def set_rates(self) -> None:
        """Set the learning rates of the next update."""
        factor = self.factor(self.steps)
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            if isinstance(rate := group.get("lr"), torch.Tensor):
                rate.fill_(base * factor)
            else:
                group.update(lr=base * factor)

    def rates_on_device(self) -> None:
        """Keep learning rates in tensors, so that a CUDA graph of :meth:`apply` reads those of each update."""
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            first, *_ = group.get("params", ())
            dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
            group.update(lr=torch.full((), base, dtype=dtype, device=first.device))
            if "capturable" in group and first.device.type == "cuda":
                group.update(capturable=True)

    def apply(self) -> None:
        """Apply the gradients with the rates that are set, and clear them; nothing is counted."""
        if self.scaler is not None and (self.clip_norm is not None or self.clip_value is not None):
            self.scaler.unscale_(self.optimizer)
        if self.clip_norm is not None or self.clip_value is not None:
            self._clip()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Context manager: the model has the weights that count, of an optimizer with ``eval()`` and ``train()``."""
        if self.evaluates:  # a checkpoint within a validation
            yield
            return
        self.evaluate()
        try:
            yield
        finally:
            self._train()

    def evaluate(self) -> None:
        """Put the weights that count into the model, of an optimizer with ``eval()`` and ``train()``."""
        if trains_others(self.optimizer):
            self.optimizer.eval()  # type: ignore[attr-defined]
        self.evaluates = True

    def _train(self) -> None:
        """Put the trained weights back into the model, of an optimizer with ``eval()`` and ``train()``."""
        if trains_others(self.optimizer):
            self.optimizer.train()  # type: ignore[attr-defined]
        self.evaluates = False

    def skip(self) -> None:
        """Clear the gradients without applying them. The update still counts for the schedule."""
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1

    def state(self) -> dict[str, Any]:
        """Everything that the next updates depend on besides parameters and gradients, for :meth:`load`."""
        return {
            "steps": self.steps,
            "kind": kind_of(self.optimizer),
            "optimizer": self._optimizer_state(),
            "made_with": self.made_with,
            "names": self.names,
            "scaler": None if self.scaler is None else _scaler_state(self.scaler),
            "plateau": None if self.plateau is None else self.plateau.state(),
        }

    def _optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state_dict, with learning rates as numbers, as in a run that captures no updates."""
        state = self.optimizer.state_dict()
        if not any(isinstance(group.get("lr"), torch.Tensor) for group in self.optimizer.param_groups):
            return state
        factor = self.factor(max(0, self.steps - 1))
        pairs = zip(state.get("param_groups", ()), self.base_lrs, strict=True)
        groups = [{**group, "lr": base * factor} for group, base in pairs]
        for group in groups:
            group.update({"capturable": False} if "capturable" in group else {})
        return {**state, "param_groups": groups}

    def load(
        self,
        steps: int,
        kind: str,
        optimizer: dict[str, Any],
        made_with: list[dict[str, Any]],
        scaler: dict[str, Any] | None,
        plateau: Mapping[str, Any] | None,
        names: Sequence[str],
    ) -> None:
        """Restore what :meth:`state` returned, each parameter's state by its name.

        The plan lists which state begins anew (:mod:`trainer.optim.state_transfer`). A setting of the optimizer, such
        as lr, keeps its new value if the saved optimizer was made with another one.
        """
        self.steps = steps
        same = load_by_name(self.optimizer, self.names, kind, optimizer, names)
        self._take_settings(groups_by_name(optimizer, names), made_with, same)
        if self.scaler is not None and scaler is not None:
            known = {"scale": float(scaler["scale"]), "_growth_tracker": int(scaler["_growth_tracker"])}
            self.scaler.load_state_dict({**scaler, **known})
        if self.plateau is not None and plateau is not None:
            self.plateau.load(**plateau)
        self._train()

    def _take_settings(
        self, groups: Mapping[str, tuple[int, Mapping[str, Any]]], made_with: list[dict[str, Any]], same: bool
    ) -> None:
        """Restore settings that an optimizer has changed itself, from the saved group of each group's first parameter.

        Args:
            groups: by parameter name, the number of its group before, and that group.
            made_with: the settings of those groups when they were made.
            same: class and parameters are the same; then keys that the optimizer added to a group are restored as well.
        """
        names = iter(self.names)
        for index, (group, own) in enumerate(zip(self.optimizer.param_groups, self.made_with, strict=True)):
            first = [next(names, "") for _ in group.get("params", ())][:1]
            loaded = (index, dict(group)) if same else (-1, {})  # a wrapper's state_dict may hide its groups
            number, saved = groups.get(first[0], loaded) if first else (-1, {})
            if 0 <= number < len(made_with):
                made = made_with[number]
                restored = {key for key, value in own.items() if key in saved and _equal(made.get(key), value)}
                later = [key for key in added(saved, made) if key not in own] if same else []
                group.update({**own, **{key: saved[key] for key in (*restored, *later)}})

    def _settings(self) -> list[dict[str, Any]]:
        """The settings of each parameter group, without its parameters."""
        return [
            {k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups
        ]

    def _clip(self) -> None:
        from trainer.optim.gradient_clipping import clip_norm, clip_value

        if self.clip_norm is not None:
            clip_norm(self.parameters, self.clip_norm, self.whole_norm)
        if self.clip_value is not None:
            clip_value(self.parameters, self.clip_value)


def _scaler_state(scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """The scaler's state_dict, of which tensors stay tensors: as numbers they would be waited for, one by one."""
    scale, tracker = scaler._scale, scaler._growth_tracker
    if scale is None or tracker is None:  # no loss was scaled yet
        return scaler.state_dict()
    fixed = {
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
    }
    return {"scale": scale, **fixed, "_growth_tracker": tracker}


def _equal(one: Any, other: Any) -> bool:
    """Whether two settings of an optimizer are the same; a setting may be a tensor."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one.cpu(), other.cpu())
    return bool(one == other)
