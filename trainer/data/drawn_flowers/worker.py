"""A drawing process, which paints its share of the flowers into the folder that `drawn_flowers.draw` has made.

Run as `python -m trainer.data.drawn_flowers.worker '<job as JSON>'`. On standard output it writes one line `.` for each
picture and, if the file system refuses, one line `{"errno": ..., "strerror": ..., "filename": ...}` before it exits
with status 1. It ends by itself when the process that started it is gone.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.data.drawn_flowers.species import CLASSES, VERSION, chosen, species
from trainer.host.signals import leave_to_launcher

SPLITS = ("train", "val")
LIMITS = {"seed": (0, 2**63 - 1), "per_class": (1, 10_000), "size": (16, 4096), "classes": (1, CLASSES)}


@dataclass(frozen=True)
class Drawing:
    """The parameters of a set of drawn flowers; the same parameters give the same bytes.

    A picture of a class is the same whatever the number of classes is.

    Attributes:
        per_class: pictures of each class in each of train and val.
        size: shorter side of a picture, in pixels.

    Raises:
        ValueError: a parameter is out of range.
    """

    seed: int = 0
    per_class: int = 10
    size: int = 500
    classes: int = CLASSES

    def __post_init__(self) -> None:
        for name, (least, most) in LIMITS.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name}={getattr(self, name)}: must be {least} to {most}")

    @property
    def total(self) -> int:
        """The number of pictures in all splits."""
        return len(SPLITS) * self.classes * self.per_class


@dataclass(frozen=True)
class Job:
    """A drawing process's share of the pictures: every `workers`-th one, beginning with number `worker`."""

    drawing: Drawing
    folder: str
    worker: int
    workers: int
    parent: int  # the process id of the caller

    def command(self) -> list[str]:
        """The command line that draws this share in a process of its own."""
        return [sys.executable, "-m", "trainer.data.drawn_flowers.worker", json.dumps(asdict(self))]

    def pictures(self) -> Iterator[tuple[int, int, int]]:
        """Yield the share's pictures as (split, number of the species, index), in the order of drawing."""
        numbers = chosen(self.drawing.classes)
        for picture in range(self.worker, self.drawing.total, self.workers):
            split_and_class, index = divmod(picture, self.drawing.per_class)
            split, label = divmod(split_and_class, self.drawing.classes)
            yield split, numbers[label], index


def _draw(job: Job) -> None:
    import numpy as np  # not above: the caller takes Job from this file and stays light

    from trainer.data.drawn_flowers.painter import jpeg, paint

    kinds = species()
    for split, number, index in job.pictures():
        if os.getppid() != job.parent:
            raise SystemExit(3)
        # the generator depends on the picture alone, so neither order nor number of processes can show in it
        rng = np.random.default_rng([VERSION, job.drawing.seed, split, number, index])
        content = jpeg(paint(kinds[number], job.drawing.size, rng))
        path = Path(job.folder, SPLITS[split], f"{number:03d}", f"{index:02d}.jpg")
        try:
            path.write_bytes(content)
        except OSError as error:
            print(json.dumps({"errno": error.errno, "strerror": error.strerror, "filename": str(path)}), flush=True)
            raise SystemExit(1) from None
        print(".", flush=True)


def main() -> None:
    """Draw the share of the flowers that the command line names."""
    leave_to_launcher()
    job = json.loads(sys.argv[1])
    _draw(Job(Drawing(**job.pop("drawing")), **job))


if __name__ == "__main__":
    main()
