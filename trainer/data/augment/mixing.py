"""Mixup and CutMix, which blend the samples of a batch, and their labels, with each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trainer.data.augment.draws import Draw


@dataclass(frozen=True)
class Mixing:
    """Applies mixup (Zhang et al., 2018) or CutMix (Yun et al., 2019) to a batch; with both, each batch draws one.

    Attributes:
        mixup, cutmix: alpha of the Beta distribution that the share is drawn from; 0: not done.
        probability: of a batch to be mixed.
        classes: of the labels.
    """

    mixup: float
    cutmix: float
    probability: float
    classes: int

    @property
    def active(self) -> bool:
        """Whether this config mixes batches at all."""
        return bool(self.probability and (self.mixup or self.cutmix))

    def __call__(
        self, images: torch.Tensor, labels: torch.Tensor, draw: Draw, addresses: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Images (N, C, H, W), uint8 or floating, and labels (N, classes) that sum to 1 for each sample.

        Args:
            labels: (N,).
            draw, addresses: what the batch's random numbers follow from.
        """
        shares = torch.nn.functional.one_hot(labels, self.classes).float()
        lots = np.random.default_rng((*draw, *addresses[:1].tolist(), len(addresses), 0x6D6978))
        if lots.random() >= self.probability:
            return images, shares
        by_patch = bool(self.cutmix) and (not self.mixup or lots.random() < 0.5)
        alpha = self.cutmix if by_patch else self.mixup
        share = float(lots.beta(alpha, alpha))
        others = images.roll(1, 0)
        if by_patch:
            images, share = _patched(images, others, share, lots)
        else:
            images = _blended(images, others, share)
        return images, share * shares + (1 - share) * shares.roll(1, 0)


def _blended(images: torch.Tensor, others: torch.Tensor, share: float) -> torch.Tensor:
    """Mixup of two image tensors: ``share`` of the images plus 1 - ``share`` of the others; uint8 is rounded."""
    mixed = share * images.float() + (1 - share) * others.float()
    return mixed.round_().to(torch.uint8) if images.dtype == torch.uint8 else mixed.to(images.dtype)


def _patched(
    images: torch.Tensor, others: torch.Tensor, share: float, lots: np.random.Generator
) -> tuple[torch.Tensor, float]:
    """CutMix of two image tensors: paste a box of the others into the images. Also returns the share of pixels kept."""
    height, width = images.shape[-2:]
    side = (1 - share) ** 0.5
    middle = lots.random(2) * (height, width)
    top, left = (int(max(0, round(m - side * s / 2))) for m, s in zip(middle, (height, width), strict=True))
    bottom, right = (int(min(s, round(m + side * s / 2))) for m, s in zip(middle, (height, width), strict=True))
    result = images.clone()
    result[..., top:bottom, left:right] = others[..., top:bottom, left:right]
    return result, 1 - (bottom - top) * (right - left) / (height * width)
