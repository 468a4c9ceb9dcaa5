"""Composes the finished config from a command line, with Hydra."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.cli import hydra_features
from trainer.cli.arguments import hydra_overrides
from trainer.cli.explain import sentences
from trainer.cli.hydra_schema import register
from trainer.config import keys, schema
from trainer.config.redact import HERE, hide, values
from trainer.errors import UserError, first_line
from trainer.host.text_checks import check_text
from trainer.planning.find_checkpoint import AUTO, FRESH
from trainer.wording import literal, typed

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra
    from omegaconf import DictConfig

PACKAGE = Path(__file__).resolve().parents[1]


def folder(name: str) -> Path:
    """The path of the project's ``conf`` or ``recipes`` folder: in an installed package, or beside it in a checkout."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name


@contextlib.contextmanager
def hydra_app(config_dir: str | None = None) -> Iterator[Hydra]:
    """Context manager: yields a Hydra application that finds the project's conf/ and recipes/ and the user's folder.

    Uses the classes behind ``@hydra.main`` (hydra-core is bounded below 1.4): the decorator itself prints its own
    error text and creates the run's folder before anything can be checked.

    Raises:
        UserError: the folder ``config_dir`` does not exist.
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
            raise UserError(
                f"--config-dir {config_dir}",
                "there is no such folder",
                "--config-dir FOLDER with your recipe/, model/, ...",
            )
        search_path.prepend("command-line", f"file://{own}", before_schema)
    outer = GlobalHydra.get_state()
    GlobalHydra.instance().clear()
    register()
    try:
        app = Hydra.create_main_hydra2("trainer", search_path)
        _learn_secrets(app)
        yield app
    finally:
        # Keep the plugins: set_state would search the disk for them again.
        GlobalHydra.set_state(outer | {"instances": outer.pop("instances") | {Plugins: Plugins.instance()}})


def _learn_secrets(app: Hydra) -> None:
    """Learn the secrets of every config that Hydra composes, for a job, a sweep or ``--cfg``."""
    loader: Any = app.config_loader
    load = loader.load_configuration

    def learning(*args: Any, **kwargs: Any) -> Any:
        config = load(*args, **kwargs)
        _learn(config)
        return config

    loader.load_configuration = learning


def _learn(config: DictConfig) -> None:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    with only(config, hydra=False):
        HERE.learn(values(OmegaConf.to_container(config, resolve=False)))
        with contextlib.suppress(OmegaConfBaseException):
            HERE.learn(values(OmegaConf.to_container(config, resolve=True)))


def frozen(config: DictConfig) -> str:
    """Return a composed config as YAML from which :func:`thawed` makes the same again, secrets included."""
    from omegaconf import OmegaConf

    from trainer.config.run_config import yaml_text

    return yaml_text(OmegaConf.to_container(config, resolve=False, enum_to_str=True), allow_unicode=True)


def thawed(file: Path, run_dir: str, resume: str | None) -> DictConfig:
    """Make the config of :func:`frozen` again, which is as it was, whatever has become of its YAML files.

    Args:
        run_dir: value of ``hydra.run.dir``. resume: of ``resume.path``; None: as it was, and ``fresh`` keeps a
        checkpoint that was named.

    Raises:
        UserError: the file cannot be read, or an interpolation cannot be resolved.
    """
    import yaml
    from hydra.conf import HydraConf
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        nodes = yaml.load(file.read_text(), Loader=loader)  # a safe one  # nosec B506
        config = OmegaConf.create({**nodes, "hydra": OmegaConf.structured(HydraConf)})
        with open_dict(config.hydra):
            config.hydra.merge_with(nodes["hydra"])
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(str(file), f"the config of the submission cannot be read: {first_line(error)}") from error
    config.hydra.run.dir = literal(run_dir)
    if resume and (resume != FRESH or config.resume.path in (None, AUTO)):
        config.resume.path = resume
    _learn(config)
    place(config)
    place(config, Path(run_dir))
    check_sources(config)
    return config


def write_config(path: Path, config: Any) -> None:
    """Write a composed Hydra config as YAML, without known secrets, readable by its owner alone."""
    from omegaconf import OmegaConf

    from trainer.config.run_config import yaml_text
    from trainer.host.files import replace_file

    path.parent.mkdir(parents=True, exist_ok=True)
    shown = hide(OmegaConf.to_container(config, resolve=False, enum_to_str=True))
    replace_file(path, yaml_text(shown, allow_unicode=True), private=True)


def compose(app: Hydra, overrides: list[str], config_name: str = "config", multirun: bool = False) -> DictConfig:
    """Compose the config of these overrides with Hydra; its ``hydra`` node is included.

    Raises:
        UserError: an unknown key, option or recipe (with the nearest match), or a value of the wrong type.
    """
    from hydra.types import RunMode

    mode = RunMode.MULTIRUN if multirun else RunMode.RUN
    overrides = hydra_overrides(overrides)
    hydra_features.check_typed(overrides, multirun)
    if "${" in (here := os.getcwd()):
        raise UserError(
            f"the working folder {here}", "holds ${, which Hydra reads as a key", "a folder whose path holds none"
        )
    with sentences(app, overrides, config_name):
        with warnings.catch_warnings():  # about a missing folder, which is refused below
            warnings.filterwarnings("ignore", ".* is not available", UserWarning)
            config = app.compose_config(config_name, overrides, run_mode=mode)
        hydra_features.check_composed(config, multirun)
        _check_schema(app, config)
        config.hydra.mode = mode
        if not multirun:
            place(config)
            place(config, Path(os.path.abspath(str(_folder(config, "hydra.run.dir")))))
            check_sources(config)
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
    """Check that each schema is included at the place of its keys.

    Raises:
        UserError: a file of the user's includes a schema without ``@_here_``.
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


def _folder(config: DictConfig, key: str) -> Any:
    """The folder of a key such as ``hydra.run.dir``; an error in ``name``, a part of it, is reported for ``name``."""
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationResolutionError

    try:
        return OmegaConf.select(config, key)
    except InterpolationResolutionError:
        OmegaConf.select(config, "name")
        raise


def check_sources(config: DictConfig) -> None:
    """Raise OmegaConf's error for an invalid interpolation (:func:`trainer.cli.explain.sentences` explains it)."""
    from omegaconf import OmegaConf

    with only(config, hydra=False):
        OmegaConf.to_container(config, resolve=True)


def plain(config: DictConfig) -> dict[str, Any]:
    """Turn a composed config into a plain dict with all interpolations resolved, without the ``hydra`` node.

    Raises:
        UserError: an interpolation is invalid, or a value, as from the environment, is not UTF-8.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with only(config, hydra=False):
            resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        raise UserError(error.full_key or "the config", first_line(error)) from error
    assert isinstance(resolved, dict)
    for path, value in keys.leaves(resolved, ""):  # type: ignore[arg-type]
        check_text(f"{path}={value}", str(value), f"{path}=ANOTHER, in UTF-8")
    return resolved  # type: ignore[return-value]


def place(config: DictConfig, folder: Path | None = None) -> None:
    """Make a composed config the source of ``${hydra:...}``; ``folder`` becomes ``hydra.runtime.output_dir``."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import open_dict, read_write

    with read_write(config.hydra), open_dict(config.hydra):
        if folder is not None:
            config.hydra.runtime.output_dir = literal(str(folder))
    HydraConfig.instance().set_config(config)


def names_whole(config: DictConfig, key: str) -> bool:
    """Whether a composed config has an absolute path for that folder."""
    from omegaconf import OmegaConf

    return os.path.isabs(str(OmegaConf.select(config, key)))


def named_by_time(config: DictConfig, key: str) -> bool:
    """Whether a composed config makes that folder's name of the time, as Hydra does by default."""
    from omegaconf import OmegaConf

    above, _, last = key.rpartition(".")
    found = OmegaConf.to_container(OmegaConf.select(config, above), resolve=False)
    return isinstance(found, dict) and "${now:" in str(found[last])


def named_folder(config: DictConfig, key: str) -> Path:
    """The folder of a run or sweep in a composed config, by a key such as ``hydra.run.dir``.

    Raises:
        UserError: there is no folder or an address; or a path (also the working folder's, trainer's) is not UTF-8.
    """
    for what, where in (("the working folder", os.getcwd()), ("the folder of trainer's own files", str(PACKAGE))):
        check_text(f"{what} {where}", where, "a folder whose path is UTF-8")  # Hydra's files name both
    configured = _folder(config, key)
    if "://" in str(configured):  # as a path it would be a folder called s3: here
        why = (
            "is an address, and a run writes into a folder of this machine, from which checkpoints are copied to "
            "an address"
        )
        raise UserError(f"{key}={configured}", why, f"{key}=outputs/NAME {typed('checkpoint.to', configured)}")
    if configured is None or not str(configured).strip():
        raise UserError(
            f"{key}={'null' if configured is None else configured}", "names no folder", f"{key}=outputs/NAME"
        )
    check_text(f"{key}={configured}", str(configured), f"{key}=ANOTHER_FOLDER")
    return Path(os.path.abspath(str(configured)))
