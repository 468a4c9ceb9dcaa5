"""data=mnist_json: MNIST as one gzip'd JSON list [[images, labels], [images, labels], [images, labels]], streamed."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.schema import MnistJsonData
from trainer.data.arrays.npy_files import digest, mapped
from trainer.data.limits import Limits
from trainer.data.prepared import cache_folder, known, prepare_once
from trainer.data.regular_files import open_unpacked
from trainer.data.source import DataSource, Facts, OnProgress, Splits, digest_of
from trainer.errors import UserError, first_line

SPLITS = ("train", "valid", "eval")
TEST = "eval"
SIDE, PIXELS, CLASSES = 28, 784, 10
TELL_EVERY = 1000
KIND = "mnist-json-2"
"""Folder in the cache; another one where what is noted there changes."""


class MnistJson(DataSource):
    """data=mnist_json: MNIST as one JSON file, streamed row by row into arrays in the user's cache (then mapped)."""

    Options = MnistJsonData
    options: MnistJsonData

    def facts(self, global_batch_size: int) -> Facts:
        path = Path(self.options.path)
        if not path.is_file():
            raise UserError(f"data.path={path}", "there is no such file", "data.path=FILE such as mnist.json.gz")
        noted = known(self._place())
        counts = noted["counts"] if noted else self._counted()
        return self._with(counts)

    def _with(self, counts: dict[str, int]) -> Facts:
        val = self.options.val_split
        for split in ("train", val):
            if not counts.get(split):
                raise UserError(
                    f"data.path={self.options.path}",
                    f"has no images in its part {split!r}",
                    "data.val_split=valid or eval",
                )
        kept = f"{4 * PIXELS * sum(counts.values()) / 2**20:.0f} MiB of arrays, mapped by all workers ({self._place()})"
        test = counts[TEST] if val != TEST else 0
        said = f"validation is the file's part {val}" + (f", the test its part {TEST}" if test else "")
        if val == TEST:
            said += ", the set's test images (data.val_split=valid keeps these for the test)"
        return Facts(
            f"MNIST in {self.options.path}",
            "real",
            counts["train"],
            counts[val],
            (1, SIDE, SIDE),
            CLASSES,
            cache=kept,
            test_samples=test,
            splits=said,
        )

    def _counted(self) -> dict[str, int]:
        counts = dict.fromkeys(SPLITS, 0)
        for split, image, _ in self._rows():
            counts[split] += image is not None
        return counts

    def prepare(self, facts: Facts, progress: OnProgress) -> Facts:
        def tell(done: int) -> None:
            progress(f"reading {Path(self.options.path).name}", done, facts.train_samples)

        counts = prepare_once(self._place(), lambda folder: self._write(folder, tell))["counts"]
        return replace(self._with(counts), cache=facts.cache)

    def fingerprint(self, facts: Facts) -> str:
        """A fingerprint of the images and labels themselves, wherever the file lies."""
        noted = known(self._place())
        if noted is None:  # mode=predict looks at other files, and keeps no arrays
            return super().fingerprint(facts)
        return digest_of(*(noted["digests"][split] for split in ("train", self.options.val_split)))

    def open(self, facts: Facts) -> Splits:
        import torch

        from trainer.data.arrays.tensors import ArrayDataset

        sets = []
        for split in ("train", self.options.val_split, *([TEST] if facts.test_samples else [])):
            images, labels = mapped(self._place(), split)
            rows = f"{Path(self.options.path).name}, part {split}"
            sets.append(ArrayDataset(torch.from_numpy(images), torch.from_numpy(labels), rows))
        # the numbers as they are: the file decides on their range
        return Splits(sets[0], sets[1], test=sets[2] if facts.test_samples else None)

    def image_preprocessing(self, facts: Facts) -> dict[str, Any]:
        """Return that images are not preprocessed: the file's numbers are the inputs."""
        return {"resize": None, "crop": None, "channels": 1, "divide": None, "mean": None, "std": None}

    def _place(self) -> Path:
        return cache_folder(KIND, [Path(self.options.path)])

    def _write(self, folder: Path, tell: Any) -> dict[str, Any]:
        """The images as (N, 1, 28, 28) float32, the labels as (N,) int64, in one pass over the file."""
        counts, labels = dict.fromkeys(SPLITS, 0), {split: [] for split in SPLITS}  # type: ignore[var-annotated]
        files = {split: (folder / f"{split}.raw").open("wb") for split in SPLITS}
        try:
            for split, image, label in self._rows():
                if image is None:
                    labels[split].append(label)
                    continue
                files[split].write(image.tobytes())
                counts[split] += 1
                if split == "train" and counts[split] % TELL_EVERY == 0:
                    tell(counts[split])
        finally:
            for file in files.values():
                file.close()
        for split in SPLITS:
            self._finish(folder, split, counts[split], labels[split])
        return {"counts": counts, "digests": {split: digest(*mapped(folder, split)) for split in SPLITS}}

    def _finish(self, folder: Path, split: str, count: int, labels: list[int]) -> None:
        if len(labels) != count:
            raise self._wrong(f"part {split!r}: {count} images and {len(labels)} labels")
        header = np.lib.format.header_data_from_array_1_0(np.empty((0, 1, SIDE, SIDE), np.float32))
        header["shape"] = (count, 1, SIDE, SIDE)
        with (folder / f"{split}.npy").open("wb") as whole, (folder / f"{split}.raw").open("rb") as raw:
            np.lib.format.write_array_header_1_0(whole, header)
            shutil.copyfileobj(raw, whole)
        (folder / f"{split}.raw").unlink()
        np.save(folder / f"{split}.labels.npy", np.array(labels, np.int64))

    def _rows(self) -> Iterator[tuple[str, np.ndarray | None, int]]:
        """(split, image (784,) float32, 0) for each image, and (split, None, label) for each label, as they come.

        Raises:
            UserError: the file is not what it should be; with the place.
        """
        import ijson

        place = JsonPlace()
        try:
            with open_unpacked(self.options.path) as file:
                limited = LimitedFile(file, Limits.of(self.options))
                for event, value in ijson.basic_parse(limited, use_float=True):
                    found = place.after(event, value)
                    if found is not None:
                        yield found
        except Unlike as error:
            raise self._wrong(str(error)) from error
        except (ijson.JSONError, OSError, EOFError, zlib.error, ValueError, OverflowError) as error:
            where = f" after image {place.row} of part {SPLITS[max(place.split, 0)]!r}"
            raise self._wrong(f"it breaks off{where}: {first_line(error)}") from error

    def _wrong(self, why: str) -> UserError:
        return UserError(
            f"data.path={self.options.path}",
            (
                f"is not [[images, labels], [images, labels], [images, labels]] with images of {PIXELS} numbers "
                f"and labels 0 to 9: {why}"
            ),
        )


class Unlike(Exception):
    """The error for a JSON file that is not laid out as MNIST: what it lacks, and where."""


class JsonPlace:
    """The JSON reader's position in MNIST's file: the part, the row, and the numbers of the image so far.

    Attributes:
        split: number of the part; -1 before the first. row: of the image or label that comes next.
    """

    def __init__(self) -> None:
        self.split, self.row = -1, 0
        self._depth, self._list = 0, ""
        self._numbers: list[float] = []

    def after(self, event: str, value: Any) -> tuple[str, np.ndarray | None, int] | None:
        """Take in one event of the JSON parser; return the image or label that it completes, or None.

        Raises:
            Unlike: such a file has no such event there.
        """
        if event == "start_array":
            self._begin()
        elif event == "end_array":
            self._depth -= 1
            if self._depth == 3:
                self.row += 1
                return SPLITS[self.split], self._image(self.row - 1), 0
        elif event == "number" and self._depth == 4:
            if len(self._numbers) == PIXELS:
                raise self._unlike(f"image {self.row} has more than {PIXELS} numbers")
            self._numbers.append(value)
        elif event == "number" and self._depth == 3 and self._list == "labels" and value in range(CLASSES):
            self.row += 1
            return SPLITS[self.split], None, int(value)
        else:
            where = f"{self._list} {self.row} of part {SPLITS[self.split]!r}" if self.split >= 0 else "its start"
            raise Unlike(f"at {where} there is {json.dumps(value) if value is not None else event}")
        return None

    def _begin(self) -> None:
        """A list begins: the whole, a part, its images or labels, an image."""
        self._depth += 1
        if self._depth == 2:
            self.split, self._list = self.split + 1, ""
            if self.split >= len(SPLITS):
                raise Unlike("more than three parts")
        elif self._depth == 3:
            self._list, self.row = "labels" if self._list else "images", 0
        elif self._depth == 4:
            self._numbers = []
        elif self._depth > 4:
            raise Unlike("there are lists in lists in lists in lists in lists")

    def _image(self, row: int) -> np.ndarray:
        if len(self._numbers) != PIXELS:
            raise self._unlike(f"image {row} has {len(self._numbers)} numbers instead of {PIXELS}")
        with np.errstate(over="ignore"):
            image = np.array(self._numbers, np.float32)
        if not np.isfinite(image).all():
            raise self._unlike(f"image {row} has a number that is not finite")
        return image

    def _unlike(self, why: str) -> Unlike:
        return Unlike(f"part {SPLITS[self.split]!r}: {why}")


class LimitedFile:
    """A file object that raises while it is read if the file is too long, or has an endless number or text."""

    LONGEST = 1000
    ENDLESS = re.compile(rb'"[^"]{%d}|[^\s,\[\]{}":]{%d}' % (LONGEST, LONGEST))

    def __init__(self, file: Any, limits: Limits) -> None:
        self.file, self.limits = file, limits
        self.total, self.tail = 0, b""

    def read(self, size: int = -1) -> bytes:
        """Read the next ``size`` bytes, as from any file.

        Raises:
            Unlike: something in it is too long.
        """
        piece: bytes = self.file.read(size)
        self.total += len(piece)
        if self.total > self.limits.file_bytes:
            raise Unlike(f"it is larger (unpacked) than it may be, more than data.max_file_mib={self.limits.file_mib}")
        if self.ENDLESS.search(self.tail + piece):
            raise Unlike(f"it has a number or a text that is longer than {self.LONGEST} characters")
        self.tail = (self.tail + piece)[-self.LONGEST :]
        return piece
