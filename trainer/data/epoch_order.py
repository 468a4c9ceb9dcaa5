"""The order of an epoch's samples over all workers: calls the sampler of the config, and checks what it returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np

from trainer.config import schema
from trainer.config.instantiate import call_target, locate
from trainer.config.run_config import RunConfig
from trainer.data.sample_orders import EachOnce
from trainer.errors import UserError
from trainer.wording import counted, kind

Sampler = Callable[..., Any]
"""(labels, samples, seed, epoch) -> positions (N,), or a pair of these and their uses."""
EACH_ONCE = schema.SamplerConfig._target_
SHIPPED = {
    EACH_ONCE: "each_once",
    schema.ClassBalancedSampler._target_: "class_balanced",
    schema.RepeatedAugmentationSampler._target_: "repeated_augmentation",
    schema.WeightedSampler._target_: "weighted",
}
OF_THE_CORE = {field.name for field in fields(schema.SamplerConfig)}
"""Keys of ``sampler`` that the sampler's class does not get."""


class EpochOrder:
    """The addresses of the samples of each epoch, over all workers.

    An address is a sample's position, plus ``samples`` for each earlier use of the sample in the epoch: augmentation
    is drawn from the address, so that each use of a sample is augmented differently.

    Args:
        samples: samples in the data set.
        sampler: orders their positions; None: each once, shuffled.
        labels: (samples,) class numbers; None: not known, or not needed.
        name: of the sampler, for messages.

    Raises:
        UserError: the sampler's ``length`` is no number of positions.
    """

    def __init__(
        self, samples: int, seed: int = 0, sampler: Sampler | None = None, labels: Any = None, name: str = "sampler"
    ) -> None:
        self.samples, self.seed, self.labels, self.name = samples, seed, labels, name
        self.sampler = sampler or EachOnce()
        length = getattr(self.sampler, "length", None)
        self.length = samples if length is None else length(samples)
        if isinstance(self.length, bool) or not isinstance(self.length, int) or (samples and self.length < 1):
            raise UserError(name, f"its length({samples}) is {self.length!r}, not a number of positions from 1 on")

    def __len__(self) -> int:
        """Addresses in an epoch, the same in every epoch."""
        return self.length

    def __call__(self, epoch: int) -> np.ndarray:
        """(len,) int64 addresses of that epoch.

        Raises:
            UserError: the sampler returns anything else than positions of samples.
        """
        found = self.sampler(labels=self.labels, samples=self.samples, seed=self.seed, epoch=epoch)
        positions, uses = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        positions = self._integers(positions, "positions of samples")
        if len(positions) != len(self):
            declared = "length(samples) says" if hasattr(self.sampler, "length") else "data have"
            instead = "a method length(samples) that returns the number of positions of an epoch"
            self._refuse(f"returned {counted(len(positions), 'position')}, and its {declared} {len(self)}", instead)
        wrong = np.flatnonzero((positions < 0) | (positions >= self.samples))
        if len(wrong):
            which = f"position {positions[wrong[0]]} at index {wrong[0]} of epoch {epoch}"
            self._refuse(f"returned {which}; the {self.samples} training samples have positions from 0 on")
        uses = earlier_uses(positions) if uses is None else self._integers(uses, "uses of samples")
        if len(uses) != len(positions) or (uses < 0).any():
            self._refuse("returned uses that are no (N,) numbers from 0 on, one for each position")
        addresses: np.ndarray = positions + self.samples * uses
        return addresses

    def check(self) -> None:
        """Call the sampler twice for the first epoch.

        Raises:
            UserError: the two orders differ, or are no orders of these samples.
        """
        one, other = self(0), self(0)
        if not np.array_equal(one, other):
            self._refuse(
                f"is not deterministic: two calls with seed={self.seed} and epoch=0 returned different orders. Every "
                f"worker calls it, and a resumed run calls it again",
                "numpy.random.default_rng((seed, epoch)) for all that is random",
            )

    def _integers(self, found: Any, what: str) -> np.ndarray:
        try:
            array = np.asarray(found)
        except Exception:
            array = np.asarray(None)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            described = f"an array of {array.dtype} {array.shape}" if array.dtype != object else kind(found)
            self._refuse(f"returned {described}, not {what}", "an int64 array or tensor (N,)")
        return array.astype(np.int64)

    def _refuse(self, why: str, instead: str = "") -> None:
        raise UserError(self.name, why, instead)


def earlier_uses(positions: np.ndarray) -> np.ndarray:
    """(N,) how often each position has come before in the array."""
    by_position = np.argsort(positions, kind="stable")
    first = np.flatnonzero(np.diff(positions[by_position], prepend=-1))
    runs = np.diff(first, append=len(positions))
    uses = np.empty(len(positions), np.int64)
    uses[by_position] = np.arange(len(positions)) - np.repeat(first, runs)
    return uses


def is_each_once(config: RunConfig) -> bool:
    """Whether an epoch has each sample once, so that nothing needs to be known of the samples."""
    return config.sampler._target_ == EACH_ONCE


def sampler_name(config: RunConfig) -> str:
    """The sampler as it can be typed: ``sampler=class_balanced``, or ``sampler._target_=my_package.Mine``."""
    target = config.sampler._target_
    return f"sampler={SHIPPED[target]}" if target in SHIPPED else f"sampler._target_={target}"


def make_sampler(config: RunConfig) -> Sampler:
    """Make the sampler that the config names: a class is called with its keys, a function gets its keys in each call.

    Raises:
        UserError: there is no such class or function, or it does not take these keys.
    """
    if is_each_once(config):
        return EachOnce(config.sampler.shuffle)
    path = config.sampler._target_
    own = {name: value for name, value in config.node("sampler").items() if name not in OF_THE_CORE}
    target = locate(path, "sampler._target_")
    if not inspect.isclass(target) and callable(target):
        return partial(target, **own) if own else target
    made = call_target({"_target_": path, **own}, "sampler")
    if not callable(made):
        how = "a method __call__(labels, samples, seed, epoch) that returns positions"
        raise UserError(sampler_name(config), "has no method __call__", how)
    return made  # type: ignore[no-any-return]


def epoch_order(config: RunConfig, samples: int, train: Any = None, labels: Any = None) -> EpochOrder:
    """Make the epoch's order of samples that the config asks for; without ``train`` its length alone is right.

    Args:
        train: the opened training data, for a sampler with a method ``prepare(train)``.
    """
    if config.mode != "train":
        return EpochOrder(samples, config.seed)
    sampler = make_sampler(config)
    if train is not None and hasattr(sampler, "prepare"):
        sampler.prepare(train)
    return EpochOrder(samples, config.seed, sampler, labels, sampler_name(config))


def needs_training_data(config: RunConfig) -> bool:
    """Whether the sampler asks for the labels of the training data, or for the data themselves."""
    return config.mode == "train" and getattr(make_sampler(config), "needs_labels", True)
