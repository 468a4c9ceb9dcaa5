"""Checks of the loss: weights of classes, and whether the losses of batches add up to that of the global batch."""

from __future__ import annotations

import math
from typing import Any

from trainer.config import keys, schema
from trainer.config.run_config import RunConfig
from trainer.errors import UserError
from trainer.planning.auto import ModelFacts
from trainer.planning.checked_config import Checked
from trainer.planning.task_checks import said_of_loss
from trainer.wording import counted

BALANCED = "balanced"


def check_weights(checked: Checked) -> None:
    """Refuse weights of classes that are no weights, or that cannot be computed from these data.

    Raises:
        UserError: they cannot be used.
    """
    loss, facts = checked.config.loss, checked.facts
    target = str(loss.get("_target_"))
    if target == schema.BinaryCrossEntropyLoss._target_ and loss.get("weight") is not None:
        raise UserError(
            f"loss.weight={keys.spelled(loss.get('weight'))}",
            f"{target} takes it as a factor for each sample of a batch, not for each class",
            "loss.weight=null loss.pos_weight=NUMBER",
        )
    for name in ("weight", "pos_weight"):
        value = loss.get(name)
        if value is None:
            continue
        if value == BALANCED:
            if facts.streams or facts.iterable or facts.kind == "random":
                example = "2.0" if name == "pos_weight" else _list([1.0] * facts.classes)
                raise UserError(
                    f"loss.{name}={value}",
                    f"{facts.source} have no labels that can be counted before the training",
                    f"loss.{name}={example} with your own numbers",
                )
        elif target.startswith("torch."):
            _check_numbers(name, value, checked)


def _check_numbers(name: str, value: Any, checked: Checked) -> None:
    """Refuse anything but a weight for each class; for ``pos_weight``, one number."""
    facts, config = checked.facts, checked.config
    what, ones = f"loss.{name}={keys.spelled(value)}", "1.0" if name == "pos_weight" else _list([1.0] * facts.classes)
    numbers = value if isinstance(value, (list, tuple)) else [value] if name == "pos_weight" else None
    if isinstance(value, dict) and isinstance(value.get("data"), (list, tuple)):
        raise UserError(
            what, "numbers are enough: they become a tensor on the device", f"loss.{name}={_list(value.get('data'))}"
        )
    if numbers is None or not all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in numbers):
        wanted = (
            "a number" if name == "pos_weight" else "a list with a number for each class, in the order of the classes"
        )
        raise UserError(
            what,
            f"must be {wanted}, or {BALANCED}",
            f"loss.{name}={BALANCED} (or loss.{name}={ones} with your own numbers)",
        )
    wrong = next((n for n in numbers if not math.isfinite(n) or n < 0), None)
    if wrong is not None:
        raise UserError(
            what, f"holds {keys.spelled(wrong)}, and a weight is a finite number, at least 0", f"loss.{name}={ones}"
        )
    if not any(numbers):
        raise UserError(what, "all weights are 0, so that nothing would be learnt", f"loss.{name}={ones}")
    if name == "pos_weight":
        factors = facts.classes if facts.task == "multi_label" else 1
        if len(numbers) not in (1, factors):
            why = "the model has one output, so there is one factor"
            why = why if factors == 1 else f"has {len(numbers)} factors for {facts.targets}"
            raise UserError(what, why, f"loss.pos_weight={numbers[0]}")
        return
    if not all(numbers) and (share := config.loss.get("label_smoothing")):
        why = "a sample of a class with weight 0 would count in the smoothing and not in the mean"
        raise UserError(f"loss.label_smoothing={share}", f"{why} ({what})", "loss.label_smoothing=0.0")
    outputs = config.model.get("num_classes")
    classes = outputs if isinstance(outputs, int) else facts.classes
    if len(numbers) != classes:
        raise UserError(
            what,
            f"has {counted(len(numbers), 'weight')} for {counted(classes, 'class')}",
            f"loss.weight={BALANCED} (or {_list([1.0] * classes)} with your own numbers)",
        )


def _list(numbers: Any) -> str:
    shown = [f"{n:g}" if isinstance(n, (int, float)) else str(n) for n in numbers]
    return "[" + ",".join([*shown[:16], *(["..."] if len(shown) > 16 else [])]) + "]"


def check_denominator(checked: Checked, model: ModelFacts) -> None:
    """Refuse a loss whose values on batches do not add up to that on the global batch, where they would have to.

    Raises:
        UserError: it is a sum, or the update would be another than that of one process on the global batch.
    """
    config, found = checked.config, model.denominator
    what = f"loss ({config.loss.get('_target_')})"
    if config.mode == "predict":
        return
    if found == "sum":
        instead = "loss.reduction=mean" if "reduction" in config.loss else ""
        what = f"loss.reduction={config.loss.get('reduction')}" if instead else what
        why = "is the sum over a batch, so that updates would depend on how samples are spread over batches and workers"
        raise UserError(what, why if instead else f"{why}. Divide by the number of samples in it", instead)
    if found != "neither" or config.mode != "train":
        return
    changes = []
    if checked.merge > 1:
        changes += [
            (
                f"strategy.gradient_merge.k_steps=1 data.batch_size={config.batch_size * checked.merge} "
                f"data.global_batch_size=null"
            )
        ]
    traits = checked.declaration.traits
    if checked.workers > 1 and traits.lockstep and (traits.exact or not traits.replicas):
        changes += ["strategy=single launch.nproc=1"]
    if changes:
        raise UserError(
            what,
            (
                "is no mean over samples: its value on a batch does not follow from its values on parts of it, so "
                "that the parts' gradients do not make that of the global batch. Give the class a method "
                "denominator(labels) if it is a weighted mean"
            ),
            " ".join(changes),
        )


def balanced_keys(config: RunConfig) -> list[str]:
    """The keys of ``loss`` whose weights are computed from the training data."""
    return [name for name in ("weight", "pos_weight") if config.loss.get(name) == BALANCED]


MEANS = {
    "samples": "a mean over samples",
    "class weights": "a mean over the weights of the samples' classes",
    "its method denominator": "a mean by its method denominator",
    "neither": "no mean over samples",
    "random": "differs from call to call: taken for a mean over samples",
}
"""What the loss of a batch was found to be, for the plan."""


def found_loss(checked: Checked, denominator: str) -> dict[str, Any]:
    """What was found about the loss, for the plan: its denominator, and the same in words, empty for torch's mean over
    samples."""
    config, traits = checked.config, checked.declaration.traits
    usual = str(config.loss.get("_target_")).startswith(("torch.", "trainer."))
    if config.mode == "predict" or (usual and denominator == "samples" and not balanced_keys(config)):
        return {"denominator": denominator, "loss": said_of_loss(config) if config.mode == "train" else ""}
    own_steps = not traits.exact and (traits.replicas or not traits.lockstep)
    of = ", of each worker's own batches" if config.mode == "train" and own_steps and checked.workers > 1 else ""
    return {"denominator": denominator, "loss": MEANS.get(denominator, denominator) + of}


def concern_of(config: RunConfig, denominator: str) -> str:
    """What is odd about a loss that runs; empty as a rule."""
    what = f"loss ({config.loss.get('_target_')})"
    if denominator == "neither":
        return (
            f"{what} is no mean over samples: each batch's own value is minimised, and val/loss is the mean of "
            f"its values on batches"
        )
    if denominator == "random":
        return (
            f"{what} differs from call to call, so it was not tested whether it is a mean over samples; it is "
            f"taken for one"
        )
    return ""
