"""Checks the tracking store and the names given to MLflow, without mlflow: what can never work, and what may come back."""

from __future__ import annotations

import base64
import contextlib
import difflib
import functools
import importlib.metadata
import importlib.util
import os
import re
import socket
import sqlite3
import ssl
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.redact import text
from trainer.config.run_config import RunConfig
from trainer.config.schema import TrackingConfig
from trainer.errors import UserError, first_line
from trainer.host import json_text

if TYPE_CHECKING:
    from trainer.planning.plan import Plan

DRIVERS = {"sqlite": "sqlite3", "postgresql": "psycopg2", "mysql": "MySQLdb", "mssql": "pyodbc"}
"""MLflow's databases, with the module that SQLAlchemy takes for each where the address names none."""
MODULES = {"mysqlconnector": "mysql.connector", "mysqldb": "MySQLdb"}
PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
OWN = ("http", "https", "databricks", "databricks-uc", "uc")
TRY_S = 5.0
OTHER_LOGINS = (
    "MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_AWS_SIGV4", "MLFLOW_TRACKING_CLIENT_CERT_PATH", "DATABRICKS_TOKEN",
)  # fmt: skip
"""Environment variables by which MLflow logs in as only it can."""
NEVER = (404, 405, 410, 501)
"""What a server answers that is none of MLflow's."""
KEPT = "sqlite:///mlflow.db"


def tracking_uri(tracking: TrackingConfig) -> str:
    """The address of the MLflow tracking store that metrics go to; '' without tracking."""
    if tracking.kind == "none":
        return ""
    return str(tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path.cwd() / 'mlflow.db'}")


def named(tracking: TrackingConfig) -> str:
    """The tracking address as the user gave it (the key or the environment variable), without a login."""
    if tracking.uri:
        return f"tracking.uri={text(tracking.uri)}"
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return f"MLFLOW_TRACKING_URI={text(uri)}"
    return f"tracking.uri={KEPT}"


def check_store(tracking: TrackingConfig, experiment: str) -> None:
    """Refuse a tracking address that is certain not to work, without calling it.

    Raises:
        UserError: it can never work.
    """
    if not (uri := tracking_uri(tracking)):
        return
    what = named(tracking)
    if uri != uri.strip() or not uri.isprintable():
        raise UserError(what, "holds characters that are in no address", f"tracking.uri={KEPT}")
    scheme, separator, rest = uri.partition("://")
    if not separator:
        _check_plain(uri, what)
        return
    dialect, _, driver = scheme.lower().partition("+")
    if dialect == "file":
        raise _folder(what, rest)
    if dialect in ("http", "https"):
        _check_address(uri, what)
    elif dialect in DRIVERS:
        module = MODULES.get(driver, driver) or DRIVERS[dialect]
        if not _installed(module):
            raise UserError(what, f"needs the Python module {module}, which is not installed", f"tracking.uri={KEPT}")
        if dialect == "sqlite":
            _check_file(rest, what, experiment)
    elif dialect not in OWN and scheme not in _plugins():
        near = difflib.get_close_matches(dialect, (*OWN, *DRIVERS), 1)
        there = "http, https, sqlite, postgresql, mysql and mssql"
        instead = f"{near[0]}://{text(uri).partition('://')[2]}" if near else KEPT
        raise UserError(what, f"MLflow knows no address that begins with {scheme}://; it takes {there}", f"tracking.uri={instead}")  # fmt: skip


def _check_plain(uri: str, what: str) -> None:
    """An address without ``://``: Databricks', a host without its scheme, or a folder."""
    if uri.split(":")[0] in (*OWN[2:], *_plugins()):
        return
    if re.fullmatch(r"[\w.-]+:\d{1,5}(/.*)?", uri) or uri.startswith("localhost"):
        raise UserError(what, "does not say how the server is spoken to", f"tracking.uri=http://{uri}")
    if found := re.match(r"(https?|sqlite|postgresql|mysql|mssql):/*(.*)", uri):
        slashes = "///" if found[1] == "sqlite" else "://"
        raise UserError(what, "is not written as an address", f"tracking.uri={found[1]}{':' if found[1] == 'sqlite' else ''}{slashes}{found[2]}")  # fmt: skip
    if os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() not in ("true", "1"):
        raise _folder(what, uri.removeprefix("file:"))


def _folder(what: str, path: str) -> UserError:
    file = Path(path) if Path(path).suffix in (".db", ".sqlite") else Path(path) / "mlflow.db"
    return UserError(what, "MLflow no longer keeps runs in folders of files", f"tracking.uri=sqlite:///{file}")


def _check_address(uri: str, what: str) -> None:
    try:
        parts = urllib.parse.urlsplit(uri)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise UserError(what, f"is no address: {error}", "tracking.uri=http://127.0.0.1:5000") from error
    if not host:
        raise UserError(what, "names no host", "tracking.uri=http://127.0.0.1:5000")


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


@functools.cache
def _plugins() -> frozenset[str]:
    """Schemes that installed plugins bring to MLflow."""
    return frozenset(entry.name for entry in importlib.metadata.entry_points(group="mlflow.tracking_store"))


# --- SQLite ---------------------------------------------------------------------------------------------------------


def _check_file(rest: str, what: str, experiment: str) -> None:
    """``sqlite:///FILE``: a database of MLflow's that can be written, or a place for one."""
    instead = f"tracking.uri={KEPT}"
    if not rest.startswith("/"):
        raise UserError(what, "a file follows three slashes, and a path from the root four", f"tracking.uri=sqlite:///{rest or 'mlflow.db'}")  # fmt: skip
    name = urllib.parse.unquote(rest[1:].partition("?")[0])
    if name in ("", ":memory:"):
        raise UserError(what, "names no file, and what is in memory is lost with the process", instead)
    file = Path(name).absolute()
    if not file.parent.is_dir():
        raise UserError(what, f"there is no folder {file.parent}", instead)
    if file.is_dir():
        raise UserError(what, "is a folder", f"tracking.uri=sqlite:///{name.rstrip('/')}/mlflow.db")
    for place in (file, file.parent):  # the folder too: SQLite makes its journal there
        if place.exists() and not os.access(place, os.W_OK):
            raise UserError(what, f"{place} cannot be written", "tracking.uri=sqlite:////FOLDER/mlflow.db (or tracking=none)")  # fmt: skip
    if file.exists() and file.stat().st_size:
        _check_database(file, what, experiment)


def _check_database(file: Path, what: str, experiment: str) -> None:
    """What another version of MLflow, or another program, left in it; an experiment that was deleted."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{urllib.parse.quote(str(file))}?mode=ro", uri=True, timeout=2)) as base:  # fmt: skip
            tables = {name for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            versions = [v for (v,) in base.execute("SELECT version_num FROM alembic_version")] if "alembic_version" in tables else []  # fmt: skip
            asked = base.execute("SELECT lifecycle_stage FROM experiments WHERE name = ?", (experiment,)) if "experiments" in tables else ()  # fmt: skip
            stages = [stage for (stage,) in asked]
    except sqlite3.OperationalError:  # locked, or being made: it may come back
        return
    except sqlite3.DatabaseError as error:
        raise UserError(what, f"{file} is no SQLite database: {error}", "tracking.uri=sqlite:///another.db") from error
    known = _revisions()
    if known and versions and not set(versions) <= known:
        raise UserError(what, "the database is of a newer MLflow than the one that is installed", "tracking.uri=sqlite:///another.db (or a newer MLflow)")  # fmt: skip
    if "deleted" in stages:
        raise _deleted(experiment)


@functools.cache
def _revisions() -> frozenset[str]:
    """The versions of the database's schema that the installed MLflow knows: its migrations' names begin with them."""
    spec = importlib.util.find_spec("mlflow")
    folders = spec.submodule_search_locations if spec is not None else None
    files = Path(next(iter(folders))).glob("store/db_migrations/versions/*.py") if folders else ()
    return frozenset(file.name.partition("_")[0] for file in files)


def _deleted(experiment: str) -> UserError:
    return UserError(f"the experiment {experiment}", "was deleted in MLflow, which keeps its name until it is removed for good", f"tracking.experiment={experiment}_2 (or mlflow experiments restore, or mlflow gc)")  # fmt: skip


# --- one try, before anything starts --------------------------------------------------------------------------------


def try_tracking(config: RunConfig, plan: Plan) -> str:
    """Call the run's tracking store once, from host 0 before anything starts; returns why it does not answer, or ''.

    Raises:
        UserError: it will never take a run.
    """
    return "" if not plan.tracking or plan.node_rank else try_store(config.tracking, config.experiment)


def try_store(tracking: TrackingConfig, experiment: str) -> str:
    """Call the tracking store once; returns why it does not answer, or ''.

    Returns:
        Why it does not answer now, though it may come back; empty where it answers, or is a file.

    Raises:
        UserError: it answers, and will never take a run.
    """
    uri = tracking_uri(tracking)
    scheme = uri.partition("://")[0].lower().partition("+")[0]
    if scheme in ("http", "https"):
        return _try_server(uri, named(tracking), experiment)
    if scheme in PORTS:
        return _try_port(uri, PORTS[scheme])
    return ""


def _try_port(uri: str, usual: int) -> str:
    parts = urllib.parse.urlsplit(uri)
    if not parts.hostname:
        return ""
    try:
        socket.create_connection((parts.hostname, parts.port or usual), TRY_S).close()
    except (OSError, ValueError) as error:
        return text(first_line(error))
    return ""


def _try_server(uri: str, what: str, experiment: str) -> str:
    """Ask for the experiment, which need not be there."""
    parts = urllib.parse.urlsplit(uri)
    netloc = parts.netloc.rpartition("@")[2]
    path = parts.path.rstrip("/") + "/api/2.0/mlflow/experiments/get-by-name"
    query = urllib.parse.urlencode({"experiment_name": experiment})
    request = urllib.request.Request(urllib.parse.urlunsplit((parts.scheme, netloc, path, query, "")))
    if login := _login(parts):
        request.add_unredirected_header("Authorization", login)  # another server that it leads to does not get it
    try:
        # The user's own tracking server, over http or https.
        with urllib.request.urlopen(request, timeout=TRY_S, context=_trusted(parts.scheme)) as answer:  # nosec B310
            found = json_text.loads(answer.read(1 << 20))
            stage = found["experiment"]["lifecycle_stage"]
    except urllib.error.HTTPError as error:
        return _refusal(error, what)
    except (OSError, urllib.error.URLError) as error:
        return text(str(getattr(error, "reason", error)))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(what, "answers, but not as an MLflow server does", "tracking.uri=ADDRESS OF AN MLFLOW SERVER") from error  # fmt: skip
    if stage == "deleted":
        raise _deleted(experiment)
    return ""


def _refusal(error: urllib.error.HTTPError, what: str) -> str:
    """What an answer that is none says: nothing (there is no such experiment yet), that it may come back, or never."""
    with contextlib.suppress(ValueError, OSError, AttributeError):
        if json_text.loads(error.read(1 << 16)).get("error_code") == "RESOURCE_DOES_NOT_EXIST":
            return ""
    if error.code in (401, 403) and not any(os.environ.get(name) for name in OTHER_LOGINS):
        raise UserError(what, f"the server does not let this user in ({error.code} {error.reason})", "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or MLFLOW_TRACKING_TOKEN) in the environment") from error  # fmt: skip
    if error.code in NEVER:
        raise UserError(what, f"there is no MLflow server ({error.code} {error.reason})", "tracking.uri=ADDRESS OF AN MLFLOW SERVER") from error  # fmt: skip
    return f"{error.code} {error.reason}"


def _login(parts: urllib.parse.SplitResult) -> str:
    """As MLflow logs in: by a token, or by a name and password, which may also be in the address."""
    user, password = os.environ.get("MLFLOW_TRACKING_USERNAME"), os.environ.get("MLFLOW_TRACKING_PASSWORD")
    if user is None and parts.username:
        user, password = urllib.parse.unquote(parts.username), urllib.parse.unquote(parts.password or "")
    if user is not None and password is not None:
        return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    return f"Bearer {token}" if token else ""


def _trusted(scheme: str) -> ssl.SSLContext | None:
    if scheme != "https":
        return None
    if os.environ.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() in ("true", "1"):
        return ssl._create_unverified_context()  # asked for, as MLflow itself offers it  # nosec B323
    known = os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH") or os.environ.get("REQUESTS_CA_BUNDLE")
    return ssl.create_default_context(cafile=known if known and Path(known).is_file() else None)


def check_tracking(config: RunConfig) -> None:
    """Refuse a tracking store that cannot work, and names of runs, experiments and tags that it does not accept."""
    tracking = config.tracking
    check_store(tracking, config.experiment)
    for key, most in (("experiment", 256), ("run_name", 250)):
        if len(given := getattr(tracking, key) or "") > most:
            raise UserError(f"tracking.{key}={given}", f"is longer than {most} characters", f"tracking.{key}=null")
    _check_registered(tracking)
    for name, value in tracking.tags.items():
        if not re.fullmatch(r"[\w\-. :/]{1,250}", str(name)) or os.path.normpath(str(name)) != str(name):
            raise UserError(f"tracking.tags.{name}", "is no name that MLflow takes: letters, digits, _ - . : / and spaces", "+tracking.tags.NAME=VALUE")  # fmt: skip
        if len(str(value)) > 8000:
            raise UserError(f"tracking.tags.{name}", "is longer than the 8000 characters that MLflow takes")


def _check_registered(tracking: TrackingConfig) -> None:
    """Refuse a ``tracking.registered_model`` whose name MLflow does not accept, or if no model is logged."""
    name = tracking.registered_model
    if name is None:
        return
    what, none = f"tracking.registered_model={name}", "tracking.registered_model=null"
    if re.search(r"[/:'\"%]", name) or len(name) > 256:
        raise UserError(
            what, "is no name for MLflow's registry: at most 256 characters, and none of / : % and quotes", none
        )
    if tracking.kind == "none" or not tracking.log_model:
        which = "tracking=none" if tracking.kind == "none" else "tracking.log_model=false"
        raise UserError(what, f"registers the logged models, and with {which} there are none", none)
