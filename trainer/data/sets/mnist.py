"""data=mnist: the 70,000 handwritten digits (1, 28, 28) of MNIST, or with a warning scikit-learn's digits enlarged."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from trainer.config.schema import MnistData
from trainer.data.arrays.array_source import ArraySource
from trainer.data.arrays.npy_files import Pair
from trainer.data.download import File, Site
from trainer.data.limits import Limits
from trainer.data.regular_files import open_regular
from trainer.data.sets.digits import read_digits
from trainer.errors import UserError, why

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "val": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
SITE = Site(
    "MNIST",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "MNIST/raw",
    (
        File("train-images-idx3-ubyte.gz", 9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        File("train-labels-idx1-ubyte.gz", 28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        File("t10k-images-idx3-ubyte.gz", 1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        File("t10k-labels-idx1-ubyte.gz", 4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    ),
)
SIDE = 28
SAMPLES, HELD_OUT = 1797, 360
"""Samples of scikit-learn's digits, MNIST's stand-in, and how many of them are for validation."""


class Mnist(ArraySource):
    """data=mnist: MNIST's own files (plain or .gz), as torchvision lays them out, or directly in the folder."""

    Options = MnistData
    options: MnistData

    site, top, samples, shape = SITE, "MNIST", (60000, 10000), (1, SIDE, SIDE)
    mean, std = (0.1307,), (0.3081,)
    val_file = FILES["val"][0]

    def stand_in(self) -> tuple[str, tuple[int, int], str]:
        what = "scikit-learn's handwritten digits, drawn on 28 pixels"
        return what, (SAMPLES - HELD_OUT, HELD_OUT), "scikit-learn's 1,797 digits are used"

    def files(self) -> list[Path]:
        return [self._path(name) for names in FILES.values() for name in names]

    def read(self) -> tuple[Pair, Pair]:
        train, val = (self._split(*names) for names in FILES.values())
        self.refuse_labels(
            {self._path(names[1]): pair[1] for names, pair in zip(FILES.values(), (train, val), strict=True)}
        )
        return train, val

    def embedded(self) -> tuple[Pair, Pair]:
        return _enlarged_digits()

    def found_in(self) -> Path | None:
        root = Path(self.options.root)
        return next(
            (f for f in (root / "MNIST" / "raw", root) if all(_there(f / n) for s in FILES.values() for n in s)), None
        )

    def _path(self, name: str) -> Path:
        """The path of a file; if it is there packed and unpacked, the packed one, which has a checksum."""
        folder = self.found_in()
        assert folder is not None
        packed = folder / f"{name}.gz"
        return packed if packed.is_file() else folder / name

    def _split(self, images: str, labels: str) -> Pair:
        """The images and labels of two files, which must agree.

        Raises:
            UserError: they do not, or one is damaged.
        """
        pixels, numbers = (_array(self._path(name), Limits.of(self.options)) for name in (images, labels))
        if numbers.ndim != 1 or len(pixels) != len(numbers) or pixels.shape[1:] != (SIDE, SIDE):
            raise UserError(
                f"data.root={self.options.root}",
                f"{self._path(images)} has images {pixels.shape} and the labels' file {len(numbers)} labels",
                "fetch it anew",
            )
        return pixels[:, None], numbers.astype(np.int64)


def _enlarged_digits() -> tuple[Pair, Pair]:
    """Return MNIST's stand-in: scikit-learn's digits enlarged to (1, 28, 28) uint8; 1,437 to train, 360 to validate."""
    import torch

    drawn, shown = read_digits()
    small = torch.from_numpy(drawn)[:, None] * (255 / 16)
    large = torch.nn.functional.interpolate(small, (20, 20), mode="bicubic").clamp(0, 255).round().to(torch.uint8)
    images = torch.nn.functional.pad(large, (4, 4, 4, 4)).numpy()  # a digit of 20 pixels in a frame, as in MNIST
    labels = shown
    order = np.random.default_rng(0).permutation(SAMPLES)
    train, val = order[HELD_OUT:], order[:HELD_OUT]
    return (images[train], labels[train]), (images[val], labels[val])


def _there(path: Path) -> bool:
    return path.is_file() or path.with_name(f"{path.name}.gz").is_file()


def _array(path: Path, limits: Limits) -> np.ndarray:
    """The array of an IDX file.

    Raises:
        UserError: the file is not one of unsigned bytes, or not as long as it says.
    """
    try:
        with open_regular(path) as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
            start = file.read(4)
            if len(start) != 4 or start[:3] != b"\0\0\x08" or not start[3]:
                raise ValueError("it does not begin as an IDX file of unsigned bytes")
            shape = struct.unpack(f">{start[3]}I", file.read(4 * start[3]))
            if (size := math.prod(shape)) > limits.file_bytes:
                raise ValueError(f"it says that it has {size:,} bytes, more than data.max_file_mib={limits.file_mib}")
            content = file.read(size + 1)  # what it may unpack to beyond that is not read
    except (ValueError, struct.error, EOFError, OSError, zlib.error) as error:
        raise UserError(
            f"data.root={path.parent}", f"{path} is not a file of MNIST: {why(error)}", "fetch it anew"
        ) from error
    if len(content) > size:
        raise UserError(
            f"data.root={path.parent}", f"{path} is damaged: it has more than its {shape[0]} entries", "fetch it anew"
        )
    if len(content) < size:
        raise UserError(
            f"data.root={path.parent}",
            f"{path} is damaged: of {shape[0]} entries it has {len(content) * shape[0] / max(1, math.prod(shape)):g}",
            "fetch it anew",
        )
    return np.frombuffer(content, np.uint8).reshape(shape)
