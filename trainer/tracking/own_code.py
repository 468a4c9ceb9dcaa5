"""Finds the user's own modules that a logged model needs: those that it imports, and nothing else of their folder."""

from __future__ import annotations

import ast
import shutil
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parents[1]
PACKED = f"{PACKAGE.name}.zip"
"""Name of the zip with this package's sources in a logged model's ``code`` folder."""
INSTALLED = ("stdlib", "platstdlib", "purelib", "platlib")


def own_modules(target: str, new: Iterable[str] = ()) -> dict[str, Path]:
    """The user's own code that a logged model needs: by module name the source files of its target's module and of what
    that imports.

    Args:
        target: ``package.module.name``; its module has been imported.
        new: names of modules that were imported while the model was built and called: what it imports in ways that its
            source does not show.
    """
    found: dict[str, Path] = {}
    parts = target.replace(":", ".").split(".")
    names = [".".join(parts[:end]) for end in range(1, len(parts) + 1)] + list(new)
    while names:
        name = names.pop()
        file = _source(sys.modules.get(name))
        if name not in found and file is not None:
            found[name] = file
            names += _imported_by(name, file)
    return dict(sorted(found.items()))


def _source(module: ModuleType | None) -> Path | None:
    """The module's file, if it is Python source of the user's own."""
    if module is None or module.__name__ == "__main__" or not getattr(module, "__file__", None):
        return None
    file = Path(str(module.__file__))
    inside = [PACKAGE, *(Path(sysconfig.get_path(kind)).resolve() for kind in INSTALLED)]
    real = file.resolve()
    if file.suffix != ".py" or real.suffix != ".py" or not real.is_file():
        return None
    return None if any(folder in (*real.parents, *file.parents) for folder in inside) else real


def _imported_by(name: str, file: Path) -> Iterator[str]:
    """Names of modules that a source file imports, and the packages above them; some may be names of other things."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            bases = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(filter(None, (above, node.module)))
            bases = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        for base in bases:
            parts = base.split(".")
            yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def third_parties(modules: Iterable[Path]) -> set[str]:
    """The names of the packages that these files import, from wherever they are."""
    found = (name.partition(".")[0] for file in modules for name in _imported_by("", file))
    return {name for name in found if name and name not in sys.stdlib_module_names}


def stage(folder: Path, modules: dict[str, Path]) -> list[str]:
    """Pack this package's sources into one zip and copy the user's modules beside it, in a new folder.

    Only files ``*.py`` are taken: no links, nothing hidden, no data. ``served_model.py`` puts the zip on the module
    search path. One file instead of hundreds: a tracking server stores and shows each file of a model by itself.

    Returns:
        the paths for MLflow's ``code_paths``.
    """
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / PACKED, "w") as packed:
        for file in sorted(PACKAGE.rglob("*.py")):
            below = file.relative_to(PACKAGE)
            if not file.is_symlink() and file.is_file() and not any(part.startswith(".") for part in below.parts):
                # The entry has a fixed date, so equal sources give equal bytes.
                entry = zipfile.ZipInfo(f"{PACKAGE.name}/{below.as_posix()}")
                packed.writestr(entry, file.read_bytes(), zipfile.ZIP_DEFLATED)
    for name, file in modules.items():
        _copy(file, folder / place(name, file))
    return sorted(str(path) for path in folder.iterdir())


def place(name: str, file: Path) -> Path:
    """The relative path of a module's file in a folder on the module search path."""
    parts = Path(*name.split("."))
    return parts / "__init__.py" if file.name == "__init__.py" else parts.with_suffix(".py")


def _copy(file: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, to)
