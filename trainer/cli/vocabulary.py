"""The groups, options and keys of a command line: all on Hydra's search path, also the user's."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainer.config import schema

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra
    from hydra.core.override_parser.types import Override


class Vocabulary:
    """Looks up the groups, options and keys that a command line can name, to propose the nearest one after a mistake.

    Args:
        app: Hydra with its search path.
        overrides: what was typed.
        config_name: the primary config.
    """

    open_groups = schema.CONSTRUCTED

    def __init__(self, app: Hydra, overrides: list[str], config_name: str) -> None:
        self.loader: Any = app.config_loader
        self.overrides = overrides
        self.config_name = config_name

    def parsed(self, typed: str) -> Override | None:
        """Parse one override as Hydra does; None if Hydra cannot."""
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException

        try:
            return OverridesParser.create().parse_overrides([typed])[0]
        except (HydraException, ValueError):  # or a number with too many digits for Python
            return None

    def typed(self, path: str) -> str:
        """The override that the user typed for the key ``path``, or ``path`` itself if there is none."""
        for override in self.overrides:
            if override.lstrip("+~").partition("=")[0].partition("@")[0] == path:
                return override
        return path

    def typed_value(self, path: str) -> Any:
        """The value that the user typed for a key; None if none was typed, or several to sweep over."""
        found = [o for o in map(self.parsed, self.overrides) if o is not None and o.key_or_group == path]
        if len(found) != 1 or found[0].is_sweep_override() or found[0].is_delete():
            return None
        value: Any = found[0].value()
        return getattr(value, "text", value)

    def usual(self, path: str) -> Any:
        """The value that a key would have without the user's override; None if that config cannot be composed."""
        from hydra.types import RunMode
        from omegaconf import OmegaConf

        others = [o for o in self.overrides if o.lstrip("+~").partition("=")[0] != path]
        try:
            config = self.loader.load_configuration(self.config_name, others, RunMode.MULTIRUN)
            return OmegaConf.select(config, path)
        except Exception:  # another error
            return None

    @property
    def recipe(self) -> str:
        """The recipe that the command line names (``+recipe=NAME``); '' without one."""
        return next((o.partition("=")[2] for o in self.overrides if o.startswith("+recipe=")), "")

    @property
    def config_dir(self) -> str:
        """The user's folder of options (``--config-dir``); '' without one."""
        path = self.loader.get_search_path().get_path()
        return next((str(element.path) for element in path if element.provider == "command-line"), "")

    @functools.cached_property
    def groups(self) -> list[str]:
        """All config groups that a command line may choose from."""
        return [g for g in self.loader.list_groups("") if g not in ("schema", "hydra")]

    def options(self, group: str) -> list[str]:
        """The options of a config group; empty when there is no such group."""
        return list(self.loader.get_group_options(group))

    @functools.cached_property
    def chosen(self) -> dict[str, str]:
        """The option that the command line chooses in each config group; empty if a choice cannot be parsed."""
        from hydra.types import RunMode

        try:
            found = self.loader.compute_defaults_list(self.config_name, self._choices(), RunMode.MULTIRUN)
        except Exception:  # a choice is wrong
            return {}
        return {k: str(v) for k, v in found.overrides.known_choices.items() if v is not None}

    def _choices(self) -> list[str]:
        """The overrides that choose options."""
        return [o for o in self.overrides if o.lstrip("+~").partition("=")[0].partition("@")[0] in self.groups]

    def own_class(self, group: str) -> str:
        """The ``_target_`` that a config group has, if it is of none of the trainer's options; else ''."""
        from hydra.types import RunMode
        from omegaconf import OmegaConf

        key = f"{group}._target_"
        typed = [o for o in self.overrides if o.lstrip("+").partition("=")[0] == key]
        try:
            config = self.loader.load_configuration(self.config_name, [*self._choices(), *typed], RunMode.MULTIRUN)
            target = OmegaConf.select(config, key)
        except Exception:  # another error
            return ""
        shipped = [getattr(option, "_target_", None) for option in schema.GROUPS.get(group, ())]
        return "" if target is None or target in shipped else str(target)

    def usual_option(self, group: str, typed: str) -> str:
        """The option that a config group would have without the override ``typed``, else the group's first option."""
        others = copy.copy(self)
        others.overrides = [o for o in self.overrides if o != typed]
        others.__dict__.pop("chosen", None)
        options = self.options(group)
        found = others.chosen.get(group)
        return found if found in options else options[0]

    def option_keys(self, group: str, option: str) -> list[str]:
        """The keys that an option of a config group adds, without the group's name."""
        return sorted(set(self._keys(f"{group}/{option}")))

    def keys(self) -> list[str]:
        """Every key of the config that the chosen options make, and the names of the groups."""
        known = [*self._keys("schema"), *self.groups]
        for group, option in self.chosen.items():
            if group in self.groups and group != "recipe":
                known += [f"{group}.{k}" for k in self.option_keys(group, option)]
        return known

    def package(self, path: str) -> str | None:
        """The ``@package`` of a config file: where its keys go in the whole config; None without one."""
        loaded = self.loader.repository.load_config(path)
        return loaded.header["package"] if loaded is not None else None

    def _keys(self, path: str) -> Iterator[str]:
        """The keys of a config file, and of files that its defaults list includes at the same place."""
        from omegaconf import DictConfig

        loaded = self.loader.repository.load_config(path)
        if loaded is None or not isinstance(loaded.config, DictConfig):
            return
        for default in loaded.defaults_list or ():
            schema_path = getattr(default, "path", None)
            if schema_path not in (None, "_self_"):
                yield from self._keys(
                    schema_path[1:] if schema_path.startswith("/") else f"{path.rpartition('/')[0]}/{schema_path}"
                )
        yield from _paths(loaded.config, "")


def _paths(node: Any, prefix: str) -> Iterator[str]:
    from omegaconf import DictConfig

    for name in node:
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_missing() and not child._is_none() and len(child):
            yield from _paths(child, f"{prefix}{name}.")
        elif name != "defaults":
            yield f"{prefix}{name}"
