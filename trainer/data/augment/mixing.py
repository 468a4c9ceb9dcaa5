"""Mixup and CutMix: a batch's samples are blended with each other, and so are their labels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trainer.data.augment.draws import Draw


@dataclass(frozen=True)
class Mixing:
    """Mixup (Zhang et al., 2018) and CutMix (Yun et al., 2019) of a worker's batch; with both, each batch draws one
    of them.

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

    def __call__(self, images: torch.Tensor, labels: torch.Tensor, draw: Draw, addresses: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
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
        partners = torch.from_numpy(np.roll(np.arange(len(labels)), 1))
        if by_patch:
            images, share = patched(images, images[partners], share, lots)
        else:
            images = blended(images, images[partners], share)
        return images, share * shares + (1 - share) * shares[partners]


def blended(images: torch.Tensor, others: torch.Tensor, share: float) -> torch.Tensor:
    """Mixup's images: ``share`` of the images and the rest of the others; of uint8, rounded."""
    mixed = share * images.float() + (1 - share) * others.float()
    return mixed.round_().to(torch.uint8) if images.dtype == torch.uint8 else mixed.to(images.dtype)


def patched(
    images: torch.Tensor, others: torch.Tensor, share: float, lots: np.random.Generator
) -> tuple[torch.Tensor, float]:
    """CutMix's images: each with a box of another image in it, and the share of pixels that stayed."""
    height, width = images.shape[-2:]
    side = (1 - share) ** 0.5
    middle = lots.random(2) * (height, width)
    top, left = (int(max(0, round(m - side * s / 2))) for m, s in zip(middle, (height, width), strict=True))
    bottom, right = (int(min(s, round(m + side * s / 2))) for m, s in zip(middle, (height, width), strict=True))
    result = images.clone()
    result[..., top:bottom, left:right] = others[..., top:bottom, left:right]
    return result, 1 - (bottom - top) * (right - left) / (height * width)
