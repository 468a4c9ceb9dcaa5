"""Checks before a run what needs torch: whether model, loss, optimizer and schedule can be built and fit the data."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainer.config import keys, schema
from trainer.config.instantiate import blamed, call_target, locate
from trainer.config.run_config import RunConfig
from trainer.data.source import Facts
from trainer.errors import UserError, first_line
from trainer.metrics.best import AVERAGED, RAW
from trainer.metrics.criterion import SAMPLES, stand_in
from trainer.models.embedding_tables import tables
from trainer.optim.groups import Groups, check_patterns, freeze, grouped, optimizer_of, rates
from trainer.optim.state_loading import state_keys
from trainer.optim.state_transfer import BETWEEN, StateKeys
from trainer.planning.auto import Buckets, ModelFacts
from trainer.planning.batches import SingleSample
from trainer.planning.find_checkpoint import FRESH
from trainer.planning.user_class_checks import before_start, refusals
from trainer.strategies.contract import Declaration
from trainer.tasks.contract import task_of
from trainer.worker.callbacks import HOOKS
from trainer.worker.model_facts import in_blocks, norms_of
from trainer.worker.sample_shapes import IMAGE_DIMENSIONS, NotTaken, Shape, fitting, forward, outputs_of
from trainer.worker.user_strategy import check_worker


def probe(
    config: RunConfig,
    facts: Facts | None = None,
    declaration: Declaration | None = None,
    one: SingleSample | None = None,
    device: str = "cpu",
) -> ModelFacts:
    """Build everything once, to check what only torch can tell. The model is built on torch's meta device if it allows
    that.

    Args:
        facts: of the data; with them, whether the model takes its samples and tells its classes apart.
        one: a training batch of one sample, if there is one.
        declaration: of the strategy; with it, whether it can train this model with this optimizer.
        device: ``cpu`` or ``cuda``, where the run will train.

    Raises:
        UserError: something cannot be built from its config node, the model has nothing to train, or it does not fit
            the data.
    """
    with _without_side_effects():
        _check_zero_init_of_weights(config)
        part = before_start("check", config.model)
        _try_transforms(config)
        model = meta_model(config)
        _check_sizes(config, model)
        if not any(p.requires_grad for p in model.parameters()):
            raise UserError(f"model._target_={config.model['_target_']}", "has no parameters to train")
        _check_blocks(config, model)
        optimizer, names = _build_optimizer(config.optimizer, model)
        unfused, unfused_by_auto = _unfused(config, device, model, optimizer, names)
        _check_tables(config, model, optimizer)
        if declaration is not None:
            _check_strategy(config, declaration, model, optimizer)
        kept = _kept(config.optimizer, model, optimizer, names) if config.resume.path not in (None, FRESH) else None
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        moved = rates(model, config.optimizer)
        trained = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad and moved[n].lr}
        loss = stand_in(config.loss, 0 if facts is None else facts.classes)
        call_target(config.node("scheduler"), "scheduler", total_steps=1, steps_per_epoch=1).factor(0)
        concern, denominator = ("", SAMPLES) if facts is None else check_outputs(config, model, loss, facts)
        if facts is not None:
            check_single_sample(config, model, facts, one)
        _check_callbacks(config.callbacks)
        lower = {} if facts is None or not config.metrics else _try_metrics(config, model, facts)
        buckets = None if facts is None else _gradient_buckets(config, model, facts)
    parameters = sum(p.numel() for p in model.parameters())
    return ModelFacts(
        parameters=parameters,
        convolutional=any(isinstance(m, nn.Conv2d) for m in model.modules()),
        concern=concern,
        denominator=denominator,
        work=0 if facts is None else parameters * _positions(facts.shape),
        lower=lower,
        buckets=buckets,
        trained=sum(trained.values()),
        in_tables=sum(table.weight.numel() for _, table in tables(model)),
        shapes=shapes,
        frozen=frozenset(shapes.keys() - trained.keys()),
        optimizer=kept,
        part=part,
        unfused=unfused,
        unfused_by_auto=unfused_by_auto,
        norms=norms_of(model),
        in_blocks=in_blocks(config, model),
        loss_by_sample=getattr(loss, "reduction", "") == "mean",
        rules=_rules(trained, [name for name, rate in moved.items() if rate.matrix]),
    )


def _check_tables(config: RunConfig, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Check that the optimizer has a counterpart for the model's tables with sparse gradients, if there are any."""
    if any(tables(model)):
        locate("trainer.optim.sparse:rule_of")(config.optimizer, optimizer)


def _rules(sizes: Mapping[str, int], matrices: Sequence[str]) -> str:
    """Which parameters the optimizer updates by which rule, in words; empty: all by one."""
    if not matrices:
        return ""
    from trainer.optim.hidden_matrices import described

    return described(sizes, matrices)


def _unfused(
    config: RunConfig, device: str, model: nn.Module, optimizer: torch.optim.Optimizer, names: Sequence[str]
) -> tuple[str, str]:
    """Why the optimizer cannot be fused, and why ``auto`` leaves it unfused; empty where that is not asked for."""
    if device != "cuda" and config.execution.fused_optimizer is not True and not config.optimizer.get("fused"):
        return "", ""
    from trainer.optim.fused import why_not, why_not_by_auto

    own = dict(model.named_parameters())
    return why_not(optimizer, [(name, own[name]) for name in names]), why_not_by_auto(optimizer, any(tables(model)))


def _try_transforms(config: RunConfig) -> None:
    """Build the image transforms of one's own, and apply them to an image."""
    if nodes := config.node("data").get("transforms"):
        from trainer.data.augment.transforms import try_out

        try_out(nodes, config.node("data")["image_size"])


def _gradient_buckets(config: RunConfig, model: nn.Module, facts: Facts) -> Buckets | None:
    """Find the buckets in which the workers will exchange gradients; the model cannot be used afterwards. None: they
    exchange none, or the compiler decides on the order of the gradients.
    """
    strategy = config.strategy
    if config.mode != "train" or config.compile is True or not isinstance(strategy, schema.CollectiveStrategy):
        return None
    if strategy._target_ != schema.CollectiveStrategy._target_:  # a user's own, which may exchange them otherwise
        return None
    from trainer.worker.gradient_buckets import buckets_of

    freeze(model, config.optimizer, [table for _, table in tables(model)])
    once = torch.enable_grad()(lambda: outputs_of(model, facts, facts.shape, train=True))
    return buckets_of(model, once, strategy, torch.float64 if config.precision == "fp64" else None)


def _check_strategy(config: RunConfig, declaration: Declaration, model: nn.Module, optimizer: Any) -> None:
    """Refuse a strategy without a worker class, or one that cannot train this model with this optimizer.

    Raises:
        UserError: it has none, or cannot.
    """
    what = f"strategy._target_={config.strategy._target_}"
    check_worker(declaration, what)
    for refusal in refusals(what, "refuse_model", lambda: declaration.refuse_model(config, model, optimizer)):
        raise refusal


def _positions(shape: Shape) -> int:
    """The most often that a parameter is used for one sample: once for each pixel of an image, else for each number."""
    if isinstance(shape, dict):
        return max(math.prod(size) for size in shape.values())
    return math.prod(shape[1:] if len(shape) == IMAGE_DIMENSIONS else shape)


def _check_callbacks(nodes: Any) -> None:
    """Refuse callbacks that do not take their keys or have no hook methods, without instantiating them.

    Raises:
        UserError: one cannot, or has none of them, or one that never would be called.
    """
    for number, node in enumerate(nodes):
        target, key = locate(node["_target_"], f"callbacks[{number}]._target_"), f"callbacks[{number}]"
        what = f"{key} ({node['_target_']})"
        try:
            inspect.signature(target).bind(**{k: v for k, v in node.items() if k != "_target_"})
        except TypeError as error:
            raise UserError(what, f"cannot be called so: {first_line(error)}") from error
        except ValueError:  # made in C
            pass
        if not isinstance(target, type):
            continue
        hooks = [name for name in dir(target) if name.startswith("on_") and callable(getattr(target, name))]
        if strange := next((name for name in hooks if name not in HOOKS), None):
            near = keys.nearest(strange, HOOKS, 0.5)
            raise UserError(what, f"{strange} would never be called; there are {', '.join(HOOKS)}", near)
        if not hooks:
            raise UserError(what, f"has none of {', '.join(HOOKS)}")


def _try_metrics(config: RunConfig, model: nn.Module, facts: Facts) -> dict[str, bool]:
    """Try the user's metrics on the model's outputs. Returns whether less is better, of metrics that define it.

    Raises:
        UserError: one cannot be used.
    """
    from trainer.metrics.user_metrics import try_out

    outputs, task = forward(model, facts, facts.val_shape or facts.shape, train=False), task_of(config)
    trial = task.trial(facts, outputs.shape[1:] if isinstance(outputs, torch.Tensor) else None)
    found = {name: try_out(name, node, *trial) for name, node in config.metrics.items()}
    return {
        prefix + name: not higher for name, higher in found.items() if higher is not None for prefix in (RAW, AVERAGED)
    }


def _kept(
    node: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, names: Sequence[str]
) -> StateKeys:
    """The state that the run's optimizer, and the one for tables, will keep of each parameter that it updates.

    Args:
        optimizer: of the dense parameters, with ``names`` in its order.
    """
    kept = state_keys(optimizer, names)
    if not (of_tables := [f"{name}.weight" for name, _ in tables(model)]):
        return kept
    from trainer.optim.sparse import CLASSES, rule_of

    sparse = CLASSES[rule_of(node, optimizer).name].__name__
    return StateKeys(f"{kept.kind}{BETWEEN}{sparse}", {**kept.keys, **dict.fromkeys(of_tables)}, of_tables)


def _build_optimizer(node: Mapping[str, Any], model: nn.Module) -> tuple[torch.optim.Optimizer, list[str]]:
    """Build the optimizer for stand-ins of the model's parameters, in the run's groups, and try it.

    Returns:
        It, and the names of its parameters in their order.

    Raises:
        UserError: it cannot be built for these, or a pattern of ``lr_factors`` names nothing.
    """
    check_patterns(model, node)
    sparse = {id(table.weight) for _, table in tables(model)}
    found = rates(model, node)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad and id(p) not in sparse and found[n].lr]
    stand_ins = [(n, torch.zeros((1,) * p.dim(), requires_grad=True)) for n, p in trained]
    if str(node.get("name") or node.get("_target_")).lower().endswith("muon"):
        from trainer.optim.hidden_matrices import check_matrices

        check_matrices(node, trained, [name for name, rate in found.items() if rate.matrix])
    groups = grouped(stand_ins, found)
    optimizer = optimizer_of(node, groups)
    if type(optimizer).__module__.startswith("torch."):  # what the step of another optimizer needs is not known
        _try_out(node, groups, optimizer)
    of = {id(p): name for name, p in stand_ins}
    return optimizer, [of[id(p)] for _, parameters in groups for p in parameters]


def _try_out(node: Mapping[str, Any], groups: Groups, optimizer: torch.optim.Optimizer) -> None:
    """Make two updates of the stand-ins, because some arguments are read only there.

    Raises:
        UserError: the updates fail; with the argument that is at fault, where it is one alone.
    """

    def update(tried: torch.optim.Optimizer) -> None:
        for _ in range(2):
            for parameter in (p for group in tried.param_groups for p in group["params"]):
                parameter.grad = torch.zeros_like(parameter)
            tried.step()

    arguments = {k: v for k, v in node.items() if k != "_target_"}
    try:
        update(optimizer)
    except Exception as error:
        wrong = blamed(lambda some: update(optimizer_of({**some, "_target_": node["_target_"]}, groups)), arguments)
        what = f"optimizer.{wrong}={arguments[wrong]}" if wrong else f"optimizer ({node['_target_']})"
        raise UserError(what, f"an update with it fails: {first_line(error)}") from error


def _check_sizes(config: RunConfig, model: nn.Module) -> None:
    """Refuse a model with lazy layers, whose parameters have no sizes yet.

    Raises:
        UserError: a lazy layer has not seen a batch yet.
    """
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise UserError(
            _named(config),
            (
                f"has lazy layers whose sizes are not known yet ({lazy[0]}). Call the layers once at the end of "
                f"__init__, with a batch of zeros"
            ),
        )


def _check_zero_init_of_weights(config: RunConfig) -> None:
    """Refuse ``model.zero_init_residual=true`` beside saved weights."""
    for key in ("weights", "pretrained"):
        if config.model.get("zero_init_residual") and (value := config.model.get(key)):
            raise UserError(
                "model.zero_init_residual=true",
                f"would undo what the weights of model.{key}={value} have learnt",
                "model.zero_init_residual=false",
            )


def _check_blocks(config: RunConfig, model: nn.Module) -> None:
    """Refuse ``recompute`` without blocks, and ``model.zero_init_residual=true`` without norms to set to zero."""
    if config.recompute != "none":
        from trainer.models.recomputed import check

        check(config, model)
    if not config.model.get("zero_init_residual"):
        return
    from trainer.models.residual import NoResidualBlocks, last_norms

    try:
        last_norms(model)
    except NoResidualBlocks as error:
        name = config.model.get("name") or config.model["_target_"]
        raise UserError(
            "model.zero_init_residual=true",
            f"in {name} there is no last norm of a residual block: {error}",
            "model.zero_init_residual=false",
        ) from error


def meta_model(config: RunConfig) -> nn.Module:
    """Build the model for the checks: on torch's meta device, or on the CPU if it needs values while it is built."""
    try:
        with torch.device("meta"):
            return call_target(config.model, "model", kind=nn.Module)  # type: ignore[no-any-return]
    except UserError:  # the error may come from the meta device; on the CPU it is the model's own
        return call_target(config.model, "model", kind=nn.Module)  # type: ignore[no-any-return]


def check_outputs(config: RunConfig, model: nn.Module, loss: nn.Module, facts: Facts) -> tuple[str, str]:
    """Run two empty samples through the model, and check its outputs with the task and the loss.

    Errors on the meta device prove nothing. On the CPU they count, except in a user's own layer that may need a GPU.

    Raises:
        UserError: the model does not take the samples, or gives what the loss and the metrics do not take.
    """
    train = config.mode == "train"
    shape = facts.shape if train else facts.val_shape or facts.shape
    outputs = forward(model, facts, shape, train)
    if isinstance(outputs, NotTaken):
        again = call_target(config.model, "model")
        if not any(p.is_meta for p in again.parameters()) or not isinstance(shape, dict):
            model = again
        outputs = forward(model, facts, shape, train)
        if isinstance(outputs, NotTaken) and (config.device != "cuda" or outputs.anywhere):
            raise UserError(
                _named(config),
                f"does not take samples of {shape}, which {facts.source} has: {outputs}",
                fitting(config, facts, shape, train),
            ) from outputs.error
    if isinstance(outputs, NotTaken):
        return task_of(config).check_model(config, loss, None, facts)
    _check_kind(config, model, outputs)
    found = task_of(config).check_model(config, loss, outputs, facts)
    if train and config.validation:
        _check_validation(config, model, outputs, facts)
    return found


def _named(config: RunConfig) -> str:
    return f"model ({config.model['_target_']})"


def _check_kind(config: RunConfig, model: nn.Module, outputs: Any) -> None:
    """Refuse outputs that are not one tensor."""
    if not isinstance(outputs, torch.Tensor):
        key = "model.aux_logits=false" if "aux_logits" in config.model else "+model.aux_logits=false"
        instead = key if getattr(model, "aux_logits", None) is True else ""
        raise UserError(
            _named(config), f"gives a {type(outputs).__name__}, where the loss takes one tensor of scores", instead
        )


def check_single_sample(config: RunConfig, model: nn.Module, facts: Facts, one: SingleSample | None) -> None:
    """Refuse a run with a training batch of one sample if batch norm, or another layer, needs two.

    Raises:
        UserError: the model trains with two samples, and not with one.
    """
    if one is None:
        return
    if isinstance(forward(model, facts, facts.shape, train=True), NotTaken):
        return  # it wants a GPU
    found = forward(model, facts, facts.shape, train=True, samples=1)
    if isinstance(found, NotTaken):
        raise UserError(
            one.what,
            f"{one.why}, and the model ({config.model.get('_target_')}) does not train with one: {found}",
            one.instead,
        )


def _check_validation(config: RunConfig, model: nn.Module, trained: torch.Tensor, facts: Facts) -> None:
    """Check that samples of the validation go through the model as training samples do, to outputs of the same kind."""
    shape = facts.val_shape or facts.shape
    outputs = forward(model, facts, shape, train=False)
    if isinstance(outputs, NotTaken) and next(model.parameters()).is_meta and not isinstance(shape, dict):
        again = call_target(config.model, "model")
        if isinstance(forward(again, facts, facts.shape, train=True), NotTaken):
            return  # it wants a GPU
        outputs = forward(again, facts, shape, train=False)
    if isinstance(outputs, torch.Tensor) and outputs.shape == trained.shape:
        return
    if isinstance(outputs, NotTaken):
        why = f"takes samples of {facts.shape} in training, but not of {shape} in validation: {outputs}"
    else:
        got = ("N", *outputs.shape[1:]) if isinstance(outputs, torch.Tensor) else f"a {type(outputs).__name__}"
        why = f"gives {('N', *trained.shape[1:])} in training, but {got} for samples of {shape} in validation"
    size = config.node("data").get("val_size")
    if facts.val_shape is None or size is None:
        raise UserError(_named(config), why)
    raise UserError(f"data.val_size={size}", f"{_named(config)} {why}", f"data.val_size={facts.shape[-1]}")  # type: ignore[index]


@contextmanager
def _without_side_effects() -> Iterator[None]:
    """Context manager: keeps the run's random numbers, and silences torch's warnings, which come again in training."""
    state = torch.random.get_rng_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.random.set_rng_state(state)
