"""model.init=reference: draws a model's first parameters as the reference's examples do."""

from __future__ import annotations

import math

import torch
from torch import nn

from trainer.models.wide_and_deep import WideAndDeep


@torch.no_grad()
def draw(model: nn.Module) -> None:
    """Draw the weights of a model's convolutions and linear layers from torch's generator, and set their biases to
    zero.

    Convolutions: N(0, sqrt(2 / fan_in)) (He et al., 2015). Linear layers: uniform by Glorot and Bengio (2010); those of
    Wide & Deep: N(0, 1 / sqrt(inputs)), its wide part cut off at two deviations. Norms and tables stay as they are.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
        elif isinstance(module, nn.Linear) and isinstance(model, WideAndDeep):
            deviation = 1 / math.sqrt(module.in_features)
            if name == "wide":
                nn.init.trunc_normal_(module.weight, 0.0, deviation, -2 * deviation, 2 * deviation)
            else:
                nn.init.normal_(module.weight, 0.0, deviation)
        elif isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
        else:
            continue
        if module.bias is not None:
            nn.init.zeros_(module.bias)
