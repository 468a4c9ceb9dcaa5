"""How a picture from elsewhere becomes an input of the model, as in validation: for mode=predict and the logged
model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.data.limits import DEFAULTS, Limits
from trainer.data.opening import read_regular


@dataclass(frozen=True)
class Preprocessing:
    """How a picture's file becomes an input of the model, as in validation.

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
        """Read a picture's file and preprocess it as in validation.

        Raises:
            Exception: whatever a decoder says of a file that is broken or no image.
        """
        return self.transform(read_regular(path, self.limits))


@dataclass(frozen=True)
class Centre:
    """A ``transform``: decode an image and cut its centre (C, size, size) of uint8, its shorter side resized to
    ``resize``.

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
