"""data=criteo: click logs in Criteo's text format, read from a cache of arrays or anew in every epoch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.schema import CriteoData, CriteoRows
from trainer.data.prepared import cache_root, known, made_once
from trainer.data.source import DataSource, Facts, Progress, Splits, digest_of, named_sizes
from trainer.errors import UserError
from trainer.wording import some

if TYPE_CHECKING:
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
            files, parts = self._sources()
        except UserError:  # mode=predict looks at other files, and these need not be there
            return super().fingerprint(facts)
        content = {name: (named_sizes(paths), asdict(parts[name])) for name, paths in files.items() if name != "test"}
        return digest_of(self.options.hash_size, content)

    def row_reader(self) -> dict[str, Any]:
        return {"_target_": "trainer.data.criteo.rows.CriteoRowReader", "hash_size": self.options.hash_size}

    def prepare(self, facts: Facts, progress: Progress) -> Facts:
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
        files, parts = self._sources()
        options = self.options
        train: Any = CriteoBlocks(
            files["train"],
            size,
            parts["train"],
            options.block_mib << 20,
            options.chunk_rows,
            options.max_bad_fraction,
            conversion.spans,
        )
        return Splits(train, val, test=test)

    @abstractmethod
    def _sources(self) -> tuple[dict[str, list[Path]], dict[str, Any]]:
        """Files and parts of them for training and for validation."""

    def _spans(self, facts: Facts) -> Spans:
        """The spans of the 13 integers, where they are known."""
        from trainer.data.criteo.parse import REFERENCE

        return REFERENCE

    def _conversion(self, facts: Facts) -> Conversion:
        """What is kept as arrays: both parts, or without cache the validation rows."""
        from trainer.data.criteo.cache import Conversion

        files, parts = self._sources()
        wanted = [name for name in files if self.options.cache or name != "train"]
        files, parts = {n: files[n] for n in wanted}, {n: parts[n] for n in wanted}
        return Conversion(files, parts, self.options.hash_size, self._place() / "criteo", self._spans(facts))

    def _place(self) -> Path:
        """Where arrays, and rows that are drawn, are kept."""
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
        from trainer.data.criteo.files import other_names

        options = self.options
        spans.check(options.dense_min, options.dense_max)
        files, parts = self._sources()
        facts = replace(self._facts(f"Criteo rows in {options.path}", 0, 0), measured=self._known_spans())
        note = self._conversion(facts).done() if self._are_known(facts) else None
        rows = note.rows if note else {}
        paths = list(dict.fromkeys(path for several in files.values() for path in several))
        first = first_rows.read(paths if len(rows) < len(files) else paths[:MOST_LOOKED_AT])
        if len(rows) < len(files):
            first_rows.check(first, options.path, options.max_bad_fraction)
            rows = {**first_rows.estimate(first, files, parts), **rows}
        far = spans.far_from(first.integers, self._spans(facts)) if self._are_known(facts) else ""
        odd = filter(None, (other_names(options.path, options.val_path), far))
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
        guessed = tuple(name for name in files if note is None or name not in note.rows)
        return replace(
            facts,
            train_samples=train,
            val_samples=val,
            test_samples=test,
            attention="; ".join(odd),
            estimated=guessed,
            splits=said,
        )

    def prepare(self, facts: Facts, progress: Progress) -> Facts:
        """Measure the spans of the integers where they are ``auto``, then convert the text.

        Facts that have spans keep them: those of the run that left the weights, or that a resumed run began with.
        """
        if not self._are_known(facts):
            from trainer.data.criteo import spans

            files, parts = self._sources()
            known = made_once(
                self._spans_folder(),
                lambda folder: _measure(
                    folder,
                    lambda: spans.measured(files["train"], parts["train"], self.options.max_bad_fraction, progress),
                ),
            )
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
        """What was measured of these training rows before; empty where ``prepare`` may refuse it beside typed spans."""
        from trainer.data.criteo.spans import KEYS

        automatic = self._automatic()
        found = known(self._spans_folder()) if len(automatic) == len(KEYS) else None
        return {key: found[key] for key in automatic} if found else {}

    def _spans_folder(self) -> Path:
        """The folder of the cache for the spans of the training rows."""
        from trainer.data.criteo.cache import Conversion

        files, parts = self._sources()
        train = Conversion({"train": files["train"]}, {"train": parts["train"]}, None, self._place() / "criteo-spans")
        return train.folder()

    def _sources(self) -> tuple[dict[str, list[Path]], dict[str, Any]]:
        """Files and parts of them for training, validation, and the test where there is one."""
        from trainer.data.criteo.blocks import SplitRows
        from trainer.data.criteo.files import find

        options, files = self.options, find(self.options.path, "data.path")
        held, share = files, options.val_fraction
        train, val = SplitRows(share), SplitRows(share, held_out=True)
        if options.val_path is not None:
            held, train, val = find(options.val_path, "data.val_path"), SplitRows(), SplitRows()
        if options.test_path is None:
            return {"train": files, "val": held}, {"train": train, "val": val}
        test = find(options.test_path, "data.test_path")
        return {"train": files, "val": held, "test": test}, {"train": train, "val": val, "test": SplitRows()}


def _measure(folder: Path, measure: Callable[[], dict[str, list[float]]]) -> dict[str, Any]:
    """Make the folder of a prepared note, which is all that is in it."""
    folder.mkdir(parents=True)
    return measure()
