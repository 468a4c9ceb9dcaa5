"""Checks MLflow's SQLite file before a run starts, without mlflow: where it lies, and which MLflow has made it."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import sqlite3
import time
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import UserError
from trainer.wording import quoted, typed

KEPT = "sqlite:///mlflow.db"
WRITTEN_OTHERWISE = re.compile(r"[%?#]")
"""Characters of a path that mean something else in an address."""
MOVES_WITHIN_S = 3.0
"""A database that another process is making just now has another version after so long."""


@dataclass(frozen=True)
class Experiment:
    """An MLflow experiment: its name, the key or variable that names it ('': the run's name), and its id if that was
    set."""

    name: str
    named_by: str = ""
    id: str = ""


def address(file: Path) -> str:
    """Return the address of an SQLite file, with the characters quoted that SQLAlchemy reads otherwise."""
    return "sqlite:///" + WRITTEN_OTHERWISE.sub(lambda found: urllib.parse.quote(found[0]), str(file))


def upgrade_command(uri: str) -> str:
    """The shell command that upgrades an MLflow database."""
    return f"mlflow db upgrade {quoted(uri)}"


def check(uri: str, rest: str, what: str, experiment: Experiment | None) -> None:
    """Refuse an address ``sqlite:///FILE`` that is no writable database of this MLflow, and no place for one.

    Args:
        rest: the address after ``://``.
        what: the address as it was typed, for a refusal.
    """
    instead = f"tracking.uri={KEPT}"
    if not rest.startswith("/"):
        raise UserError(
            what,
            "a file follows three slashes, and a path from the root four",
            typed("tracking.uri", f"sqlite:///{rest or 'mlflow.db'}"),
        )
    path, mark, options = rest[1:].partition("?")
    if mark and not re.match(r"\w+=", options):
        raise UserError(
            what,
            "options of SQLite follow a ?, and a ? of the path is written as %3F",
            typed("tracking.uri", address(Path(rest[1:]))),
        )
    name = urllib.parse.unquote(path)
    if name in ("", ":memory:"):
        raise UserError(what, "names no file, and what is in memory is lost with the process", instead)
    file = Path(name).absolute()
    if name != path and Path(path).parent.is_dir() and not file.parent.is_dir():
        raise UserError(what, "a % of the path is written as %25", typed("tracking.uri", address(Path(path))))
    if not file.parent.is_dir():
        raise UserError(what, f"there is no folder {file.parent}", instead)
    if file.is_dir():
        raise UserError(what, "is a folder", typed("tracking.uri", address(Path(name) / "mlflow.db")))
    for place in (file, file.parent):  # the folder too: SQLite makes its journal there
        if place.exists() and not os.access(place, os.W_OK):
            raise UserError(
                what, f"{place} cannot be written", "tracking.uri=sqlite:////FOLDER/mlflow.db (or tracking=none)"
            )
    if file.exists() and file.stat().st_size:
        _check_database(file, uri, what, experiment)
    elif experiment is not None:
        check_known(experiment, what)


def check_known(experiment: Experiment, where: str) -> None:
    """Refuse an experiment that was named by its id, for a store that does not have it."""
    if experiment.id:
        raise UserError(
            f"{experiment.named_by}={experiment.id}",
            f"there is no such experiment at {where}",
            "tracking.experiment=NAME",
        )


@dataclass(frozen=True)
class _Found:
    """What a database says: its tables, the versions of its schema, the states of the run's experiment."""

    tables: frozenset[str]
    versions: frozenset[str]
    stages: tuple[str, ...]


def _read(file: Path, experiment: Experiment | None) -> _Found:
    with contextlib.closing(
        sqlite3.connect(f"file:{urllib.parse.quote(str(file))}?mode=ro", uri=True, timeout=2)
    ) as base:
        tables = frozenset(name for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'"))
        versions = (
            [v for (v,) in base.execute("SELECT version_num FROM alembic_version")]
            if "alembic_version" in tables
            else []
        )
        stages: list[str] = []
        if experiment is not None and "experiments" in tables:
            column, value = ("experiment_id", experiment.id) if experiment.id else ("name", experiment.name)
            asked = f"SELECT lifecycle_stage FROM experiments WHERE {column} = ?"  # one of two columns  # nosec B608
            stages = [stage for (stage,) in base.execute(asked, (value,))]
    return _Found(tables, frozenset(versions), tuple(stages))


def _check_database(file: Path, uri: str, what: str, experiment: Experiment | None) -> None:
    """Refuse a database of another MLflow version or another program, and a deleted experiment."""
    try:
        found = _read(file, experiment)
        _check_version(file, found, uri, what)
    except sqlite3.OperationalError:  # locked, or being made: it may come back
        return
    except sqlite3.DatabaseError as error:
        raise UserError(what, f"{file} is no SQLite database: {error}", "tracking.uri=sqlite:///another.db") from error
    if "deleted" in found.stages and experiment is not None:
        raise deleted(experiment)
    if not found.stages and experiment is not None and "experiments" in found.tables:
        check_known(experiment, what)


def _check_version(file: Path, found: _Found, uri: str, what: str) -> None:
    known, newest = _revisions()
    if not known or not found.versions or found.versions == newest:
        return
    if not found.versions <= known:
        raise UserError(
            what,
            "the database is of a newer MLflow than the one that is installed",
            "tracking.uri=sqlite:///another.db (or a newer MLflow)",
        )
    until = time.monotonic() + MOVES_WITHIN_S  # MLflow makes a new database through all older versions
    while time.monotonic() < until:
        time.sleep(0.1)
        if _read(file, None).versions != found.versions:
            return
    raise UserError(
        what,
        (
            "the database is of an older MLflow than the one that is installed. Upgrade it (a copy of it is the "
            "way back), or take tracking.uri=sqlite:///another.db"
        ),
        upgrade_command(uri),
    )


@functools.cache
def _revisions() -> tuple[frozenset[str], frozenset[str]]:
    """The versions of the database's schema that the installed MLflow knows, from its migrations, and the newest of
    them."""
    spec = importlib.util.find_spec("mlflow")
    folders = spec.submodule_search_locations if spec is not None else None
    files = list(Path(next(iter(folders))).glob("store/db_migrations/versions/*.py")) if folders else []
    known = frozenset(file.name.partition("_")[0] for file in files if not file.name.startswith("_"))
    before = {one for file in files for one in re.findall(r"^down_revision\s*=\s*[\"'](\w+)", file.read_text(), re.M)}
    return known, known - before


def deleted(experiment: Experiment) -> UserError:
    """The refusal of an experiment that was deleted."""
    return UserError(
        f"the experiment {experiment.name}",
        "was deleted in MLflow, which keeps its name until it is removed for good",
        (
            f"{typed('tracking.experiment', 'NAME' if experiment.id else f'{experiment.name}_2')} (or mlflow "
            f"experiments restore, or mlflow gc)"
        ),
    )
