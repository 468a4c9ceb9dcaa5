"""data=mnist: the 70,000 handwritten digits (1, 28, 28) of MNIST, or scikit-learn's drawn larger, said loudly."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np

from trainer.data.array_images import ArraySource, Pair
from trainer.data.base import Facts, Progress
from trainer.data.fetched import Site, absent, fetch
from trainer.errors import UserError

FILES = {"train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"), "val": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")}  # fmt: skip
SITE = Site("MNIST", "https://ossci-datasets.s3.amazonaws.com/mnist/train-labels-idx1-ubyte.gz", 12)
SIDE, CLASSES = 28, 10
SAMPLES, HELD_OUT = 1797, 360
"""Of scikit-learn's digits, which are used where MNIST cannot be had."""


class Mnist(ArraySource):
    """MNIST's own files (plain or .gz), as torchvision lays them out, or directly in the folder."""

    mean, std = (0.1307,), (0.3081,)

    def facts(self, global_batch_size: int) -> Facts:
        if self._folder() is not None:
            counts = [self._count(split) for split in FILES]
            return self._facts(f"MNIST in {self._folder()}", "real", counts)
        reason = absent(self.config, SITE, Path(self.config["root"]) / "MNIST")
        if not reason:
            return self._facts(f"MNIST, to be downloaded into {self.config['root']}", "download", [60000, 10000])
        return self._instead(reason)

    def _facts(self, source: str, kind: str, counts: list[int], stand_in: str = "") -> Facts:
        kept = self.kept(sum(counts), SIDE, SIDE)
        return Facts(source, kind, counts[0], counts[1], (1, SIDE, SIDE), CLASSES, stand_in, cache=kept)

    def _instead(self, reason: str) -> Facts:
        return self._facts(
            "scikit-learn's handwritten digits, drawn on 28 pixels", "embedded", [SAMPLES - HELD_OUT, HELD_OUT],
            SITE.stand_in(reason, "scikit-learn's 1,797 digits are used"),
        )  # fmt: skip

    def prepare(self, facts: Facts, progress: Progress) -> Facts:
        if facts.kind != "download":
            return facts
        from torchvision.datasets import MNIST

        reason = fetch(self.config, SITE, lambda root: MNIST(root, download=True))
        return self._instead(reason) if reason else self.facts(0)

    def arrays(self, facts: Facts) -> tuple[Pair, Pair]:
        if facts.kind == "embedded":
            return enlarged_digits()
        return self._read("train"), self._read("val")

    def _folder(self) -> Path | None:
        root = Path(self.config["root"])
        return next((f for f in (root / "MNIST" / "raw", root) if all(_there(f / n) for s in FILES.values() for n in s)), None)  # fmt: skip

    def _count(self, split: str) -> int:
        """Samples of a split, from the files' headers, which must agree."""
        images, labels = (_header(self._path(name)) for name in FILES[split])
        if images[0] != labels[0] or images[1:] != (SIDE, SIDE):
            raise UserError(f"data.root={self.config['root']}", f"{self._path(FILES[split][0])} has images {images} and the labels' file {labels[0]} labels")  # fmt: skip
        return images[0]

    def _path(self, name: str) -> Path:
        folder = self._folder()
        assert folder is not None
        return folder / name if (folder / name).is_file() else folder / f"{name}.gz"

    def _read(self, split: str) -> Pair:
        images, labels = (_array(self._path(name)) for name in FILES[split])
        if len(labels) and labels.max() >= CLASSES:
            raise UserError(f"data.root={self.config['root']}", f"{self._path(FILES[split][1])} has labels up to {labels.max()}, which should be 0 to 9")  # fmt: skip
        return images[:, None], labels.astype(np.int64)


def enlarged_digits() -> tuple[Pair, Pair]:
    """scikit-learn's 8x8 digits on (1, 28, 28) uint8: 1,437 for training and 360 for validation."""
    import torch
    from sklearn.datasets import load_digits

    bunch = load_digits()
    small = torch.from_numpy(bunch.images)[:, None] * (255 / 16)
    large = torch.nn.functional.interpolate(small, (20, 20), mode="bicubic").clamp(0, 255).round().to(torch.uint8)
    images = torch.nn.functional.pad(large, (4, 4, 4, 4)).numpy()  # a digit of 20 pixels in a frame, as in MNIST
    labels = bunch.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(SAMPLES)
    train, val = order[HELD_OUT:], order[:HELD_OUT]
    return (images[train], labels[train]), (images[val], labels[val])


def _there(path: Path) -> bool:
    return path.is_file() or path.with_name(f"{path.name}.gz").is_file()


def _opened(path: Path) -> gzip.GzipFile | object:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _header(path: Path) -> tuple[int, ...]:
    """The shape of an IDX file's array.

    Raises:
        UserError: the file is not one of unsigned bytes.
    """
    with _opened(path) as file:  # type: ignore[attr-defined]
        return _shape(file, path)


def _shape(file: object, path: Path) -> tuple[int, ...]:
    try:
        start = file.read(4)  # type: ignore[attr-defined]
        if len(start) != 4 or start[:3] != b"\0\0\x08":
            raise ValueError("it does not begin as an IDX file of unsigned bytes")
        return struct.unpack(f">{start[3]}I", file.read(4 * start[3]))  # type: ignore[attr-defined]
    except (ValueError, struct.error, EOFError, OSError) as error:
        raise UserError(f"data.root={path.parent}", f"{path} is not a file of MNIST: {error}", "fetch it anew") from error  # fmt: skip


def _array(path: Path) -> np.ndarray:
    with _opened(path) as file:  # type: ignore[attr-defined]
        shape = _shape(file, path)
        try:
            return np.frombuffer(file.read(), np.uint8).reshape(shape).copy()
        except (ValueError, EOFError, OSError) as error:
            raise UserError(f"data.root={path.parent}", f"{path} is damaged: {error}", "fetch it anew") from error
