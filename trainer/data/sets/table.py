"""data=table: images by the paths in a column of a CSV or Parquet file, and their labels by another column."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from trainer.config.schema import TableData
from trainer.data.images.listing import Listing, TableRows
from trainer.data.images.source import ImageSource
from trainer.data.images.split_checks import attention, refuse_one_label, refuse_untrained, unused_labels
from trainer.data.images.split_folders import split_named
from trainer.data.limits import Limits
from trainer.data.remote_files import local_images, local_path, public
from trainer.data.source import Facts, held_out
from trainer.data.tables.labels import CLASS, TASKS, LabelKind, kind_of_labels
from trainer.data.tables.read import read_columns
from trainer.errors import UserError
from trainer.visible import one_line
from trainer.wording import counted, some

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Rows:
    """The rows of a table.

    Attributes:
        key: the config key that names the table; path: of the table on this machine.
        images: path of each row's image; None where it has none.
        labels: for each row its values in the label columns.
        splits: for each row ``train``, ``val`` or ``test``; empty: the table has no column of splits.
    """

    key: str
    path: str
    images: list[str | None]
    labels: list[tuple[Any, ...]]
    splits: list[str]


class Table(ImageSource):
    """data=table: training images in a table, validation images in another, in rows of their own, or held out."""

    Options = TableData
    options: TableData

    def facts(self, global_batch_size: int) -> Facts:
        train, val, *_ = listings = self.listings(None)
        kind, what = self._kind, self._what()
        names, classes = list(kind.names), len(kind.names)
        if kind.kind == CLASS:
            classes = classes or int(np.concatenate([listing.labels for listing in listings]).max()) + 1
            names = names or [str(label) for label in range(self.options.num_classes or classes)]
            self._refuse_labels_above(listings, len(names))
            if self.options.val_path != self.options.path:  # eval RUN TABLE measures whatever the table has
                refuse_one_label(what, train)
            refuse_untrained(what, listings, names)
        source = f"images in {one_line(public(str(self.options.path)))}"
        facts = self.facts_of(source, "table", listings, len(names), self._splits_in_words())
        unused = unused_labels(train, val, len(names)) if kind.kind == CLASS and not kind.names else []
        odd = attention(listings, names if kind.kind == CLASS else [], labels=unused)
        return self.with_cache(replace(facts, task=TASKS[kind.kind], attention=odd), listings)

    def listings(self, facts: Facts | None) -> tuple[Listing, ...]:
        return self._listings

    def class_names(self, facts: Facts) -> list[str]:
        """The names of the classes, of the members of sets, or of the columns of numbers."""
        return [one_line(name) for name in self._kind.names]

    def pictures_of(self, table: str) -> tuple[str, list[str]]:
        key = "predict.input"
        path = local_path(table, key)
        names = read_columns(path, [self.options.image], key)[self.options.image]
        address = self.options.root or table.partition("?")[0].rpartition("/")[0] or "."
        root, copies = local_images([name or "" for name in names], address)
        found = []
        for row, name in enumerate(names, 1):
            try:
                found.append(os.path.relpath(_image(name, root, copies), root))
            except (ValueError, OSError) as error:
                raise UserError(f"{key}={public(table)}", f"row {row}: {error}", f"{key}=FILE") from error
        return root, found

    @cached_property
    def _tables(self) -> list[Rows]:
        """The tables of ``path``, ``val_path`` and ``test_path``, as far as there are any."""
        options = self.options
        if not options.image or not options.label:
            raise UserError("data.image=null data.label=null", "name columns", "data.image=image data.label=label")
        keys = [key for key in ("path", "val_path", "test_path") if getattr(options, key)]
        if options.split and len(keys) > 1:
            why = f"data.{keys[1]} names the rows of that split"
            raise UserError(f"data.split={options.split}", why, f"data.split=null (or data.{keys[1]}=null)")
        return [self._read(key) for key in keys]

    @property
    def _columns(self) -> list[str]:
        """The names of the label columns."""
        label = self.options.label
        return [label] if isinstance(label, str) else list(label)

    def _read(self, key: str) -> Rows:
        options, name = self.options, f"data.{key}"
        path = local_path(str(getattr(options, key)), name)
        split = [options.split] if options.split else []
        found = read_columns(path, [options.image, *self._columns, *split], name)
        labels = list(zip(*(found[column] for column in self._columns), strict=True))
        splits = (
            [_split_of(value, number, options.split) for number, value in enumerate(found[options.split], 1)]
            if (options.split)
            else []
        )
        return Rows(name, path, found[options.image], labels, splits)

    @cached_property
    def _kind(self) -> LabelKind:
        """The kind of the labels of all tables."""
        options, columns = self.options, self._columns
        values = (row[0] for table in self._tables for row in table.labels if row[0] not in (None, ""))
        return kind_of_labels(values, options.label_kind, options.label_separator, columns)

    @cached_property
    def _listings(self) -> tuple[Listing, ...]:
        tables, options = self._tables, self.options
        parts: list[Listing] = []
        if options.split:
            (table,) = tables
            of_split = [np.array([split == name for split in table.splits]) for name in SPLITS]
            if not of_split[0].any():
                raise UserError(f"data.split={options.split}", "no row is of the split train", "data.split=null")
            parts = [self._listing(table, chosen) for chosen in of_split if chosen.any()]
            has_val, has_test = bool(of_split[1].any()), bool(of_split[2].any())
        else:
            parts = [self._listing(table, np.ones(len(table.images), bool)) for table in tables]
            has_val, has_test = bool(options.val_path), bool(options.test_path)
        train, *others = parts
        if has_val:
            return tuple(parts)
        train, val = train.split(options.val_fraction, options.split_seed)
        if not len(val):
            why = "holds no validation samples: no class has two, of which one could be held out"
            raise UserError(self._what(), why, "data.val_path=FILE")
        return (train, val, *others) if has_test else (train, val)

    def _listing(self, table: Rows, chosen: np.ndarray) -> Listing:
        """The images of some rows of a table, in the order of the table.

        Raises:
            UserError: rows have no image or no label, and ``data.on_bad`` is ``error``.
        """
        address = self._root(table)
        root, copies = local_images([table.images[n] or "" for n in np.flatnonzero(chosen).tolist()], address)
        usable, bad = [], []
        for number in np.flatnonzero(chosen).tolist():
            try:
                usable.append((number, _image(table.images[number], root, copies), self._label(table.labels[number])))
            except (ValueError, OSError) as error:
                bad.append(f"row {number + 1}: {one_line(str(error))}")
        if bad and (self.options.on_bad == "error" or not usable):
            said = f"{len(bad)} of {counted(int(chosen.sum()), 'row')} cannot be used: {some(bad)}"
            said += f" (paths lead from {one_line(public(address))})" if "no file" in said else ""
            raise UserError(f"{table.key}={one_line(table.path)}", said, "data.on_bad=skip, or repair these rows")
        rows, paths, labels = (list(column) for column in zip(*usable, strict=True))
        number_of = {path: number for number, path in enumerate(dict.fromkeys(paths))}
        listing = Listing.of_files(paths, self._kind.array(labels), Limits.of(self.options))
        return replace(
            listing,
            files=list(number_of),
            file=np.array([number_of[path] for path in paths]),
            passed_over=tuple(bad),
            linked=True,
            root=root,
            said=tuple(_repeated(rows, paths, labels)),
            table=TableRows(table.path, table.key, np.array(rows)),
        )

    def _label(self, values: Sequence[Any]) -> Any:
        if any(value is None or (value == "" and not self._kind.separator) for value in values):
            raise ValueError("it has no label")
        return self._kind.label(values)

    def _root(self, table: Rows) -> str:
        """The folder from which the paths of images lead."""
        if self.options.root is None:
            address = str(getattr(self.options, table.key.removeprefix("data.")))
            if "://" in address:
                return address.partition("?")[0].rpartition("/")[0]
            return os.path.dirname(table.path) or "."
        return str(self.options.root)

    def _refuse_labels_above(self, listings: Sequence[Listing], classes: int) -> None:
        for listing in listings:
            wrong = np.flatnonzero(listing.labels >= classes)
            if len(wrong):
                first = some([f"{listing.short_name(n)} with {listing.labels[n]}" for n in wrong.tolist()])
                why = f"{len(wrong)} of {len(listing)} rows have a label above {classes - 1}: {first}"
                raise UserError(f"data.num_classes={classes}", why)

    def _what(self) -> str:
        return f"data.path={one_line(public(str(self.options.path)))}"

    def _splits_in_words(self) -> str:
        """Where validation and test images come from, for the plan."""
        options = self.options
        if options.split:
            return f"by the column {one_line(options.split)} (data.split)"
        named = [f"{key.partition('_')[0]} in data.{key}" for key in ("val_path", "test_path") if getattr(options, key)]
        if not options.val_path:
            named.insert(0, held_out(options, "each class" if self._kind.kind == CLASS else "the rows"))
        return "; ".join(named)


def _image(value: Any, root: str, copies: Mapping[str, str]) -> str:
    """The path of a row's image; a path with the separators of Windows is read with those of this machine.

    Args:
        copies: address of an image -> its copy.

    Raises:
        ValueError: the row has no path; OSError: there is no such file.
    """
    if not isinstance(value, str) or not value.strip():
        raise ValueError("it names no image")
    path = copies.get(value) or os.path.normpath(os.path.join(root, value))
    if os.path.isfile(path):
        return path
    if "\\" in value and os.path.isfile(other := os.path.normpath(os.path.join(root, value.replace("\\", "/")))):
        return other
    raise FileNotFoundError(f"there is no file {value}")


def _split_of(value: Any, row: int, column: str) -> str:
    if found := split_named(str(value)):
        return found
    why = f"row {row} is of the split {one_line(repr(value))}, which is none of train, val and test"
    raise UserError(f"data.split={column}", why, "a column of train, val and test, or data.val_fraction=0.2")


def _repeated(rows: Sequence[int], paths: Sequence[str], labels: Sequence[Any]) -> Iterator[str]:
    """A sentence about images that several rows name, and one about those with different labels."""
    first: dict[str, int] = {}
    again: list[str] = []
    differ: list[str] = []
    for index, path in enumerate(paths):
        earlier = first.setdefault(path, index)
        if earlier != index:
            both = f"rows {rows[earlier] + 1} and {rows[index] + 1}"
            (again if labels[earlier] == labels[index] else differ).append(both)
    if again:
        yield f"{counted(len(again), 'row')} repeat an image of an earlier row: {some(again)}"
    if differ:
        yield f"{counted(len(differ), 'row')} repeat an image of an earlier row with another label: {some(differ)}"
