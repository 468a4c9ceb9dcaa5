"""Opens a data source's data sets and checks that they are as its facts promise; if not, an error names the class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from trainer.data.augment.global_generators import own_randomness
from trainer.data.source import DataSource, Facts, Splits
from trainer.errors import RunFailed, UserError, failed, first_line

CHECKED, CHECKED_IF_SLOW = 16, 2
"""Samples of a data set that are checked, spread over all of it; fewer if each takes long to read."""
MOST_LABELS = 10_000_000
MAY_LACK = {"validation": ", or type validation=false", "test": " with test=..., or type test=false"}
"""What the user can type if a set is None."""
IMAGE_DIMENSIONS = 3


def opened(source: DataSource, facts: Facts, validates: bool = True, tests: bool = True) -> Splits:
    """Open a source's data sets, and check shapes, sizes and labels against its facts.

    Args:
        validates: False: the validation set is not checked, and may be None. tests: the same for the test set.

    Raises:
        RunFailed: they cannot be opened, or are not what the facts say.
    """
    name = f"{type(source).__module__}.{type(source).__qualname__}"
    try:
        splits = source.open(facts)
    except (RunFailed, UserError, OSError):
        raise
    except Exception as error:
        raise failed(name, "open", source.open, error) from error
    if not isinstance(splits, Splits):
        raise RunFailed(
            f"{name}: open returned something of type {type(splits).__name__}. Return a "
            f"trainer.data.source.Splits(train, val)"
        )
    _check_normalisation(splits, facts, name)
    if not facts.streams and not facts.iterable:
        _check(splits.train, "training", facts.train_samples, facts.shape, facts, name)
    shape = facts.val_shape or facts.shape
    if validates and not _is_unnumbered(splits.val, facts):
        _check(splits.val, "validation", facts.val_samples, shape, facts, name)
    if tests and (splits.test is not None or facts.test_samples) and not _is_unnumbered(splits.test, facts):
        _check(splits.test, "test", facts.test_samples, shape, facts, name)
    return splits


def _is_unnumbered(dataset: Any, facts: Facts) -> bool:
    """Whether a data set may be a stream: it has no length."""
    return facts.iterable and dataset is not None and not hasattr(dataset, "__len__")


def _check_normalisation(splits: Splits, facts: Facts, name: str) -> None:
    """Check that mean and standard deviation have one number for each channel of images."""
    for what in ("mean", "std"):
        values = getattr(splits, what)
        if values is None:
            continue
        if not isinstance(facts.shape, tuple) or len(facts.shape) != IMAGE_DIMENSIONS:
            raise RunFailed(
                f"{name}: Splits has {what}={values}, and only images (C, H, W) are normalised; these inputs "
                f"are {facts.shape}. Leave mean and std out"
            )
        if len(values) not in (1, facts.shape[0]):
            raise RunFailed(
                f"{name}: Splits has {len(values)} numbers as {what}, and the images have {facts.shape[0]} channels"
            )


def _check(dataset: Any, which: str, samples: int, shape: Any, facts: Facts, name: str) -> None:
    """Check the number of samples of a data set, and shape and labels of some of them."""
    where = f"{name}, the {which} set"
    kind = type(dataset).__name__
    if dataset is None:
        raise RunFailed(f"{where} is None. open returns Splits(train, val)" + MAY_LACK.get(which, ""))
    try:
        there = len(dataset)
    except TypeError as error:
        raise RunFailed(
            f"{where} ({kind}) has no length. A data set has __len__ and __getitem__, or a method batch(indices)"
        ) from error
    if there != samples:
        raise RunFailed(f"{where} ({kind}) has {there} samples, and its facts say {samples}")
    if not there or hasattr(dataset, "augmented"):
        return
    most = CHECKED_IF_SLOW if facts.slow else CHECKED
    labels = _labels(dataset)
    for index in np.unique(np.linspace(0, there - 1, most).astype(np.int64)):
        inputs, label = _sample(dataset, int(index), f"{where} ({kind})")
        check_shape(inputs, shape, f"{where} ({kind})")
        check_labels(label, facts, f"{where} ({kind})")
    if labels is not None:
        check_labels(labels, facts, f"{where} ({kind})")


def _labels(dataset: Any) -> torch.Tensor | None:
    """All labels of a data set that holds them, if reading them takes no time."""
    tensors = getattr(dataset, "tensors", None)
    held = tensors[1] if isinstance(tensors, tuple) and len(tensors) > 1 else getattr(dataset, "labels", None)
    if not isinstance(held, (torch.Tensor, np.ndarray)) or len(held) > MOST_LABELS:
        return None
    return held if isinstance(held, torch.Tensor) else torch.tensor(held)


def _sample(dataset: Any, index: int, where: str) -> tuple[Any, torch.Tensor]:
    """One sample as a batch."""
    batched = hasattr(dataset, "batch")
    method = f"batch([{index}])" if batched else f"item {index}"
    try:
        with own_randomness():
            found = dataset.batch(np.array([index])) if batched else dataset[index]
    except (RunFailed, UserError, OSError):
        raise
    except Exception as error:
        raise failed(where, method, dataset.batch if batched else dataset.__getitem__, error) from error
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        size = f" of {len(found)}" if isinstance(found, (tuple, list)) else ""
        what = "(inputs, labels)" if batched else "(input, label)"
        raise RunFailed(f"{where}: {method} is a {type(found).__name__}{size}, not a pair {what}")
    if not batched:
        try:
            found = default_collate([tuple(found)])
        except TypeError as error:
            raise RunFailed(f"{where}: {method} cannot be part of a batch: {first_line(error)}") from error
    inputs, labels = found
    if not isinstance(inputs, (torch.Tensor, Mapping)) or not isinstance(labels, torch.Tensor):
        raise RunFailed(
            f"{where}: {method} has inputs of type {type(inputs).__name__} and labels of type "
            f"{type(labels).__name__}. Both must be tensors"
        )
    return inputs, labels


def check_shape(inputs: Any, shape: Any, where: str) -> None:
    """Refuse (RunFailed) a split's sample whose inputs (1, ...) have another shape than the facts tell."""
    found = (
        {name: tuple(tensor.shape[1:]) for name, tensor in inputs.items()}
        if isinstance(inputs, Mapping)
        else tuple(inputs.shape[1:])
    )
    if found != shape:
        raise RunFailed(f"{where} has samples of {found}, and its facts say {shape}")


def check_labels(labels: torch.Tensor, facts: Facts, where: str) -> None:
    """Refuse (RunFailed) labels that are not what ``Facts.task`` says."""
    shape = f"({', '.join(map(str, ('N', *labels.shape[1:])))})"
    if facts.task in ("multi_label", "regression"):
        _check_numbers(labels, facts, f"{where} has labels {shape}")
        return
    if facts.task == "classification" and (labels.is_floating_point() or labels.dim() != 1):
        raise RunFailed(
            f"{where} has labels {shape} of type {labels.dtype}. "
            f"Labels are whole numbers (N,), from 0 to {facts.classes - 1}"
        )
    most = facts.classes - 1 if facts.task == "classification" else 1
    low, high = labels.min().item(), labels.max().item()
    if low < 0 or high > most:
        raise RunFailed(
            f"{where} has the label {low if low < 0 else high}, and its facts say {facts.classes} classes: "
            f"labels are from 0 to {most}"
        )


def _check_numbers(labels: torch.Tensor, facts: Facts, what: str) -> None:
    """Refuse (RunFailed) labels that are not (N, classes) finite numbers, and for ``multi_label`` not 0 and 1."""
    alone = facts.task == "regression" and facts.classes == 1
    if labels.dim() != 2 - (alone and labels.dim() == 1) or labels.shape[1:] not in ((), (facts.classes,)):
        raise RunFailed(f"{what}. Labels of task={facts.task} are (N, {facts.classes})" + (" or (N,)" if alone else ""))
    if not labels.isfinite().all():
        raise RunFailed(f"{what}, and one is no finite number")
    if facts.task == "multi_label" and not ((labels == 0) | (labels == 1)).all():
        raise RunFailed(f"{what} other than 0 and 1. Labels of task=multi_label say which are in a sample's set")
