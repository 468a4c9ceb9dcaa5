"""data=synthetic_criteo: files in Criteo's format drawn by a teacher, read as Criteo's own are."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.schema import SyntheticCriteoData
from trainer.data.criteo.source import RowFiles
from trainer.data.prepared import known, prepare_once
from trainer.data.source import Facts, OnProgress, digest_of

if TYPE_CHECKING:
    from trainer.data.criteo.blocks import Split

VERSION = 1
CHUNK = 20_000
FILES = 4


class SyntheticCriteo(RowFiles):
    """data=synthetic_criteo: rows drawn by a teacher into the user's cache.
    Three text files and a .gz to train, one file to validate."""

    Options = SyntheticCriteoData
    options: SyntheticCriteoData

    def facts(self, global_batch_size: int) -> Facts:
        drawn = known(self._folder())
        return self._facts(
            _name(drawn), self.options.train_rows, self.options.val_rows, drawn["auc"] if drawn else None
        )

    def fingerprint(self, facts: Facts) -> str:
        """A fingerprint of what the rows are drawn from: a .gz of the same rows has another size where zlib is
        another."""
        options = self.options
        return digest_of(
            "synthetic Criteo rows", VERSION, options.draw_seed, options.train_rows, options.val_rows, options.hash_size
        )

    def prepare(self, facts: Facts, progress: OnProgress) -> Facts:
        """Draw the files unless they exist, then prepare them as Criteo's own."""
        drawn = prepare_once(self._folder(), lambda part: self._write(part, progress))
        facts = super().prepare(facts, progress)
        return self._facts(_name(drawn), facts.train_samples, facts.val_samples, drawn["auc"])

    def _write(self, folder: Path, progress: OnProgress) -> dict[str, Any]:
        import numpy as np

        from trainer.data.criteo.teacher import Teacher, area_under_curve, write

        (folder / "train").mkdir()
        seed, total = self.options.draw_seed, self.options.train_rows + self.options.val_rows
        teacher, done, drawn = Teacher(seed), 0, []
        names = [f"train/part-{n}.txt" + (".gz" if n == FILES - 1 else "") for n in range(FILES)]
        shares = [(name, len(range(n, self.options.train_rows, FILES))) for n, name in enumerate(names)]
        for number, (name, rows) in enumerate([*shares, ("val.txt", self.options.val_rows)]):
            generator = np.random.default_rng([seed, 1, number])
            path = folder / name
            with gzip.open(path, "wb", 1) if path.suffix == ".gz" else path.open("wb") as file:
                for start in range(0, rows, CHUNK):
                    chunk = teacher.draw(min(CHUNK, rows - start), generator)
                    write(file, chunk)  # type: ignore[arg-type]
                    done += len(chunk.labels)
                    progress("drawing Criteo rows", done, total)
                    if name == "val.txt":
                        drawn.append((chunk.probability, chunk.labels))
        probability, labels = (np.concatenate(column) for column in zip(*drawn, strict=True))
        return {"auc": area_under_curve(probability, labels), "clicks": float(labels.mean())}

    def _folder(self) -> Path:
        options = self.options
        name = f"v{VERSION}-seed{options.draw_seed}-{options.train_rows}-{options.val_rows}"
        return self._place() / "synthetic-criteo" / name

    def _splits(self) -> dict[str, Split]:
        from trainer.data.criteo.blocks import Split
        from trainer.data.criteo.files import find

        folder = self._folder()
        train, val = find(folder / "train", "data.path"), find(folder / "val.txt", "data.val_path")
        return {"train": Split(train), "val": Split(val)}


def _name(drawn: dict[str, Any] | None) -> str:
    return "synthetic Criteo rows" + (f" (teacher AUC {drawn['auc']:.4f})" if drawn else "")
