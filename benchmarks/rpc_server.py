"""The rival of ``pserver.py``: a parameter server over torch.distributed.rpc, written as torch's tutorials do it.

One server holds an nn.Embedding, the dense parameters and an optimizer. Each worker pulls the dense parameters and the
rows of its batch's unique ids by ``rpc_sync``, computes, and pushes its gradients by ``rpc_sync``; they are applied
when they come. TensorPipe as it configures itself: on one host that is shared memory, which is faster than its TCP.
"""

from __future__ import annotations

import resource
import threading
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trainer.strategies.seat import Seat


def available() -> str:
    """Why torch.distributed.rpc cannot be had here; empty when it can."""
    try:
        from torch.distributed import rpc
    except ImportError as error:
        return str(error)
    return "" if rpc.is_available() else "this torch was built without it"


class ParameterServer:
    """The parameters and their optimizer; calls come from several threads."""

    def __init__(self, model: nn.Module, rows: int, columns: int, lr: float) -> None:
        self.dense = [p for p in model.parameters() if not p.is_meta]
        self.table = nn.Embedding(rows, columns, sparse=True)
        self.optimizer = torch.optim.SGD([*self.dense, self.table.weight], lr)
        self.lock = threading.Lock()

    def pull(self, ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The dense parameters, and the rows of unique ids (U,)."""
        with torch.no_grad(), self.lock:
            return [p.clone() for p in self.dense], self.table.weight[ids]

    def push(self, dense: list[torch.Tensor], ids: torch.Tensor, rows: torch.Tensor) -> None:
        """One optimizer step by gradients."""
        with self.lock:
            for parameter, gradient in zip(self.dense, dense, strict=True):
                parameter.grad = gradient
            weight = self.table.weight
            weight.grad = torch.sparse_coo_tensor(ids[None], rows, weight.shape, is_coalesced=True)
            self.optimizer.step()


kept: list[ParameterServer] = []


def pull(ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """At the server."""
    return kept[0].pull(ids)


def push(dense: list[torch.Tensor], ids: torch.Tensor, rows: torch.Tensor) -> None:
    """At the server."""
    kept[0].push(dense, ids, rows)


class Pulled(nn.Module):
    """Stands where the model has its table."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = self.positions = torch.empty(0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows that were pulled for this batch."""
        return F.embedding(self.positions, self.rows)


def _join(seat: Seat, payload: dict[str, Any], name: str, number: int) -> None:
    import os

    from torch.distributed import rpc

    os.environ["TP_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=payload["meet"], rpc_timeout=120)
    rpc.init_rpc(name, rank=number, world_size=payload["workers"] + 1, rpc_backend_options=options)


def _model(payload: dict[str, Any]) -> Any:
    from trainer.models.wide_and_deep import WideAndDeep

    torch.manual_seed(0)
    return WideAndDeep(payload["rows"], payload["columns"])


def serve(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """Entry of the server."""
    from torch.distributed import rpc

    kept.append(ParameterServer(_model(payload), payload["rows"], payload["columns"], payload["lr"]))
    _join(seat, payload, "server", 0)
    rpc.shutdown()
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"cpu_s": used.ru_utime + used.ru_stime}


def work(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """Entry of a worker: the same steps, stamped as ``pserver.measure`` stamps its own."""
    from pserver import Batches
    from torch.distributed import rpc

    model = _model(payload)
    model.embedding = table = Pulled()
    dense = list(model.parameters())
    batches = Batches(payload["batch"])
    loss_function = nn.BCEWithLogitsLoss()
    _join(seat, payload, f"worker{seat.rank}", 1 + seat.rank)
    stamps = []
    for step in range(payload["steps"]):
        inputs, labels = batches.pool[(step + seat.rank * len(batches.pool) // 2) % len(batches.pool)]
        ids, table.positions = torch.unique(inputs["sparse"], return_inverse=True)
        values, table.rows = rpc.rpc_sync("server", pull, (ids,))
        with torch.no_grad():
            for parameter, value in zip(dense, values, strict=True):
                parameter.copy_(value)
        table.rows.requires_grad_()
        loss_function(model(inputs), labels).backward()
        rpc.rpc_sync("server", push, ([p.grad for p in dense], ids, table.rows.grad))
        model.zero_grad()
        stamps.append((time.perf_counter(), time.process_time(), 0, 0))
    rpc.shutdown()
    return {"stamps": stamps}
