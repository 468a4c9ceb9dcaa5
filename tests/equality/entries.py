"""What the processes of a cell do."""

from __future__ import annotations

from typing import Any

from tests.strategies.entries import parameters, taking_part
from trainer.strategies.contract import whole
from trainer.strategies.seat import Seat
from trainer.worker.loop import fit


def ended(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """The whole loop; the parameters at its beginning and its end, the validation."""
    with taking_part(seat, payload) as run:
        with whole(run.strategy):
            begin = parameters(run)
        validation = fit(run)
        with whole(run.strategy):
            end = parameters(run)  # all workers gather it
        return {"begin": begin, "end": end, "validation": validation} if seat.rank == 0 else {}


def scored(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """The whole loop; the validation alone."""
    with taking_part(seat, payload) as run:
        return {"validation": fit(run)}
