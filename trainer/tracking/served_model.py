"""The model as MLflow serves it: built from its config, filled with its weights, fed as the data source says.

MLflow keeps a copy of this file and runs it where the model is loaded ("model from code"); it needs neither the run's
folder nor a pickle of the module, and the trainer's own source travels with it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import torch

# In a logged model the trainer's sources are a zip (``own_code.stage``); it goes before a trainer that is installed.
sys.path[:0] = [str(packed) for packed in Path(__file__).parent.glob("code/trainer.zip")]

from trainer.config.instantiate import call_target  # noqa: E402
from trainer.data.picture_preprocessing import Preprocessing  # noqa: E402
from trainer.data.placement import Placement  # noqa: E402
from trainer.models.skeleton import built  # noqa: E402
from trainer.weights import fit  # noqa: E402

BINARY = "trainer.tasks.binary.Binary"
"""The task of rows in a ``model.json`` that names none, as those of earlier versions."""


class Served(mlflow.pyfunc.PythonModel):  # type: ignore[misc,name-defined]
    """The MLflow model: inputs (N, ...) to scores (N, C), or rows of text (N,) to what the task
    makes of their scores: probabilities (N,), or numbers. Inputs are as in training, before normalisation."""

    def load_context(self, context: Any) -> None:
        """Build the model from its skeleton or, without one, from ``model.json``; load ``model.safetensors`` into
        it."""
        spec = json.loads(Path(context.artifacts["spec"]).read_text())
        dtype = torch.float64 if spec["fp64"] else torch.float32
        cpu = torch.device("cpu")
        bare = context.artifacts.get("skeleton")
        module = call_target(spec["model"], "model") if bare is None else built(Path(bare).read_bytes())
        tables = [m for m in module.modules() if any(p.is_meta for p in m.parameters(recurse=False))]
        for table in tables:  # rows without memory, until they are drawn or, here, read
            rows: Any = table.weight
            table.weight = torch.nn.Parameter(torch.empty(rows.shape))
        module = module.to(dtype)
        fit.load(Path(context.artifacts["weights"]), module)
        self.module = module.eval()
        mean, std = (None if spec[k] is None else tuple(spec[k]) for k in ("mean", "std"))
        self.place = Placement(Preprocessing(_unused, mean, std), cpu, dtype, channels_last=False)
        self.reader: Any = None if spec.get("rows") is None else call_target(spec["rows"], "data")
        self.task: Any = call_target(spec.get("task") or {"_target_": BINARY}, "task")

    def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
        """Return the model's scores as an array, for an array of inputs or a dict of such by name.
        Without type hints, which MLflow takes for a schema.

        Where the data are rows of text: the task's scores of a list of rows, or of a DataFrame's one column.
        """
        if self.reader is not None:
            return self.of_rows(_texts(model_input))
        if isinstance(model_input, dict):
            inputs: Any = {name: torch.from_numpy(np.array(value)) for name, value in model_input.items()}
        else:
            inputs = torch.from_numpy(np.array(model_input))
        with torch.inference_mode():
            placed, _ = self.place(inputs, torch.zeros(0))
            return self.module(placed).numpy()

    def of_rows(self, rows: list[bytes]) -> Any:
        """The task's scores for rows of text, all of which have their label, or none: of labels 0 and 1 probabilities
        (N,), of numbers the numbers.

        Raises:
            ValueError: rows are wrong; the first one's number, from 1, and why.
        """
        for number, row in enumerate(rows, 1):
            if b"\n" in row:
                raise ValueError(f"row {number} holds the end of a line; a row is {self.reader.format}")
        text = b"".join(row + b"\n" for row in rows)
        read = self.reader.read(text, bool(self.reader.labelled(text)))
        if read.bad:
            number, why = read.bad[0]
            raise ValueError(f"row {number + 1}: {why}; a row is {self.reader.format}")
        inputs: Any = {name: torch.from_numpy(array) for name, array in read.inputs.items()}
        with torch.inference_mode():
            placed, _ = self.place(inputs, torch.zeros(0))
            return self.task.scores(self.module(placed).double()).numpy()


def _texts(rows: Any) -> list[bytes]:
    """Rows from a list, an array or a Series of them, or from a DataFrame's one column.

    Raises:
        ValueError: a DataFrame has several columns.
    """
    columns = getattr(rows, "columns", None)
    if columns is not None and len(columns) != 1:
        raise ValueError(f"a DataFrame of rows has one column, the whole row as text, and not {len(columns)}")
    rows = rows if columns is None else rows.iloc[:, 0]
    texts = [row if isinstance(row, bytes) else str(row).encode("utf-8", "surrogateescape") for row in list(rows)]
    return [text.rstrip(b"\r\n") for text in texts]


def _unused(content: bytes) -> Any:
    raise NotImplementedError("inputs come as arrays")


mlflow.models.set_model(Served())
