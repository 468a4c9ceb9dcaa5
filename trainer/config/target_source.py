"""Checks a ``_target_`` by reading its source files: importing torch to refuse a typing error takes seconds."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config import schema
from trainer.config.instantiate import missing, no_module
from trainer.errors import UserError
from trainer.wording import quoted

KEPT = 64
"""Sources that stay parsed, for the other targets in them and for the next job of a sweep."""


def check_target(target: str, key: str) -> None:
    """Refuse a ``_target_`` that does not exist, without importing it.

    Targets in compiled modules, and names made at run time, pass; ``locate`` checks them later.

    Raises:
        UserError: the module or name does not exist.
    """
    parts = target.replace(":", ".").split(".")
    if len(parts) < 2 or not all(p.isidentifier() for p in parts):
        raise UserError(f"{key}={target}", "must be package.module.name of a class or function")
    file, used = _source_file(parts[:-1])
    if used == 0:
        if parts[0] in sys.builtin_module_names or parts[0] in sys.modules:
            return
        raise no_module(key, target)
    if file is None or file.suffix != ".py":
        return
    names = _names(file, set())
    if names is not None and parts[used] not in names:
        raise missing(key, target, ".".join(parts[:used]), parts[used], sorted(names))


def check_arguments(node: Mapping[str, Any], key: str, typed: set[str]) -> None:
    """Read the source of a ``_target_``, and refuse keys that its constructor does not take.

    Raises:
        UserError: an argument is unknown; the message has the nearest one, or how to remove a key of an option.
    """
    accepted = parameters(str(node["_target_"]))
    if accepted is None:
        return
    known = (*accepted, "_target_", *schema.not_arguments(key, node))
    if not (unknown := [name for name in node if name not in known]):
        return
    takes = ", ".join(accepted) or "none"
    for name in unknown:
        nearest = difflib.get_close_matches(name, [t for t in accepted if t not in node], 1, 0.6)
        if nearest or f"{key}.{name}" in typed:
            instead = quoted(f"+{key}.{nearest[0]}={node[name]}") if nearest else ""
            raise UserError(f"{key}.{name}", f"{node['_target_']} takes no such argument; it takes {takes}", instead)
    raise UserError(
        ", ".join(f"{key}.{name}" for name in unknown),
        f"{node['_target_']} takes no such argument; it takes {takes}",
        " ".join(f"~{key}.{name}" for name in unknown),
    )


def parameters(target: str) -> list[str] | None:
    """The argument names of a class or function, read from its source; None: they cannot be read."""
    called = _called(target)
    return None if called is None or called.args.kwarg else _arguments(called)


def keys_of(target: str) -> list[str]:
    """The keys that a class or function takes, read from its source; [] if it has none, or they cannot be read.

    Those are its arguments by name, and what the class reads from ``self.config``, where the trainer's own base
    classes keep all keys.
    """
    called, found = _called(target), _defined(target)
    read = [_key_read(node) for node in ast.walk(found)] if isinstance(found, ast.ClassDef) else []
    return list(dict.fromkeys([*(_arguments(called) if called is not None else ()), *filter(None, read)]))


def _key_read(node: ast.AST) -> str:
    """The key that ``self.config["key"]`` or ``self.config.get("key")`` reads; '' of other expressions."""
    if isinstance(node, ast.Subscript):
        owner, key = node.value, node.slice
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
        owner, key = node.func.value, node.args[0]
    else:
        return ""
    if ast.unparse(owner) != "self.config" or not isinstance(key, ast.Constant):
        return ""
    return key.value if isinstance(key.value, str) else ""


def _arguments(called: ast.FunctionDef) -> list[str]:
    return [a.arg for a in (*called.args.args, *called.args.kwonlyargs) if a.arg != "self"]


def _called(target: str) -> ast.FunctionDef | None:
    """The function, or the constructor in the source of the class, that calling a ``_target_`` calls; None: unknown."""
    found = _defined(target)
    if isinstance(found, ast.ClassDef):
        constructors = [n for n in found.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        found = constructors[-1] if constructors and not found.decorator_list else None
    return found if isinstance(found, ast.FunctionDef) and not found.decorator_list else None


def _defined(target: str) -> ast.stmt | None:
    """The class or function in the source that a ``_target_`` names; None: it is not found."""
    *module, name = target.replace(":", ".").split(".")
    file, used = _source_file(module)
    return _definition(file, name, set()) if file is not None and used == len(module) else None


def _definition(file: Path, name: str, visited: set[Path]) -> ast.stmt | None:
    """The class or function of that name in a module's source, followed through imports."""
    if file in visited or file.suffix != ".py":
        return None
    visited.add(file)
    for node in _parsed(file).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return node
        if not isinstance(node, ast.ImportFrom):
            continue
        for alias in node.names:
            source = _imported(file, node) if alias.name == "*" or (alias.asname or alias.name) == name else None
            found = _definition(source, name if alias.name == "*" else alias.name, visited) if source else None
            if found is not None:
                return found
    return None


def _parsed(file: Path) -> ast.Module:
    try:
        return _tree(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


@functools.lru_cache(KEPT)
def _tree(source: str) -> ast.Module:
    """Parse a source."""
    return ast.parse(source)


def _source_file(parts: list[str]) -> tuple[Path | None, int]:
    """The source file of the longest module path at the beginning of ``parts``, and the number of its parts."""
    path: list[str] | None = None
    file: Path | None = None
    for number, _ in enumerate(parts):
        spec = _spec(".".join(parts[: number + 1]), path)
        if spec is None:
            return file, number
        file = Path(spec.origin) if spec.origin not in (None, "built-in", "frozen") else None
        path = list(spec.submodule_search_locations) if spec.submodule_search_locations else None
        if path is None:
            return file, number + 1
    return file, len(parts)


def _spec(name: str, path: list[str] | None) -> importlib.machinery.ModuleSpec | None:
    """The spec of a module; for a top-level one, from all finders (editable installs have their own)."""
    if path is not None:
        return importlib.machinery.PathFinder.find_spec(name, path)
    try:
        return importlib.util.find_spec(name)
    except ValueError:  # a module without a spec, like __main__
        return None


def _names(file: Path, visited: set[Path]) -> set[str] | None:
    """Names that a module may define, also by star imports; None: not known."""
    if file in visited:
        return set()
    visited.add(file)
    tree = _parsed(file)
    if not tree.body or _makes_names(tree):
        return None
    beside = file.parent.iterdir() if file.name == "__init__.py" else ()
    names = {child.stem for child in beside if child.is_dir() or child.suffix == ".py"}
    own, stars = _own_names(tree)
    names |= own
    for node in stars:
        source = _imported(file, node)
        starred = _names(source, visited) if source is not None else None
        if starred is None:
            return None
        names |= starred
    return names


@functools.lru_cache(KEPT)
def _own_names(tree: ast.Module) -> tuple[frozenset[str], tuple[ast.ImportFrom, ...]]:
    """Names that a module's source shows, and its star imports. The jobs of a sweep ask for the same ones."""
    names: set[str] = set()
    stars = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(a.asname or a.name).split(".")[0] for a in node.names}
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                stars.append(node)
    return frozenset(names), tuple(stars)


@functools.lru_cache(KEPT)
def _makes_names(tree: ast.Module) -> bool:
    """Whether a module makes names at run time that its source does not show."""
    if any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body):
        return True
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    on_self = [n for n in calls if n.args and isinstance(n.args[0], ast.Name) and n.args[0].id == "self"]
    return any(n.func.id in ("globals", "setattr") for n in calls if n not in on_self)  # type: ignore[attr-defined]


def _imported(file: Path, node: ast.ImportFrom) -> Path | None:
    """The source file of the module that an import names."""
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
