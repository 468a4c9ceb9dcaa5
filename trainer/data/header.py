"""What the header of an encoded image says, read without torch."""

from __future__ import annotations

import io

from trainer.errors import first_line


class BadImage(Exception):
    """What cannot be decoded, and why, in one line."""


def size_of(content: bytes) -> tuple[int, int]:
    """Height and width as ``decode`` would give them, from the header alone.

    Raises:
        BadImage: the header is not readable.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as image:
            width, height = image.size
            turned = image.format != "TIFF" and image.getexif().get(0x0112, 1) in (5, 6, 7, 8)  # TIFF: Pillow turns it
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadImage(reason(error)) from error
    return (width, height) if turned else (height, width)


def reason(error: Exception) -> str:
    """A decoder's own words, in one line, without the place in its source."""
    line = first_line(error)
    return line.rsplit(".cpp:", 1)[-1].partition(", ")[2] or line if ".cpp:" in line else line
