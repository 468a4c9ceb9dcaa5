"""data=shards: tar files in WebDataset's layout, whose images are read in any order through an index made once.

A sample is an image and its label as ``.cls`` (a number in text) or in ``.json`` (under ``label``). An index instead of WebDataset's streaming gives each worker the samples that the
sampler says, exactly once, whatever the number of shards and workers.
"""

from __future__ import annotations

import glob
import json
import math
import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.schema import ShardsData
from trainer.data.folder_walk import distinct
from trainer.data.images.listing import Listing
from trainer.data.images.shard_samples import LabelLimits, ShardIndex, index_of
from trainer.data.images.source import ImageSource
from trainer.data.images.split_checks import attention, refuse_one_label, refuse_untrained, unused_labels
from trainer.data.images.split_folders import split_folders
from trainer.data.limits import Limits
from trainer.data.prepared import known, made_once, place_of
from trainer.data.source import Facts, Progress
from trainer.errors import UserError
from trainer.host import json_text
from trainer.visible import shortened
from trainer.wording import some

MOST_SHARDS = 1_000_000
INDEX = "shard-index-2"
"""Folder of indices in the user's cache; another name where an index says other things than before."""
BRACES = re.compile(r"\{(\d{1,18})\.\.(\d{1,18})\}")


@dataclass(frozen=True)
class ShardFiles:
    """The tar files of each split; none of validation: a part of the training samples is held out."""

    train: list[Path]
    val: list[Path]
    test: list[Path]


class Shards(ImageSource):
    """data=shards: training and validation images in tar files, on this host or on a file system that it mounts."""

    Options = ShardsData
    options: ShardsData

    def facts(self, global_batch_size: int) -> Facts:
        train, val, *rest = listings = self.listings(None)
        classes = self.options.num_classes or int(max(listing.labels.max() for listing in listings)) + 1
        for listing in listings:
            wrong = np.flatnonzero((listing.labels < 0) | (listing.labels >= classes))
            if len(wrong):
                first = some([f"{shortened(listing.names[n])} with {listing.labels[n]}" for n in wrong])
                raise UserError(f"data.num_classes={classes}", f"{len(wrong)} of {len(listing)} samples have a label outside 0 to {classes - 1}: {first}")  # fmt: skip
        names = [str(label) for label in range(classes)]
        refuse_one_label(f"data.path={self.options.path}", train)
        refuse_untrained(f"data.path={self.options.path}", train, val, names, folders=False)
        for test in rest:
            refuse_untrained(f"data.path={self.options.path}", train, test, names, folders=False, which="test")
        source = f"{' + '.join(str(len(listing.files)) for listing in listings)} shards"
        facts = Facts(
            source, "shards", len(train), len(val), self.shape(), classes, slow=True,
            test_samples=sum(map(len, rest)), splits=self._held_out(),
        )  # fmt: skip
        facts = replace(facts, attention=attention(train, val, names, unused_labels(train, val, classes)))
        return self.sized(facts, listings)

    def prepare(self, facts: Facts, progress: Progress) -> Facts:
        parts = self._parts()
        for files in (parts.train, parts.val, parts.test):
            if files:
                made_once(place_of(INDEX, files), lambda folder, files=files: _write_index(folder, files, self._label_limits()))  # type: ignore[misc]  # fmt: skip
        return super().prepare(facts, progress)

    def listings(self, facts: Facts | None) -> tuple[Listing, ...]:
        parts, options = self._parts(), self.options
        train = self._listing("path", parts.train)
        test = (self._listing("test_path", parts.test),) if parts.test else ()
        if parts.val:
            return train, self._listing("val_path", parts.val), *test
        return *train.split(options.val_fraction, options.split_seed), *test

    def _held_out(self) -> str:
        """What is said of splits that no key names: by the names of the files, or a part of the training samples."""
        parts, options, said = self._parts(), self.options, []
        named = [split for split in ("val", "test") if getattr(parts, split) and not getattr(options, f"{split}_path")]
        if named:
            said.append(f"{' and '.join(named)} by the names of the files in data.path")
        if not parts.val:
            said.append(f"validation is {options.val_fraction:g} of each class (data.val_fraction), held out by data.split_seed={options.split_seed}")  # fmt: skip
        return "; ".join(said)

    def _parts(self) -> ShardFiles:
        """The files of each split, by their keys, or by their names where all files of ``data.path`` tell a split."""
        files, options = self._found("path")[0], self.options
        stems = {path: re.sub(r"[-_.]*\d+", "", path.name.partition(".")[0]) or "-" for path in files}
        found = split_folders(set(stems.values()), f"data.path={options.path}")
        if not found.train or found.others or not (found.val or found.test):
            by_name = ShardFiles(files, [], [])
        else:
            by_name = ShardFiles(
                *([p for p in files if stems[p] == name] for name in (found.train, found.val, found.test))
            )
        return ShardFiles(
            by_name.train,
            self._found("val_path")[0] if options.val_path else by_name.val,
            self._found("test_path")[0] if options.test_path else by_name.test,
        )

    def _listing(self, key: str, files: list[Path]) -> Listing:
        folder = place_of(INDEX, files)
        limits = self._label_limits()
        index = ShardIndex(**json_text.read(folder / "index.json")) if known(folder) else index_of(files, limits)
        if not index.names:
            raise UserError(
                f"data.{key}={getattr(self.options, key) or self.options.path}",
                "holds no samples (NAME.jpg with NAME.cls or NAME.json)" + "".join(f". {said}" for said in index.said),
            )
        return Listing(
            [str(f) for f in files],
            np.array(index.file, np.int64),
            np.array(index.spans, np.int64).reshape(-1, 2),
            np.array(index.labels, np.int64),
            index.names,
            np.arange(len(index.names)),
            Limits.of(self.options),
            passed_over=tuple(self._found(key if getattr(self.options, key) else "path")[1]),
            said=tuple(index.said),
            root=os.path.commonpath([file.parent for file in files]),
        )

    def _label_limits(self) -> LabelLimits:
        return LabelLimits(self.options.max_label_kib, self.options.max_depth)

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
    index = index_of(files, limits)
    (folder / "index.json").write_text(json.dumps(asdict(index)))
    return {"samples": len(index.names)}
