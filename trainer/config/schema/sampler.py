"""sampler: which samples an epoch has, in which order, and which worker sees which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional  # OmegaConf reads it

from trainer.config.schema.declare import key


@dataclass
class SamplerConfig:
    """sampler: which worker sees which sample when."""

    _target_: str = key(
        "trainer.data.sample_orders.EachOnce",
        "class or function: (labels or None, samples, seed, epoch) -> positions of an epoch's samples",
    )
    shuffle: bool = key(True, "a new order each epoch, from (seed, epoch)")
    drop_last: bool = key(
        True, "leave out the epoch's last batch (with data.global_batch_size: update) when it is not full"
    )
    pad: bool = key(
        True, "with data.batch_size: repeat samples so that all workers get equally many; false: unequal, weighted"
    )
    padding: str = key(
        "strided",
        "how samples are repeated and split: as PyTorch's sampler does, or in blocks as Paddle's does",
        choices=("strided", "contiguous"),
    )
    shard: bool = key(
        True, "workers share out the samples; false: each reads all of them in one order, with its own augmentation"
    )


@dataclass
class ClassBalancedSampler(SamplerConfig):
    """sampler=class_balanced: every class equally often."""

    _target_: str = key("trainer.data.sample_orders.ClassBalanced", "class that orders the samples")


@dataclass
class RepeatedAugmentationSampler(SamplerConfig):
    """sampler=repeated_augmentation: some samples, each several times, augmented differently."""

    _target_: str = key("trainer.data.sample_orders.RepeatedAugmentation", "class that orders the samples")
    repeats: int = key(3, "uses of a sample side by side", "uses", ge=1, le=1000)


@dataclass
class WeightedSampler(SamplerConfig):
    """sampler=weighted: samples are drawn by weights, from a column of the data or from a file."""

    _target_: str = key("trainer.data.sample_orders.Weighted", "class that orders the samples")
    column: Optional[str] = key(None, "column of the training data that holds the weights (null: from path)")
    path: Optional[str] = key(None, ".npy file, or a text file of a number per line: weights of the training samples")
    draws: Optional[int] = key(None, "samples of an epoch (null: as many as there are)", "samples", ge=1)
    replacement: bool = key(True, "a sample may be drawn again in the same epoch")
