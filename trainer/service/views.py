"""What the API answers about a run: typed, with every secret redacted."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from trainer.config import redact
from trainer.config.keys import key_of, leaves
from trainer.service import run_files
from trainer.service.queue import ALIVE, OVER, OWN, WAITING, Queue, Run
from trainer.service.queue import Slots as OfQueue
from trainer.service.slots import without
from trainer.service.tokens import Caller

START = "python -m trainer"
OF_QUEUE = (
    *("launch", "launch.wait", "launch.once", "launch.priority", "launch.runner", "launch.max_preemptions"),
    *("launch.cores", "launch.gpus", "launch.memory", "launch.python", "hydra.run.dir"),
)
"""Keys that a run without the queue does not have, and its folder."""
KEY = re.compile(r"api/([^/]+)/(.*)", re.DOTALL)
"""The key of a run that the API has submitted: who, and their own key."""


class Slots(BaseModel):
    """Slots of a host, or of a run. ``memory``: bytes."""

    cores: list[int]
    gpus: list[str]
    memory: int


class Needs(BaseModel):
    """How many slots a run needs. ``memory``: bytes."""

    cores: int
    gpus: int
    memory: int


class Progress(BaseModel):
    """How far a run is: ``status.json`` of its folder."""

    step: int | None = None
    total: int | None = None
    epoch: int | None = None
    percent: float | None = None
    eta_s: float | None = None
    metrics: dict[str, float | None] = {}


class RunView(BaseModel):
    """A run of the queue. ``position``: how many wait before it. ``by``: the token that submitted it; empty: a command
    line. ``may``: what this caller may ask for. Times are seconds since 1970."""

    number: int
    name: str
    state: str
    reason: str
    asked: str
    position: int | None
    by: str
    key: str | None
    priority: int
    folder: str
    command: str
    slots: Slots
    needs: Needs
    life: int
    preempted: int
    code: int | None
    submitted: float
    began: float | None
    ended: float | None
    may: list[str]
    progress: Progress | None


class RunDetail(RunView):
    """A run with its config, flat and by key, its result once it has one, and its pictures."""

    config: dict[str, Any]
    result: dict[str, Any] | None
    pictures: list[str]


class HostView(BaseModel):
    """A host: its slots, and those that no run has."""

    host: str
    all: Slots
    free: Slots


def learn(queue: Queue, run: Run) -> None:
    """Find the secrets of a run's environment and command line, before anything of the run is shown. These never
    change, so they are found once."""
    key = (run.folder, run.number, run.submitted)
    if key not in _KNOWN:
        environment, _ = queue.start_of(run.number)
        while len(_KNOWN) >= MOST_KNOWN:
            _KNOWN.pop(next(iter(_KNOWN)))
        _KNOWN[key] = frozenset(redact.of_environment(environment) | redact.of_command_line(run.words))


def known(run: Run) -> frozenset[str]:
    """The secrets of a run, which were learned."""
    return _KNOWN[run.folder, run.number, run.submitted]


MOST_KNOWN = 50_000
_KNOWN: dict[tuple[str, int, float], frozenset[str]] = {}


def by(run: Run) -> str:
    """The name of the token that submitted a run; '' of a command line."""
    found = KEY.fullmatch(run.key or "")
    return found[1] if found else ""


def may(run: Run, caller: Caller) -> list[str]:
    """What a caller may ask of a run: everything of their own runs, the owner of all runs."""
    if not caller.owner and by(run) != caller.name:
        return []
    return ["resume", "retry"] if run.state in OVER else [] if run.asked else ["cancel"]


def view(run: Run, caller: Caller, waiting: Sequence[int]) -> RunView:
    """Describe a run.

    Args:
        waiting: the numbers of the runs that wait, in their order.
    """
    values = _values(run, caller, waiting)
    return RunView(**_hidden(values, run))


def detail(run: Run, caller: Caller, waiting: Sequence[int]) -> RunDetail:
    """Describe a run in full."""
    folder = Path(run.folder)
    result, config = run_files.json_of(folder, "result.json"), _yaml(run_files.text_of(folder, "config.yaml"))
    values = {
        **_values(run, caller, waiting),
        "config": finite(dict(leaves(config, ""))) if isinstance(config, dict) else {},
        "result": finite(result) if isinstance(result, dict) and run.state in OVER else None,
        "pictures": [one.path for one in run_files.listed(folder) if Path(one.path).suffix in run_files.PICTURES],
    }
    return RunDetail(**_hidden(values, run))


def _hidden(values: dict[str, Any], run: Run) -> dict[str, Any]:
    """The values without secrets. A run's ``key`` is a name, although it is called as secrets are."""
    return {**redact.hide(values, known(run)), "key": redact.hide(values.get("key"), known(run))}


def _values(run: Run, caller: Caller, waiting: Sequence[int]) -> dict[str, Any]:
    found = KEY.fullmatch(run.key or "")
    return {
        "number": run.number,
        "name": run.name,
        "state": run.state,
        "reason": run.reason,
        "asked": run.asked,
        "position": waiting.index(run.number) if run.state in WAITING and run.number in waiting else None,
        "by": by(run),
        "key": found[2] if found else run.key,
        "priority": run.priority,
        "folder": run.folder,
        "command": f"{START} {redact.command(repeated(run), known(run))}",
        "slots": slots(run.slots).model_dump(),
        "needs": {"cores": run.cores, "gpus": run.gpus, "memory": run.memory},
        "life": run.life,
        "preempted": run.preempted,
        "code": run.code,
        "submitted": run.submitted,
        "began": run.began,
        "ended": run.ended,
        "may": may(run, caller),
        "progress": _progress(run),
    }


def repeated(run: Run) -> list[str]:
    """The words that repeat a run by hand: without the queue, and in a new folder."""
    own = OF_QUEUE if run.engine == OWN else ("launch.wait", "hydra.run.dir")
    return [word for word in run.words if key_of(word) not in own]


def _progress(run: Run) -> dict[str, Any] | None:
    if run.state not in (*ALIVE, *OVER):
        return None
    status = run_files.json_of(Path(run.folder), "status.json")
    if not isinstance(status, dict):
        return None
    try:
        return Progress(
            **{name: finite(status.get(name)) for name in Progress.model_fields if name in status}
        ).model_dump()
    except ValueError:
        return None


def slots(of_queue: OfQueue) -> Slots:
    """Slots as the API has them."""
    return Slots(cores=list(of_queue.cores), gpus=list(of_queue.gpus), memory=of_queue.memory)


def host(all_slots: OfQueue, alive: Sequence[Run]) -> HostView:
    """Describe this host."""
    free = without(all_slots, [run.slots for run in alive])
    return HostView(host=socket.gethostname(), all=slots(all_slots), free=slots(free))


def _yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        return None


def finite(node: Any) -> Any:
    """The same with null for NaN and infinity, which JSON does not have."""
    if isinstance(node, float):
        return node if node == node and abs(node) != float("inf") else None
    if isinstance(node, dict):
        return {str(key): finite(value) for key, value in node.items()}
    return [finite(value) for value in node] if isinstance(node, list) else node
