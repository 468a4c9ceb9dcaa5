"""The file of a validation's findings in the run's folder: numbers and images, from which the task draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.host.files import replacing

WHICH = ("last", "best")
CHANNELS = (1, 3)
VAL = "val"


OF_FILE = ("images", "files", "split")
"""Arrays of the file that are not the task's."""


@dataclass(frozen=True)
class Findings:
    """A validation's findings.

    Attributes:
        arrays: of the task, by name.
        images: (S, H, W, C) uint8 of each of the samples that the task shows; None without images.
        files: what each of them was read from; '' where that is not known.
        split: whose samples were examined.
    """

    arrays: Mapping[str, Any]
    images: np.ndarray | None = None
    files: tuple[str, ...] = ()
    split: str = VAL

    def name(self, place: int, sample: int) -> str:
        """What the sample at this place was read from, or its split and number."""
        file = self.files[place] if place < len(self.files) else ""
        return file or f"{self.split} sample {sample}"


def _path_of(run_dir: Path, which: str) -> Path:
    """The path of the findings file of the last or the best validation."""
    return run_dir / f"validation.{which}.npz"


def keep(
    run_dir: Path, which: str, arrays: Mapping[str, Any], inputs: Any, files: Sequence[str] = (), split: str = VAL
) -> None:
    """Write the findings file of a validation.

    Args:
        arrays: of the task, by name.
        inputs: of the samples that the task shows, a batch in their order; None: there are none.
        files: what they were read from, in their order; '' where that is not known.
        split: whose samples were examined.
    """
    written: dict[str, Any] = {**arrays, "files": np.array(files, dtype=str), "split": np.array(split)}
    if (images := pictured(inputs)) is not None:
        written["images"] = images
    with replacing(_path_of(run_dir, which)) as part, part.open("wb") as file:
        np.savez_compressed(file, **written)


def read(run_dir: Path, which: str) -> Findings | None:
    """Read the findings file of a validation; None if there is none."""
    path = _path_of(run_dir, which)
    if not path.exists():
        return None
    with np.load(path) as kept:
        arrays = {name: kept[name] for name in kept.files if name not in OF_FILE}
        return Findings(arrays, kept.get("images"), tuple(kept["files"].tolist()), str(kept["split"]))


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
