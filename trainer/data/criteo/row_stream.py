"""Criteo rows read anew in every epoch, block by block, for workers that lease blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from trainer.data.criteo.blocks import MOST_NAMED, RowCounts, SplitRows, blocks_of, rows_of
from trainer.data.criteo.parse import REFERENCE, Spans

Rows = tuple[dict[str, torch.Tensor], torch.Tensor]
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


class CriteoBlocks:
    """A data set of click rows read by block: ``dense`` (N, 13) float32, ``sparse`` (N, 26) int64, labels (N,) int64.

    Args:
        files: plain text or .gz.
        hash_size: ids are below it; None: below 2^63.
        part: of the rows.
        block_bytes: piece of a plain file that makes a block; a .gz is one.
        chunk_rows: rows at a time that ``read_chunks`` gives, which bounds its memory.
        max_bad_fraction: greatest share of malformed lines of a block with at least 100 of them.
        spans: of the integers.
    """

    def __init__(
        self,
        files: list[Path],
        hash_size: int | None,
        part: SplitRows,
        block_bytes: int,
        chunk_rows: int,
        max_bad_fraction: float,
        spans: Spans = REFERENCE,
    ) -> None:
        self.hash_size, self.spans = hash_size, spans
        self.part = part
        self.chunk_rows = chunk_rows
        self.max_bad_fraction = max_bad_fraction
        self.places = blocks_of(files, block_bytes)
        self.tally = RowCounts()

    def blocks(self) -> int:
        """The number of blocks in the click-log files."""
        return len(self.places)

    def read(self, block: int) -> Rows:
        """Read all rows of a block as one batch."""
        chunks = list(self.read_chunks(block))
        if not chunks:
            return _tensors((np.zeros(0, np.uint8), np.zeros((0, 13), np.float32), np.zeros((0, 26), np.int64)))
        inputs = {name: torch.cat([chunk[0][name] for chunk in chunks]) for name in chunks[0][0]}
        return inputs, torch.cat([labels for _, labels in chunks])

    def read_chunks(self, block: int) -> Iterator[Rows]:
        """Read the rows of a block in chunks of ``chunk_rows``; the last one may have fewer.

        Raises:
            UserError: too many lines are malformed, or the file is broken.
        """
        tally = RowCounts()
        waiting: list[Arrays] = []
        for arrays in self._arrays(block, tally):
            waiting.append(arrays)
            if sum(len(labels) for labels, _, _ in waiting) < self.chunk_rows:
                continue
            together = _joined(waiting)
            whole = len(together[0]) // self.chunk_rows * self.chunk_rows
            for start in range(0, whole, self.chunk_rows):
                yield _tensors(tuple(a[start : start + self.chunk_rows] for a in together))  # type: ignore[arg-type]
            waiting = [tuple(a[whole:] for a in together)]  # type: ignore[list-item]
        if waiting and len((rest := _joined(waiting))[0]):
            yield _tensors(rest)
        self.tally.rows += tally.rows
        self.tally.bad += tally.bad
        self.tally.named += tally.named[: max(0, MOST_NAMED - len(self.tally.named))]
        if tally.bad > 100 * self.max_bad_fraction:  # in a short block one bad line is a large share
            tally.check(self.max_bad_fraction)

    def left_out(self) -> str:
        """Return a sentence about the malformed lines skipped since the last call, or '' if there were none."""
        tally, self.tally = self.tally, RowCounts()
        lines = tally.rows + tally.bad
        return (
            f"{tally.bad} of {lines} lines are malformed and left out, the first: {'; '.join(tally.named)}"
            if tally.bad
            else ""
        )

    def _arrays(self, block: int, tally: RowCounts) -> Iterator[Arrays]:
        place = self.places[block]
        for parsed, start in rows_of(place, self.hash_size, tally, self.spans):
            chosen = self.part.chosen(parsed.offsets + start, place.number)
            yield parsed.labels[chosen], parsed.dense[chosen], parsed.sparse[chosen]


def _joined(parts: list[Arrays]) -> Arrays:
    labels, dense, sparse = (np.concatenate(column) for column in zip(*parts, strict=True))
    return labels, dense, sparse


def _tensors(arrays: Arrays) -> Rows:
    labels, dense, sparse = (torch.from_numpy(np.ascontiguousarray(a)) for a in arrays)
    return {"dense": dense, "sparse": sparse}, labels.long()
