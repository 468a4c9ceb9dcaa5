"""mode=predict for images: one worker's share of a folder, and the table. For rows see predict_rows.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from trainer.config.instantiate import call_target
from trainer.data.picture_preprocessing import Preprocessing
from trainer.data.placement import Placement
from trainer.data.rows import RowReader
from trainer.data.source import DataSource, Facts, Splits, reader_of
from trainer.errors import why
from trainer.host.files import replacing
from trainer.planning.class_names import for_predictions
from trainer.planning.launcher import Assignment
from trainer.planning.plan import Plan
from trainer.run_folder import csv_files
from trainer.run_folder.report import Phase, Report
from trainer.strategies.contract import Strategy
from trainer.strategies.seat import Seat
from trainer.tasks.contract import Task, task_of
from trainer.visible import one_line
from trainer.weights import fit
from trainer.wording import counted
from trainer.worker import predict_rows
from trainer.worker.model import Updaters, autocast, build_model, type_of_bytes
from trainer.worker.train import membership

BLOCK = 4096
"""Files between two exchanges of results, so that memory does not grow with the folder."""
MOST_NAMED = 20


class Pictures(Dataset[torch.Tensor | None]):
    """A data set of picture files as model inputs; a picture that cannot be read is None.

    Args:
        folder, files: paths relative to the folder.
    """

    def __init__(self, folder: Path, files: Sequence[str], preprocessing: Preprocessing) -> None:
        self.folder = folder
        self.files = files
        self.preprocessing = preprocessing

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> torch.Tensor | None:
        try:
            tensor: torch.Tensor = self.preprocessing.read(self.folder / self.files[number])
            return tensor
        except Exception:  # decoders raise what they like; the table says what it was
            return None


def _together(inputs: list[torch.Tensor | None]) -> tuple[torch.Tensor | None, list[bool]]:
    """Stack the pictures that could be read into a batch; also returns which ones these are."""
    there = [tensor for tensor in inputs if tensor is not None]
    return torch.stack(there) if there else None, [tensor is not None for tensor in inputs]


def predict(seat: Seat, assignment: Assignment) -> dict[str, Any]:
    """Predict this worker's share of the files; the first worker writes the table. Returns the outcome."""
    config, plan = assignment.config, assignment.plan
    report = Report(Path(plan.paths.run_dir) if seat.rank == 0 else None, plan.length.total_steps)
    with contextlib.closing(report), membership(seat, assignment, report) as strategy:
        model = build_model(config, plan, torch.device(seat.device))
        fit.load(Path(plan.model.weights), model)
        strategy.setup(model.eval(), Updaters(config, plan))
        source: DataSource = call_target(config.node("data"), "data")
        reader = reader_of(source, plan.data.facts)
        report.phase = Phase.PREDICTION
        if reader is not None:
            return _predict_rows(reader, model, seat, assignment, strategy, report)
        return _predict_images(source, model, seat, assignment, strategy, report)


def _output(assignment: Assignment) -> Path:
    return Path(assignment.config.predict.output or Path(assignment.plan.paths.run_dir) / "predictions.csv")


def _predict_images(
    source: DataSource, model: torch.nn.Module, seat: Seat, assignment: Assignment, strategy: Strategy, report: Report
) -> dict[str, Any]:
    """Predict this worker's share of the images; the first worker writes the table."""
    plan, files = assignment.plan, assignment.files
    preprocessing = source.preprocessing(plan.data.facts)
    pictures = Pictures(Path(str(assignment.config.predict.input)), files, preprocessing)
    task, loader = task_of(assignment.config), _loader(pictures, plan, seat)
    blocks = _blocks(loader, model, task, preprocessing, plan, seat, strategy, report)
    if seat.rank:
        for _ in blocks:
            pass
        return report.outcome()
    names = for_predictions(assignment.config, source, plan.data.facts).names
    unreadable = write(_output(assignment), blocks, pictures, task, names, plan.data.facts)
    return {**_outcome(report, len(files), unreadable), "unreadable": unreadable[:MOST_NAMED]}


def _predict_rows(
    node: Mapping[str, Any],
    model: torch.nn.Module,
    seat: Seat,
    assignment: Assignment,
    strategy: Strategy,
    report: Report,
) -> dict[str, Any]:
    """Predict this worker's share of the rows of text; the first worker writes the table."""
    config, plan, names = assignment.config, assignment.plan, assignment.files
    device, precision = torch.device(seat.device), plan.chosen.precision
    reader: RowReader = call_target(node, "data")
    place = Placement(Splits(None, None), device, torch.float64 if precision == "fp64" else torch.float32, False)  # type: ignore[arg-type]
    context = autocast(precision, device)
    task = task_of(config)
    looking = predict_rows.RowPrediction(
        model, task, plan.data.facts, reader, place, context, plan.batches.size, seat, strategy, report
    )
    results = looking.results([Path(str(config.predict.input)) / name for name in names])
    if seat.rank:
        for _ in results:
            pass
        return report.outcome()
    return predict_rows.outcome(
        report, *predict_rows.write(_output(assignment), results, names, reader, task, plan.data.facts)
    )


def _shares(files: int, seat: Seat) -> list[tuple[int, list[int]]]:
    """For each block of files, where it begins and which of them are this worker's."""
    starts = range(0, files, BLOCK)
    return [(start, list(range(start, min(start + BLOCK, files)))[seat.rank :: seat.size]) for start in starts]


def _loader(pictures: Pictures, plan: Plan, seat: Seat) -> DataLoader[Any]:
    """This worker's files in batches, none across the end of a block."""
    size = plan.batches.size
    batches = [share[i : i + size] for _, share in _shares(len(pictures), seat) for i in range(0, len(share), size)]
    return DataLoader(
        pictures,
        batch_sampler=batches,
        collate_fn=_together,
        num_workers=int(plan.chosen.num_workers),
        prefetch_factor=int(plan.chosen.prefetch) or None,
        pin_memory=plan.chosen.pin_memory,
    )


@torch.inference_mode()
def _blocks(
    loader: DataLoader[Any],
    model: torch.nn.Module,
    task: Task,
    preprocessing: Preprocessing,
    plan: Plan,
    seat: Seat,
    strategy: Strategy,
    report: Report,
) -> Iterator[torch.Tensor]:
    """For each block its rows (N, 1 + W) of all workers: whether the file could be read, and the task's numbers."""
    device, precision = torch.device(seat.device), plan.chosen.precision
    dtype = torch.float64 if precision == "fp64" else torch.float32
    place = Placement(preprocessing, device, dtype, plan.chosen.channels_last, type_of_bytes(precision, device))
    context = autocast(precision, device)
    batches, step = iter(loader), 0
    files: int = len(loader.dataset)  # type: ignore[arg-type]
    for start, share in _shares(files, seat):
        rows = torch.zeros((min(BLOCK, files - start), 1 + task.width(plan.data.facts)), dtype=torch.float64)
        done = 0
        while done < len(share):
            inputs, readable = next(batches)
            found = torch.tensor(share[done : done + len(readable)])[torch.tensor(readable)] - start
            if inputs is not None:
                placed, _ = place(inputs, found)
                with context():
                    numbers = task.rows(model(placed)).cpu()
                rows[found] = torch.cat([torch.ones_like(numbers[:, :1]), numbers], 1)
            done += len(readable)
            step += 1
            report.progress(0, step)
        yield strategy.all_reduce_sum(rows.flatten()).cpu().reshape(rows.shape)


def write(
    output: Path, blocks: Iterator[torch.Tensor], pictures: Pictures, task: Task, names: Sequence[str], facts: Facts
) -> list[str]:
    """Write the table of predictions, which replaces the old one; returns the files that could not be read."""
    unreadable, number = [], 0
    with replacing(output) as part, part.open("w", encoding="utf-8", newline="") as file:
        table = csv_files.CsvTable(file)
        header = task.header(names, facts)
        table.row(["file", *header, "error"])
        for rows in blocks:
            for row in rows.tolist():
                path = one_line(pictures.files[number])
                if row[0]:
                    table.row([*task.cells(row[1:], names), ""], name=path)
                else:
                    unreadable.append(path)
                    table.row([*[""] * len(header), _why_unreadable(pictures, number)], name=path)
                number += 1
    return unreadable


def _why_unreadable(pictures: Pictures, number: int) -> str:
    """Why an image cannot be read, in one line, in the decoder's own words."""
    try:
        pictures.preprocessing.read(pictures.folder / pictures.files[number])
    except Exception as error:
        return why(error)
    return "could not be read at first"


def _outcome(report: Report, files: int, unreadable: list[str]) -> dict[str, Any]:
    """Print what was predicted, report the counts as metrics, and return the outcome."""
    if unreadable:
        named = ", ".join(unreadable[:MOST_NAMED]) + (", ..." if len(unreadable) > MOST_NAMED else "")
        print(f"{len(unreadable)} of {counted(files, 'file')} could not be read: {named}", flush=True)
    report.counted({"predict/files": float(files), "predict/unreadable": float(len(unreadable))})
    return {**report.outcome(), "samples": files}
