"""Encoded images to uint8 tensors: torchcodec, and Pillow for the formats that torchcodec does not read."""

from __future__ import annotations

import io

import numpy as np
import torch

PILLOW_ONLY = (b"BM", b"II*\x00", b"MM\x00*", b"P4", b"P5", b"P6")
"""How files of BMP, TIFF and the portable pixmaps begin."""


class BadImage(Exception):
    """What cannot be decoded, and why, in one line."""


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
        raise BadImage(_reason(error)) from error
    return image if image.dim() == 3 else image[0]


def size_of(content: bytes) -> tuple[int, int]:
    """Height and width as ``decode`` would give them, from the header alone.

    Raises:
        BadImage: the header is not readable.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as image:
            width, height = image.size
            turned = image.format != "TIFF" and image.getexif().get(0x0112, 1) in (
                5,
                6,
                7,
                8,
            )  # Pillow turns TIFF itself
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadImage(_reason(error)) from error
    return (width, height) if turned else (height, width)


def _by_pillow(content: bytes) -> torch.Tensor:
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(content)) as image:
            pixels = np.array(ImageOps.exif_transpose(image).convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadImage(_reason(error)) from error
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _reason(error: Exception) -> str:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line.rsplit(".cpp:", 1)[-1].partition(", ")[2] or line if ".cpp:" in line else line
