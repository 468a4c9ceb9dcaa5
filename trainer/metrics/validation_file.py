"""The file of a validation's findings in the run's folder: numbers and images, from which ``job/pictures`` draws."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.host import json_text
from trainer.host.files import replacing
from trainer.metrics.confusion import Examination, Mistake

WHICH = ("last", "best")
CHANNELS = (1, 3)
VAL = "val"


@dataclass(frozen=True)
class Findings:
    """A validation's findings: an examination, and what its mistakes are.

    Attributes:
        images: (H, W, C) uint8 of each mistake; None without images.
        files: what each mistake was read from; '' where that is not known.
        split: whose samples were examined.
    """

    examination: Examination
    images: np.ndarray | None
    files: tuple[str, ...] = ()
    split: str = VAL

    def name(self, mistake: int) -> str:
        """What the mistake at this place was read from, or its split and number."""
        file = self.files[mistake] if mistake < len(self.files) else ""
        return file or f"{self.split} sample {self.examination.mistakes[mistake].number}"


def _path_of(run_dir: Path, which: str) -> Path:
    """The path of the findings file of the last or the best validation."""
    return run_dir / f"validation.{which}.npz"


def keep(
    run_dir: Path, which: str, examination: Examination, inputs: Any, files: Sequence[str] = (), split: str = VAL
) -> None:
    """Write the findings file of a validation.

    Args:
        inputs: of the examination's mistakes, a batch in their order; None: there are none.
        files: what they were read from, in their order; '' where that is not known.
        split: whose samples were examined.
    """
    found = examination
    rows = [[m.number, m.label, m.guess, m.confidence, m.loss] for m in found.mistakes]
    arrays: dict[str, Any] = {
        "metrics": json.dumps(found.metrics),
        "hits": found.hits,
        "labels": found.labels,
        "guesses": found.guesses,
        "mistakes": np.array(rows, dtype=np.float64).reshape(-1, 5),
        "files": np.array(files, dtype=str),
        "split": np.array(split),
    }
    if found.confusion is not None:
        arrays["confusion"] = found.confusion
    if (images := pictured(inputs)) is not None:
        arrays["images"] = images
    with replacing(_path_of(run_dir, which)) as part, part.open("wb") as file:
        np.savez_compressed(file, **arrays)


def read(run_dir: Path, which: str) -> Findings | None:
    """Read the findings file of a validation; None if there is none."""
    path = _path_of(run_dir, which)
    if not path.exists():
        return None
    with np.load(path) as kept:
        mistakes = tuple(
            Mistake(int(n), int(label), int(g), c, loss) for n, label, g, c, loss in kept["mistakes"].tolist()
        )
        examination = Examination(
            json_text.loads(str(kept["metrics"])),
            kept["hits"],
            kept["labels"],
            kept["guesses"],
            kept.get("confusion"),
            mistakes,
        )
        files = tuple(kept["files"].tolist()) if "files" in kept else ()
        return Findings(examination, kept.get("images"), files, str(kept.get("split", VAL)))


def pictured(inputs: Any) -> np.ndarray | None:
    """Convert a validation's inputs to the images of its file: (N, C, H, W) to (N, H, W, C) uint8, rescaled; None if
    they are none."""
    if not isinstance(inputs, torch.Tensor) or inputs.dim() != 4 or inputs.shape[1] not in CHANNELS:
        return None
    if inputs.dtype != torch.uint8:
        flat = inputs.double().flatten(1)
        least, greatest = flat.amin(1)[:, None], flat.amax(1)[:, None]
        inputs = ((flat - least) * (255.0 / (greatest - least).clamp_min(1e-12))).round().reshape(inputs.shape)
    images: np.ndarray = inputs.to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    return images
