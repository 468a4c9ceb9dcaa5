"""``mlflow server --app-name trainer``: MLflow and the queue behind one port, each with its protection."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainer
from tests import runs
from tests.ports import ports
from trainer.service.tokens import Tokens

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[bytes], str, str]]:
    """The process, its address, and the owner's token."""
    folder = tmp_path_factory.mktemp("mlflow")
    named = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"]["mlflow.app"]["trainer"]
    about = folder / "packages" / "own_app-1.dist-info"  # whatever this package's own metadata were installed from
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-app\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[mlflow.app]\ntrainer = {named}\n")
    environment = runs.environment()
    environment["PYTHONPATH"] = f"{about.parent}:{environment.get('PYTHONPATH', '')}:{PYPROJECT.parent}"
    environment |= {"TRAINER_HOME": str(folder / "home"), "TRAINER_SERVE": "--quota 1"}
    token, port = Tokens(folder / "home").make("owner"), ports(1)[0]
    options = ["--app-name", "trainer", "--port", str(port), "--workers", "1"]
    command = [sys.executable, "-m", "mlflow", "server", *options, "--backend-store-uri", f"sqlite:///{folder}/m.db"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
    end = time.monotonic() + PATIENCE_S
    while status(f"http://127.0.0.1:{port}/health") != 200:
        assert time.monotonic() < end and process.poll() is None, (folder / "log").read_text()
        time.sleep(0.2)
    yield process, f"http://127.0.0.1:{port}", token
    if process.poll() is None:
        process.kill()


def status(url: str, body: object = None, **headers: str) -> int:
    """The status of an answer; 0: none came."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@pytest.mark.all
def test_one_port_serves_mlflow_and_the_queue_each_with_its_protection(
    server: tuple[subprocess.Popen[bytes], str, str],
) -> None:
    process, url, token = server
    search = {"max_results": 1}
    assert status(f"{url}/api/2.0/mlflow/experiments/search", search) == 200, "MLflow answers as ever"
    for path in ("/trainer/", "/trainer", "/trainer/page.js"):
        assert status(f"{url}{path}") == 200
    for path in ("/trainer/api/runs", "/trainer/openapi.json", "/trainer//api/runs", "/trainer/trainer/api/runs"):
        assert status(f"{url}{path}") == 401, path
    bearer = {"authorization": f"Bearer {token}"}
    assert status(f"{url}/trainer/api/runs", **bearer) == 200
    assert status(f"{url}/trainer/api/runs", host="evil.example", **bearer) == 403, "MLflow's middleware"
    assert status(f"{url}/trainer/api/runs", origin="http://evil.example", **bearer) == 403
    client = trainer.Client(f"{url}/trainer", token)
    words = ["+recipe=digits_lenet", "max_steps=3", "tracking=none", "execution.threads=1"]
    assert client.run(words).status == "done"
    with urllib.request.urlopen(urllib.request.Request(f"{url}/trainer/api/events", headers=bearer)) as stream:
        assert stream.readline() == b": begins\n"
        process.send_signal(signal.SIGTERM)
        stream.read()  # to its end: the server does not wait for the reader
    process.wait(PATIENCE_S)
    assert status(f"{url}/health") == 0
