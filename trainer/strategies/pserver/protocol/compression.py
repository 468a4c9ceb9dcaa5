"""How values travel: as they are, as bfloat16, or as int8 with one scale per row and the rounding error kept for
later."""

from __future__ import annotations

import warnings

import numpy as np
import torch

from trainer.strategies.pserver.protocol.messages import Kind, Malformed, Record

# What another process has sent is read, and never written to.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

BLOCK = 512
"""Values of a dense vector that share one int8 scale."""
FORMATS = ("full", "bf16", "int8")
FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


def encode(values: torch.Tensor, kind: Kind, table: int, form: str = "full") -> list[Record]:
    """Compress a tensor (N,) or (N, D) to the form in which it travels (full, bf16, int8); returns the records that
    carry it.

    The tensor is float32 or float64, on the CPU and contiguous.

    int8 is symmetric: each row (of a vector, each 512 values) is divided by its greatest magnitude / 127.
    """
    if form == "full" or values.numel() == 0:
        return [Record(kind, values.numpy(), table)]
    if form == "bf16":
        return [Record(kind, values.to(torch.bfloat16).view(torch.uint16).numpy(), table)]
    rows = _in_rows(values)
    scales = rows.abs().amax(1).to(torch.float32).div_(127.0).clamp_(min=1e-30)
    whole = torch.round(rows / scales.unsqueeze(1)).clamp_(-127, 127).to(torch.int8)
    shape = values.shape
    whole = whole.reshape(-1)[: values.numel()].view(shape)
    return [Record(kind, whole.numpy(), table), Record(Kind.SCALES, scales.numpy(), table)]


def decode(array: np.ndarray, scales: np.ndarray | None, dtype: torch.dtype) -> torch.Tensor:
    """Decompress the tensor that records carry to that dtype; a view of the array where nothing has to be computed.

    Raises:
        Malformed: the scales do not fit.
    """
    if array.dtype in FLOATS:
        values = torch.from_numpy(array)
        return values if values.dtype == dtype else values.to(dtype)
    if array.dtype == np.uint16:
        return torch.from_numpy(array).view(torch.bfloat16).to(dtype)
    if array.dtype == np.int8:
        values = torch.from_numpy(array)
        rows = _in_rows(values)
        if scales is None or scales.shape != (len(rows),):
            raise Malformed("int8 values without their scales")
        return (
            (rows.to(dtype) * torch.from_numpy(scales).to(dtype).unsqueeze(1))
            .reshape(-1)[: values.numel()]
            .view(values.shape)
        )
    raise Malformed(f"values of {array.dtype}")


def _in_rows(values: torch.Tensor) -> torch.Tensor:
    if values.dim() > 1:
        return values
    missing = -len(values) % BLOCK
    padded = torch.cat([values, values.new_zeros(missing)]) if missing else values
    return padded.view(-1, BLOCK)


class Feedback:
    """Error feedback (Seide et al., 2014): what rounding took from a vector is added to the next one.

    Args:
        form: of the wire; ``full`` loses nothing and keeps nothing.
    """

    def __init__(self, form: str) -> None:
        self.form = form
        self.errors: dict[int, torch.Tensor] = {}

    def encode(self, values: torch.Tensor, kind: Kind, table: int) -> list[Record]:
        """The records that carry a dense vector with its last rounding error added."""
        if self.form == "full":
            return encode(values, kind, table)
        if table in self.errors:
            values = values + self.errors[table]
        records = encode(values, kind, table, self.form)
        scales = records[1].array if len(records) > 1 else None
        self.errors[table] = values - decode(records[0].array, scales, values.dtype)
        return records
