"""loss=squared_error: the reference's other loss for classes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class SquaredError(nn.Module):
    """Mean over samples and classes of the squared difference between output and target.

    Shapes:
        outputs (N, C); labels (N,) of 0..C-1, or (N, C) shares of the classes.
    """

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        shares = F.one_hot(labels, outputs.shape[1]) if labels.dim() == 1 else labels
        return F.mse_loss(outputs, shares.to(outputs.dtype))
