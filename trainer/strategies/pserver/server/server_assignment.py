"""The part of a run's Assignment that a server reads: the config, and a part of the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from trainer.config.run_config import RunConfig


class ServersTopology(Protocol):
    """The processes of each role."""

    @property
    def roles(self) -> Mapping[str, int]: ...
    @property
    def workers(self) -> int: ...


class ServersModel(Protocol):
    """How many parameters the model has."""

    @property
    def parameters(self) -> int: ...


class ServersBatches(Protocol):
    """The learning rate, scaled to the batch; None: the optimizer has no such key."""

    @property
    def lr(self) -> float | None: ...


class ServersLength(Protocol):
    """How long the training is, for schedules."""

    @property
    def total_steps(self) -> int: ...
    @property
    def steps_per_epoch(self) -> int: ...


class ServersPaths(Protocol):
    """The run's folder."""

    @property
    def run_dir(self) -> str: ...


class ServersPlan(Protocol):
    """The part of :class:`trainer.planning.plan.Plan` that a server needs."""

    @property
    def topology(self) -> ServersTopology: ...
    @property
    def model(self) -> ServersModel: ...
    @property
    def batches(self) -> ServersBatches: ...
    @property
    def length(self) -> ServersLength: ...
    @property
    def paths(self) -> ServersPaths: ...


class ServersRun(Protocol):
    """What the launcher hands to a server: the config and the plan."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def plan(self) -> ServersPlan: ...
    @property
    def resume(self) -> str: ...
