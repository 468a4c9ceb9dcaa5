"""Composes the finished config from a command line, with Hydra."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config import schema
from trainer.config.redact import HERE, hide, values
from trainer.errors import UserError, WrongValue, first_line

if TYPE_CHECKING:
    import argparse

    from hydra._internal.hydra import Hydra
    from hydra.core.config_store import ConfigNode
    from hydra.types import RunMode
    from omegaconf import DictConfig

PACKAGE = Path(__file__).resolve().parents[1]
TEXT_WITH_COMMAS = (
    "launch.ips",
    "launch.server_hosts",
    "launch.server_ports",
    "launch.server_endpoints",
    "launch.worker_endpoints",
)


def folder(name: str) -> Path:
    """The path of the project's ``conf`` or ``recipes`` folder: in an installed package, or beside it in a checkout."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name


def flags(args: argparse.Namespace) -> list[str]:
    """Return ``--config-dir`` and ``--config-name`` as typed: the flags that the command which repeats a run needs."""
    given = (("--config-dir", args.config_dir), ("--config-name", args.config_name))
    return [word for flag, value in given if value for word in (flag, str(value))]


@contextlib.contextmanager
def hydra_app(config_dir: str | None = None) -> Iterator[Hydra]:
    """Context manager: yields a Hydra application that finds the project's conf/ and recipes/ and the user's folder.

    Uses the classes behind ``@hydra.main`` (hydra-core is bounded below 1.4): the decorator itself prints its own
    error text and creates the run's folder before anything can be checked.

    Raises:
        UserError: there is no folder ``config_dir``.
    """
    from hydra import version
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_config_search_path
    from hydra.core.config_search_path import SearchPathQuery
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.plugins import Plugins

    version.setbase("1.3")
    search_path = create_config_search_path(str(folder("conf")))
    before_schema = SearchPathQuery(provider="schema")
    search_path.prepend("trainer", f"file://{folder('recipes')}", before_schema)
    if config_dir is not None:
        own = Path(config_dir).resolve()
        if not own.is_dir():
            raise UserError(f"--config-dir {config_dir}", "there is no such folder", "--config-dir FOLDER with your recipe/, model/, ...")  # fmt: skip
        search_path.prepend("command-line", f"file://{own}", before_schema)
    outer = GlobalHydra.get_state()
    GlobalHydra.instance().clear()
    register()
    try:
        app = Hydra.create_main_hydra2("trainer", search_path)
        _learn_secrets(app)
        yield app
    finally:
        # Plugins are no part of the state, and set_state would look for them again, all over the disk.
        GlobalHydra.set_state(outer | {"instances": outer.pop("instances") | {Plugins: Plugins.instance()}})


def _learn_secrets(app: Hydra) -> None:
    """Every config that Hydra composes, for a job, a sweep or ``--cfg``, tells this process what it must not show."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    loader: Any = app.config_loader
    load = loader.load_configuration

    def learning(*args: Any, **kwargs: Any) -> Any:
        config = load(*args, **kwargs)
        with only(config, hydra=False):
            HERE.learn(values(OmegaConf.to_container(config, resolve=False)))
            with contextlib.suppress(OmegaConfBaseException):
                HERE.learn(values(OmegaConf.to_container(config, resolve=True)))
        return config

    loader.load_configuration = learning


@contextlib.contextmanager
def ours_to_write() -> Iterator[None]:
    """Context manager: files that Hydra saves (multirun.yaml, .hydra/) are written by :func:`write_config`."""
    from hydra.core import utils
    from omegaconf import OmegaConf

    saved, written = OmegaConf.save, utils._save_config

    def save(config: Any, f: Any, resolve: bool = False) -> None:
        write_config(Path(f), config, resolve)

    def write(config: Any, filename: str, output_dir: Path) -> None:
        write_config(Path(output_dir) / filename, config)

    OmegaConf.save, utils._save_config = staticmethod(save), write  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        OmegaConf.save, utils._save_config = staticmethod(saved), written  # type: ignore[assignment, method-assign]


def write_config(path: Path, config: Any, resolve: bool = False) -> None:
    """Write a composed Hydra config as YAML, without known secrets, readable by its owner alone."""
    from omegaconf import OmegaConf

    from trainer.config.run_config import yaml_text
    from trainer.host.files import replace_file

    path.parent.mkdir(parents=True, exist_ok=True)
    shown = hide(OmegaConf.to_container(config, resolve=resolve, enum_to_str=True))
    replace_file(path, yaml_text(shown, allow_unicode=True), private=True)


def register() -> None:
    """Register the schema's classes in Hydra's ConfigStore, as ``schema`` (the root) and ``schema/<ClassName>``."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(name="schema", node=_root(), provider="trainer")
    of_options = {
        f"{declared.__name__}.yaml": (declared, group in schema.OPEN_GROUPS)
        for group, classes in schema.GROUPS.items()
        for declared in classes
    }
    store.repo.update(schema=Schemas(of_options))


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


def compose(app: Hydra, overrides: list[str], config_name: str = "config", multirun: bool = False) -> DictConfig:
    """Compose the config of these overrides with Hydra; its ``hydra`` node is included.

    Raises:
        UserError: an unknown key, option or recipe (with the nearest match), or a value of the wrong type.
    """
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    mode = RunMode.MULTIRUN if multirun else RunMode.RUN
    overrides = quoted(overrides)
    with sentences(app, overrides, config_name):
        config = app.compose_config(config_name, [*overrides, f"hydra.mode={mode.name}"], run_mode=mode)
        _check_schema(app, config)
        config.hydra.overrides.hydra = [o for o in config.hydra.overrides.hydra if not o.startswith("hydra.mode=")]
        if not multirun:
            OmegaConf.select(config, "hydra.run.dir")
            with only(config, hydra=False):
                OmegaConf.to_container(config, resolve=True)
        return config


@contextlib.contextmanager
def only(config: DictConfig, hydra: bool) -> Iterator[None]:
    """Context manager: the config holds its ``hydra`` node alone, or all other nodes, so that it is cheap to copy."""
    content: Any = config._content
    vars(config).update(_content={key: node for key, node in content.items() if (key == "hydra") == hydra})
    try:
        yield
    finally:
        vars(config).update(_content=content)


def _check_schema(app: Hydra, config: DictConfig) -> None:
    """Each schema is taken in where its keys belong.

    Raises:
        UserError: a file of the user's names one without ``@_here_``.
    """
    loader: Any = app.config_loader
    for group in schema.GROUPS:
        if "schema" not in (config.get(group) or ()):
            continue
        file = f"{group}/{config.hydra.runtime.choices.get(group)}"
        loaded = loader.repository.load_config(file)
        for default in (loaded.defaults_list or ()) if loaded is not None else ():
            path = str(getattr(default, "path", "") or "")
            if path.startswith("/schema/") and not default.package:
                raise UserError(f"{path} (in {file}.yaml)", f"its keys would go to {group}.schema", f"{path}@_here_")


def compose_sweep(app: Hydra, overrides: list[str], config_name: str) -> tuple[DictConfig, list[str]]:
    """Compose the config of a sweep; also returns the overrides that only single points can take.

    Raises:
        UserError: as :func:`compose`.
    """
    later: list[str] = []
    while True:
        try:
            with leaving_out(app, later, {}):
                return compose(app, overrides, config_name, multirun=True), later
        except UserError as error:
            strange = [o for o in overrides if o not in later and key_of(o) in error.unusable]
            if not strange:
                raise
            later += strange


def key_of(override: str) -> str:
    """The config key that an override sets: ``+optimizer.lr=0.1`` gives ``optimizer.lr``."""
    return override.lstrip("+~").partition("=")[0]


@contextlib.contextmanager
def leaving_out(app: Hydra, later: list[str], strange: Mapping[tuple[str, ...], list[str]]) -> Iterator[None]:
    """Context manager: Hydra composes a sweep without the overrides ``later``, and points without ``strange`` ones."""
    loader: Any = app.config_loader
    whole, point = loader.load_configuration, loader.load_sweep_config

    def load(*, overrides: list[str], run_mode: RunMode, **others: Any) -> DictConfig:
        from hydra.types import RunMode
        from omegaconf import OmegaConf, open_dict, read_write

        others["run_mode"] = run_mode
        if run_mode == RunMode.RUN:  # a point
            return whole(overrides=overrides, **others)  # type: ignore[no-any-return]
        config: DictConfig = whole(overrides=[o for o in overrides if o not in later], **others)
        with read_write(config), open_dict(config):
            task: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
            known = [*task, *later]
            config.hydra.overrides.task = [o for o in overrides if o in known]
        return config

    def load_point(master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        left_out = strange.get(tuple(sweep_overrides), ())
        config: DictConfig = point(master_config, [o for o in sweep_overrides if o not in left_out])
        return config

    loader.load_configuration, loader.load_sweep_config = load, load_point
    try:
        yield
    finally:
        loader.load_configuration, loader.load_sweep_config = whole, point


def quoted(overrides: list[str]) -> list[str]:
    """Rewrite overrides for Hydra: ``resume=X`` becomes ``resume.path=X``, and texts with commas are quoted."""
    overrides = [f"resume.path={o.removeprefix('resume=')}" if o.startswith("resume=") else o for o in overrides]
    return [f"{o.partition('=')[0]}='{o.partition('=')[2]}'" if _has_commas(o) else o for o in overrides]


def _has_commas(override: str) -> bool:
    name, _, value = override.partition("=")
    return name.lstrip("+") in TEXT_WITH_COMMAS and "," in value and value[0] not in "'\""


@contextlib.contextmanager
def sentences(app: Hydra, overrides: list[str], config_name: str = "config") -> Iterator[None]:
    """Context manager: errors of Hydra, OmegaConf and YAML become a UserError that names the key and what to type.

    Hydra raises ValueError, TypeError and AttributeError too where an override is not what it expects.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        yield
    except UserError:
        raise
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, TypeError, AttributeError) as error:
        from trainer.cli.explain import explain
        from trainer.cli.vocabulary import Vocabulary

        raise explain(Vocabulary(app, overrides, config_name), error) from error


@contextlib.contextmanager
def usual_values(app: Hydra, overrides: list[str], config_name: str = "config") -> Iterator[None]:
    """Context manager: the error for a refused value proposes the value that the key has without the override."""
    try:
        yield
    except WrongValue as error:
        from trainer.cli.vocabulary import Vocabulary

        raise error.usually(Vocabulary(app, overrides, config_name).usual(error.path)) from error


def plain(config: DictConfig) -> dict[str, Any]:
    """Turn a composed config into a plain dict with all interpolations resolved, without the ``hydra`` node.

    Raises:
        UserError: an interpolation that leads nowhere.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with only(config, hydra=False):
            resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        raise UserError(error.full_key or "the config", first_line(error)) from error
    assert isinstance(resolved, dict)
    return resolved  # type: ignore[return-value]


def typed_keys(overrides: Sequence[str]) -> list[str]:
    """The config keys that these overrides set."""
    return [o.lstrip("+~").split("=", 1)[0] for o in overrides]


def named_folder(config: DictConfig, key: str) -> Path:
    """The folder that a key of Hydra's own config names, such as ``hydra.run.dir``.

    Raises:
        UserError: it names none.
    """
    from omegaconf import OmegaConf

    given = OmegaConf.select(config, key)
    if given is None or not str(given).strip():
        raise UserError(f"{key}={'null' if given is None else given}", "names no folder", f"{key}=outputs/NAME")
    return Path(os.path.abspath(str(given)))
