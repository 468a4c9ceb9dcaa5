"""The typed config: every key with type, default, unit and one line of help; here the keys of the run as a whole."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Dict, List, Optional  # OmegaConf reads them

from trainer.config.schema.data import *
from trainer.config.schema.declare import AUTO, LONG, key
from trainer.config.schema.model import *
from trainer.config.schema.optim import *
from trainer.config.schema.run import *
from trainer.config.schema.sampler import *
from trainer.config.schema.strategy import *
from trainer.config.schema.task import *


@dataclass
class Config:
    """The whole run."""

    name: str = key("custom", "the recipe's name: MLflow experiment and folder under outputs/")
    mode: str = key("train", "what to do", choices=("train", "eval", "predict", "lr_find", "scaling"))
    weights: Optional[str] = key(
        None, "what mode=eval and predict load: .safetensors, .pt, the folder of a run, or of a checkpoint"
    )
    epochs: int = key(10, "passes over the training data", "epochs", ge=1)
    max_steps: Optional[int] = key(None, "the run ends after this number of updates, or after epochs", "updates", ge=1)
    limit_train_batches: Optional[int] = key(None, "greatest number of batches per epoch", "batches", ge=1)
    limit_val_batches: Optional[int] = key(
        None, "greatest number of batches per validation, and of the test", "batches", ge=1
    )
    validation: bool = key(
        True, "measure the validation samples every execution.val_every epochs; false: never, and none are needed"
    )
    test: bool = key(True, "measure the test samples, if there are any, once at the end with the best model")
    seed: int = key(0, "seed of parameters, order of samples, augmentation", ge=0, le=LONG)
    precision: str = key("auto", "arithmetic of the forward pass", choices=("auto", "fp64", "fp32", "bf16", "fp16"))
    device: str = key("auto", "where to compute", choices=("auto", "cpu", "cuda"))
    recompute: Any = key(
        "none",
        "activations that the backward computes again: none, of blocks (auto), or of modules by name or class",
        texts=True,
    )
    compile: Any = key(
        False, "compile the model (static graph) instead of running it eagerly; auto: where it pays", choices=AUTO
    )
    profile: bool = key(False, "trace a few updates with torch's profiler and print where their time goes")
    plan: bool = key(False, "print the plan and stop")
    debug: bool = key(False, "show tracebacks of errors")
    verbosity: str = key(
        "normal",
        "quiet: warnings and the last lines; debug: tracebacks, and what every process prints",
        choices=("quiet", "normal", "debug"),
    )
    ema: EmaConfig = key(EmaConfig, "a moving average of the weights, evaluated and saved beside the model")
    best: BestConfig = key(BestConfig, "which model checkpoints/best.safetensors is")
    on_nonfinite: str = key(
        "stop",
        "NaN or infinity in a loss or gradient: end, leave the update out, or go back to the last checkpoint",
        choices=("stop", "skip", "rewind"),
    )
    max_rewinds: int = key(3, "with on_nonfinite=rewind: how often the run goes back before it ends", "rewinds", ge=1)
    early_stop: EarlyStopConfig = key(EarlyStopConfig, "end when a validation metric has stopped getting better")
    callbacks: List[Any] = key(
        [], "called at the start, after updates, validations and at the end: [{_target_: my_package.MyCallback}]"
    )
    metrics: Dict[str, Any] = key(
        {}, "further metrics of validations, by name: {f1w: {_target_: torchmetrics.classification.MulticlassF1Score}}"
    )
    model: Any = key("???", "group: what is trained")
    data: Any = key("???", "group: what is learnt from")
    sampler: Any = key("???", "group: which worker sees which sample when")
    task: Any = key("???", "group: what labels are, which metrics, what predict writes")
    loss: Any = key("???", "group: what is minimised")
    optimizer: Any = key("???", "group: how a gradient becomes a step")
    scheduler: Any = key("???", "group: a factor on the learning rate")
    strategy: Any = key("???", "group: how gradients become shared parameters")
    launch: Any = key("???", "group: how many processes, and where")
    execution: Any = key("???", "group: arithmetic and rhythm")
    tracking: Any = key("???", "group: where metrics go")
    sweep: SweepConfig = key(SweepConfig, "how the jobs of a sweep run")
    lr_find: LrFindConfig = key(LrFindConfig, "which learning rates mode=lr_find tries")
    scaling: ScalingConfig = key(ScalingConfig, "how long mode=scaling trains")
    advise: AdviseConfig = key(AdviseConfig, "what strategy=advise measures and predicts")
    eval: EvalConfig = key(EvalConfig, "which part of the data mode=eval measures")
    predict: Any = key("???", "group: which images or rows mode=predict looks at")
    checkpoint: Any = key("???", "group: when the run saves what it can go on from")
    resume: ResumeConfig = key(ResumeConfig, "go on from a checkpoint instead of afresh")


def _options(base: type) -> tuple[type, ...]:
    """The classes of a group's options: the base class, and its subclasses in the order of their file."""
    return tuple(c for c in vars(sys.modules[base.__module__]).values() if isinstance(c, type) and issubclass(c, base))


GROUPS: dict[str, tuple[type, ...]] = {
    "model": _options(ModelConfig),
    "data": _options(DataConfig),
    "sampler": _options(SamplerConfig),
    "task": _options(TaskConfig),
    "loss": _options(LossConfig),
    "optimizer": _options(OptimizerConfig),
    "scheduler": _options(SchedulerConfig),
    "strategy": _options(StrategyConfig),
    "launch": _options(LaunchConfig),
    "execution": _options(ExecutionConfig),
    "tracking": _options(TrackingConfig),
    "predict": _options(PredictConfig),
    "checkpoint": _options(CheckpointConfig),
}


OPEN_GROUPS = ("model", "data", "sampler", "task", "loss", "optimizer", "scheduler", "strategy", "launch")
"""Groups whose option names a class by ``_target_``: a user's own class may take further keys."""

CONSTRUCTED = ("model", "loss", "optimizer")
"""Of these, the groups whose further keys are arguments of a constructor outside of this project."""

NOT_ARGUMENTS = {
    "optimizer": ("sparse", "decay_norms_and_biases", "lr_factors", "layer_decay", "lr_scaling", "lr_base_batch"),
    "model": ("zero_init_residual",),
}
"""By group: keys that the constructor does not get."""
UNLESS_NULL = {"loss": ("weight", "pos_weight")}
"""By group: keys that the constructor gets only if they are not null, as a user's own class need not take them."""
STARTED = tuple(str(getattr(model, "_target_", "")) for model in GROUPS["model"] if hasattr(model, "init"))
"""The models of the reference's examples, which have ``model.init``."""


def not_arguments(key: str, node: Mapping[str, Any], required: Collection[str] = ()) -> tuple[str, ...]:
    """Keys of a config node (``key``: optimizer, model, ...) that its constructor does not get.

    Args:
        required: arguments without which its class cannot be called.
    """
    # a recipe sets model.init, and the user has replaced its model by a class without this argument
    own_class = node.get("init") == "default" and "init" not in required
    started = key == "model" and (node.get("_target_") in STARTED or own_class)
    unset = [name for name in UNLESS_NULL.get(key, ()) if node.get(name) is None]
    return (*NOT_ARGUMENTS.get(key, ()), *(("init",) if started else ()), *unset)


WEIGHT_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".pth.tar", ".pt.tar", ".th")
"""Suffixes of files of weights."""


def option_of(group: str, target: str) -> type:
    """The schema class for a config group's ``_target_``; for a user's own target, the group's first class."""
    options = GROUPS[group]  # a base class is before those that have its target
    return {str(getattr(c, "_target_", None)): c for c in reversed(options)}.get(target, options[0])
