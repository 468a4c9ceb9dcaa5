"""``python -m trainer.checkpoints export``: write a checkpoint's model as safetensors, .pt, .pt2 or ONNX."""

from __future__ import annotations

import io
import warnings
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from trainer.checkpoint import store
from trainer.config.instantiate import call_target, for_saved_weights
from trainer.data.picture_preprocessing import Preprocessing
from trainer.data.placement import Placement
from trainer.errors import UserError, first_line
from trainer.host import json_text
from trainer.host.files import replacing
from trainer.models import skeleton
from trainer.planning.plan import read_plan
from trainer.terminal.screen import Screen
from trainer.weights import checkpoint_weights
from trainer.worker import example
from trainer.worker.model import save

ONNX = ("onnx", "onnxscript")
CLOSE = 1e-4
"""Greatest relative difference between a program's outputs and the model's."""


def exported(folder: Path, out: Path, kind: str, averaged: bool) -> None:
    """Write the model of a checkpoint to the file ``out``, in the format ``kind``; ``averaged``: its EMA weights.

    Raises:
        UserError: the model cannot be written in that format.
    """
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise UserError(str(out), "is a folder" if out.is_dir() else f"there is no folder {out.parent}", "a file")
    if kind == "onnx" and not all(find_spec(name) for name in ONNX):
        raise UserError(
            "--format onnx",
            f"needs the packages {' and '.join(ONNX)}, which are not installed",
            "pip install 'trainer[onnx]'",
        )
    model, note = built(folder, averaged), ""
    if kind == "safetensors":
        save(model, out)
    elif kind == "pt":
        with replacing(out) as part:
            torch.save(model.state_dict(), part)
    else:
        note = _program(model, folder, out, kind)
    Screen().print(f"{out}: {'averaged weights' if averaged else 'model'} of {folder.name}{note}")


def built(folder: Path, averaged: bool) -> nn.Module:
    """Build the model of a checkpoint's config and load the checkpoint's weights, which keep their dtypes.

    Raises:
        UserError: the weights do not fit the model.
    """
    about = store.about(folder)
    if (bare := skeleton.of_run(folder.parent.parent)) is None:
        model: nn.Module = call_target(for_saved_weights(about.config.get("model", {})), "model")
    else:
        try:
            model = skeleton.built(bare)
        except Exception as error:  # any error of the user's modules
            raise UserError(
                str(folder.parent.parent / store.SKELETON),
                f"cannot be built: {first_line(error)}",
                "the folder where the run was started, or PYTHONPATH=FOLDER of the model's module",
            ) from error
    values = checkpoint_weights.read(folder, averaged)
    own = model.state_dict(keep_vars=True)
    found = {id(own[name]): value for name, value in values.items() if name in own}
    whole = {name: found[id(tensor)] for name, tensor in own.items() if id(tensor) in found}
    if missing := [name for name in own if name not in whole]:
        raise UserError(str(folder), f"its model has no {missing[0]}", "the model that made it")
    try:
        model.load_state_dict(whole, assign=True)
    except RuntimeError as error:
        raise UserError(str(folder), f"its values do not go into the model: {first_line(error)}") from error
    return model.eval()


def _program(model: nn.Module, folder: Path, out: Path, kind: str) -> str:
    """Write the exported program of a model; returns a note about its exactness."""
    inputs = _example_inputs(folder.parent.parent, next(model.parameters()).dtype)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            wanted = model(inputs)
            batch = torch.export.Dim("batch")
            shapes: Any = {name: {0: batch} for name in inputs} if isinstance(inputs, dict) else {0: batch}
            program = torch.export.export(model, (inputs,), dynamic_shapes=(shapes,))
            content, found = (_as_onnx if kind == "onnx" else _as_pt2)(program, inputs)
            differs = "" if isinstance(found, str) else _difference(found, wanted)
    except Exception as error:  # any error of torch.export with a user's model
        raise UserError(
            str(folder),
            f"torch.export cannot make a program of its model: {first_line(error)[:200]}",
            "--format safetensors",
        ) from error
    if differs:
        raise UserError(str(folder), f"the program differs from the model {differs}", "--format safetensors")
    with replacing(out) as part:
        part.write_bytes(content)
    checked = (
        "are those of the model" if isinstance(found, torch.Tensor) else f"were not compared with the model's: {found}"
    )
    return f", any batch size; its outputs {checked}"


def _as_pt2(program: torch.export.ExportedProgram, inputs: Any) -> tuple[bytes, torch.Tensor]:
    """The content of a .pt2 file, and the outputs of the program read from it."""
    content = io.BytesIO()
    torch.export.save(program, content)
    content.seek(0)
    return content.getvalue(), torch.export.load(content).module()(inputs)


def _as_onnx(program: torch.export.ExportedProgram, inputs: Any) -> tuple[bytes, torch.Tensor | str]:
    """The content of an .onnx file, and the outputs of ONNX's reference evaluator, or why it has none."""
    from onnx.reference import ReferenceEvaluator

    made: Any = torch.onnx.export(program, dynamo=True, verbose=False)
    content = io.BytesIO()
    made.save(content)
    try:
        evaluator = ReferenceEvaluator(content.getvalue())
        values = [tensor.numpy() for tensor in tree_leaves(inputs)]
        [output] = evaluator.run(None, dict(zip(evaluator.input_names, values, strict=True)))
        return content.getvalue(), torch.from_numpy(output)
    except Exception as error:  # an operator or type that the evaluator lacks
        return content.getvalue(), f"onnx.reference cannot run it: {first_line(error)[:200]}"


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> str:
    """The difference between a program's outputs and the model's; empty: only rounding."""
    if found.shape != wanted.shape:
        return f"in its outputs' shape: {tuple(found.shape)} and not {tuple(wanted.shape)}"
    difference = float((found - wanted).abs().max())
    same = torch.equal(found, wanted) or difference <= CLOSE * float(wanted.abs().max())
    return "" if same else f"by {difference:.3g}"


def _example_inputs(run: Path, dtype: torch.dtype) -> Any:
    """Two samples to trace the exported model with, from the run's example.npz; else noise of the shape in plan.json.

    Raises:
        UserError: the run's folder has neither.
    """
    try:
        spec = json_text.read(run / example.SPEC)
        with np.load(run / example.SAMPLE) as kept:
            arrays = {name: torch.from_numpy(np.concatenate([kept[name][:1]] * 2)) for name in kept.files}
        mean, std = (None if spec.get(key) is None else tuple(spec.get(key)) for key in ("mean", "std"))
        place = Placement(Preprocessing(_unused, mean, std), torch.device("cpu"), dtype, channels_last=False)
        return place(arrays[example.ALONE] if set(arrays) == {example.ALONE} else arrays, torch.zeros(0))[0]
    except (OSError, ValueError, KeyError, AttributeError, EOFError, zipfile.BadZipFile):
        pass
    try:
        facts = read_plan(run).data.facts
    except (OSError, ValueError) as error:
        raise UserError(
            str(run),
            "it has neither example.npz nor a plan.json that tells the shape of a sample",
            "--format safetensors",
        ) from error
    shape = facts.val_shape or facts.shape
    draw = torch.Generator().manual_seed(0)
    if not isinstance(shape, dict):
        return torch.randn((2, *shape), generator=draw, dtype=dtype)
    return {
        name: torch.zeros((2, *size), dtype=torch.int64)
        if name in facts.integers
        else torch.randn((2, *size), generator=draw, dtype=dtype)
        for name, size in shape.items()
    }


def _unused(content: bytes) -> Any:
    raise NotImplementedError("inputs come as arrays")
