"""data=criteo: click logs in Criteo's text format, read from a cache of arrays or anew in every epoch."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.schema import CriteoData, CriteoRows
from trainer.data.prepared import cache_root, known, prepare_once
from trainer.data.source import DataSource, Facts, OnProgress, Splits, digest_of, named_sizes
from trainer.errors import UserError
from trainer.wording import some

if TYPE_CHECKING:
    from trainer.data.criteo.blocks import Split
    from trainer.data.criteo.cache import Conversion
    from trainer.data.criteo.parse import Spans

SHAPE = {"dense": (13,), "sparse": (26,)}
MOST_LOOKED_AT = 4
"""Files whose first rows are looked at again when all rows are known."""


class RowFiles(DataSource):
    """Base class of data sources of files of rows ``label <tab> 13 integers <tab> 26 tokens``; see docs/ctr.md."""

    Options = CriteoRows
    options: CriteoRows

    def _facts(self, source: str, train: int, val: int, ceiling: float | None = None) -> Facts:
        return Facts(
            source,
            "rows",
            train,
            val,
            dict(SHAPE),
            2,
            task="binary",
            integers=("sparse",),
            ceiling={} if ceiling is None else {"auc": ceiling},
            streams=not self.options.cache,
        )

    def fingerprint(self, facts: Facts) -> str:
        """A fingerprint of the files' names and sizes, of the rows that are held out, and of ``hash_size``."""
        try:
            splits = self._splits()
        except UserError:  # mode=predict reads other files, and these need not be there
            return super().fingerprint(facts)
        content = {name: (named_sizes(split.files), asdict(split.rows)) for name, split in splits.items()}
        content.pop("test", None)
        return digest_of(self.options.hash_size, content)

    def row_reader(self) -> dict[str, Any]:
        return {"_target_": "trainer.data.criteo.rows.CriteoRowReader", "hash_size": self.options.hash_size}

    def prepare(self, facts: Facts, progress: OnProgress) -> Facts:
        """Before the workers start: convert the text into arrays; with data.cache=false, only the validation rows.

        Raises:
            UserError: more lines are malformed than data.max_bad_fraction, or a file is broken.
        """
        note = self._conversion(facts).convert(
            self.options.max_bad_fraction, lambda done, total: progress("reading Criteo rows, MiB", done, total)
        )
        if note.bad:
            print(f"{note.bad} malformed lines are left out, the first: {'; '.join(note.named)}", flush=True)
        if headers := note.headers:
            print(f"a header is left out, the first line of {some(headers)}", flush=True)
        rows = note.rows
        for name, count in rows.items():
            if not count:
                raise UserError("data.path", f"has no row for {name}")
        found = self._facts(facts.source, rows.get("train", facts.train_samples), rows["val"])
        tested = rows.get("test", 0)
        guessed = tuple(name for name in facts.estimated if name not in rows)
        return replace(
            found,
            attention=facts.attention,
            measured=facts.measured,
            test_samples=tested,
            estimated=guessed,
            splits=facts.splits,
        )

    def open(self, facts: Facts) -> Splits:
        from trainer.data.criteo.cache import CriteoArrays
        from trainer.data.criteo.row_stream import CriteoBlocks

        conversion = self._conversion(facts)
        folder, size = conversion.folder(), self.options.hash_size
        val = CriteoArrays(folder / "val", facts.val_samples, size)
        test: Any = CriteoArrays(folder / "test", facts.test_samples, size) if facts.test_samples else None
        if self.options.cache:
            return Splits(CriteoArrays(folder / "train", facts.train_samples, size), val, test=test)
        rows, options = self._splits()["train"], self.options
        train: Any = CriteoBlocks(
            rows.files, size, rows.rows, options.block_mib << 20, options.max_bad_fraction, conversion.spans
        )
        return Splits(train, val, test=test)

    @abstractmethod
    def _splits(self) -> dict[str, Split]:
        """Files and rows for training, for validation, and for the test where there is one."""

    def _spans(self, facts: Facts) -> Spans:
        """The spans of the 13 integers, where they are known."""
        from trainer.data.criteo.parse import REFERENCE

        return REFERENCE

    def _conversion(self, facts: Facts) -> Conversion:
        """The rows that are kept as arrays: all, or without cache those of validation and test."""
        from trainer.data.criteo.cache import Conversion

        splits = self._splits()
        if not self.options.cache:
            del splits["train"]
        return Conversion(splits, self.options.hash_size, self._place() / "criteo", self._spans(facts))

    def _place(self) -> Path:
        """The folder for arrays and drawn rows."""
        return Path(self.options.cache_dir).expanduser().absolute() if self.options.cache_dir else cache_root()


class Criteo(RowFiles):
    """data=criteo: the user's own click-log files.

    The rows are counted by reading them. Until ``prepare`` has done so, the facts hold an estimate from the beginning
    of each file.
    """

    Options = CriteoData
    options: CriteoData

    def facts(self, global_batch_size: int) -> Facts:
        """Find the files and parse the first rows of each.

        Raises:
            UserError: there are no files, or what they hold is not in Criteo's format.
        """
        from trainer.data.criteo import first_rows, spans
        from trainer.data.criteo.files import duplicate_names

        options = self.options
        spans.check(options.dense_min, options.dense_max)
        splits = self._splits()
        facts = replace(self._facts(f"Criteo rows in {options.path}", 0, 0), measured=self._known_spans())
        note = self._conversion(facts).done() if self._are_known(facts) else None
        rows = note.rows if note else {}
        paths = list(dict.fromkeys(path for split in splits.values() for path in split.files))
        first = first_rows.read(paths if len(rows) < len(splits) else paths[:MOST_LOOKED_AT])
        if len(rows) < len(splits):
            first_rows.check(first, options.path, options.max_bad_fraction)
            rows = {**first_rows.estimate(first, splits), **rows}
        far = spans.outliers(first.integers, self._spans(facts)) if self._are_known(facts) else ""
        odd = filter(None, (duplicate_names(options.path, options.val_path), far))
        train, val, test = rows["train"], rows["val"], rows.get("test", 0)
        said = (
            "validation is data.val_path"
            if options.val_path
            else (
                f"validation is {options.val_fraction:g} of the rows (data.val_fraction), chosen by a hash of "
                f"their places"
            )
        )
        said += ", the test data.test_path" if options.test_path else ""
        guessed = tuple(name for name in splits if note is None or name not in note.rows)
        return replace(
            facts,
            train_samples=train,
            val_samples=val,
            test_samples=test,
            attention="; ".join(odd),
            estimated=guessed,
            splits=said,
        )

    def prepare(self, facts: Facts, progress: OnProgress) -> Facts:
        """Measure the spans of the integers where they are ``auto``, then convert the text.

        Facts that have spans keep them: those of the run that left the weights, or that a resumed run began with.
        """
        if not self._are_known(facts):
            from trainer.data.criteo import spans

            train, most_bad = self._splits()["train"], self.options.max_bad_fraction
            known = prepare_once(self._spans_folder(), lambda _: spans.measured(train, most_bad, progress))
            facts = replace(facts, measured={key: known[key] for key in self._automatic()})
            spans.refuse_empty(self._spans(facts), self.options.dense_min, self.options.dense_max)
        return super().prepare(facts, progress)

    def row_reader(self) -> dict[str, Any]:
        return {**super().row_reader(), "dense_min": self.options.dense_min, "dense_max": self.options.dense_max}

    def _automatic(self) -> list[str]:
        """The keys of spans that are to be measured."""
        from trainer.data.criteo.spans import AUTO, KEYS

        return [key for key in KEYS if getattr(self.options, key) == AUTO]

    def _are_known(self, facts: Facts) -> bool:
        return set(self._automatic()) <= set(facts.measured)

    def _spans(self, facts: Facts) -> Spans:
        from trainer.data.criteo.spans import KEYS, spans_of

        return spans_of(*(facts.measured.get(key, getattr(self.options, key)) for key in KEYS))

    def _known_spans(self) -> dict[str, list[float]]:
        """The spans that were measured of these training rows before; empty if only one of the two keys is ``auto``."""
        from trainer.data.criteo.spans import KEYS

        automatic = self._automatic()
        found = known(self._spans_folder()) if len(automatic) == len(KEYS) else None
        return {key: found[key] for key in automatic} if found else {}

    def _spans_folder(self) -> Path:
        """The folder of the cache for the spans of the training rows."""
        from trainer.data.criteo.cache import Conversion

        train = {"train": self._splits()["train"]}
        return Conversion(train, None, self._place() / "criteo-spans").folder()

    def _splits(self) -> dict[str, Split]:
        from trainer.data.criteo.blocks import Split, SplitRows
        from trainer.data.criteo.files import find

        options, files = self.options, find(self.options.path, "data.path")
        if options.val_path is None:
            share = options.val_fraction
            splits = {"train": Split(files, SplitRows(share)), "val": Split(files, SplitRows(share, held_out=True))}
        else:
            splits = {"train": Split(files), "val": Split(find(options.val_path, "data.val_path"))}
        if options.test_path is not None:
            splits["test"] = Split(find(options.test_path, "data.test_path"))
        return splits
