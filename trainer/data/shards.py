"""data=shards: tar files in WebDataset's layout, whose images are read in any order by an index made once.

A sample is the members that share a name up to the first dot: an image and its label as ``.cls`` (a number in text) or
in ``.json`` (under ``label``). An index instead of WebDataset's streaming gives each worker the samples that the
sampler says, exactly once, whatever the number of shards and workers.
"""

from __future__ import annotations

import glob
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.base import Facts, Progress
from trainer.data.images import ImageSource
from trainer.data.listing import EXTENSIONS, Listing
from trainer.data.once import known, made_once, place_of
from trainer.data.representation import some
from trainer.errors import UserError

MOST = 2**31
"""Labels are below this."""


class Shards(ImageSource):
    """Training and validation images in tar files of this host or a file system that it shares."""

    def facts(self, global_batch_size: int) -> Facts:
        train, val = self.listings(None)
        classes = self.config["num_classes"] or int(max(train.labels.max(), val.labels.max())) + 1
        for listing in (train, val):
            wrong = np.flatnonzero((listing.labels < 0) | (listing.labels >= classes))
            if len(wrong):
                first = some([f"{listing.names[n]} with {listing.labels[n]}" for n in wrong])
                raise UserError(f"data.num_classes={classes}", f"{len(wrong)} of {len(listing)} samples have a label outside 0 to {classes - 1}: {first}")  # fmt: skip
        source = f"{len(train.files)} + {len(val.files)} shards"
        facts = Facts(source, "shards", len(train), len(val), self.shape(), classes, slow=True)
        return self.sized(facts, (train, val))

    def prepare(self, facts: Facts, progress: Progress) -> Facts:
        for key in ("path", "val_path"):
            if self.config[key]:
                files = self._files(key)
                made_once(place_of("shards", files), lambda folder, files=files: _write_index(folder, files))  # type: ignore[misc]  # fmt: skip
        return super().prepare(facts, progress)

    def listings(self, facts: Facts | None) -> tuple[Listing, Listing]:
        train = self._listing("path")
        if self.config["val_path"]:
            return train, self._listing("val_path")
        return train.split(self.config["val_fraction"], self.config["split_seed"])

    def _listing(self, key: str) -> Listing:
        files = self._files(key)
        folder = place_of("shards", files)
        index = json.loads((folder / "index.json").read_text()) if known(folder) else indexed(files)
        if not index["names"]:
            raise UserError(f"data.{key}={self.config[key]}", "holds no samples (NAME.jpg with NAME.cls or NAME.json)")
        return Listing(
            [str(f) for f in files],
            np.array(index["file"], np.int64),
            np.array(index["spans"], np.int64).reshape(-1, 2),
            np.array(index["labels"], np.int64),
            index["names"],
            np.arange(len(index["names"])),
        )

    def _files(self, key: str) -> list[Path]:
        given = self.config[key]
        patterns = [given] if isinstance(given, str) else list(given)
        found = sorted({Path(p) for pattern in patterns for braced in braces(pattern) for p in glob.glob(braced)})
        if not found:
            raise UserError(f"data.{key}={given}", "there are no such files", f"data.{key}='DIR/train-{{000..009}}.tar' or 'DIR/*.tar'")  # fmt: skip
        return found


def braces(pattern: str) -> list[str]:
    """``a-{000..002}.tar`` as three names, as WebDataset writes them."""
    match = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if match is None:
        return [pattern]
    first, last = match.groups()
    numbers = (f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1))
    return [name for n in numbers for name in braces(pattern[: match.start()] + n + pattern[match.end() :])]


def _write_index(folder: Path, files: list[Path]) -> dict[str, Any]:
    folder.mkdir(parents=True)
    index = indexed(files)
    (folder / "index.json").write_text(json.dumps(index))
    return {"samples": len(index["names"])}


def indexed(files: list[Path]) -> dict[str, list[Any]]:
    """Where each sample's image lies, and its label.

    Raises:
        UserError: a file is no tar file, or samples have no label; how many, and the first of them.
    """
    index: dict[str, list[Any]] = {"file": [], "spans": [], "labels": [], "names": []}
    wrong: list[str] = []
    for number, path in enumerate(files):
        try:
            with tarfile.open(path, "r:") as shard:
                wrong += _add(index, number, path, shard)
        except (tarfile.TarError, OSError) as error:
            raise UserError(f"data.path ({path})", f"is not a plain tar file: {error}") from error
    if wrong:
        total = len(index["names"]) + len(wrong)
        raise UserError("data.path", f"{len(wrong)} of {total} samples have no label (NAME.cls or NAME.json with a 'label', a whole number): {some(wrong)}")  # fmt: skip
    return index


def _add(index: dict[str, list[Any]], number: int, path: Path, shard: tarfile.TarFile) -> list[str]:
    """Adds the samples of a shard; returns those without a label, and why."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int | str] = {}
    for member in shard:
        folder, _, base = member.name.rpartition("/")
        stem, _, extension = base.partition(".")
        key, extension = f"{folder}/{stem}".lstrip("/"), f".{extension.lower()}"
        if not member.isfile():
            continue
        if extension in EXTENSIONS:
            images[key] = (member.offset_data, member.size)
        elif extension in (".cls", ".json"):
            labels[key] = _label(shard, member)
    wrong = []
    for key, span in images.items():
        label = labels.get(key, "an image but no label")
        if isinstance(label, str):
            wrong.append(f"{path}:{key} has {label}")
            continue
        index["file"].append(number)
        index["spans"].append(span)
        index["labels"].append(label)
        index["names"].append(f"{path}:{key}")
    return wrong


def _label(shard: tarfile.TarFile, member: tarfile.TarInfo) -> int | str:
    """The label, or what stands in its place."""
    file = shard.extractfile(member)
    content = file.read() if file is not None else b""
    try:
        label = int(str(json.loads(content)["label"]) if member.name.endswith(".json") else content)
    except (ValueError, KeyError, TypeError):
        return f"{content[:40]!r} in {member.name}"
    return label if abs(label) < MOST else f"a label of {len(str(label))} digits in {member.name}"
