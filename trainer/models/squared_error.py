"""loss=squared_error: squared error for classes, as usually defined or as in the reference project."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class SquaredError(nn.Module):
    """The mean over samples and classes of the squared difference between outputs and labels.

    Args:
        target: ``one_hot``: between the outputs as they are and 1 for the label's class, 0 for the others;
            ``class_number``: between each class's probability (softmax of the outputs) and the label's number, as the
            reference does.

    Shapes:
        outputs (N, C); labels (N,) of 0..C-1, or with ``one_hot`` also (N, C) shares of the classes.

    Raises:
        ValueError: another target.
    """

    def __init__(self, target: str = "one_hot") -> None:
        super().__init__()
        if target not in ("one_hot", "class_number"):
            raise ValueError(f"target={target} must be one_hot or class_number")
        self.target = target

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.target == "class_number":
            numbers = labels.to(outputs.dtype).unsqueeze(1).expand_as(outputs)
            return F.mse_loss(outputs.softmax(1), numbers)
        shares = F.one_hot(labels, outputs.shape[1]) if labels.dim() == 1 else labels
        return F.mse_loss(outputs, shares.to(outputs.dtype))
