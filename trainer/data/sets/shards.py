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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.schema import ShardsData
from trainer.data.folder_walk import distinct
from trainer.data.images.listing import Listing
from trainer.data.images.shard_samples import LabelLimits, ShardIndex, index_of
from trainer.data.images.source import ImageSource
from trainer.data.images.split_checks import attention, refuse_one_label, refuse_untrained, unused_labels
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
        refuse_one_label(f"data.path={self.options.path}", train)
        refuse_untrained(f"data.path={self.options.path}", train, val, names, folders=False)
        source = f"{len(train.files)} + {len(val.files)} shards"
        facts = Facts(source, "shards", len(train), len(val), self.shape(), classes, slow=True)
        facts = replace(facts, attention=attention(train, val, names, unused_labels(train, val, classes)))
        return self.sized(facts, (train, val))

    def prepare(self, facts: Facts, progress: Progress) -> Facts:
        for key in ("path", "val_path"):
            if getattr(self.options, key):
                files = self._files(key)
                made_once(place_of(INDEX, files), lambda folder, files=files: _write_index(folder, files, self._label_limits()))  # type: ignore[misc]  # fmt: skip
        return super().prepare(facts, progress)

    def listings(self, facts: Facts | None) -> tuple[Listing, Listing]:
        train = self._listing("path")
        if self.options.val_path:
            return train, self._listing("val_path")
        return train.split(self.options.val_fraction, self.options.split_seed)

    def _listing(self, key: str) -> Listing:
        files = self._files(key)
        folder = place_of(INDEX, files)
        limits = self._label_limits()
        index = ShardIndex(**json_text.read(folder / "index.json")) if known(folder) else index_of(files, limits)
        if not index.names:
            raise UserError(
                f"data.{key}={getattr(self.options, key)}",
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
            passed_over=tuple(self._found(key)[1]),
            said=tuple(index.said),
            root=os.path.commonpath([file.parent for file in files]),
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
    index = index_of(files, limits)
    (folder / "index.json").write_text(json.dumps(asdict(index)))
    return {"samples": len(index.names)}
