"""Counts the labels of the training data in the parent process, where weights or samples are to be balanced by
class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trainer.errors import UserError
from trainer.job.ready import Ready
from trainer.planning.eval_and_predict import class_weights_of
from trainer.planning.training_checks import BALANCED, balanced_keys


def weighed(ready: Ready, early: bool = False) -> Ready:
    """The job whose plan has the weights that are ``balanced`` in the config, from the labels of its training data.

    An evaluation of saved weights takes those of the run that left them.

    Args:
        early: the data may not be prepared. Those that cannot be opened yet are counted when they are; the others are
            refused before anything is written.

    Raises:
        UserError: the training data have no labels to count, or a class has no sample.
    """
    config = ready.checked.config
    keys = balanced_keys(config)
    of_samples = config.mode == "train" and config.sampler.order == "class_balanced"
    if config.mode == "predict" or ready.checked.elsewhere or ready.counted or not (keys or of_samples):
        return ready
    known = class_weights_of(config)
    if keys and all(
        len(known.get(name, [])) == (1 if name == "pos_weight" else ready.plan.data.facts.classes) for name in keys
    ):
        weights = {name: known[name] for name in keys}
        return replace(ready.with_plan(objective={"class_weights": weights}), counted=True)
    try:
        labels = _labels(ready)
    except Exception:
        if early:
            return ready
        raise
    with ready.checked.lacks:
        weights = _weights(ready, keys, of_samples, labels)
        return replace(ready.with_plan(objective={"class_weights": weights}), counted=True)
    return ready


def _weights(ready: Ready, keys: Sequence[str], of_samples: bool, labels: Any) -> dict[str, list[float]]:
    """The balanced weights by key of ``loss``.

    Raises:
        UserError: the labels are not known, or a class has no sample.
    """
    from trainer.metrics.criterion import weights_of  # torch

    if of_samples and labels is None:
        raise UserError(
            "sampler.order=class_balanced",
            "the training data have no labels to count (an attribute 'labels' or 'targets', (N,))",
            "sampler.order=each_once",
        )
    found = weights_of({name: BALANCED for name in keys}, ready.plan.data.facts.classes, labels)
    return {name: values.flatten().tolist() for name, values in found.items()}


def _labels(ready: Ready) -> Any:
    """The labels (N,) of the training data; None: they are not known."""
    from trainer.data.checked_splits import opened
    from trainer.metrics.criterion import labels_of
    from trainer.planning.class_names import of_data

    facts = of_data(ready.plan.data.facts, ready.plan.data.labels)
    return labels_of(opened(ready.checked.source, facts, validates=False, tests=False).train)
