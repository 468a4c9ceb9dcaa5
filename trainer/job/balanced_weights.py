"""Reads the labels of the training data in the parent process, for balanced weights and for samplers that need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.config.run_config import RunConfig
from trainer.data.epoch_order import epoch_order, needs_training_data, sampler_name
from trainer.job.ready import Ready
from trainer.planning.class_names import run_of
from trainer.planning.plan import read_plan
from trainer.planning.training_checks import BALANCED, balanced_keys
from trainer.planning.user_class_checks import asked


def weighed(ready: Ready, early: bool = False) -> Ready:
    """The job with the ``balanced`` weights of its config, computed from the labels of its training data.

    An evaluation of saved weights takes the weights of the run that wrote them.

    Args:
        early: the data may not be prepared yet; if they cannot be opened, the job is returned unchanged.

    Raises:
        UserError: the training data have no labels, a class has no sample, or the sampler returns no order.
    """
    config = ready.checked.config
    keys = balanced_keys(config)
    of_samples = needs_training_data(config)
    if config.mode == "predict" or ready.checked.elsewhere or ready.counted or not (keys or of_samples):
        return ready
    known = _weights_of_the_run(config)
    if keys and all(
        len(known.get(name, [])) == (1 if name == "pos_weight" else ready.plan.data.facts.classes) for name in keys
    ):
        weights = {name: known[name] for name in keys}
        return replace(ready.with_plan(objective={"class_weights": weights}), counted=True)
    try:
        train = _training_data(ready)
    except Exception:
        if early:
            return ready
        raise
    with ready.checked.lacks:
        from trainer.metrics.criterion import labels_of  # torch

        labels = labels_of(train)
        if of_samples:
            samples = ready.plan.data.facts.train_samples
            asked(
                sampler_name(config), "order of an epoch", lambda: epoch_order(config, samples, train, labels).check()
            )
        weights = _weights(ready, keys, labels)
        return replace(ready.with_plan(objective={"class_weights": weights}), counted=True)
    return ready


def _weights(ready: Ready, keys: Sequence[str], labels: Any) -> dict[str, list[float]]:
    """The balanced weights by key of ``loss``.

    Raises:
        UserError: the labels are not known, or a class has no sample.
    """
    from trainer.metrics.criterion import weights_of  # torch

    found = weights_of({name: BALANCED for name in keys}, ready.plan.data.facts.classes, labels)
    return {name: values.flatten().tolist() for name, values in found.items()}


def _weights_of_the_run(config: RunConfig) -> dict[str, list[float]]:
    """For mode=eval the class weights that the run of the saved weights had computed; empty if it has no plan."""
    if config.mode != "eval" or (run := run_of(Path(str(config.weights)))) is None:
        return {}
    try:
        return read_plan(run).objective.class_weights
    except (OSError, ValueError):
        return {}


def _training_data(ready: Ready) -> Any:
    """Open the training data."""
    from trainer.data.checked_splits import opened
    from trainer.planning.class_names import of_data

    facts = of_data(ready.plan.data.facts, ready.plan.data.labels)
    return opened(ready.checked.source, facts, validates=False, tests=False).train
