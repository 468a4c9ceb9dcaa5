"""data=shards: tar files in WebDataset's layout, whose images are read in any order through an index made once.

A sample is an image and its label as ``.cls`` (a number in text) or in ``.json`` (under ``label``). An index instead of
WebDataset's streaming gives each worker the samples that the sampler says, exactly once, whatever the number of shards
and workers.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.schema import ShardsData
from trainer.data.folder_walk import distinct
from trainer.data.images.listing import Listing
from trainer.data.images.shard_samples import LabelLimits, ShardIndex, index_of
from trainer.data.images.source import ImageSource
from trainer.data.images.split_checks import attention, refuse_one_label, refuse_untrained, unused_labels
from trainer.data.images.split_folders import held_out_split, split_folders
from trainer.data.limits import Limits
from trainer.data.prepared import cache_folder, known, prepare_once
from trainer.data.remote_files import found_by
from trainer.data.source import Facts, OnProgress, held_out
from trainer.errors import UserError
from trainer.host import json_text
from trainer.visible import one_line, shortened
from trainer.wording import some

MOST_SHARDS = 1_000_000
INDEX = "shard-index-2"
"""Folder of indices in the user's cache; another name where an index says other things than before."""
BRACES = re.compile(r"\{(\d{1,18})\.\.(\d{1,18})\}")


@dataclass(frozen=True)
class ShardFiles:
    """The tar files of each split; without files for validation, a part of the training samples is held out.

    Attributes:
        unused: files with names of no split, beside files with names of splits.
    """

    train: list[Path]
    val: list[Path]
    test: list[Path]
    unused: tuple[str, ...] = ()


class Shards(ImageSource):
    """data=shards: training and validation images in tar files, on this host or on a file system that it mounts."""

    Options = ShardsData
    options: ShardsData

    def facts(self, global_batch_size: int) -> Facts:
        train, val, *_ = listings = self.listings(None)
        classes = self.options.num_classes or int(np.concatenate([listing.labels for listing in listings]).max()) + 1
        for listing in listings:
            wrong = np.flatnonzero((listing.labels < 0) | (listing.labels >= classes))
            if len(wrong):
                first = some([f"{shortened(listing.names[n])} with {listing.labels[n]}" for n in wrong])
                raise UserError(
                    f"data.num_classes={classes}",
                    f"{len(wrong)} of {len(listing)} samples have a label outside 0 to {classes - 1}: {first}",
                )
        if not len(val):
            raise UserError(
                f"data.path={self.options.path}",
                "holds no validation samples: no class has two, of which one could be held out",
                "data.val_path='DIR/val-*.tar'",
            )
        names = [str(label) for label in range(classes)]
        refuse_one_label(f"data.path={self.options.path}", train)
        refuse_untrained(f"data.path={self.options.path}", listings, names)
        source = f"{' + '.join(str(len(listing.files)) for listing in listings)} shards"
        facts = self.facts_of(source, "shards", listings, classes, self._splits_in_words())
        odd = attention(listings, names, list(self._odd()), unused_labels(train, val, classes))
        return self.with_cache(replace(facts, attention=odd), listings)

    def prepare(self, facts: Facts, progress: OnProgress) -> Facts:
        parts = self._parts()
        for files in (parts.train, parts.val, parts.test):
            if files:
                prepare_once(
                    cache_folder(INDEX, files), partial(_write_index, files=files, limits=self._label_limits())
                )
        return super().prepare(facts, progress)

    def listings(self, facts: Facts | None) -> tuple[Listing, ...]:
        parts, options = self._parts(), self.options
        train = self._listing("path", parts.train)
        test = (self._listing("test_path", parts.test),) if parts.test else ()
        if parts.val:
            return train, self._listing("val_path", parts.val), *test
        return *train.split(options.val_fraction, options.split_seed), *test

    def _splits_in_words(self) -> str:
        """Where validation and test samples come from, for the plan."""
        parts, options, said = self._parts(), self.options, []
        named = [split for split in ("val", "test") if getattr(parts, split) and not getattr(options, f"{split}_path")]
        if named:
            said.append(f"{' and '.join(named)} by the names in data.path")
        said += [f"{split} by data.{split}_path" for split in ("val", "test") if getattr(options, f"{split}_path")]
        if not parts.val:
            said.append(held_out(options, "each class"))
        return "; ".join(said)

    def _odd(self) -> Iterator[str]:
        """Sentences about files of no split, and about files of two splits."""
        parts, options = self._parts(), self.options
        if parts.unused:
            yield f"{some(parts.unused)}: no shards of a split, and not used"
        if options.val_path == options.path:  # eval RUN DATA
            return
        for one, other, name in (
            (parts.train, parts.val, "validation"),
            (parts.train, parts.test, "test"),
            (parts.val, parts.test, "test"),
        ):
            there = {os.path.realpath(path) for path in one}
            if both := [one_line(str(path)) for path in other if os.path.realpath(path) in there]:
                yield (
                    f"{len(both)} of {len(other)} {name} shards are "
                    f"{'training' if one is parts.train else 'validation'} shards as well: {some(both)}"
                )

    def _parts(self) -> ShardFiles:
        """The files of each split, by their keys, or by the names in ``data.path`` where these tell training from
        others.

        Raises:
            UserError: some names mean a split, and none beside them means training.
        """
        files, options = self._found("path")[0], self.options
        kinds = _kinds(files)
        found = split_folders(set(kinds.values()), f"data.path={options.path}")
        train, val, test = (
            [path for path in files if kinds[path] == name] for name in (found.train, found.val, found.test)
        )
        unused = tuple(one_line(str(path)) for path in files if kinds[path] in found.others)
        if not train or not (val or test):
            if options.val_path != options.path:  # eval RUN DATA takes all of DATA
                self._refuse_mixed(kinds)
            train, val, test, unused = files, [], [], ()
        return ShardFiles(
            train,
            self._found("val_path")[0] if options.val_path else val,
            self._found("test_path")[0] if options.test_path else test,
            unused,
        )

    def _refuse_mixed(self, kinds: dict[Path, str]) -> None:
        """Refuse files of validation or test beside others, of which no name says that they are for training."""
        parts: dict[str, list[Path]] = {}
        for path, kind in kinds.items():
            parts.setdefault(held_out_split(kind) or "train", []).append(path)
        if len(set(kinds.values())) == 1 or not {"val", "test"} & set(parts):
            return
        keys = {"train": "data.path", "val": "data.val_path", "test": "data.test_path"}
        typed = {keys[split]: _patterns(paths) for split, paths in parts.items()}
        named = [some([one_line(path.name) for path in paths]) for paths in parts.values()]
        raise UserError(
            f"data.path={self.options.path}",
            f"the names do not tell which files are trained on: {' beside '.join(named)}",
            " ".join(f"{key}={value}" for key, value in sorted({"data.path": "'DIR/train-*.tar'", **typed}.items())),
        )

    def _listing(self, key: str, files: list[Path]) -> Listing:
        folder = cache_folder(INDEX, files)
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
        chosen = getattr(self.options, key)
        patterns = [chosen] if isinstance(chosen, str) else list(chosen)
        for pattern in patterns:
            if (meant := _how_many(pattern)) > MOST_SHARDS:
                raise UserError(
                    f"data.{key}={chosen}", f"means {meant:,} files, more than {MOST_SHARDS:,}", "data.path='DIR/*.tar'"
                )
        found = found_by([name for pattern in patterns for name in braces(pattern)], f"data.{key}")
        if not found:
            raise UserError(
                f"data.{key}={chosen}",
                "there are no such files",
                f"data.{key}='DIR/train-{{000..009}}.tar' or 'DIR/*.tar'",
            )
        return distinct(found)


def _kinds(files: list[Path]) -> dict[Path, str]:
    """File -> its name without numbers and suffix; or the folder and this, where the folders tell the splits."""
    names = {path: re.sub(r"[-_.]*\d+", "", path.name.partition(".")[0]) or "-" for path in files}
    if any(held_out_split(name) for name in names.values()):
        return names
    root = os.path.commonpath([path.parent for path in files])
    return {
        path: os.path.normpath(os.path.join(os.path.relpath(path.parent, root), name)) for path, name in names.items()
    }


def _patterns(files: list[Path]) -> str:
    """A pattern for these files and those with other numbers, as a value to type."""
    found = sorted({str(path.with_name(re.sub(r"\d+", "*", path.name))) for path in files})
    return f"'{found[0]}'" if len(found) == 1 else f"'[{','.join(found)}]'"


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
    index = index_of(files, limits)
    (folder / "index.json").write_text(json.dumps(asdict(index)))
    return {"samples": len(index.names)}
