"""What can only be checked with torch: the model, loss, optimizer and schedule can be built from the config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainer.auto import ModelFacts
from trainer.build import call_target
from trainer.errors import UserError


def probe(config: Mapping[str, Any]) -> ModelFacts:
    """Build everything once, the model without memory (on torch's meta device) where it allows that.

    Raises:
        UserError: something cannot be built from its config node, or the model has nothing to train.
    """
    model = build(config)
    if not isinstance(model, nn.Module):
        raise UserError(f"model._target_={config['model']['_target_']}", f"gave a {type(model).__name__}, not a torch.nn.Module")  # fmt: skip
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise UserError(f"model._target_={config['model']['_target_']}", "has no parameters to train")
    call_target(config["optimizer"], "optimizer", [torch.zeros(1, requires_grad=True)])
    call_target(config["loss"], "loss")
    call_target(config["scheduler"], "scheduler", total_steps=1, steps_per_epoch=1).factor(0)
    return ModelFacts(
        parameters=sum(p.numel() for p in model.parameters()),
        convolutional=any(isinstance(m, nn.Conv2d) for m in model.modules()),
    )


def build(config: Mapping[str, Any]) -> Any:
    """The model on the meta device, or for models that need values while they are made, on the CPU."""
    state = torch.random.get_rng_state()
    try:
        with torch.device("meta"):
            return call_target(config["model"], "model")
    except UserError:
        raise
    except Exception:  # any failure may come from the meta device; on the CPU only the model's own are left
        return call_target(config["model"], "model")
    finally:
        torch.random.set_rng_state(state)
