"""The typed config: every key, its type, default, unit and one line of help, in this one place; here the run as a
whole."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Dict, List, Optional  # OmegaConf reads them

from trainer.config import schema
from trainer.config.schema.data import (
    ArraysData,
    AugmentedData,
    Cifar10Data,
    CriteoData,
    CriteoRows,
    DataConfig,
    DigitsData,
    EmbeddedFlowersData,
    Flowers102Data,
    FlowersData,
    ImageFolderData,
    ImagesData,
    MnistData,
    MnistJsonData,
    PicturesData,
    RandomImagesData,
    ShardsData,
    SyntheticCriteoData,
    TableData,
)
from trainer.config.schema.declare import LONG, key
from trainer.config.schema.model import (
    BinaryCrossEntropyLoss,
    ConvnetModel,
    CrossEntropyLoss,
    FinetuneModel,
    HuberLoss,
    LeNetModel,
    LogLoss,
    LossConfig,
    ModelConfig,
    MseLoss,
    ResNet18Model,
    ResNet50Model,
    SquaredErrorLoss,
    TimmModel,
    TorchvisionModel,
    WideAndDeepModel,
)
from trainer.config.schema.optim import (
    AdagradOptimizer,
    AdamOptimizer,
    AdamWOptimizer,
    CosineSchedule,
    MomentumOptimizer,
    MultiStepSchedule,
    OneCycleSchedule,
    OptimizerConfig,
    PlateauSchedule,
    PolynomialSchedule,
    RMSpropOptimizer,
    SchedulerConfig,
    StepSchedule,
    TorchOptimizer,
)
from trainer.config.schema.run import (
    BestConfig,
    CheckpointConfig,
    EarlyStopConfig,
    EmaConfig,
    EvalConfig,
    ExecutionConfig,
    ForkserverLaunch,
    InProcessLaunch,
    KubernetesLaunch,
    LaunchConfig,
    MpiLaunch,
    PredictConfig,
    ResumeConfig,
    SlurmLaunch,
    SubmitLaunch,
    TrackingConfig,
)
from trainer.config.schema.sampler import (
    ClassBalancedSampler,
    RepeatedAugmentationSampler,
    SamplerConfig,
    WeightedSampler,
)
from trainer.config.schema.strategy import (
    AutoStrategy,
    CollectiveStrategy,
    FreeStrategy,
    GroupStrategy,
    LocalSgdStrategy,
    PserverAsyncStrategy,
    PserverGeoStrategy,
    PserverSspStrategy,
    PserverStrategy,
    PserverSyncStrategy,
    StaleStrategy,
    StrategyConfig,
)
from trainer.config.schema.task import (
    AutoTask,
    BinaryTask,
    ClassificationTask,
    MultiLabelTask,
    RegressionTask,
    TaskConfig,
)


@dataclass
class Config:
    """The whole run."""

    name: str = key("custom", "the recipe's name: MLflow experiment and folder under outputs/")
    mode: str = key("train", "what to do", choices=("train", "eval", "predict"))
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
        True, "measure validation samples as execution.val_every tells; false: never, data need none"
    )
    test: bool = key(True, "where the data have test samples: measure them once, at the end, with the best model")
    seed: int = key(0, "seed of parameters, order of samples, augmentation", ge=0, le=LONG)
    precision: str = key("auto", "arithmetic of the forward pass", choices=("auto", "fp64", "fp32", "bf16", "fp16"))
    device: str = key("auto", "where to compute", choices=("auto", "cpu", "cuda"))
    compile: bool = key(False, "compile the model (static graph) instead of running it eagerly")
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
    eval: EvalConfig = key(EvalConfig, "which part of the data mode=eval measures")
    predict: Any = key("???", "group: which images or rows mode=predict looks at")
    checkpoint: Any = key("???", "group: when the run saves what it can go on from")
    resume: ResumeConfig = key(ResumeConfig, "go on from a checkpoint instead of afresh")


GROUPS: dict[str, tuple[type, ...]] = {
    "model": (
        ModelConfig,
        LeNetModel,
        ConvnetModel,
        ResNet18Model,
        ResNet50Model,
        TorchvisionModel,
        FinetuneModel,
        TimmModel,
        WideAndDeepModel,
    ),
    "data": (
        DataConfig,
        DigitsData,
        RandomImagesData,
        PicturesData,
        AugmentedData,
        ImagesData,
        FlowersData,
        Flowers102Data,
        EmbeddedFlowersData,
        ImageFolderData,
        TableData,
        ShardsData,
        ArraysData,
        Cifar10Data,
        MnistData,
        MnistJsonData,
        CriteoRows,
        CriteoData,
        SyntheticCriteoData,
    ),
    "sampler": (SamplerConfig, ClassBalancedSampler, RepeatedAugmentationSampler, WeightedSampler),
    "task": (TaskConfig, AutoTask, ClassificationTask, BinaryTask, MultiLabelTask, RegressionTask),
    "loss": (LossConfig, CrossEntropyLoss, SquaredErrorLoss, BinaryCrossEntropyLoss, LogLoss, MseLoss, HuberLoss),
    "optimizer": (
        OptimizerConfig,
        MomentumOptimizer,
        RMSpropOptimizer,
        AdamOptimizer,
        AdamWOptimizer,
        AdagradOptimizer,
        TorchOptimizer,
    ),
    "scheduler": (
        SchedulerConfig,
        StepSchedule,
        MultiStepSchedule,
        CosineSchedule,
        OneCycleSchedule,
        PolynomialSchedule,
        PlateauSchedule,
    ),
    "strategy": (
        StrategyConfig,
        GroupStrategy,
        CollectiveStrategy,
        AutoStrategy,
        LocalSgdStrategy,
        PserverStrategy,
        PserverSyncStrategy,
        FreeStrategy,
        StaleStrategy,
        PserverAsyncStrategy,
        PserverSspStrategy,
        PserverGeoStrategy,
    ),
    "launch": (LaunchConfig, InProcessLaunch, ForkserverLaunch, SlurmLaunch, KubernetesLaunch, MpiLaunch),
    "execution": (ExecutionConfig,),
    "tracking": (TrackingConfig,),
    "predict": (PredictConfig,),
    "checkpoint": (CheckpointConfig,),
}


OPEN_GROUPS = ("model", "data", "sampler", "task", "loss", "optimizer", "scheduler", "strategy", "launch")
"""Groups whose option names a class by ``_target_``: a user's own class may take further keys."""

CONSTRUCTED = ("model", "loss", "optimizer")
"""Of these, the ones whose further keys are arguments of a constructor that is not ours."""

NOT_ARGUMENTS = {
    "optimizer": ("sparse", "decay_norms_and_biases", "lr_factors", "layer_decay", "lr_scaling", "lr_base_batch"),
    "model": ("zero_init_residual",),
}
"""Keys of these that the constructor does not get."""
UNLESS_NULL = {"loss": ("weight", "pos_weight")}
"""Keys of these that the constructor gets unless they are null: a class of the user's own need not take them."""
STARTED = tuple(
    declared._target_ for declared in (LeNetModel, ConvnetModel, ResNet18Model, ResNet50Model, WideAndDeepModel)
)
"""The models of the reference's examples, which have ``model.init``."""


def not_arguments(key: str, node: Mapping[str, Any], required: Collection[str] = ()) -> tuple[str, ...]:
    """Keys of a config node (``key``: optimizer, model, ...) that its constructor does not get.

    Args:
        required: arguments without which its class cannot be called.
    """
    # what a recipe has left over a model of the user's own
    own_class = node.get("init") == "default" and "init" not in required
    started = key == "model" and (node.get("_target_") in STARTED or own_class)
    unset = [name for name in UNLESS_NULL.get(key, ()) if node.get(name) is None]
    return (*NOT_ARGUMENTS.get(key, ()), *(("init",) if started else ()), *unset)


WEIGHT_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".pth.tar", ".pt.tar", ".th")
"""What the name of a file of weights ends with."""


def option_of(group: str, target: str) -> type:
    """The schema class for a config group's ``_target_``; for a user's own target, the group's first class."""
    options = schema.GROUPS[group]
    return {str(getattr(c, "_target_", None)): c for c in options}.get(target, options[0])
