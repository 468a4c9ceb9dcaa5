"""Criteo rows read anew in every epoch, block by block, for workers that lease blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from trainer.data.criteo.blocks import MOST_NAMED, RowCounts, SplitRows, blocks_of, rows_of
from trainer.data.criteo.parse import REFERENCE, Spans

ClickRows = tuple[dict[str, torch.Tensor], torch.Tensor]


class CriteoBlocks:
    """A data set of click rows read by block: ``dense`` (N, 13) float32, ``sparse`` (N, 26) int64, labels (N,) int64.

    Args:
        files: plain text or .gz.
        hash_size: ids are below it; None: below 2^63.
        part: of the rows.
        block_bytes: piece of a plain file that makes a block; a .gz is one.
        max_bad_fraction: greatest share of malformed lines of a block with at least 100 of them.
        spans: of the integers.
    """

    def __init__(
        self,
        files: list[Path],
        hash_size: int | None,
        part: SplitRows,
        block_bytes: int,
        max_bad_fraction: float,
        spans: Spans = REFERENCE,
    ) -> None:
        self.hash_size, self.spans = hash_size, spans
        self.part = part
        self.max_bad_fraction = max_bad_fraction
        self.places = blocks_of(files, block_bytes)
        self.tally = RowCounts()

    def blocks(self) -> int:
        """The number of blocks in the click-log files."""
        return len(self.places)

    def read_chunks(self, block: int) -> Iterator[ClickRows]:
        """Read the rows of a block in chunks: those of about 1 MiB of text each, which bounds the memory.

        Raises:
            UserError: too many lines are malformed, or the file is broken.
        """
        tally = RowCounts()
        place = self.places[block]
        for parsed, start in rows_of(place, self.hash_size, tally, self.spans):
            chosen = self.part.chosen(parsed.offsets + start, place.number)
            labels, dense, sparse = (
                torch.from_numpy(array[chosen]) for array in (parsed.labels, parsed.dense, parsed.sparse)
            )
            yield {"dense": dense, "sparse": sparse}, labels.long()
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
