"""Refuses files of Paddle, recognised by their suffix, which are not read."""

from __future__ import annotations

from pathlib import Path

from trainer.errors import UserError

SUFFIXES = (".pdparams", ".pdopt", ".pdmodel", ".pdiparams", ".pdstates")
NAMES = ("__model__", "__params__")
"""Files of fluid's save_inference_model."""


def refuse(path: Path, key: str) -> None:
    """Refuse a file, or a folder of files, that Paddle has saved.

    Raises:
        UserError: it is one; the message says how to convert its arrays.
    """
    folder = sorted(path.iterdir()) if path.is_dir() else [path]
    found = next((file for file in folder if file.suffix in SUFFIXES or file.name in NAMES), None)
    if found is None:
        return
    which = "was" if found == path else f"has {found.name}, which was"
    how = (
        "safetensors.numpy.save_file writes the arrays of paddle.load by this model's names, those of linear "
        "layers transposed"
    )
    raise UserError(
        f"{key}={path}", f"{which} saved by Paddle, whose files are not read; {how}", f"{key}=FILE.safetensors"
    )
