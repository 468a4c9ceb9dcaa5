"""data=criteo: click logs in Criteo's text format, read from a cache of arrays or anew in every epoch."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.schema import CriteoData, CriteoRows
from trainer.data.prepared import cache_root
from trainer.data.source import DataSource, Facts, Progress, Splits, digest_of, named_sizes
from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.data.criteo.cache import Conversion

SHAPE = {"dense": (13,), "sparse": (26,)}
SAMPLE = 1 << 18


class RowFiles(DataSource):
    """Base class of data sources of files of rows ``label <tab> 13 integers <tab> 26 tokens``; see docs/ctr.md."""

    Options = CriteoRows
    options: CriteoRows

    def _facts(self, source: str, train: int, val: int, ceiling: float | None = None) -> Facts:
        return Facts(
            source, "rows", train, val, dict(SHAPE), 2, task="binary", integers=("sparse",),
            ceiling={} if ceiling is None else {"auc": ceiling}, streams=not self.options.cache,
        )  # fmt: skip

    def fingerprint(self, facts: Facts) -> str:
        """A fingerprint of the files' names and sizes, of the rows that are held out, and of ``hash_size``."""
        try:
            files, parts = self._sources()
        except UserError:  # mode=predict looks at other files, and these need not be there
            return super().fingerprint(facts)
        told = {name: (named_sizes(paths), asdict(parts[name])) for name, paths in files.items()}
        return digest_of(self.options.hash_size, told)

    def row_reader(self) -> dict[str, Any]:
        return {"_target_": "trainer.data.criteo.rows.CriteoRowReader", "hash_size": self.options.hash_size}

    def prepare(self, facts: Facts, progress: Progress) -> Facts:
        """Before the workers start: convert the text into arrays; with data.cache=false, only the validation rows.

        Raises:
            UserError: more lines are malformed than data.max_bad_fraction, or a file is broken.
        """
        known = self._conversion().convert(
            self.options.max_bad_fraction, lambda done, total: progress("reading Criteo rows, MiB", done, total)
        )
        if known["bad"]:
            print(f"{known['bad']} malformed lines are left out, the first: {'; '.join(known['named'])}", flush=True)
        rows = known["rows"]
        for name, count in rows.items():
            if not count:
                raise UserError("data.path", f"has no row for {name}")
        found = self._facts(facts.source, rows.get("train", facts.train_samples), rows["val"])
        return replace(found, attention=facts.attention)

    def open(self, facts: Facts) -> Splits:
        from trainer.data.criteo.cache import CriteoArrays
        from trainer.data.criteo.row_stream import CriteoBlocks

        conversion = self._conversion()
        folder, size = conversion.folder(), self.options.hash_size
        val = CriteoArrays(folder / "val", facts.val_samples, size)
        if self.options.cache:
            return Splits(CriteoArrays(folder / "train", facts.train_samples, size), val)
        files, parts = self._sources()
        options = self.options
        train: Any = CriteoBlocks(
            files["train"], size, parts["train"], options.block_mib << 20, options.chunk_rows,
            options.max_bad_fraction,
        )  # fmt: skip
        return Splits(train, val)

    @abstractmethod
    def _sources(self) -> tuple[dict[str, list[Path]], dict[str, Any]]:
        """Files and parts of them for training and for validation."""

    def _conversion(self) -> Conversion:
        """What is kept as arrays: both parts, or without cache the validation rows."""
        from trainer.data.criteo.cache import Conversion

        files, parts = self._sources()
        wanted = ("train", "val") if self.options.cache else ("val",)
        files, parts = {n: files[n] for n in wanted}, {n: parts[n] for n in wanted}
        return Conversion(files, parts, self.options.hash_size, self._place() / "criteo")

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
        conversion = self._conversion()
        known = conversion.done()
        rows = known["rows"] if known else {}
        train, val = rows.get("train"), rows.get("val")
        if train is None or val is None:
            guessed = self._estimate(conversion)
            train, val = train or guessed["train"], val or guessed["val"]
        from trainer.data.criteo.files import other_names

        facts = self._facts(f"Criteo rows in {self.options.path}", train, val)
        return replace(facts, attention=other_names(self.options.path, self.options.val_path))

    def _sources(self) -> tuple[dict[str, list[Path]], dict[str, Any]]:
        """Files and parts of them for training and for validation."""
        from trainer.data.criteo.blocks import SplitRows
        from trainer.data.criteo.files import find

        files = find(self.options.path, "data.path")
        if self.options.val_path is not None:
            return {"train": files, "val": find(self.options.val_path, "data.val_path")}, {
                "train": SplitRows(),
                "val": SplitRows(),
            }
        fraction = self.options.val_fraction
        return {"train": files, "val": files}, {"train": SplitRows(fraction), "val": SplitRows(fraction, held_out=True)}

    def _estimate(self, conversion: Conversion) -> dict[str, int]:
        """Rows of each part, from the sizes of the files and the length of their first lines."""
        from trainer.data.criteo.blocks import RowCounts

        files, parts = self._sources()
        tally, rows = RowCounts(), {}
        counts = {path: _rows(path, tally) for paths in files.values() for path in dict.fromkeys(paths)}
        for name, paths in files.items():
            share = parts[name].fraction if parts[name].held_out else 1.0 - parts[name].fraction
            rows[name] = max(1, round(share * sum(counts[path] for path in paths)))
        if tally.bad > tally.rows and tally.bad > self.options.max_bad_fraction * (tally.bad + tally.rows):
            raise UserError(f"data.path={self.options.path}", f"is not in Criteo's format, a label, 13 integers and 26 tokens separated by tabs: {'; '.join(tally.named[:2])}")  # fmt: skip
        return rows


def _rows(path: Path, tally: Any) -> float:
    """About how many rows a file has; its first ones are parsed and counted."""
    from trainer.data.criteo.blocks import Block, pieces
    from trainer.data.criteo.parse import parse

    for _, text in pieces(Block(path, 0, 0, None)):
        parsed = parse(text[: text.rfind(b"\n", 0, SAMPLE) + 1] or text, None)
        tally.add(parsed, str(path), 0)
        size = path.stat().st_size
        if path.suffix != ".gz":
            return size / max(1, len(text)) * text.count(b"\n")
        import zlib

        packed = len(zlib.compress(text, 6))
        return (1.0 if len(text) < 1 << 19 else max(1.0, size / packed)) * text.count(b"\n")
    return 0.0
