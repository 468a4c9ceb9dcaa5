"""One worker in this very process: no process is started, what it prints goes to the screen and to workerlog.0."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer import interpreter, streams
from trainer.build import locate
from trainer.errors import Interrupted, RunFailed, UserError
from trainer.plan import Plan
from trainer.strategies.base import Seat


def in_place(plan: Plan, payload: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """Be the plan's only worker.

    Raises:
        RunFailed: the training broke; with its traceback.
    """
    seat = Seat("worker", 0, 1, 0, 1, plan.processes[0].device, dist.HashStore())
    with streams.log(run_dir / "workerlog.0") as log, teed(log), interpreter.at_work():
        try:
            outcome: dict[str, Any] = locate(plan.entries["worker"])(seat, payload)
            return outcome
        except (RunFailed, UserError, Interrupted):
            raise
        except Exception as error:
            raise RunFailed(f"worker 0 failed:\n{traceback.format_exc()}  its log: {run_dir}/workerlog.0") from error


class _Tee:
    """A text stream that also writes to a file."""

    def __init__(self, stream: Any, log: Any) -> None:
        self.stream = stream
        self.log = log

    def write(self, text: str) -> int:
        self.log.write(text)
        return int(self.stream.write(text))

    def flush(self) -> None:
        self.log.flush()
        self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def teed(log: Any) -> Iterator[None]:
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (streams.Guard(_Tee(stream, log)) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        sys.stdout, sys.stderr = before
