"""Checks before a run whether a model's outputs and the loss suit class labels, and what the loss is divided by."""

from __future__ import annotations

import torch
from torch import nn

from trainer.config import keys
from trainer.config.instantiate import blamed, call_target
from trainer.config.run_config import RunConfig
from trainer.data.source import Facts
from trainer.errors import UserError, first_line
from trainer.metrics.criterion import BALANCED, NEITHER, kind_of
from trainer.wording import counted


def check_classes(config: RunConfig, loss: nn.Module, facts: Facts, outputs: torch.Tensor) -> str:
    """Check that there is an output for each class, and that the loss takes outputs and labels; returns what is odd
    about them.

    Raises:
        UserError: there are fewer outputs than classes, or the loss does not take them.
    """
    num_classes, named = config.model.get("num_classes"), f"model ({config.model.get('_target_')})"
    if outputs.dim() != 2:
        why = f"makes outputs of {('N', *outputs.shape[1:])} for {facts.source}, whose labels need scores (N, "
        raise UserError(named, f"{why}{facts.classes})")
    if outputs.shape[1] < facts.classes:
        what = f"model.num_classes={num_classes}" if num_classes else named
        instead = f"model.num_classes={facts.classes}" if num_classes else ""
        raise UserError(
            what,
            f"makes {outputs.shape[1]} outputs for the {counted(facts.classes, 'class')} of {facts.source}",
            instead,
        )
    scores, labels = torch.zeros(2, outputs.shape[1]), torch.zeros(2, dtype=torch.long)
    try:
        value = loss(scores, labels)
    except Exception as error:
        _check_weights_for_outputs(config, facts, outputs.shape[1])
        target, arguments = config.loss["_target_"], {k: v for k, v in config.loss.items() if k != "_target_"}
        wrong = blamed(lambda some: call_target({**some, "_target_": target}, "loss")(scores, labels), arguments)
        if wrong:
            raise UserError(
                f"loss.{wrong}={arguments[wrong]}", f"{target} does not take this value: {first_line(error)}"
            ) from error
        raise UserError(
            f"loss ({config.loss['_target_']})",
            f"does not take outputs (N, {outputs.shape[1]}) and labels (N,): {first_line(error)}",
            "loss=cross_entropy",
        ) from error
    if value.dim():
        raise UserError(
            f"loss ({config.loss['_target_']})",
            f"gives {tuple(value.shape)} values instead of one, the mean",
            "loss=cross_entropy",
        )
    if outputs.shape[1] == facts.classes:
        return ""
    advice = f" (model.num_classes={facts.classes} makes one for each)" if num_classes else ""
    return (
        f"{named} makes {outputs.shape[1]} outputs for the {counted(facts.classes, 'class')} of {facts.source}: "
        f"{outputs.shape[1] - facts.classes} of them have no samples{advice}"
    )


def denominator_of_classes(config: RunConfig, loss: nn.Module, classes: int, outputs: int) -> str:
    """What the loss of a batch is divided by, for all forms of labels that it will get.

    Raises:
        UserError: mixed batches have shares of classes as labels, which the loss does not take.
    """
    data, forms = config.node("data"), ["numbers"]
    mixed = next((name for name in ("mixup", "cutmix") if config.mode == "train" and data.get(name)), None)
    if mixed is not None:
        shares = torch.full((2, outputs), 1 / outputs)
        try:
            loss(shares, shares)
        except Exception as error:
            what = f"data.{mixed}={data[mixed]}"
            raise UserError(
                what,
                (
                    f"makes labels (N, {outputs}) that are shares of classes, which {config.loss.get('_target_')} "
                    f"does not take: {first_line(error)}"
                ),
                f"data.{mixed}=0",
            ) from error
        forms = ["shares", *(forms if config.validation else [])]
    return kind_of(loss, classes, outputs, forms)


def denominator_of_logits(config: RunConfig, loss: nn.Module, facts: Facts, outputs: torch.Tensor | None) -> str:
    """What the loss of a batch is divided by, where samples have one logit; cross-entropy would take the batch for
    classes."""
    if outputs is not None and outputs.dim() != 1:
        raise UserError(
            f"model ({config.model['_target_']})",
            (
                f"makes outputs of {('N', *outputs.shape[1:])} for {facts.source}, whose labels "
                f"0 and 1 need one logit (N,)"
            ),
            "model=wide_and_deep",
        )
    logits, labels = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])
    what, instead = f"loss ({config.loss['_target_']})", "loss=binary_cross_entropy"
    try:
        both = loss(logits, labels)
    except Exception as error:
        raise UserError(what, f"does not take logits (N,) and labels (N,): {first_line(error)}", instead) from error
    found = NEITHER if both.dim() else kind_of(loss, 2, None, ["numbers"])
    if found == NEITHER:
        raise UserError(what, "is not the mean over samples for logits (N,) and labels (N,)", instead)
    return found


def _check_weights_for_outputs(config: RunConfig, facts: Facts, outputs: int) -> None:
    """Refuse weights of classes for a model with more outputs than classes, where the loss wants a weight for each
    output.

    Raises:
        UserError: their numbers differ.
    """
    weight = config.loss.get("weight")
    weights = facts.classes if weight == BALANCED else len(weight) if isinstance(weight, (list, tuple)) else outputs
    if weights == outputs:
        return
    why = f"gives {counted(weights, 'weight')}, and the model ({config.model.get('_target_')}) makes {outputs} outputs"
    instead = f"model.num_classes={facts.classes}" if "num_classes" in config.model else ""
    raise UserError(f"loss.weight={keys.spelled(weight)}", why, instead)
