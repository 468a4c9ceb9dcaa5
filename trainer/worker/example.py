"""Writes what a trained model needs to be used elsewhere: model.json (how to build and feed it), skeleton and one
sample."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainer.checkpoint.store import SKELETON
from trainer.config.instantiate import locate
from trainer.data.batch_inputs import Inputs
from trainer.data.placement import Placement
from trainer.host import files, json_text
from trainer.run_folder.json_files import leave

SPEC, SAMPLE = "model.json", "example.npz"
ALONE = "inputs"
"""The name in the file of inputs that have none."""


def keep(
    run_dir: Path,
    model: Mapping[str, Any],
    precision: str,
    place: Placement,
    inputs: Inputs,
    rows: Mapping[str, Any] | None = None,
    preprocessing: Mapping[str, Any] | None = None,
    task: Mapping[str, Any] | None = None,
) -> None:
    """Write ``model.json`` and ``example.npz`` for a trained model.

    Args:
        model: the ``model`` node of the config.
        place: what the batches went through on their way to the model.
        inputs: one sample or several, as the data source gives them.
        rows: node of what reads rows of text, where the data source has such.
        preprocessing: what validation does to an image; empty or None: samples are none.
        task: its node, by which outputs of rows of text become what is predicted.
    """
    mean, std = (None if t is None else t.flatten().tolist() for t in (place.mean, place.std))
    spec = {
        "model": dict(model),
        "mean": mean,
        "std": std,
        "fp64": precision == "fp64",
        "rows": rows,
        "preprocessing": preprocessing or None,
        "task": task,
    }
    by_name = inputs if isinstance(inputs, dict) else {ALONE: inputs}
    arrays: dict[str, Any] = {name: tensor.cpu().numpy() for name, tensor in by_name.items()}
    with files.replacing(run_dir / SAMPLE) as part, part.open("wb") as file:
        np.savez_compressed(file, **arrays)
    leave(run_dir / SPEC, spec, private=True)


def keep_skeleton(run_dir: Path, content: bytes | None) -> None:
    """Write the skeleton of the user's own model, or remove the skeleton of an earlier life. It is written before the
    first update, so that a checkpoint of an unfinished run can be exported.
    """
    if content is None:
        (run_dir / SKELETON).unlink(missing_ok=True)
        return
    with files.replacing(run_dir / SKELETON, files.PRIVATE) as part:
        part.write_bytes(content)


def sample(run_dir: Path) -> Any:
    """Read the example input that a worker has kept for the logged model: one or several arrays, or a row of text."""
    if (rows := json_text.read(run_dir / SPEC)["rows"]) is not None:
        return [locate(rows["_target_"]).example]
    with np.load(run_dir / SAMPLE) as kept:
        by_name = {name: kept[name] for name in kept.files}
    return by_name[ALONE] if set(by_name) == {ALONE} else by_name
