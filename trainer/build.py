"""Makes objects from config nodes with ``_target_``, and finds out without importing whether a target exists."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.errors import UserError


def call_target(node: Mapping[str, Any], key: str, *args: Any, **kwargs: Any) -> Any:
    """Call the node's ``_target_`` with the node's other keys (and what is given here).

    Raises:
        UserError: there is no such target, or it does not take these arguments, or refuses them.
    """
    target = locate(node["_target_"], f"{key}._target_")
    arguments = {k: v for k, v in node.items() if k != "_target_"}
    try:
        return target(*args, **{**arguments, **kwargs})
    except (TypeError, ValueError) as error:
        raise UserError(f"{key} ({node['_target_']})", str(error)) from error


def locate(target: str, key: str = "_target_") -> Any:
    """The object behind ``package.module.name`` or ``package.module:name``.

    Raises:
        UserError: there is none; with the nearest match.
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
        for number, part in enumerate(parts[cut:]):
            if not hasattr(found, part):
                names = [n for n in dir(found) if not n.startswith("_")]
                raise missing(key, target, ".".join(parts[: cut + number]), part, names)
            found = getattr(found, part)
        return found
    raise UserError(f"{key}={target}", f"there is no module {parts[0]!r} here (is it on PYTHONPATH?)")


def missing(key: str, target: str, owner: str, name: str, names: list[str]) -> UserError:
    """The error for a name that its module does not have."""
    nearest = difflib.get_close_matches(name, names, 1, 0.6)
    return UserError(f"{key}={target}", f"{owner} has no {name!r}", f"{key}={owner}.{nearest[0]}" if nearest else "")


def check_target(target: str, key: str) -> None:
    """Refuse a target that does not exist, by reading source files instead of importing (torch takes seconds).

    What cannot be decided that way (compiled modules, names made at run time) passes; ``locate`` decides it later.

    Raises:
        UserError: there is no such module or name.
    """
    parts = target.replace(":", ".").split(".")
    if len(parts) < 2 or not all(p.isidentifier() for p in parts):
        raise UserError(f"{key}={target}", "must be package.module.name of a class or function")
    file, used = _source_file(parts[:-1])
    if used == 0:
        if parts[0] in sys.builtin_module_names or parts[0] in sys.modules:
            return
        raise UserError(f"{key}={target}", f"there is no module {parts[0]!r} here (is it on PYTHONPATH?)")
    if file is None or file.suffix != ".py":
        return
    names = _names(file, set())
    if names is not None and parts[used] not in names:
        raise missing(key, target, ".".join(parts[:used]), parts[used], sorted(names))


def _source_file(parts: list[str]) -> tuple[Path | None, int]:
    """The source file of the longest module path that ``parts`` begins with, and how many parts that is."""
    path: list[str] | None = None
    file: Path | None = None
    for number, _ in enumerate(parts):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[: number + 1]), path)
        if spec is None:
            return file, number
        file = Path(spec.origin) if spec.origin not in (None, "built-in", "frozen") else None
        path = list(spec.submodule_search_locations) if spec.submodule_search_locations else None
        if path is None:
            return file, number + 1
    return file, len(parts)


def _names(file: Path, visited: set[Path]) -> set[str] | None:
    """Names that a module defines at its top level, star imports followed; None: cannot be told."""
    if file in visited:
        return set()
    visited.add(file)
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    names: set[str] = {child.stem for child in file.parent.glob("*.py")} if file.name == "__init__.py" else set()
    if file.name == "__init__.py":
        names |= {child.name for child in file.parent.iterdir() if child.is_dir()}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            if node.name == "__getattr__" and node in tree.body:
                return None
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                if alias.name != "*":
                    names.add((alias.asname or alias.name).split(".")[0])
                    continue
                assert isinstance(node, ast.ImportFrom)
                starred = _starred(file, node)
                more = _names(starred, visited) if starred is not None else None
                if more is None:
                    return None
                names |= more
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("globals", "setattr"):
            return None
    return names


def _starred(file: Path, node: ast.ImportFrom) -> Path | None:
    if not node.level:
        found, used = _source_file((node.module or "").split("."))
        return found if used == len((node.module or "").split(".")) else None
    base = file.parent
    for _ in range(node.level - 1):
        base = base.parent
    path = base.joinpath(*(node.module or "").split(".")) if node.module else base
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None
