"""model=torchvision: a torchvision classifier by name, from images to scores (N, classes)."""

from __future__ import annotations

from typing import Any

from torch import nn

from trainer.errors import UserError

OTHER_TASKS = ("detection", "segmentation", "optical_flow")
HEADS = ("aux1", "aux2", "AuxLogits")
"""GoogLeNet's and Inception's auxiliary classifiers (Szegedy et al., 2014), by the names of torchvision."""
OWN_NORMALISATION = ("googlenet", "inception_v3")
"""Models with pretrained weights for inputs of another mean and deviation; their ``transform_input`` converts them."""


def classifier(name: str, **arguments: Any) -> nn.Module:
    """Make ``torchvision.models.<name>`` with the given arguments, as a model that returns scores (N, classes) alone.

    Auxiliary classifiers are removed unless ``aux_logits`` is an argument: with them a model in training returns three
    outputs, and a loss takes one.

    Raises:
        UserError: the name is that of a model for another task.
    """
    from torchvision.models import get_model, get_model_builder

    where = get_model_builder(name).__module__
    for task in OTHER_TASKS:
        if where.startswith(f"torchvision.models.{task}"):
            raise UserError(
                f"model.name={name}",
                f"is a model of torchvision for {task.replace('_', ' ')}, whose outputs are not scores (N, classes)",
                "model.name=resnet50",
            )
    if name in OWN_NORMALISATION and arguments.get("weights") is None:
        arguments = {"init_weights": True, **arguments}  # torchvision's default; without the argument it warns
    model: nn.Module = get_model(name, **arguments)
    if "aux_logits" not in arguments and getattr(model, "aux_logits", False):
        model.aux_logits = False  # type: ignore[assignment]
        for head in HEADS:
            if hasattr(model, head):
                setattr(model, head, None)
    return model


def without_weights(name: str, weights: Any = None, **arguments: Any) -> nn.Module:
    """Make a classifier as :func:`classifier` does, without its pretrained weights: others will be loaded."""
    if weights is not None and name in OWN_NORMALISATION:
        arguments = {"transform_input": True, **arguments}
    return classifier(name, **arguments)


classifier.without_pretrained = f"{__name__}.{without_weights.__name__}"  # type: ignore[attr-defined]
