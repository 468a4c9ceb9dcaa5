"""What the header of an encoded image says, read without torch."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from trainer.data.limits import DEFAULTS, Limits
from trainer.errors import why

if TYPE_CHECKING:
    from PIL.Image import Image


class BadImage(Exception):
    """What cannot be decoded, and why, in one line."""


def opened(content: bytes, limits: Limits = DEFAULTS) -> Image:
    """The image by Pillow, of which the header alone is read until its pixels are asked for.

    Raises:
        BadImage: the header is not readable, or the image has more pixels than ``data.max_pixels``.
    """
    from PIL import Image, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # data.max_pixels is in its place, which can be set
    if not content:
        raise BadImage("is empty (0 bytes)")
    try:
        image = Image.open(io.BytesIO(content))
    except UnidentifiedImageError as error:
        raise BadImage("is no image of a kind that can be read, or its beginning is damaged") from error
    except (OSError, ValueError, SyntaxError, RecursionError) as error:
        raise BadImage(reason(error)) from error
    width, height = image.size
    if width * height > limits.pixels:
        raise BadImage(f"has {width} x {height} pixels, more than data.max_pixels={limits.pixels}")
    return image


def size_of(content: bytes, limits: Limits = DEFAULTS) -> tuple[int, int]:
    """Height and width as ``decode`` would give them, from the header alone.

    Raises:
        BadImage: as ``opened``.
    """
    with opened(content, limits) as image:
        width, height = image.size
        try:
            turned = image.format != "TIFF" and image.getexif().get(0x0112, 1) in (5, 6, 7, 8)  # TIFF: Pillow turns it
        except (OSError, ValueError, SyntaxError, RecursionError) as error:
            raise BadImage(reason(error)) from error
    return (width, height) if turned else (height, width)


def reason(error: Exception) -> str:
    """A decoder's own words, in one line, without the place in its source."""
    line = why(error)
    return line.rsplit(".cpp:", 1)[-1].partition(", ")[2] or line if ".cpp:" in line else line
