"""data=shards: tar files in WebDataset's layout, whose images are read in any order through an index made once.

A sample is the members that share a name up to the first dot: an image and its label as ``.cls`` (a number in text) or
in ``.json`` (under ``label``). An index instead of WebDataset's streaming gives each worker the samples that the
sampler says, exactly once, whatever the number of shards and workers.
"""

from __future__ import annotations

import glob
import json
import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from trainer.config.schema import ShardsData
from trainer.data.folder_walk import distinct
from trainer.data.images.image_files import EXTENSIONS
from trainer.data.images.listing import Listing
from trainer.data.images.source import ImageSource
from trainer.data.images.split_checks import attention, refuse_untrained
from trainer.data.images.tar_index import NotTar, TarMember, members
from trainer.data.limits import Limits
from trainer.data.prepared import known, made_once, place_of
from trainer.data.regular_files import open_regular
from trainer.data.source import Facts, Progress
from trainer.errors import UserError, why
from trainer.visible import shortened
from trainer.wording import some

MOST = 2**31
"""Labels are below this."""
MOST_SHARDS = 1_000_000
BRACES = re.compile(r"\{(\d{1,18})\.\.(\d{1,18})\}")
LABELS = (".cls", ".json")


@dataclass(frozen=True)
class LabelLimits:
    """Limits on a sample's label in shards: its size, and how deeply it is nested.

    Attributes:
        kib: its size (``data.max_label_kib``).
        depth: how often lists and mappings lie in one another (``data.max_depth``).
    """

    kib: int
    depth: int


class Shards(ImageSource):
    """data=shards: training and validation images in tar files, on this host or on a file system that it mounts."""

    Options = ShardsData
    options: ShardsData

    def facts(self, global_batch_size: int) -> Facts:
        train, val = self.listings(None)
        classes = self.options.num_classes or int(max(train.labels.max(), val.labels.max())) + 1
        for listing in (train, val):
            wrong = np.flatnonzero((listing.labels < 0) | (listing.labels >= classes))
            if len(wrong):
                first = some([f"{shortened(listing.names[n])} with {listing.labels[n]}" for n in wrong])
                raise UserError(f"data.num_classes={classes}", f"{len(wrong)} of {len(listing)} samples have a label outside 0 to {classes - 1}: {first}")  # fmt: skip
        names = [str(label) for label in range(classes)]
        refuse_untrained(f"data.path={self.options.path}", train, val, names, folders=False)
        source = f"{len(train.files)} + {len(val.files)} shards"
        facts = Facts(source, "shards", len(train), len(val), self.shape(), classes, slow=True)
        facts = replace(facts, attention=attention(train, val, names))
        return self.sized(facts, (train, val))

    def prepare(self, facts: Facts, progress: Progress) -> Facts:
        for key in ("path", "val_path"):
            if getattr(self.options, key):
                files = self._files(key)
                made_once(place_of("shards", files), lambda folder, files=files: _write_index(folder, files, self._label_limits()))  # type: ignore[misc]  # fmt: skip
        return super().prepare(facts, progress)

    def listings(self, facts: Facts | None) -> tuple[Listing, Listing]:
        train = self._listing("path")
        if self.options.val_path:
            return train, self._listing("val_path")
        return train.split(self.options.val_fraction, self.options.split_seed)

    def _listing(self, key: str) -> Listing:
        files = self._files(key)
        folder = place_of("shards", files)
        index = (
            json.loads((folder / "index.json").read_text()) if known(folder) else _indexed(files, self._label_limits())
        )
        if not index["names"]:
            raise UserError(
                f"data.{key}={getattr(self.options, key)}", "holds no samples (NAME.jpg with NAME.cls or NAME.json)"
            )
        return Listing(
            [str(f) for f in files],
            np.array(index["file"], np.int64),
            np.array(index["spans"], np.int64).reshape(-1, 2),
            np.array(index["labels"], np.int64),
            index["names"],
            np.arange(len(index["names"])),
            Limits.of(self.options),
            passed_over=tuple(self._found(key)[1]),
        )

    def _label_limits(self) -> LabelLimits:
        return LabelLimits(self.options.max_label_kib, self.options.max_depth)

    def _files(self, key: str) -> list[Path]:
        return self._found(key)[0]

    def _found(self, key: str) -> tuple[list[Path], list[str]]:
        """The files that a key means, each real one once, and the other names of these."""
        given = getattr(self.options, key)
        patterns = [given] if isinstance(given, str) else list(given)
        for pattern in patterns:
            if (meant := _how_many(pattern)) > MOST_SHARDS:
                raise UserError(f"data.{key}={given}", f"means {meant:,} files, more than {MOST_SHARDS:,}", "data.path='DIR/*.tar'")  # fmt: skip
        found = sorted({Path(p) for pattern in patterns for braced in braces(pattern) for p in glob.glob(braced)})
        if not found:
            raise UserError(f"data.{key}={given}", "there are no such files", f"data.{key}='DIR/train-{{000..009}}.tar' or 'DIR/*.tar'")  # fmt: skip
        return distinct(found)


def braces(pattern: str) -> list[str]:
    """Expand a pattern such as ``a-{000..002}.tar`` into the names it stands for, as WebDataset does."""
    match = BRACES.search(pattern)
    if match is None:
        return [pattern]
    first, last = match.groups()
    numbers = (f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1))
    return [name for n in numbers for name in braces(pattern[: match.start()] + n + pattern[match.end() :])]


def _how_many(pattern: str) -> int:
    """The number of names that :func:`braces` would return."""
    return math.prod(max(0, int(last) - int(first) + 1) for first, last in BRACES.findall(pattern))


def _write_index(folder: Path, files: list[Path], limits: LabelLimits) -> dict[str, Any]:
    folder.mkdir(parents=True)
    index = _indexed(files, limits)
    (folder / "index.json").write_text(json.dumps(index))
    return {"samples": len(index["names"])}


def _indexed(files: list[Path], limits: LabelLimits) -> dict[str, list[Any]]:
    """Index the tar files of shards: where each sample's image lies, and its label.

    Raises:
        UserError: a file is no tar file, or samples have no label; how many, and the first of them.
    """
    index: dict[str, list[Any]] = {"file": [], "spans": [], "labels": [], "names": []}
    wrong: list[str] = []
    for number, path in enumerate(files):
        try:
            with open_regular(path) as shard:
                wrong += _add(index, number, path, shard, limits)
        except NotTar as error:
            raise UserError(f"data.path ({path})", f"is not a plain tar file: {error}") from error
        except OSError as error:
            raise UserError(f"data.path ({path})", why(error)) from error
    if wrong:
        total = len(index["names"]) + len(wrong)
        raise UserError("data.path", f"{len(wrong)} of {total} samples have no label (NAME.cls or NAME.json with a 'label', a whole number): {some(wrong)}")  # fmt: skip
    return index


def _add(index: dict[str, list[Any]], number: int, path: Path, shard: IO[bytes], limits: LabelLimits) -> list[str]:
    """Adds the samples of a shard; returns those without a label, and why."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int | str] = {}
    for member in members(shard, os.fstat(shard.fileno()).st_size):
        folder, _, base = member.name.rpartition("/")
        stem, _, extension = base.partition(".")
        key, extension = f"{folder}/{stem}".lstrip("/"), f".{extension.lower()}"
        if extension not in EXTENSIONS and extension not in LABELS:
            continue
        if member.sparse:
            raise NotTar(
                f"{shortened(member.name)} is a sparse member, which cannot be read where it lies; pack it plainly"
            )
        if extension in EXTENSIONS:
            images[key] = (member.start, member.size)
        else:
            labels[key] = _label(shard, member, limits)
    wrong = []
    for key, span in images.items():
        label = labels.get(key, "an image but no label")
        if isinstance(label, str):
            wrong.append(f"{path}:{shortened(key)} has {label}")
            continue
        index["file"].append(number)
        index["spans"].append(span)
        index["labels"].append(label)
        index["names"].append(f"{path}:{key}")
    return wrong


def _label(shard: IO[bytes], member: TarMember, limits: LabelLimits) -> int | str:
    """The label, or what stands in its place."""
    if member.size > limits.kib << 10:
        return (
            f"a label of {member.size:,} bytes in {shortened(member.name)}, more than data.max_label_kib={limits.kib}"
        )
    shard.seek(member.start)
    content = shard.read(member.size)
    as_json = member.name.lower().endswith(".json")
    if as_json and _deeper(content, limits.depth):
        return f"lists or mappings deeper than data.max_depth={limits.depth} in {shortened(member.name)}"
    try:
        label = int(str(json.loads(content)["label"]) if as_json else content)
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"{content[:40]!r} in {shortened(member.name)}"
    return label if abs(label) < MOST else f"a label of {len(str(label))} digits in {shortened(member.name)}"


def _deeper(content: bytes, depth: int) -> bool:
    """Whether a JSON text nests lists and mappings deeper than ``depth``; brackets inside strings do not count."""
    if content.count(b"[") + content.count(b"{") <= depth:
        return False
    now = 0
    for bracket in re.finditer(rb"[\[\]{}]", re.sub(rb'"(?:[^"\\]|\\.)*"', b"", content)):
        now += 1 if bracket[0] in b"[{" else -1
        if now > depth:
            return True
    return False
