"""Hydra composes each choice of options once in a testing process: thousands of configs differ in values alone.

What Hydra does before it looks at a command line's values depends on the options chosen (``model=lenet``) and on the
files of the search path, and takes nine tenths of the time. The first config of a choice is kept as it is then, and the
next ones are copies. The values are Hydra's own work each time, and so is all that is asked of a folder that a test has
made. ``tests/config/test_schema.py`` compares.

A config takes 0.07 s of CPU so, and 0.23 s without: of some thousand configs of ``make test`` more than a tenth of its
time.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hydra._internal import config_loader_impl
from hydra.core.config_store import ConfigStore

from trainer.cli import compose, hydra_schema
from trainer.planning import key_checks

FIXED = {f"file://{compose.folder(name)}" for name in ("conf", "recipes")}
"""Folders whose files stay as they are while tests run."""


class Kept(list[Any]):
    """A defaults list, with the choice that it is of."""

    choice: tuple[Any, ...]


@contextmanager
def once() -> Iterator[None]:
    """Inside, the schema is stored and each choice of options is composed once."""
    hydra_schema.register()
    schemas = ConfigStore.instance().repo["schema"]
    for name in schemas:
        schemas[name]  # is made when it is asked for: processes that are forked from here have it
    loader: Any = config_loader_impl.ConfigLoaderImpl
    listed, merged, checked = (
        config_loader_impl.create_defaults_list,
        loader._compose_config_from_defaults_list,
        key_checks.check_target,
    )
    lists: dict[tuple[Any, ...], bytes] = {}
    configs: dict[tuple[Any, ...], bytes] = {}
    targets: set[tuple[str, str]] = set()

    def create_defaults_list(repo: Any, config_name: str, overrides_list: list[Any], **how: bool) -> Any:
        sources = [source.full_path() for source in repo.get_sources()]
        chosen = [o for o in overrides_list if repo.group_exists(o.key_or_group)]
        strange = any(path.startswith("file://") and path not in FIXED for path in sources)
        if strange or any(o.is_sweep_override() or isinstance(o.value(), dict) for o in chosen):
            return listed(repo=repo, config_name=config_name, overrides_list=overrides_list, **how)
        choice = (config_name, *how.values(), *sources, *(o.input_line for o in chosen))
        if choice not in lists:
            lists[choice] = pickle.dumps(listed(repo=repo, config_name=config_name, overrides_list=chosen, **how))
        found = pickle.loads(lists[choice])
        found.config_overrides = [o for o in overrides_list if o not in chosen and not o.is_sweep_override()]
        found.defaults = Kept(found.defaults)
        found.defaults.choice = choice
        return found

    def compose_from(self: Any, defaults: list[Any], repo: Any) -> Any:
        if not isinstance(defaults, Kept):
            return merged(self, defaults=defaults, repo=repo)
        if defaults.choice not in configs:
            configs[defaults.choice] = pickle.dumps(merged(self, defaults=defaults, repo=repo))
        return pickle.loads(configs[defaults.choice])

    def check_target(target: str, key: str) -> None:
        if (target, key) not in targets:
            checked(target, key)
            if target.partition(".")[0] in ("trainer", "torch", "torchvision"):
                targets.add((target, key))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "register", lambda: None)
        patch.setattr(ConfigStore, "__deepcopy__", lambda store, memo: store, raising=False)
        patch.setattr(config_loader_impl, "create_defaults_list", create_defaults_list)
        patch.setattr(loader, "_compose_config_from_defaults_list", compose_from)
        patch.setattr(key_checks, "check_target", check_target)
        yield
