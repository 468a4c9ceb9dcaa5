"""SAVE: a server's part of the persistables."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.strategies.pserver.protocol import snapshot
from trainer.strategies.pserver.protocol.messages import Malformed, Message, Verb
from trainer.strategies.pserver.server.leases import Progress
from trainer.strategies.pserver.server.members import Members
from trainer.strategies.pserver.server.parameters import Parameters
from trainer.strategies.pserver.server.shard import Shard
from trainer.strategies.pserver.server.starting import kept_by
from trainer.strategies.pserver.server.turns import Outlet


class Saving:
    """Writes what a server keeps.

    Args:
        outlet: makes room for files.
        run_dir: the run's folder; nothing is written anywhere else.
    """

    def __init__(
        self, parameters: Parameters, members: Members, progress: Progress, outlet: Outlet, run_dir: Path
    ) -> None:
        self.parameters, self.members, self.progress, self.outlet = parameters, members, progress, outlet
        self.run_dir = run_dir.resolve()

    def save(self, message: Message) -> Message:
        """Write this server's part of the persistables."""
        folder = Path(message.mapping()["folder"])
        if not folder.resolve().is_relative_to(self.run_dir):
            raise Malformed(f"SAVE to {folder}, which is not in the run's folder")
        shard, _ = self.parameters.opened()
        tensors, numbers = shard.state()
        began = time.monotonic()
        told = {**numbers, **self._counts(), **self._kind(shard)}
        with self.outlet.room_for_files():
            snapshot.write_part(folder, self.parameters.server, tensors, told)
        size = sum(t.nbytes for t in tensors.values())
        print(f"saved {size / 1e6:.1f} MB in {time.monotonic() - began:.2f} s", flush=True)
        return Message(Verb.DONE)

    def _counts(self) -> dict[str, Any]:
        """How far the run is: pushes by worker, batches by block, ages."""
        marks = {str(m.rank): [m.watermark.done, sorted(m.watermark.above)] for m in self.members.all}
        return {
            "watermarks": marks,
            "progress": {
                "epoch": self.progress.epoch,
                "applied": {str(b): list(p) for b, p in self.progress.applied.items()},
            },
            "age": self.parameters.age,
            "age_before": self.parameters.age_before,
            "evict_by": self.parameters.strategy.evict_by,
        }

    def _kind(self, shard: Shard) -> Mapping[str, Any]:
        """What another run must have to go on from it."""
        layout = shard.layout
        return {
            "mode": self.parameters.mode,
            "optimizer": kept_by(self.parameters.config.optimizer),
            "dtype": layout.dtype,
            "step": shard.step,
            "tables": {
                t.name: {"dim": t.dim, "dtype": layout.dtype, "kernel": t.kernel.name, "num_rows": t.num_rows, "rows": len(t)}
                for t in shard.tables.values()
            },
            "dense": [{"name": n, "start": a, "stop": b} for n, a, b in layout.pieces],
        }  # fmt: skip
