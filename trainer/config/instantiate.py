"""Instantiates config nodes with ``_target_``."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from trainer.config import schema
from trainer.errors import UserError, first_line

EXTRAS = ("timm",)
"""Packages that an extra of their name installs."""
NESTED = (*schema.CONSTRUCTED, "callbacks", "metrics")
"""Groups in which a mapping with a ``_target_`` may be an argument of another (``data.transforms`` is read apart)."""
OWN_INIT = "has an __init__ of its own that does not keep the keys. Leave __init__ alone: the keys are in self.config"
FETCHED: dict[str, dict[str, Any]] = {
    "timm": {"pretrained": False, "checkpoint_path": ""},
    "torchvision": {"weights": None},
}
"""Arguments of other packages' models that load pretrained weights, with the value for none."""
BUILT_ANYWHERE = ("trainer", *FETCHED)
"""Packages whose models :func:`for_saved_weights` builds without pretrained weights."""


def call_target(node: Mapping[str, Any], key: str, *args: Any, kind: type | None = None, **kwargs: Any) -> Any:
    """Call a config node's ``_target_`` with the node's other keys and the arguments given here.
    Keys in ``schema.not_arguments`` are left out.

    Args:
        kind: class of the result.

    Raises:
        UserError: the target does not exist, or does not take these arguments.
    """
    target, what = locate(node["_target_"], f"{key}._target_"), f"{key}._target_={node['_target_']}"
    left_out = ("_target_", *schema.not_arguments(key, node, required_by(target)))
    arguments = {k: v for k, v in node.items() if k not in left_out}
    if re.split(r"[.\[]", key)[0] in NESTED:
        arguments = {k: _made(v, f"{key}.{k}") for k, v in arguments.items()}
    if not callable(target):
        raise UserError(what, f"is a {type(target).__name__}, not a class or function")
    ours = kind is not None and kind.__module__.startswith("trainer.")
    if kind is not None and isinstance(target, type):
        _check_class(target, what, key, kind)
    try:
        made = target(*args, **{**arguments, **kwargs})
    except UserError:
        raise
    except Exception as error:
        if (found := re.search(r"unexpected keyword argument '(\w+)'", str(error))) and found[1] in arguments:
            if ours:
                raise UserError(what, OWN_INIT) from error
            name = f"{key}.{found[1]}"
            raise UserError(
                name, f"{node['_target_']} takes no such argument (~{name} takes away what a recipe brings)"
            ) from error
        said, wrong = first_line(error), blamed(lambda some: target(*args, **{**some, **kwargs}), arguments)
        if wrong is not None:
            raise UserError(
                f"{key}.{wrong}={arguments[wrong]}",
                f"{node['_target_']} does not take this value: {said}",
                _default(target, key, wrong),
            ) from error
        shown = ", ".join(f"{k}={v}" for k, v in arguments.items())
        raise UserError(f"{key} ({node['_target_']})", f"called with {shown or 'nothing'} it says: {said}") from error
    if kind is not None and not isinstance(made, kind):
        raise UserError(what, f"gave a {type(made).__name__}, not a {_named(kind)}")
    if ours and not hasattr(made, "config"):
        raise UserError(what, OWN_INIT)
    return made


def _made(value: Any, key: str) -> Any:
    """An argument, in which each mapping with a ``_target_`` is replaced by its result, as Hydra's instantiate does."""
    if isinstance(value, Mapping):
        made = {k: _made(v, f"{key}.{k}") for k, v in value.items()}
        return call_target(made, key) if isinstance(value.get("_target_"), str) else made
    if isinstance(value, (list, tuple)):
        return [_made(v, f"{key}[{n}]") for n, v in enumerate(value)]
    return value


def _check_class(target: type, what: str, key: str, kind: type) -> None:
    """Check that a class is a subclass of ``kind``, and has all of its methods.

    Raises:
        UserError: it is not, or lacks methods.
    """
    if not issubclass(target, kind):
        if target.__new__ is object.__new__:
            raise UserError(what, f"is no {_named(kind)}, which {key} needs")
        return
    if missing := sorted(getattr(target, "__abstractmethods__", ())):
        raise UserError(what, f"lacks the {'method' if len(missing) == 1 else 'methods'} {', '.join(missing)}")


def _named(kind: type) -> str:
    """A class's name as users import it, e.g. ``torch.nn.Module``."""
    package = ".".join(kind.__module__.split(".")[:2]) if kind.__module__.startswith("torch.") else kind.__module__
    return f"{package}.{kind.__qualname__}"


def blamed(call: Callable[[dict[str, Any]], Any], arguments: Mapping[str, Any]) -> str | None:
    """Find the argument that makes a call fail: the call works without it. None if no single argument is to blame.

    It is not tried if each call would download weights.
    """
    if any(arguments.get(name) for name in ("weights", "pretrained", "checkpoint_path")):
        return None
    found = []
    for name in arguments:
        with contextlib.suppress(Exception):
            call({k: v for k, v in arguments.items() if k != name})
            found.append(name)
    return found[0] if len(found) == 1 else None


def _default(target: Any, key: str, name: str) -> str:
    """The override that gives an argument the target's default; empty if there is none.

    Models are left out, as their defaults are for other data.
    """
    if key == "model":
        return ""
    try:
        default = inspect.signature(target).parameters[name].default
    except (TypeError, ValueError, KeyError):
        return ""
    if not isinstance(default, (bool, int, float, tuple)):
        return ""
    shown = f"[{','.join(map(str, default))}]" if isinstance(default, tuple) else str(default).lower()
    return f"{key}.{name}={shown}"


def for_saved_weights(node: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the model's config node without pretrained weights, for a model into which saved weights are loaded.

    A target that downloads weights names another target without them in ``without_pretrained``; timm and torchvision
    have an argument for it.
    """
    target = str(node["_target_"])
    plain = getattr(locate(target, "model._target_"), "without_pretrained", None)
    if isinstance(plain, str):
        return {**node, "_target_": plain}
    fetched = FETCHED.get(target.replace(":", ".").partition(".")[0], {})
    return {**node, **{name: none for name, none in fetched.items() if name in node}}


def needs_skeleton(node: Mapping[str, Any]) -> bool:
    """Whether building the model again may load pretrained weights: it is the user's, or of a package that
    :func:`for_saved_weights` does not know, and names no ``without_pretrained``."""
    target = str(node["_target_"])
    plain = getattr(locate(target, "model._target_"), "without_pretrained", None)
    return not isinstance(plain, str) and target.replace(":", ".").partition(".")[0] not in BUILT_ANYWHERE


def required_by(target: Any) -> list[str]:
    """The required arguments of a class or function; empty if its signature is not known."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.kind in named and p.default is inspect.Parameter.empty]


def locate(target: str, key: str = "_target_") -> Any:
    """Import the object that ``package.module.name`` or ``package.module:name`` names.

    Raises:
        UserError: it does not exist; the message has the nearest match.
    """
    parts = target.replace(":", ".").split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:cut])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and not (module_name + ".").startswith(error.name + "."):
                raise UserError(f"{key}={target}", f"importing {module_name} failed: {error}") from error
            continue
        except Exception as error:
            raise UserError(
                f"{key}={target}", f"importing {module_name} failed: {type(error).__name__}: {error}"
            ) from error
        for number, part in enumerate(parts[cut:]):
            if not hasattr(found, part):
                names = [n for n in dir(found) if not n.startswith("_")]
                raise missing(key, target, ".".join(parts[: cut + number]), part, names)
            found = getattr(found, part)
        return found
    raise no_module(key, target)


def no_module(key: str, target: str) -> UserError:
    """The error for a ``_target_`` whose package cannot be found."""
    package, _, rest = target.partition(".")
    if package in EXTRAS:
        return UserError(
            f"{key}={target}",
            f"needs {package}, which is not installed",
            f"pip install 'trainer[{package}]' (in a checkout: '.[{package}]')",
        )
    nearest = difflib.get_close_matches(package, ("torch", "torchvision", "trainer"), 1, 0.6)
    return UserError(
        f"{key}={target}",
        f"there is no module {package!r} here (is it on PYTHONPATH?)",
        f"{key}={nearest[0]}.{rest}" if nearest else "",
    )


def missing(key: str, target: str, owner: str, name: str, names: list[str]) -> UserError:
    """The error for a ``_target_`` whose module has no such name; it proposes the nearest name."""
    nearest = difflib.get_close_matches(name, names, 1, 0.6)
    return UserError(f"{key}={target}", f"{owner} has no {name!r}", f"{key}={owner}.{nearest[0]}" if nearest else "")
