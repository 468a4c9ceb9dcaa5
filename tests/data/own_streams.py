"""A source of streams that the tests configure by ``_target_``: sample i has the input i + 1 in each element."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from trainer.data.source import DataSource, Facts, Splits
from trainer.data.streamed import Files

SHAPE = (4,)


def sample(number: int) -> tuple[torch.Tensor, int]:
    """Its number can be read off its input."""
    return torch.full(SHAPE, float(number + 1)), number % 2


class OwnIterable(IterableDataset[Any]):
    """Shares itself out over reading processes, as many do."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (sample(number) for number in range(first, self.samples, step))


class Streams(DataSource):
    """Streams of ``samples`` samples, of the kind that ``how`` names."""

    def facts(self, global_batch_size: int) -> Facts:
        return Facts(
            "numbers",
            "drawn",
            self.config.get("known", 0),
            self.config.get("val") or 0,
            SHAPE,
            classes=2,
            iterable=True,
        )

    def open(self, facts: Facts) -> Splits:
        samples, how = self.config.get("samples", 10**9), self.config.get("how", "function")

        def read(epoch: int = 0) -> Iterator[Any]:
            for number in range(samples):
                if number == 9 and how == "breaking":
                    raise ValueError("the line is not a number")
                if number == 9 and how == "growing":
                    yield torch.zeros(5), 0
                yield (
                    (sample(number) if how != "by epoch" else sample(number + 1000 * epoch))
                    if how != "lone"
                    else torch.zeros(4)
                )

        def of_file(name: int) -> Iterator[Any]:
            return (sample(100 * name + number) for number in range(samples))

        kinds: dict[str, Any] = {
            "iterable": OwnIterable(samples),
            "files": Files(range(4), of_file),
            "generator": read(),
            "list": [sample(0)],
        }
        train = kinds.get(how, read)
        val = (
            None
            if self.config.get("val") is None
            else lambda: (sample(number) for number in range(self.config["val_length"]))
        )
        return Splits(train, val)


class Linear(torch.nn.Module):
    """Writes what it is trained and evaluated on into ``$SEEN.PID``, one line a batch."""

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(SHAPE[0], num_classes)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if "SEEN" in os.environ and not inputs.is_meta and (inputs != 0).any():
            numbers = " ".join(str(int(n) - 1) for n in inputs[:, 0].tolist())
            with Path(f"{os.environ['SEEN']}.{os.getpid()}").open("a") as file:
                file.write(f"{'train' if self.training else 'val'} {numbers}\n")
        return self.layer(self.drop(inputs / 1000))
