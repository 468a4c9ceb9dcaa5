"""Reads the header of an encoded image (its size, or why it is no image) without torch."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from trainer.data.images.image_files import HEADER, HEIC_HELP, kind_by_contents
from trainer.data.limits import DEFAULTS, Limits
from trainer.errors import why
from trainer.visible import one_line, shortened

if TYPE_CHECKING:
    from PIL.Image import Image


FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "PPM")
"""Pillow's names of the formats that are read; MPO comes with JPEG. Other formats make Pillow run programs (EPS), or
unpack pixels to find the size (ICO, ICNS)."""


GPU_MODES = ("RGB", "L")
"""Pillow's names of the colours of JPEGs that a GPU decodes: three channels, or grey. CMYK is not among them."""


class BadImage(Exception):
    """The error for an image that cannot be decoded; its text is the reason, in one line."""


def opened(content: bytes, limits: Limits = DEFAULTS) -> Image:
    """Read the header of an encoded image: it is opened with Pillow, which reads pixels only when they are needed.

    Raises:
        BadImage: it is of none of ``FORMATS``, whatever its name says; the header is not readable; or the image has
            more pixels than ``data.max_pixels``.
    """
    from PIL import Image, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # data.max_pixels is in its place, which can be set
    if not content:
        raise BadImage("is empty (0 bytes)")
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError as error:
        if kind_by_contents(content[:HEADER]) == "HEIC":
            raise BadImage(f"is HEIC, which is not read: {HEIC_HELP}") from error
        raise BadImage(
            f"is no image of a kind that can be read ({', '.join(FORMATS)}), or its beginning is damaged"
        ) from error
    except Exception as error:  # Pillow's readers break on crafted headers each in its own way
        raise BadImage(reason(error)) from error
    width, height = image.size
    if width * height > limits.pixels:
        raise BadImage(f"has {width} x {height} pixels, more than data.max_pixels={limits.pixels}")
    return image


def size_of(content: bytes, limits: Limits = DEFAULTS) -> tuple[int, int]:
    """The height and width that ``decode`` would give an image, from its header alone.

    Raises:
        BadImage: as ``opened``.
    """
    with opened(content, limits) as image:
        width, height = image.size
        try:
            turned = image.format != "TIFF" and image.getexif().get(0x0112, 1) in (5, 6, 7, 8)  # TIFF: Pillow turns it
        except Exception as error:
            raise BadImage(reason(error)) from error
    return (width, height) if turned else (height, width)


def reason(error: Exception) -> str:
    """Word in one line why an image's header or pixels cannot be read, without the location in the decoder's source."""
    line = why(error)
    if not str(error).strip() or not isinstance(error, (OSError, ValueError, SyntaxError, RuntimeError)):
        line = f"breaks its decoder, {type(error).__name__}" + f": {line}" * bool(str(error).strip())
    line = line.rsplit(".cpp:", 1)[-1].partition(", ")[2] or line if ".cpp:" in line else line
    return shortened(one_line(line))
