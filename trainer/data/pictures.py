"""How a picture from elsewhere becomes an input of the model, as in validation."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Preprocessing:
    """How a picture becomes an input, as in validation.

    Attributes:
        transform: from a file's bytes to a tensor (C, H, W), of uint8 as a rule.
        mean, std: as in ``Splits``.
    """

    transform: Callable[[bytes], Any]
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def read(self, path: Path) -> Any:
        """The file as an input.

        Raises:
            Exception: whatever a decoder says of a file that is broken or no image.
        """
        return self.transform(path.read_bytes())


@dataclass(frozen=True)
class Centre:
    """A picture's centre (C, size, size) of uint8, after its shorter side has become ``resize``.

    Attributes:
        channels: 3, or 1: grey.
    """

    resize: int
    size: int
    channels: int = 3

    def __call__(self, content: bytes) -> Any:
        """The centre of an encoded image."""
        from trainer.data.augment import CentreView
        from trainer.data.decode import decode

        return CentreView(self.resize, self.size).one(decode(content) if self.channels == 3 else _grey(content))


def _grey(content: bytes) -> Any:
    """An image (1, H, W) uint8; grey ones exactly as they are."""
    import numpy as np
    import torch
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(content)) as image:
        return torch.from_numpy(np.array(ImageOps.exif_transpose(image).convert("L")))[None]
