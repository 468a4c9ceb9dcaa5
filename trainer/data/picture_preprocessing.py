"""Turns a picture file into a model input as in validation, for mode=predict and the logged model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.schema import PicturesData
from trainer.data.limits import DEFAULTS, Limits
from trainer.errors import UserError
from trainer.wording import counted


@dataclass(frozen=True)
class Preprocessing:
    """Turns a picture file into a model input, as validation does.

    Attributes:
        transform: from a file's bytes to a tensor (C, H, W), of uint8 as a rule.
        mean, std: as in ``Splits``.
        limits: of one file.
    """

    transform: Callable[[bytes], Any]
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    limits: Limits = DEFAULTS

    def read(self, path: Path) -> Any:
        """Read a picture file and preprocess it as validation does.

        Raises:
            Exception: whatever a decoder says of a file that is broken or no image.
        """
        from trainer.data.regular_files import read_regular

        return self.transform(read_regular(path, self.limits))


Channels = tuple[float, ...]
"""One number for each channel of an image."""


def normalisation(options: PicturesData, mean: Channels, std: Channels) -> tuple[Channels | None, Channels | None]:
    """The mean and the standard deviation for pixels between 0 and 1, as ``data.normalize`` says; None: not normalised.

    Args:
        mean, std: of the data's kind, where the options have no others.

    Raises:
        UserError: the options have them for another number of channels, or ones that would not be used.
    """
    kind, channels = options.normalize, len(mean)
    for key, numbers, unused in (("mean", options.mean, kind == "none"), ("std", options.std, kind != "mean_std")):
        if numbers is not None and unused:
            raise UserError(
                f"data.{key}",
                f"is not used with data.normalize={kind}",
                f"data.{key}=null (or data.normalize=mean_std)",
            )
        if numbers is not None and len(numbers) != channels:
            raise UserError(
                f"data.{key}",
                f"has {counted(len(numbers), 'number')}, and images have {counted(channels, 'channel')}",
                f"data.{key}=[{','.join(['0.5'] * channels)}]",
            )
    if kind == "none":
        return None, None
    mean, std = tuple(options.mean or mean), tuple(options.std or std)
    return mean, std if kind == "mean_std" else (1.0,) * channels


@dataclass(frozen=True)
class Centre:
    """A ``transform`` that decodes an image, resizes its shorter side and cuts the centre (C, size, size) uint8.

    Attributes:
        channels: 3, or 1: grey.
        limits: of one image.
    """

    resize: int
    size: int
    channels: int = 3
    limits: Limits = DEFAULTS

    def __call__(self, content: bytes) -> Any:
        """The centre of an encoded image."""
        from trainer.data.augment.views import CentreView
        from trainer.data.images.decode import decode, decode_grey

        image = (decode if self.channels == 3 else decode_grey)(content, self.limits)
        return CentreView(self.resize, self.size).one(image)
