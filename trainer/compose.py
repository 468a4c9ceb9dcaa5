"""Turns a command line into a finished config, with Hydra, and Hydra's complaints into sentences."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra
    from omegaconf import DictConfig

PACKAGE = Path(__file__).resolve().parent


def folder(name: str) -> Path:
    """The folder ``conf`` or ``recipes``: inside an installed package, beside it in a checkout."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name


@contextlib.contextmanager
def hydra_app(config_dir: str | None = None) -> Iterator[Hydra]:
    """Hydra with our vocabulary (conf/), our recipes and the user's own folder on its search path.

    Uses the classes behind ``@hydra.main`` (hydra-core is bounded below 1.4): the decorator itself prints its own
    error text and creates the run's folder before anything can be checked.
    """
    from hydra import version
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_config_search_path
    from hydra.core.config_search_path import SearchPathQuery
    from hydra.core.global_hydra import GlobalHydra

    from trainer import schema

    version.setbase("1.3")
    search_path = create_config_search_path(str(folder("conf")))
    before_schema = SearchPathQuery(provider="schema")
    search_path.prepend("trainer", f"file://{folder('recipes')}", before_schema)
    if config_dir is not None:
        own = Path(config_dir).resolve()
        if not own.is_dir():
            raise UserError(f"--config-dir {config_dir}", "there is no such folder")
        search_path.prepend("command-line", f"file://{own}", before_schema)
    outer = GlobalHydra.get_state()
    GlobalHydra.instance().clear()
    schema.register()
    try:
        yield Hydra.create_main_hydra2("trainer", search_path)
    finally:
        GlobalHydra.set_state(outer)


def compose(app: Hydra, overrides: list[str], config_name: str = "config", multirun: bool = False) -> DictConfig:
    """The composed config, with its ``hydra`` node.

    Raises:
        UserError: an unknown key, option or recipe (with the nearest match), or a value of the wrong type.
    """
    from hydra.types import RunMode

    mode = RunMode.MULTIRUN if multirun else RunMode.RUN
    with sentences(app, overrides, config_name):
        config = app.compose_config(config_name, [*overrides, f"hydra.mode={mode.name}"], run_mode=mode)
        config.hydra.overrides.hydra = [o for o in config.hydra.overrides.hydra if not o.startswith("hydra.mode=")]
        return config


@contextlib.contextmanager
def sentences(app: Hydra, overrides: list[str], config_name: str = "config") -> Iterator[None]:
    """Turn what Hydra and OmegaConf raise inside into a UserError that names the key and what to type."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except UserError:
        raise
    except (HydraException, OmegaConfBaseException) as error:
        raise _sentence(app, error, overrides, config_name) from error


def _sentence(app: Hydra, error: Exception, overrides: list[str], config_name: str) -> UserError:
    text = " ".join(str(e) for e in _chain(error))
    if found := re.search(r"Could not find '(\S+?)/?([^'/]+)'.*?Available options in '([^']+)':(.*)", text, re.S):
        group, name = found[3], found[2]
        options = [line.strip() for line in found[4].splitlines() if line.strip()][:200]
        options = [o for o in options if re.fullmatch(r"[\w\-.]+", o)]
        typed = "+recipe=" if group == "recipe" else f"{group}="
        nearest = difflib.get_close_matches(name, options, 1, 0.4)
        listing = f"{group} has {', '.join(options)}"
        return UserError(f"{typed}{name}", f"there is no such {'recipe' if group == 'recipe' else 'option'}; {listing}", typed + nearest[0] if nearest else "")  # fmt: skip
    if found := re.search(r"Could not override '([^']+)'\.?\s+No match in the defaults list", text):
        if found[1] == "recipe":
            typed = next((o for o in overrides if o.startswith("recipe=")), "recipe=NAME")
            return UserError(typed, "a recipe is added to the config, with a plus", f"+{typed}")
        return UserError(found[1], "no such group in the config", f"+{found[1]}=OPTION")
    if found := re.search(r"You must specify '([^']+)', e\.g, (\S+)=<OPTION>", text):
        return UserError(
            "nothing to train", f"no recipe and no {found[1]} chosen (python -m trainer --help lists them)",
            f"+recipe=digits_lenet, or {found[1]}=OPTION",
        )  # fmt: skip
    if found := re.search(r"Could not find '([^']+)'", text):
        return UserError(found[1], "there is no such group or config", _near(found[1].split("/")[0], _groups(app)))
    if found := re.search(r"Multiple values for ([\w/@.]+)", text):
        return UserError(found[1], "chosen twice; a group takes one option")
    if found := re.search(r"(?:Could not override|Could not append to config|Key) '([^']+)'", text):
        path = _full_key(text) or found[1]
        if "already at" in text:
            path = re.search(r"item is already at '([^']+)'", text)[1]  # type: ignore[index]
            return UserError(f"+{path}", "this key exists already, so it takes no plus", f"{path}=VALUE")
        known = _known_keys(app, overrides, config_name)
        if path not in known and (typed := _typed(overrides, path)):  # type: ignore[assignment]
            path = typed
        return UserError(path, "there is no such key", _near(path, known, "=VALUE"))
    if found := re.search(r"Value '(.*?)' (?:of type '\w+' )?could not be converted to (\w+)", text, re.S):
        path, kind = _full_key(text) or "a key", {"Integer": "an integer", "Float": "a number", "Boolean": "true or false"}.get(found[2], found[2])  # fmt: skip
        return UserError(f"{path}={found[1]}", f"must be {kind}")
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    path = _full_key(text)
    return UserError(path or "the command line", first if path is None else first.removeprefix(path))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _full_key(text: str) -> str | None:
    found = re.findall(r"full_key: (\S+)", text)
    return found[-1] if found else None


def _typed(overrides: list[str], last: str) -> str | None:
    """The key as the user typed it, for messages that only know its last part."""
    for override in overrides:
        path = override.lstrip("+~").split("=")[0].split("@")[0]
        if path == last or path.split(".")[-1] == last.split(".")[-1]:
            return path
    return None


def _near(word: str, known: list[str], suffix: str = "") -> str:
    by_leaf = [k for k in known if k.split(".")[-1] == word.split(".")[-1]]
    nearest = difflib.get_close_matches(word, known, 1, 0.6) or by_leaf[:1]
    if not nearest:
        leaves = {k.split(".")[-1]: k for k in known}
        nearest = [leaves[m] for m in difflib.get_close_matches(word.split(".")[-1], leaves, 1, 0.6)]
    return nearest[0] + suffix if nearest else ""


def _groups(app: Hydra) -> list[str]:
    return [g for g in app.config_loader.list_groups("") if g not in ("schema", "hydra")]


def _known_keys(app: Hydra, overrides: list[str], config_name: str) -> list[str]:
    """Every key of the config that the chosen groups make, for the nearest match."""
    from omegaconf import DictConfig, OmegaConf

    groups = set(_groups(app))
    chosen = [o for o in overrides if o.lstrip("+").split("=")[0].split("@")[0] in groups]
    try:
        from hydra.types import RunMode

        config = app.compose_config(config_name, chosen, run_mode=RunMode.MULTIRUN)
    except Exception:  # the choice of groups itself is wrong, so no nearest key can be named
        return sorted(groups)

    def walk(node: Any, prefix: str) -> Iterator[str]:
        for name in node:
            yield f"{prefix}{name}"
            if not OmegaConf.is_missing(node, name) and isinstance(child := node._get_node(name), DictConfig):
                yield from walk(child, f"{prefix}{name}.")

    return [k for k in walk(config, "") if not k.startswith("hydra")] + sorted(groups)
