"""mode=predict for rows of text: one worker's share of the files, and the table of predictions."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.config import redact
from trainer.data.criteo.blocks import Block, pieces
from trainer.data.placement import Placement
from trainer.data.rows import RowReader
from trainer.data.source import Facts
from trainer.host.files import replacing
from trainer.run_folder.csv_files import cell
from trainer.run_folder.report import Report
from trainer.strategies.contract import Strategy
from trainer.strategies.seat import Seat
from trainer.tasks.contract import Task

LINES = 4096
"""Most lines of one worker in a round, so that memory does not grow with the files."""
MOST_BLANK = 64 << 10
"""Bytes of blank lines at the end of a file that are passed over."""
MOST_NAMED = 20
Result = tuple["Chunk", np.ndarray]


@dataclass(frozen=True)
class Chunk:
    """Some whole lines of a file to predict: the number of the first (from 1), and whether they have labels."""

    file: int
    line: int
    lines: int
    labelled: bool
    text: bytes


def chunks(files: Sequence[Path], reader: RowReader) -> Iterator[Chunk]:
    """Yield all lines of the files to predict, in order, as chunks.

    Raises:
        UserError: a file is broken.
    """
    for number, path in enumerate(files):
        line, labelled, blank = 1, None, b""
        for _, more in pieces(Block(path, number, 0, None), "predict.input"):
            text, blank = _without_last_blanks(blank + more)
            if not text:
                continue
            if labelled is None:
                labelled = reader.labelled(text)
            ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n")) + 1
            for start in range(0, len(ends), LINES):
                part = ends[start : start + LINES]
                begin = int(ends[start - 1]) if start else 0
                yield Chunk(number, line, len(part), bool(labelled), text[begin : part[-1]])
                line += len(part)


def _without_last_blanks(text: bytes) -> tuple[bytes, bytes]:
    """Split blank lines from the end of whole lines: at the end of a file they are no rows. Beyond ``MOST_BLANK`` bytes
    they count as lines, so that memory stays small.
    """
    end = text.find(b"\n", len(text.rstrip(b"\r\n"))) + 1 if text.strip(b"\r\n") else 0
    return (text[:end], text[end:]) if len(text) - end <= MOST_BLANK else (text, b"")


@dataclass
class RowPrediction:
    """Predicts rows of text on one worker: model, task, facts, reader, placement, batch size.

    Attributes:
        batch_size: rows of a forward pass.
        context: of a forward pass (autocast).
    """

    model: nn.Module
    task: Task
    facts: Facts
    reader: RowReader
    place: Placement
    context: Callable[[], AbstractContextManager[Any]]
    batch_size: int
    seat: Seat
    strategy: Strategy
    report: Report

    def results(self, files: Sequence[Path]) -> Iterator[Result]:
        """Yield the results (N, 1 + W) of each chunk in order: for each line 1 if it could be read, and the task's
        numbers. Every worker reads all lines, which is quick, and parses and predicts every ``size``-th chunk.
        """
        size, step, all_chunks = self.seat.size, 0, chunks(files, self.reader)
        while together := list(islice(all_chunks, size)):
            found = torch.zeros((size, LINES, 1 + self.task.width(self.facts)), dtype=torch.float64)
            if self.seat.rank < len(together):
                chunk = together[self.seat.rank]
                found[self.seat.rank, : chunk.lines] = self.predict(chunk)
            found = self.strategy.all_reduce_sum(found.flatten()).cpu().reshape(found.shape)
            step += -(-together[0].lines // self.batch_size)
            self.report.progress(0, step)
            for chunk, values in zip(together, found.numpy(), strict=False):
                yield chunk, values[: chunk.lines]

    @torch.inference_mode()
    def predict(self, chunk: Chunk) -> torch.Tensor:
        """Compute the results (N, 1 + W) float64 of a chunk's lines."""
        rows = self.reader.read(chunk.text, chunk.labelled)
        values = torch.zeros((chunk.lines, 1 + self.task.width(self.facts)), dtype=torch.float64)
        good = torch.from_numpy(np.flatnonzero(rows.good))
        for start in range(0, len(good), self.batch_size):
            part = slice(start, start + self.batch_size)
            inputs: Any = {name: torch.from_numpy(array[part]) for name, array in rows.inputs.items()}
            placed, _ = self.place(inputs, good[part])
            with self.context():
                outputs = self.model(placed)
            values[good[part], 0] = 1.0
            values[good[part], 1:] = self.task.rows(outputs).cpu()
        return values


def write(
    output: Path, results: Iterable[Result], names: Sequence[str], reader: RowReader, task: Task, facts: Facts
) -> tuple[int, int, list[str]]:
    """Write the table of predictions for rows; returns the number of rows and of unreadable ones, and some of these."""
    rows, wrong = 0, 0
    named: list[str] = []
    with replacing(output) as part, part.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)  # millions of rows: what is not ours in them, the names, is cleaned once
        shown = [cell(redact.without(name)) for name in names]
        header = task.header((), facts)
        table.writerow(["file", "row", *header, "error"])
        for chunk, values in results:
            reasons = {} if values[:, 0].all() else dict(reader.read(chunk.text, chunk.labelled).bad)
            for number, (good, *row) in enumerate(values.tolist()):
                line, why = chunk.line + number, "" if good else cell(redact.text(reasons[number]))
                cells = task.cells(row, ()) if good else [""] * len(header)
                table.writerow([shown[chunk.file], line, *cells, why])
                if why and len(named) < MOST_NAMED:
                    named.append(f"{names[chunk.file]}:{line}: {why}")
                wrong += bool(why)
            rows += chunk.lines
    return rows, wrong, named


def outcome(report: Report, rows: int, wrong: int, named: list[str]) -> dict[str, Any]:
    """Print the rows that could not be read, report the counts as metrics, and return the outcome."""
    if wrong:
        more = "; ..." if wrong > len(named) else ""
        print(f"{wrong} of {rows} rows could not be read: {'; '.join(named)}{more}", flush=True)
    report.counted({"predict/rows": float(rows), "predict/unreadable": float(wrong)})
    return {**report.outcome(), "samples": rows, "unreadable": named}
