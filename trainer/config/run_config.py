"""The finished config as typed, frozen objects of the schema's classes, made once from Hydra's composed config."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

from trainer.config import schema
from trainer.config.schema import option_of

Section = TypeVar("Section")


@dataclass
class RunConfig(schema.Config):
    """A run's finished config, immutable; ``changed`` returns another. Groups of ``schema.CONSTRUCTED`` stay mappings.

    Attributes:
        model, loss, optimizer: ``_target_`` and arguments of its constructor.
        extra: keys outside the schema, of groups whose ``_target_`` is a user's own class.
    """

    model: Mapping[str, Any] = field(default_factory=dict)
    loss: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    data: schema.DataConfig = field(default_factory=schema.DataConfig)
    sampler: schema.SamplerConfig = field(default_factory=schema.SamplerConfig)
    task: schema.TaskConfig = field(default_factory=schema.ClassificationTask)
    scheduler: schema.SchedulerConfig = field(default_factory=schema.SchedulerConfig)
    strategy: schema.StrategyConfig = field(default_factory=schema.StrategyConfig)
    launch: schema.LaunchConfig = field(default_factory=schema.LaunchConfig)
    execution: schema.ExecutionConfig = field(default_factory=schema.ExecutionConfig)
    tracking: schema.TrackingConfig = field(default_factory=schema.TrackingConfig)
    predict: schema.PredictConfig = field(default_factory=schema.PredictConfig)
    checkpoint: schema.CheckpointConfig = field(default_factory=schema.CheckpointConfig)
    extra: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def batch_size(self) -> int:
        """The batch size of one worker, once it is decided."""
        assert isinstance(self.data.batch_size, int)
        return self.data.batch_size

    @property
    def saves_checkpoints(self) -> bool:
        """Whether the run writes checkpoints from which it can resume."""
        every = self.checkpoint
        return self.mode == "train" and bool(every.every_steps or every.every_minutes or every.every_epochs)

    @staticmethod
    def of(plain: Mapping[str, Any]) -> RunConfig:
        """Make a RunConfig of a plain mapping that ``check_keys`` has accepted."""
        hints = _hints(RunConfig)
        made: dict[str, Any] = {"extra": {}}
        for name, value in plain.items():
            if name not in schema.GROUPS or name in schema.CONSTRUCTED:
                made[name] = typed(hints[name], value) if is_dataclass(hints[name]) else value
                continue
            declared = option_of(name, str(value.get("_target_")))
            made[name] = typed(declared, value)
            known = {f.name for f in fields(declared)}
            if others := {k: v for k, v in value.items() if k not in known}:
                made["extra"][name] = others
        return RunConfig(**made)

    def plain(self) -> dict[str, Any]:
        """Return this config as a plain mapping, as :meth:`of` takes it."""
        return {f.name: self.node(f.name) for f in fields(self) if f.name != "extra"}

    def node(self, name: str) -> Any:
        """Return one key's value as plain data; for a group, ``_target_`` and all arguments of its constructor."""
        value: Any = getattr(self, name)
        plain = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        return {**plain, **self.extra[name]} if name in self.extra else plain

    def changed(self, **changes: Any) -> RunConfig:
        """Return a copy of this config with other values; in groups and sections, only the given keys change."""
        plain = self.plain()
        for name, value in changes.items():
            plain[name] = {**plain[name], **value} if isinstance(value, Mapping) else value
        return RunConfig.of(plain)

    def replaced(self, group: str, node: Mapping[str, Any]) -> RunConfig:
        """Return a copy of this config with another option in one group."""
        return RunConfig.of({**self.plain(), group: node})


def typed(declared: type[Section], node: Mapping[str, Any]) -> Section:
    """Make an object of a schema class (a part of :class:`RunConfig`) from a mapping; missing keys get defaults."""
    hints = _hints(declared)  # type: ignore[arg-type]
    return declared(
        **{
            f.name: typed(hints[f.name], node[f.name]) if is_dataclass(hints[f.name]) else node[f.name]
            for f in fields(declared)  # type: ignore[arg-type]
            if f.name in node
        }
    )


@functools.cache
def _hints(declared: Any) -> dict[str, Any]:
    return get_type_hints(declared)


def yaml_text(data: Any, allow_unicode: bool = False) -> str:
    """Return data as YAML like ``yaml.safe_dump``, keys in their order; by libyaml, if PyYAML has it (10x faster)."""
    import yaml

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return str(yaml.dump(data, Dumper=dumper, sort_keys=False, allow_unicode=allow_unicode))
