"""optimizer, scheduler: how a gradient becomes a step. Open groups: further keys go to the constructor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Optional  # OmegaConf reads them

from trainer.config.schema.declare import key


def _optimizer(target: str) -> Any:
    return key(target, "torch.optim.Optimizer called with (parameters, lr=..., ...)")


def _schedule(target: str) -> Any:
    return key(target, "class with factor(step) -> float")


@dataclass
class OptimizerConfig:
    """optimizer: how a gradient becomes a step. Further keys are arguments of the constructor."""

    _target_: str = _optimizer("torch.optim.SGD")
    lr: float = key(0.01, "learning rate that the scheduler multiplies", gt=0)
    weight_decay: float = key(0.0, "L2 decay; never of sparse embedding tables", ge=0)
    decay_norms_and_biases: bool = key(False, "weight decay also of norms, biases and all else that has one dimension")
    lr_factors: Dict[str, float] = key(
        {}, "factors on lr by parameter name, e.g. {backbone.*: 0.1, stem: 0} (0: frozen)"
    )
    layer_decay: Optional[float] = key(
        None, "factor on lr from each layer to the one before it (null: none)", gt=0, le=1
    )
    lr_scaling: str = key(
        "none",
        "lr grows with the samples per update / lr_base_batch, or with its root",
        choices=("none", "linear", "sqrt"),
    )
    lr_base_batch: int = key(256, "samples per update for which lr is meant, with lr_scaling", "samples", ge=1)
    sparse: str = key(
        "auto",
        "rule for embedding tables with sparse gradients (auto: the optimizer's counterpart)",
        choices=("auto", "sgd", "adagrad", "rowwise_adagrad", "adam"),
    )


@dataclass
class MomentumOptimizer(OptimizerConfig):
    """optimizer=momentum: SGD with momentum."""

    lr: float = key(0.1, "learning rate that the scheduler multiplies", gt=0)
    momentum: float = key(0.9, "share of the last step that is kept", ge=0)
    nesterov: bool = key(False, "Nesterov's momentum")


@dataclass
class RMSpropOptimizer(OptimizerConfig):
    """optimizer=rmsprop: steps are divided by a running mean of the gradient's size."""

    _target_: str = _optimizer("torch.optim.RMSprop")
    alpha: float = key(0.99, "decay of the running mean of the squared gradient", ge=0, le=1)
    eps: float = key(1e-8, "added to the denominator", ge=0)
    momentum: float = key(0.0, "share of the last step that is kept", ge=0)
    centered: bool = key(False, "divide by the deviation instead of the size")


@dataclass
class AdamOptimizer(OptimizerConfig):
    """optimizer=adam."""

    _target_: str = _optimizer("torch.optim.Adam")
    lr: float = key(0.001, "learning rate that the scheduler multiplies", gt=0)
    betas: List[float] = key(
        [0.9, 0.999], "decay of the running means of gradient and squared gradient", ge=0, lt=1, length=2
    )
    eps: float = key(1e-8, "added to the denominator", ge=0)


@dataclass
class AdamWOptimizer(AdamOptimizer):
    """optimizer=adamw: Adam with decoupled weight decay."""

    _target_: str = _optimizer("torch.optim.AdamW")
    weight_decay: float = key(0.01, "decoupled decay; never of sparse embedding tables", ge=0)


@dataclass
class AdagradOptimizer(OptimizerConfig):
    """optimizer=adagrad: steps shrink with what a parameter has moved, which suits features that are rare."""

    _target_: str = _optimizer("torch.optim.Adagrad")
    initial_accumulator_value: float = key(0.0, "sum of squared gradients at the start", ge=0)
    eps: float = key(1e-10, "added to the denominator", ge=0)


@dataclass
class LarsOptimizer(MomentumOptimizer):
    """optimizer=lars: momentum whose steps are in proportion to the norm of each layer's weights, for large batches."""

    _target_: str = _optimizer("timm.optim.Lars")
    lr: float = key(1.0, "learning rate that the scheduler multiplies", gt=0)
    weight_decay: float = key(1e-4, "L2 decay; what is not decayed (norms, biases) takes plain steps of momentum", ge=0)
    trust_coeff: float = key(0.001, "step of a layer as a share of the norm of its weights, at lr=1", gt=0)
    eps: float = key(1e-8, "added to the denominator", ge=0)


@dataclass
class LambOptimizer(AdamOptimizer):
    """optimizer=lamb: Adam whose steps are in proportion to the norm of each layer's weights, for large batches."""

    _target_: str = _optimizer("timm.optim.Lamb")
    weight_decay: float = key(0.01, "decay; what is not decayed (norms, biases) takes plain steps of Adam", ge=0)
    eps: float = key(1e-6, "added to the denominator", ge=0)
    max_grad_norm: Optional[float] = key(
        None, "clips the whole gradient, as strategy.clip_norm does too (null: it is not clipped here)", gt=0
    )


@dataclass
class LionOptimizer(OptimizerConfig):
    """optimizer=lion: steps by the sign of a running mean of the gradient; one number for each parameter."""

    _target_: str = _optimizer("timm.optim.Lion")
    lr: float = key(0.0001, "learning rate that the scheduler multiplies: about a tenth of Adam's", gt=0)
    betas: List[float] = key(
        [0.9, 0.99], "shares of the running mean in the step, and that are kept of it", ge=0, lt=1, length=2
    )


@dataclass
class MuonOptimizer(AdamWOptimizer):
    """optimizer=muon: orthogonal steps for the matrices of hidden layers, AdamW for all other parameters."""

    _target_: str = _optimizer("trainer.optim.muon.Muon")
    momentum: float = key(0.95, "share of the last step of a matrix that is kept", ge=0)
    nesterov: bool = key(True, "Nesterov's momentum")
    ns_steps: int = key(5, "steps of Newton-Schulz that make a step of a matrix orthogonal", "steps", ge=1, le=99)
    scale: str = key(
        "match_rms_adamw",
        "size of a matrix's step: as large as AdamW's, with its lr; or the first authors', with lr=0.02",
        choices=("match_rms_adamw", "original"),
    )


@dataclass
class ScheduleFreeOptimizer(AdamOptimizer):
    """optimizer=schedule_free: AdamW that averages its steps and needs no schedule, only a warm-up."""

    _target_: str = _optimizer("trainer.optim.schedule_free.ScheduleFreeAdamW")
    lr: float = key(0.0025, "learning rate that the scheduler multiplies: 1 to 10 times AdamW's", gt=0)
    weight_decay: float = key(0.0, "decoupled decay; never of sparse embedding tables", ge=0)
    betas: List[float] = key(
        [0.9, 0.999],
        "share of the average where gradients are computed, and decay of the running mean of the squared gradient",
        gt=0,
        lt=1,
        length=2,
    )


@dataclass
class ScheduleFreeSgdOptimizer(OptimizerConfig):
    """optimizer=schedule_free_sgd: SGD that averages its steps and needs no schedule, only a warm-up."""

    _target_: str = _optimizer("trainer.optim.schedule_free.ScheduleFreeSgd")
    lr: float = key(1.0, "learning rate that the scheduler multiplies: 10 to 50 times SGD's", gt=0)
    beta: float = key(0.9, "share of the average where gradients are computed", gt=0, lt=1)


@dataclass
class TorchOptimizer(OptimizerConfig):
    """optimizer=torch: any of torch.optim's classes."""

    _target_: str = _optimizer("trainer.optim.by_name.by_name")
    name: str = key("???", "its name in torch.optim, e.g. RMSprop")


@dataclass
class SchedulerConfig:
    """scheduler: a factor on optimizer.lr at every update."""

    _target_: str = _schedule("trainer.optim.schedules.Constant")
    warmup_epochs: float = key(0.0, "linear warm-up before the schedule", "epochs", ge=0, le=1e9)
    warmup_steps: Optional[int] = key(None, "linear warm-up, instead of warmup_epochs", "updates", ge=0)
    warmup_start: float = key(0.0, "factor at the first update of the warm-up", ge=0, le=1)


@dataclass
class StepSchedule(SchedulerConfig):
    """scheduler=step: drops by gamma at regular intervals."""

    _target_: str = _schedule("trainer.optim.schedules.Step")
    every_epochs: float = key(30.0, "epochs between two drops", "epochs", gt=0, le=1e9)
    gamma: float = key(0.1, "factor of each drop", gt=0, le=1)


@dataclass
class MultiStepSchedule(SchedulerConfig):
    """scheduler=multistep: drops by gamma at given epochs."""

    _target_: str = _schedule("trainer.optim.schedules.MultiStep")
    milestones: List[float] = key([30.0, 60.0, 90.0], "epochs of the drops, from the start of the run", gt=0, le=1e9)
    gamma: float = key(0.1, "factor of each drop", gt=0, le=1)


@dataclass
class CosineSchedule(SchedulerConfig):
    """scheduler=cosine: half a cosine down to final at the last update."""

    _target_: str = _schedule("trainer.optim.schedules.Cosine")
    final: float = key(0.0, "factor at the last update", ge=0, le=1)


@dataclass
class OneCycleSchedule(SchedulerConfig):
    """scheduler=one_cycle: up to lr and down again; optimizer.lr is the peak."""

    _target_: str = _schedule("trainer.optim.schedules.OneCycle")
    rise: float = key(0.3, "share of the updates that lead up", ge=0, le=1)
    initial: float = key(0.04, "factor at the first update", ge=0, le=1)
    final: float = key(4e-6, "factor at the last update", ge=0, le=1)
    anneal: str = key("cos", "shape of both ways", choices=("cos", "linear"))


@dataclass
class PolynomialSchedule(SchedulerConfig):
    """scheduler=polynomial: a power of what is left of the run; power 1 is a straight line."""

    _target_: str = _schedule("trainer.optim.schedules.Polynomial")
    power: float = key(1.0, "power of the share of updates that are left", gt=0, le=1000)
    final: float = key(0.0, "factor at the last update", ge=0, le=1)


@dataclass
class ExponentialSchedule(SchedulerConfig):
    """scheduler=exponential: multiplied by one factor at every update, down (or up) to final."""

    _target_: str = _schedule("trainer.optim.schedules.Exponential")
    final: float = key(0.01, "factor at the last update; above 1 the rate grows", gt=0, le=1e12)


@dataclass
class PlateauSchedule(SchedulerConfig):
    """scheduler=plateau: drops by gamma when a validation metric has stopped getting better."""

    _target_: str = _schedule("trainer.optim.schedules.Plateau")
    metric: str = key("val/loss", "validation metric that is watched")
    gamma: float = key(0.1, "factor of each drop", gt=0, le=1)
    patience: int = key(10, "validations without a better value before the rate falls", "validations", ge=0)
    min_delta: float = key(1e-4, "a value counts as better only when it is better by more than this", ge=0)
    cooldown: int = key(0, "validations after a drop that do not count", "validations", ge=0)
    least: float = key(0.0, "the factor does not fall below this", ge=0, le=1)
