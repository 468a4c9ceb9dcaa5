"""Registers the schema in Hydra, which then checks keys and types when it composes a config."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from trainer.config import schema

if TYPE_CHECKING:
    from hydra.core.config_store import ConfigNode


def register() -> None:
    """Register the schema's classes in Hydra's ConfigStore, as ``schema`` (the root) and ``schema/<ClassName>``."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("suffix_of_mode", _suffix_of_mode, replace=True)
    store = ConfigStore.instance()
    store.store(name="schema", node=_root(), provider="trainer")
    of_options = {
        f"{declared.__name__}.yaml": (declared, group in schema.OPEN_GROUPS)
        for group, classes in schema.GROUPS.items()
        for declared in classes
    }
    store.repo.update(schema=Schemas(of_options))


def _suffix_of_mode(mode: Any) -> str:
    """What the name of a run's folder ends with, so that it tells whether anything was trained there."""
    return "" if mode == "train" else f"_{mode}"


class Schemas(dict[str, Any]):
    """The ConfigStore's ``schema`` group, which turns a class into a node only when Hydra loads it.
    A command needs one class of five, and to turn all of them takes longer than to compose a config."""

    def __getitem__(self, name: str) -> ConfigNode:
        return _stored(name, *super().__getitem__(name))


@cache
def _stored(name: str, declared: type, opened: bool) -> ConfigNode:
    from hydra.core.config_store import ConfigNode
    from omegaconf import OmegaConf

    node = _open(declared) if opened else OmegaConf.structured(declared)
    if "trackers" in node:  # tracking.trackers.NAME._target_=... needs no plus
        OmegaConf.set_struct(node.trackers, False)
    return ConfigNode(name=name, node=node, group="schema", package=None, provider="trainer")


def _root() -> Any:
    """The root's schema; ``metrics={name: ...}`` and ``metrics.name.key=...`` need no plus."""
    from omegaconf import OmegaConf

    root = OmegaConf.structured(schema.Config)
    OmegaConf.set_struct(root.metrics, False)
    return root


def _open(declared: type) -> Any:
    """A schema's typed keys in a mapping that takes further keys: they are for the component's constructor.

    A key that is a mapping takes any names: ``optimizer.lr_factors={head: 1}`` needs no plus.
    """
    from omegaconf import DictConfig, OmegaConf

    typed = OmegaConf.structured(declared)
    node = OmegaConf.create({})
    for name in typed:
        node[name] = typed._get_node(name)
        if isinstance(inside := node._get_node(name), DictConfig) and OmegaConf.get_type(inside) is dict:
            OmegaConf.set_struct(inside, False)
    return node
