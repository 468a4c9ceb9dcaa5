"""Checks the tracking store and the names for MLflow, without mlflow: what can never work, and what does not answer
now."""

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
import ssl
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from trainer.config.redact import text
from trainer.config.run_config import RunConfig
from trainer.config.schema import TrackingConfig
from trainer.config.schema.run import MLFLOW
from trainer.errors import UserError, first_line
from trainer.host import json_text, text_checks
from trainer.planning import sqlite_store
from trainer.planning.plan import Plan
from trainer.planning.sqlite_store import KEPT, Experiment, address, deleted
from trainer.wording import typed

DRIVERS = {"sqlite": "sqlite3", "postgresql": "", "mysql": "MySQLdb", "mssql": "pyodbc"}
"""MLflow's databases, with the module that SQLAlchemy takes for each where the address names none."""
PSYCOPG_3 = (2, 1)
"""The version of SQLAlchemy from which on it takes psycopg for PostgreSQL, where it took psycopg2 before."""
MODULES = {"mysqlconnector": "mysql.connector", "mysqldb": "MySQLdb"}
PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
OWN = ("http", "https", "databricks", "databricks-uc", "uc")
TRY_S = 5.0
OTHER_LOGINS = (
    "MLFLOW_TRACKING_AUTH",
    "MLFLOW_TRACKING_AWS_SIGV4",
    "MLFLOW_TRACKING_CLIENT_CERT_PATH",
    "DATABRICKS_TOKEN",
)
"""Environment variables by which MLflow logs in as only it can."""
LONGEST_EXPERIMENT = 500
"""Characters of a name in MLflow."""
NEVER = (404, 405, 410, 501)
"""What a server answers that is none of MLflow's."""


def tracking_uri(tracking: TrackingConfig) -> str:
    """The address of the MLflow tracking store that metrics go to; '' without MLflow."""
    return store_uri(tracking.uri) if MLFLOW in tracking.trackers else ""


def store_uri(uri: str | None) -> str:
    """The address of the tracking store: what is typed, what the environment says, or a file in the working folder."""
    return str(uri or os.environ.get("MLFLOW_TRACKING_URI") or address(Path.cwd() / "mlflow.db"))


def chosen(tracking: TrackingConfig) -> str:
    """The trackers as typed: ``none``, ``mlflow``, or ``[mlflow,tensorboard]``."""
    names = list(tracking.trackers)
    return names[0] if len(names) == 1 else f"[{','.join(names)}]" if names else "none"


def named(tracking: TrackingConfig) -> str:
    """The tracking address as the user gave it (the key or the environment variable), without a login."""
    if tracking.uri:
        return f"tracking.uri={text(tracking.uri)}"
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return f"MLFLOW_TRACKING_URI={text(uri)}"
    return f"tracking.uri={KEPT}"


def experiment_of(tracking: TrackingConfig, name: str) -> Experiment:
    """The experiment of a run that is called ``name``: ``tracking.experiment``, else what a platform has set, else its
    name."""
    if tracking.experiment:
        return Experiment(tracking.experiment, "tracking.experiment")
    if there := os.environ.get("MLFLOW_EXPERIMENT_NAME"):
        return Experiment(there, "MLFLOW_EXPERIMENT_NAME")
    if there := os.environ.get("MLFLOW_EXPERIMENT_ID"):
        return Experiment(f"experiment {there}", "MLFLOW_EXPERIMENT_ID", there)
    return Experiment(name)


def check_store(tracking: TrackingConfig, experiment: Experiment | None) -> None:
    """Refuse a tracking address that is certain not to work, without calling it.

    Args:
        experiment: of the run; None: only the address is checked.

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
        module = MODULES.get(driver, driver) or DRIVERS[dialect] or _postgresql_module()
        if not _installed(module):
            raise UserError(what, f"needs the Python module {module}, which is not installed", f"tracking.uri={KEPT}")
        if experiment is not None and not re.fullmatch(r"\d{0,18}", experiment.id):  # a database numbers them
            sqlite_store.check_known(experiment, what)
        if dialect == "sqlite":
            sqlite_store.check(uri, rest, what, experiment)
    elif dialect not in OWN and scheme not in _plugins():
        near = difflib.get_close_matches(dialect, (*OWN, *DRIVERS), 1)
        there = "http, https, sqlite, postgresql, mysql and mssql"
        instead = f"{near[0]}://{text(uri).partition('://')[2]}" if near else KEPT
        raise UserError(
            what,
            f"MLflow knows no address that begins with {scheme}://; it takes {there}",
            typed("tracking.uri", instead),
        )


def _check_plain(uri: str, what: str) -> None:
    """An address without ``://``: Databricks', a host without its scheme, or a folder."""
    if uri.split(":")[0] in (*OWN[2:], *_plugins()):
        return
    if re.fullmatch(r"[\w.-]+:\d{1,5}(/.*)?", uri) or uri.startswith("localhost"):
        raise UserError(what, "does not say how the server is spoken to", typed("tracking.uri", f"http://{uri}"))
    if found := re.match(r"(https?|sqlite|postgresql|mysql|mssql):/*(.*)", uri):
        slashes = "///" if found[1] == "sqlite" else "://"
        raise UserError(
            what,
            "is not written as an address",
            typed("tracking.uri", f"{found[1]}{':' if found[1] == 'sqlite' else ''}{slashes}{found[2]}"),
        )
    if os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() not in ("true", "1"):
        raise _folder(what, uri.removeprefix("file:"))


def _folder(what: str, path: str) -> UserError:
    file = Path(path) if Path(path).suffix in (".db", ".sqlite") else Path(path) / "mlflow.db"
    return UserError(what, "MLflow no longer keeps runs in folders of files", typed("tracking.uri", address(file)))


def _check_address(uri: str, what: str) -> None:
    try:
        parts = urllib.parse.urlsplit(uri)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise UserError(what, f"is no address: {error}", "tracking.uri=http://127.0.0.1:5000") from error
    if not host:
        raise UserError(what, "names no host", "tracking.uri=http://127.0.0.1:5000")


def _postgresql_module() -> str:
    """The module that the installed SQLAlchemy takes for ``postgresql://``."""
    version = importlib.metadata.version("sqlalchemy").split(".")
    return "psycopg" if (int(version[0]), int(version[1])) >= PSYCOPG_3 else "psycopg2"


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


@functools.cache
def _plugins(of: str = "tracking_store") -> frozenset[str]:
    """Schemes that installed plugins bring to MLflow's stores of this kind."""
    return frozenset(entry.name for entry in importlib.metadata.entry_points(group=f"mlflow.{of}"))


# --- one try, before anything starts --------------------------------------------------------------------------------


def try_tracking(config: RunConfig, plan: Plan) -> str:
    """Call the run's tracking store once, from host 0 before anything starts; returns why it does not answer, or ''.

    Raises:
        UserError: it will never take a run.
    """
    if not plan.paths.tracking or plan.topology.node_rank:
        return ""
    return try_store(config.tracking, experiment_of(config.tracking, config.name))


def try_store(tracking: TrackingConfig, experiment: Experiment) -> str:
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


def _try_server(uri: str, what: str, experiment: Experiment) -> str:
    """Ask for the experiment, which need not be there if it is named."""
    parts = urllib.parse.urlsplit(uri)
    netloc = parts.netloc.rpartition("@")[2]
    asked = (
        ("get", "experiment_id", experiment.id)
        if experiment.id
        else ("get-by-name", "experiment_name", experiment.name)
    )
    path = f"{parts.path.rstrip('/')}/api/2.0/mlflow/experiments/{asked[0]}"
    query = urllib.parse.urlencode({asked[1]: asked[2]})
    request = urllib.request.Request(urllib.parse.urlunsplit((parts.scheme, netloc, path, query, "")))
    if login := _login(parts):
        request.add_unredirected_header("Authorization", login)  # another server that it leads to does not get it
    try:
        # The user's own tracking server, over http or https.
        with urllib.request.urlopen(request, timeout=TRY_S, context=_trusted(parts.scheme)) as answer:  # nosec B310
            found = json_text.loads(answer.read(1 << 20))
            stage = found["experiment"]["lifecycle_stage"]
    except urllib.error.HTTPError as error:
        return _refusal(error, what, experiment)
    except (OSError, urllib.error.URLError) as error:
        return text(str(getattr(error, "reason", error)))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            what, "answers, but not as an MLflow server does", "tracking.uri=ADDRESS OF AN MLFLOW SERVER"
        ) from error
    if stage == "deleted":
        raise deleted(experiment)
    return ""


def _refusal(error: urllib.error.HTTPError, what: str, experiment: Experiment) -> str:
    """The meaning of an HTTP error: empty (the experiment does not exist yet), a reason why the store may answer later,
    or a UserError."""
    with contextlib.suppress(ValueError, OSError, AttributeError):
        code = json_text.loads(error.read(1 << 16)).get("error_code")
        if code == "RESOURCE_DOES_NOT_EXIST" or (code == "INVALID_PARAMETER_VALUE" and experiment.id):
            sqlite_store.check_known(experiment, what)
            return ""
    if error.code in (401, 403) and not any(os.environ.get(name) for name in OTHER_LOGINS):
        raise UserError(
            what,
            f"the server does not let this user in ({error.code} {error.reason})",
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or MLFLOW_TRACKING_TOKEN) in the environment",
        ) from error
    if error.code in NEVER:
        raise UserError(
            what, f"there is no MLflow server ({error.code} {error.reason})", "tracking.uri=ADDRESS OF AN MLFLOW SERVER"
        ) from error
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
    experiment = experiment_of(tracking, config.name)
    if MLFLOW in tracking.trackers:
        _check_experiment(experiment)
    check_store(tracking, experiment)
    for key, most in (("experiment", 256), ("run_name", 250)):
        if len(value := getattr(tracking, key) or "") > most:
            raise UserError(f"tracking.{key}={value}", f"is longer than {most} characters", f"tracking.{key}=null")
    _check_registered(tracking)
    for name, value in tracking.tags.items():
        if not re.fullmatch(r"[\w\-. :/]{1,250}", str(name)) or os.path.normpath(str(name)) != str(name):
            raise UserError(
                f"tracking.tags.{name}",
                "is no name that MLflow takes: letters, digits, _ - . : / and spaces",
                "+tracking.tags.NAME=VALUE",
            )
        if len(str(value)) > 8000:
            raise UserError(f"tracking.tags.{name}", "is longer than the 8000 characters that MLflow takes")


def _check_experiment(experiment: Experiment) -> None:
    """Refuse an experiment's name that MLflow does not accept."""
    what = f"{experiment.named_by or 'name'}={experiment.id or experiment.name}"
    text_checks.check_text(what, experiment.name, "tracking.experiment=NAME")
    if len(experiment.name) > LONGEST_EXPERIMENT:
        raise UserError(
            what,
            f"is longer than the {LONGEST_EXPERIMENT} characters that MLflow takes for an experiment",
            "tracking.experiment=NAME",
        )


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
    if MLFLOW not in tracking.trackers or not tracking.log_model:
        which = "tracking.log_model=false" if MLFLOW in tracking.trackers else f"tracking={chosen(tracking)}"
        raise UserError(what, f"registers the logged models, and with {which} there are none", none)
    registry = os.environ.get("MLFLOW_REGISTRY_URI", "")
    scheme = registry.partition(":")[0].lower().partition("+")[0]
    if registry and scheme not in (*OWN, *DRIVERS, "file") and scheme not in _plugins("model_registry_store"):
        why = f"MLFLOW_REGISTRY_URI={text(registry)} names no registry: MLflow knows none that begins with {scheme}:"
        raise UserError(what, why, f"MLFLOW_REGISTRY_URI=http://HOST:PORT, or {none}")
