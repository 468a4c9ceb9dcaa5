"""Decodes images to uint8 tensors with torchcodec, or with Pillow where torchcodec does not read them correctly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer.data.images.header import BadImage, opened, reason
from trainer.data.limits import DEFAULTS, Limits

if TYPE_CHECKING:
    pass

BY_TORCHCODEC = ("JPEG", "MPO", "PNG", "WEBP", "AVIF")
"""Formats as Pillow calls them. GIF is not among them: torchcodec decodes all frames of an animation."""
BITS_PER_SAMPLE, SAMPLE_FORMAT, PHOTOMETRIC = 258, 339, 262
"""Tags of TIFF."""


def decode(content: bytes, limits: Limits = DEFAULTS) -> torch.Tensor:
    """Decode an image to (3, H, W) uint8, turned as its EXIF orientation demands; grey and transparent ones become RGB.

    Transparency is left out: a pixel has the colour that the file gives it, however transparent it is, as in Pillow's
    ``convert("RGB")`` and so in torchvision's ImageFolder.

    In memory it lies as (H, W, 3), which is what resizing is fastest on. Of an animation, the first frame. 16 bits
    become 8 by the range of the type: 65535 becomes 255.

    Raises:
        BadImage: the bytes are no image, are damaged, have numbers whose range is not known, or too many pixels.
    """
    image = opened(content, limits)
    multiplied = image.format == "AVIF" and "A" in image.getbands()  # torchcodec would multiply colours by the alpha
    if image.format not in BY_TORCHCODEC or getattr(image, "is_animated", False) or multiplied:
        return torch.from_numpy(_pixels(image, "RGB")).permute(2, 0, 1)
    from torchcodec.decoders import decode_image  # type: ignore[attr-defined]

    try:
        decoded = decode_image(content)
    except Exception as error:  # whatever a decoder breaks with: the image is named
        raise BadImage(reason(error)) from error
    return decoded if decoded.dim() == 3 else decoded[0]


def decode_grey(content: bytes, limits: Limits = DEFAULTS) -> torch.Tensor:
    """Decode an image to one grey channel (1, H, W) uint8; grey images keep their exact values.

    Raises:
        BadImage: as ``decode``.
    """
    return torch.from_numpy(_pixels(opened(content, limits), "L"))[None]


def _pixels(image: Any, mode: str) -> np.ndarray:
    """The pixels of a Pillow image as uint8, turned upright: (H, W) for mode L, (H, W, 3) for RGB.

    Raises:
        BadImage: it is damaged, or its numbers have no range that is known.
    """
    from PIL import ImageOps

    try:
        with image:
            upright = ImageOps.exif_transpose(image)
            if image.mode == "F" or image.mode.startswith("I"):
                grey = _scaled(np.asarray(upright), image)
                return grey if mode == "L" else np.repeat(grey[..., None], 3, axis=2)
            return np.array(upright.convert(mode))
    except BadImage:
        raise
    except Exception as error:
        raise BadImage(reason(error)) from error


def _scaled(values: np.ndarray, image: Any) -> np.ndarray:
    """Whole numbers of 9 to 16 bits as 8 bits; Pillow itself would cut off what is above 255."""
    bits = _bits(image)
    if not bits:
        kind = "floating-point numbers" if image.mode == "F" else "signed numbers or such of 32 bits"
        raise BadImage(f"holds {kind}, whose range is not known; save it with 8 or 16 bits")
    most = 2**bits - 1
    tags = getattr(image, "tag_v2", None)
    if tags is not None and tags.get(PHOTOMETRIC) == 0:  # 0 is white, which Pillow leaves as it is in 16 bits
        values = most - values
    scaled: np.ndarray = np.round(values.astype(np.float64) * (255 / most)).clip(0, 255).astype(np.uint8)
    return scaled


def _bits(image: Any) -> int:
    """The bits of each number of an image with whole numbers from 0 on; 0: its numbers are others."""
    if image.mode == "F":
        return 0
    tags = getattr(image, "tag_v2", None)
    if tags is None:  # PNG and PGM: Pillow widens their numbers to 16 bits
        return 16 if image.mode.startswith("I;16") or image.format == "PPM" else 0
    bits = int(tags.get(BITS_PER_SAMPLE, (1,))[0])
    return bits if image.mode.startswith("I;16") and bits <= 16 and tags.get(SAMPLE_FORMAT, (1,))[0] == 1 else 0
