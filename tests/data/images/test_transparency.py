"""A transparent pixel has the colour that the file gives it, in every format and by every decoder."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.pictures import encoded
from trainer.data.images.decode import decode, decode_grey
from trainer.data.images.header import size_of

COLOURS = np.zeros((32, 48, 3), np.uint8)
COLOURS[:16], COLOURS[16:] = (200, 60, 30), (20, 160, 240)
ALPHA = np.repeat(np.array([255, 0, 1, 128, 254, 0], np.uint8), 8)[None].repeat(32, 0)
RGB = Image.fromarray(COLOURS)
GREY = RGB.convert("L")


def with_alpha(image: Image.Image) -> Image.Image:
    made = image.copy()
    made.putalpha(Image.fromarray(ALPHA))
    return made


RGBA, LA, P = with_alpha(RGB), with_alpha(GREY), RGB.quantize(4)
LOSSLESS = {"lossless": True, "exact": True}
FILES: dict[str, tuple[bytes, Image.Image, int]] = {
    "PNG": (encoded(RGBA, "PNG"), RGB, 0),
    "PNG, grey": (encoded(LA, "PNG"), GREY, 0),
    "PNG, a transparent colour": (encoded(RGB, "PNG", transparency=(200, 60, 30)), RGB, 0),
    "PNG, a transparent grey": (encoded(GREY, "PNG", transparency=int(np.asarray(GREY)[0, 0])), GREY, 0),
    "PNG, palette with a transparent colour": (encoded(P, "PNG", transparency=0), RGB, 0),
    "PNG, palette with transparencies": (encoded(P, "PNG", transparency=bytes([0, 128, 255, 255])), RGB, 0),
    "PNG, animated": (encoded(RGBA, "PNG", save_all=True, append_images=[RGBA.rotate(180)]), RGB, 0),
    "WebP": (encoded(RGBA, "WEBP", **LOSSLESS), RGB, 0),
    "WebP with loss": (encoded(RGBA, "WEBP", quality=100, exact=True), RGB, 8),
    "GIF": (encoded(P, "GIF", transparency=0), RGB, 0),
    "GIF, animated": (encoded(RGBA, "GIF", save_all=True, append_images=[RGBA.rotate(180)]), RGB, 255),
    "TIFF": (encoded(RGBA, "TIFF"), RGB, 0),
    "TIFF, grey": (encoded(LA, "TIFF"), GREY, 0),
    "AVIF": (encoded(RGBA, "AVIF", quality=100, subsampling="4:4:4"), RGB, 6),
    "AVIF, half of the colours": (encoded(RGBA, "AVIF", quality=95), RGB, 24),
    "AVIF, multiplied already": (encoded(RGBA, "AVIF", quality=100, alpha_premultiplied=True), RGB, 40),
    "AVIF, animated": (encoded(RGBA, "AVIF", quality=100, save_all=True, append_images=[RGBA.rotate(180)]), RGB, 24),
}
UNKNOWN = {"GIF, animated": ALPHA < 128, "AVIF, multiplied already": ALPHA < 128}
"""Pixels whose colours the encoder itself drops."""


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("name", FILES)
def test_a_transparent_pixel_has_the_colour_of_the_file(name: str) -> None:
    content, image, most = FILES[name]
    seen = ~UNKNOWN.get(name, np.zeros_like(ALPHA, bool))
    seen[12:20] = most == 0  # where the two colours meet, loss blurs them
    truth = np.asarray(image.convert("RGB")).astype(int)
    ours = decode(content).permute(1, 2, 0).numpy().astype(int)
    assert np.abs(ours - truth)[seen].max() <= most % 255
    pillows = np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).astype(int)
    assert np.abs(ours - pillows).max() <= (2 if "WebP with" in name else 0)
    grey = np.asarray(Image.open(io.BytesIO(content)).convert("RGB").convert("L")).astype(int)
    assert np.abs(decode_grey(content)[0].numpy().astype(int) - grey).max() <= 1


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "AVIF", "TIFF"])
@pytest.mark.parametrize("turned", [1, 3, 6, 8])
def test_transparent_images_are_turned_as_the_camera_says(kind: str, turned: int) -> None:
    def exif() -> Image.Exif:  # Pillow's AVIF takes the orientation out of what it is passed
        made = Image.Exif()
        made[0x0112] = turned
        return made

    options: dict[str, Any] = {"PNG": {}, "TIFF": {}, "WEBP": LOSSLESS, "AVIF": {"quality": 100}}[kind]
    content = encoded(RGBA, kind, exif=exif(), **options)
    opaque = decode(encoded(RGB, kind, exif=exif(), **options)).numpy().astype(int)
    difference = np.abs(decode(content).numpy().astype(int) - opaque).max(0)
    assert np.median(difference) <= 2 and (difference > 24).mean() < 0.3, "where the two colours meet, loss blurs them"
    assert size_of(content) == opaque.shape[1:]
