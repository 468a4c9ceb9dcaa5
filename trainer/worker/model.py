"""Builds the model, its optimizer and the context of its arithmetic, as the plan says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from trainer.checkpoint.pinned import PinnedMemory
from trainer.config import schema
from trainer.config.instantiate import call_target, for_saved_weights
from trainer.config.run_config import RunConfig
from trainer.host.files import replacing
from trainer.host.sharded import local
from trainer.host.transfers import wait_for
from trainer.models.embedding_tables import materialise, tables, without_empty_tables
from trainer.optim.groups import Rate, freeze, grouped, optimizer_of, rates
from trainer.optim.schedules import Plateau
from trainer.optim.updater import Updater
from trainer.planning.plan import Plan
from trainer.strategies.contract import HoldsShards, Strategy, whole
from trainer.worker.settings import seed_all

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
REGISTERED = ("_parameters", "_buffers", "_modules")
"""Attributes of a module whose tensors have names in the model."""


def build_model(config: RunConfig, plan: Plan, device: torch.device) -> nn.Module:
    """Build the model on the device, initialised from the seed, in the planned precision and memory format."""
    return prepared(construct(config), config, plan, device)


def construct(config: RunConfig) -> nn.Module:
    """Call the config's model class or function, with the random numbers of the seed."""
    seed_all(config.seed)
    model: nn.Module = call_target(config.model, "model")
    return model


def without_values(config: RunConfig, plan: Plan, device: torch.device) -> nn.Module | None:
    """Build the model on torch's meta device, for a worker that receives its values; None: it cannot be built there, or
    keeps tensors that are neither parameters nor buffers."""
    meta = torch.device("meta")
    try:
        with meta:
            model: nn.Module = call_target(for_saved_weights(config.model), "model")
            model = prepared(model, config, plan, device, meta)
    except Exception:  # of a class that needs values
        return None
    kept = [one for module in model.modules() for name, one in vars(module).items() if name not in REGISTERED]
    return None if any(isinstance(one, torch.Tensor) for one in tree_leaves(kept)) else model


def prepared(
    model: nn.Module, config: RunConfig, plan: Plan, device: torch.device, where: torch.device | None = None
) -> nn.Module:
    """Prepare a model as its class built it: initialised, on the device, in the planned precision and memory format.

    Args:
        where: a place for it until its strategy moves it to the device; None: it is on the device at once.
    """
    if config.model.get("_target_") in schema.STARTED and config.model.get("init") == "reference":
        from trainer.models.reference_start import draw

        draw(model)
    if config.model.get("zero_init_residual"):
        from trainer.models.residual import zero_last_norms

        zero_last_norms(model)
    if config.node("strategy").get("sync_batch_norm"):
        from trainer.models.sync_batch_norm import synchronised

        model = synchronised(model)
    model = model.to(where or device, torch.float64 if plan.chosen.precision == "fp64" else None)
    if not plan.strategy.traits.tables_at_servers:
        materialise(model, config.seed, device)
    freeze(model, config.optimizer, [table for _, table in tables(model)])
    if plan.chosen.precision == "bf16" and device.type == "cpu":
        from trainer.models.strided_bf16 import write_all_gradients

        write_all_gradients(model)
    if config.recompute != "none" and config.mode == "train":
        from trainer.models.blocks import chosen
        from trainer.models.recomputed import recompute

        recompute(chosen(model, config.recompute, "recompute"))
    return model.to(memory_format=torch.channels_last) if plan.chosen.channels_last else model


class Updaters:
    """Makes the optimizers of a run, for its strategy."""

    def __init__(self, config: RunConfig, plan: Plan) -> None:
        self.config, self.plan = config, plan

    def __call__(self, module: nn.Module) -> Updater:
        """Make the updater of a worker's model: optimizers (dense and sparse), schedule, clipping and loss scale."""
        found = rates(module, self.config.optimizer)
        sparse = {id(table.weight): (table.weight, found[f"{name}.weight"].lr) for name, table in tables(module)}
        trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad and id(p) not in sparse]
        node = {**self.config.optimizer, **({"fused": True} if self.plan.chosen.fused_optimizer else {})}
        optimizer = optimizer_of(node, grouped(trained, found), self.plan.batches.lr)
        if sparse:
            from trainer.optim.sparse import DenseAndSparse, rule_of, sparse_optimizer

            rule = rule_of(self.config.optimizer, optimizer)
            weights, factors = zip(*sparse.values(), strict=True)
            optimizer = DenseAndSparse(optimizer, sparse_optimizer(rule, weights, factors), rule)
        of = {id(p): name for name, p in module.named_parameters()}
        schedule = call_target(
            self.config.node("scheduler"),
            "scheduler",
            total_steps=self.plan.length.total_steps,
            steps_per_epoch=self.plan.length.steps_per_epoch,
        )
        if isinstance(schedule, Plateau):
            schedule.best.lower = self.plan.objective.lower
        return Updater(
            optimizer,
            schedule.factor,
            self.config.strategy.clip_norm,
            loss_scaling=self.plan.chosen.precision == "fp16",
            clip_value=self.config.strategy.clip_value,
            plateau=schedule if isinstance(schedule, Plateau) else None,
            lr=self.plan.batches.lr,
            names=[of.get(id(p), "") for group in optimizer.param_groups for p in group["params"]],
        )

    def rates(self, module: nn.Module) -> dict[str, Rate]:
        """The :class:`Rate` of each parameter, by name."""
        return rates(module, self.config.optimizer)


def autocast(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Return the context manager for a forward pass in the plan's precision (autocast, or nothing)."""
    if precision not in DTYPES:
        return nullcontext
    return lambda: torch.autocast(device.type, DTYPES[precision])


def type_of_bytes(precision: str, device: torch.device) -> torch.dtype | None:
    """The type that images of bytes get on a GPU, where the precision has 16 bits; None: that of other inputs."""
    return DTYPES.get(precision) if device.type == "cuda" else None


def not_finite_parameters(model: nn.Module) -> list[str]:
    """Return the names of the model's parameters that hold NaN or infinite values."""
    return [name for name, p in model.named_parameters() if not torch.isfinite(local(p.detach())).all()]


class Superseded(Exception):
    """Raised within :func:`save` to keep the old file."""


class Gathered:
    """A model's state whose tensors are whole, by name: all that safetensors asks of a model."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self.state = state

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """The tensors by name."""
        return self.state


class OnHost(Gathered):
    """A model's state as copies on the CPU, which come from a GPU together: the host waits once and not for each.

    Args:
        pinned: memory for the copies, which it holds until it is released.
    """

    def __init__(self, model: nn.Module, pinned: PinnedMemory) -> None:
        state = model.state_dict()
        on_gpu = {_place(tensor): tensor for tensor in state.values() if tensor.device.type == "cuda"}
        copies, events = pinned.fill(list(on_gpu.values()))
        for event in events:
            wait_for(event)
        own = dict(zip(on_gpu, map(_with_storage, copies), strict=True))
        super().__init__({name: own.get(_place(tensor), tensor) for name, tensor in state.items()})


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are one: a model may have a parameter under several names."""
    memory = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return *memory, tensor.shape, tensor.stride(), tensor.dtype


def _with_storage(copy: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor with a storage of its own: safetensors takes parts of a storage for one tensor."""
    if not copy.numel():
        return copy.clone()
    return torch.from_numpy(copy.reshape(-1).view(torch.uint8).numpy()).view(copy.dtype).view(copy.shape)


def save_by_first(
    strategy: Strategy,
    model: nn.Module,
    path: Path,
    first: bool,
    counts: Callable[[], bool] = lambda: True,
    pinned: PinnedMemory | None = None,
) -> None:
    """Save the model of a run by its first worker. The others only take part where they hold shards of it.

    Args:
        first: this worker saves. counts, pinned: as in :func:`save`.
    """
    if isinstance(strategy, HoldsShards):
        state = strategy.gathered(model.state_dict())
        if first:
            save(model, path, counts, None, Gathered(state))
    elif first:
        with whole(strategy):
            save(model, path, counts, pinned)


def save(
    model: nn.Module,
    path: Path,
    counts: Callable[[], bool] = lambda: True,
    pinned: PinnedMemory | None = None,
    gathered: Gathered | None = None,
) -> None:
    """Save a model: its parameters and buffers as a safetensors file, which replaces the old one. The file lists the
    tables that it leaves out.

    Args:
        gathered: the whole state of a model that is sharded.
        counts: asked when all is written; False: the old file stays.
        pinned: memory for the copies of a model on a GPU; None: each of its tensors is waited for.
    """
    from safetensors.torch import save_model

    with suppress(Superseded), replacing(path) as part, without_empty_tables(model) as absent:
        metadata = {"format": "pt"}
        if absent:
            from trainer.weights.tensor_files import LEFT_OUT

            metadata = {LEFT_OUT: " ".join(absent)}
        # One entry: safetensors writes several in random order, and equal models must have equal files.
        try:
            saved: Any = gathered or (OnHost(model, pinned) if pinned is not None and on_gpu(model) else model)
            save_model(saved, str(part), metadata=metadata)
        finally:
            if pinned is not None:
                pinned.release()
        if not counts():
            raise Superseded


def on_gpu(model: nn.Module) -> bool:
    """Whether a parameter of the model is on a GPU."""
    return any(parameter.device.type == "cuda" for parameter in model.parameters())
