"""What of a run's Assignment a server reads: the config, and a part of the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from trainer.config.run_config import RunConfig


class ServersPlan(Protocol):
    """The part of the plan that a server needs: processes of each role, parameters of the model, the schedule."""

    @property
    def roles(self) -> Mapping[str, int]: ...
    @property
    def workers(self) -> int: ...
    @property
    def parameters(self) -> int: ...
    @property
    def run_dir(self) -> str: ...
    @property
    def lr(self) -> float | None: ...
    @property
    def total_steps(self) -> int: ...
    @property
    def steps_per_epoch(self) -> int: ...


class ServersRun(Protocol):
    """What the launcher hands to a server: the config and the plan."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def plan(self) -> ServersPlan: ...
    @property
    def resume(self) -> str: ...
