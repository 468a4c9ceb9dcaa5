"""A service as a user starts it, and ``trainer.Client``: a real process, a real run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

import trainer
from tests import runs
from trainer.errors import RunFailed, UserError

SERVE: list[int] = []
"""The process of the service."""
RUN = ["+recipe=digits_lenet", "max_steps=3", "tracking=none", "execution.threads=1"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The address and the owner's token of a service on a free port."""
    folder = tmp_path_factory.mktemp("serve")
    environment = {**runs.environment(), "TRAINER_HOME": str(folder / "home")}
    command = [sys.executable, "-m", "trainer", "serve", "--port", "0"]
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = "".join(process.stdout.readline() for _ in range(4))
    page, token = re.search(r"page +(http://\S+:\d+)/", said), re.search(r"token +(\S+)", said)
    assert page is not None and token is not None, said
    SERVE.append(process.pid)
    yield page[1], token[1]
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    for pid in (folder / "home").glob("runner*.pid"):
        os.kill(int(pid.read_text()), signal.SIGTERM)


def test_a_client_gets_what_a_run_returns(service: tuple[str, str]) -> None:
    client = trainer.Client(*service)
    result = client.run(RUN, key="once")
    assert result.status == "done" and result.steps == 3 and Path(result.run_dir, "model.safetensors").is_file()
    number = client.submit(RUN, key="once")
    assert client.result(number) == result, "the same key is the same run"
    assert [point["step"] for point in client.metrics(number)][-1] == 3
    assert [run["number"] for run in client.runs()] == [number]


def test_what_is_refused_is_the_command_lines_own_sentence(service: tuple[str, str]) -> None:
    client = trainer.Client(*service)
    with pytest.raises(UserError, match=r"optimizer\.lrr=1: there is no such key"):
        client.run([*RUN, "optimizer.lrr=1"])
    with pytest.raises(UserError, match="no such token"):
        trainer.Client(service[0], "wrong").run(RUN)
    with pytest.raises(UserError, match="there is no run 99"):
        client.cancel(99)


def test_a_service_that_is_away_is_a_sentence() -> None:
    with pytest.raises(RunFailed, match=r"http://127\.0\.0\.1:9 does not answer"):
        trainer.Client("http://127.0.0.1:9", "token").runs()
    with pytest.raises(UserError, match="is no address of a service"):
        trainer.Client("127.0.0.1:8080", "token")


@pytest.mark.all
def test_clients_submit_side_by_side_and_one_key_is_one_run(service: tuple[str, str]) -> None:
    client = trainer.Client(*service)
    words = [*RUN, "launch.cores=10000"]  # waits for ever
    with ThreadPoolExecutor(8) as clients:
        numbers = list(clients.map(lambda key: client.submit(words, key=key), ["a", "b", "c", "d"] * 2))
    assert numbers[:4] == numbers[4:] and len(set(numbers)) == 4
    assert {run["number"] for run in client.runs() if run["state"] == "queued"} == set(numbers)


@pytest.mark.all
def test_a_submission_outlives_the_death_of_the_process_that_makes_submissions(service: tuple[str, str]) -> None:
    client = trainer.Client(*service)
    client.submit([*RUN, "launch.cores=10000"], key="before")
    (warm,) = [one for one in psutil.Process(SERVE[0]).children() if "trainer.cli.warm_submit" in one.cmdline()]
    warm.kill()
    while warm.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.05)
    assert client.submit([*RUN, "launch.cores=10000"], key="after") > client.submit(RUN, key="before")
