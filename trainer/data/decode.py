"""Encoded images to uint8 tensors: torchcodec, and Pillow for the formats that torchcodec does not read."""

from __future__ import annotations

import io

import numpy as np
import torch

from trainer.data.header import BadImage, reason

PILLOW_ONLY = (b"BM", b"II*\x00", b"MM\x00*", b"P4", b"P5", b"P6")
"""How files of BMP, TIFF and the portable pixmaps begin."""


def decode(content: bytes) -> torch.Tensor:
    """An image (3, H, W) uint8, turned as its EXIF orientation says; grey and transparent ones become RGB.

    In memory it lies as (H, W, 3), which is what resizing is fastest on. Of an animation, the first frame.

    Raises:
        BadImage: the bytes are no image, or are damaged.
    """
    if content.startswith(PILLOW_ONLY):
        return _by_pillow(content)
    from torchcodec.decoders import decode_image  # type: ignore[attr-defined]

    try:
        image = decode_image(content)
    except (ValueError, RuntimeError) as error:
        raise BadImage(reason(error)) from error
    return image if image.dim() == 3 else image[0]


def _by_pillow(content: bytes) -> torch.Tensor:
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(content)) as image:
            pixels = np.array(ImageOps.exif_transpose(image).convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadImage(reason(error)) from error
    return torch.from_numpy(pixels).permute(2, 0, 1)
