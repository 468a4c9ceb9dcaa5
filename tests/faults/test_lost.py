"""Processes of a parameter-server run die, stop and wake up: the others go on, or the run ends and says why."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.pace import patient, wait_for
from tests.runs import alive, family, kill, listening, points, read, start, trainer
from tests.zygote import Started

BASE = (
    "+recipe=digits_lenet",
    "launch.nproc=3",
    "data.batch_size=8",
    "execution.log_every=5",
    "tracking=none",
    "hydra.run.dir=run",
    "execution.threads=1",
    "optimizer.lr=0.005",
    "launch.max_restarts=0",
)
EPOCHS = 2
PER_EPOCH = 179  # 1438 samples in whole batches of 8
GATE = "_target_:tests.faults.gate.Gate"
GATES = f"callbacks=[{{{GATE},at:30,until:first}},{{{GATE},at:60,until:second}}]"
"""A third of a worker's updates each: it waits there until the test has done what it does (``let_go``)."""


@contextmanager
def running(folder: Path, *overrides: str) -> Iterator[tuple[Started, Path, list[psutil.Process]]]:
    """A run that has begun to train; it has no port, and afterwards no process of it is left."""
    process = start(*BASE, f"epochs={EPOCHS}", *overrides, cwd=folder)
    everybody: list[psutil.Process] = []
    try:
        run = folder / "run"

        def trains() -> bool:
            assert process.poll() is None, screen(folder)
            return (run / "metrics.jsonl").exists() and len(points(run, "train/loss")) > 2

        wait_for(trains, 90, "training goes on")
        everybody = family(process.pid)
        assert not listening(everybody), "on one host there is nothing to connect to"
        yield process, run, everybody
        wait_for(lambda: not alive(everybody), 10, f"{alive(everybody)} end")
    finally:
        process.kill()
        kill(alive(everybody))


def let_go(run: Path, *gates: str) -> None:
    """Open gates of the run."""
    for gate in gates:
        (run / gate).touch()


def screen(folder: Path) -> str:
    """What the user has seen."""
    return (folder / "screen.txt").read_text()


def member(run: Path, name: str, everybody: list[psutil.Process]) -> psutil.Process:
    """The process that writes that log."""
    log = str(run / name)
    holders = [p for p in everybody if p.is_running() and log in _outputs(p)]
    assert holders, f"nobody writes {log}"
    return min(holders, key=lambda p: p.create_time())  # a server's copy, which saves, writes there as well


def _outputs(process: psutil.Process) -> list[str]:
    found = []
    for number in (1, 2):
        link = Path(f"/proc/{process.pid}/fd/{number}")
        try:
            found.append(str(link.readlink()))
        except OSError:
            continue
    return found


def ended(process: Started, folder: Path, code: int, seconds: float = 90) -> None:
    """The run ends by itself with that exit code."""
    try:
        wait_for(lambda: process.poll() is not None, seconds, "the run ends")
    except AssertionError as error:
        raise AssertionError(f"{error}:\n{screen(folder)[-3000:]}") from None
    assert process.returncode == code, screen(folder)[-3000:]


def served(run: Path, number: int = 0) -> dict[str, Any]:
    """What a server counted."""
    return dict(json.loads((run / f"server.{number}.json").read_text()))


def check_curves(run: Path) -> None:
    """No curve runs backwards or has two values of one step, whoever wrote it."""
    steps: dict[str, list[int]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        point = json.loads(line)
        for name in point["metrics"]:
            if name.startswith(("train/", "val/")):
                steps.setdefault(name, []).append(point["step"])
    for name, found in steps.items():
        assert found == sorted({*found}), (name, found)


@pytest.mark.all
@pytest.mark.parametrize(
    ("mode", "rank", "servers"),
    [pytest.param("async", 1, 2, marks=pytest.mark.long), ("async", 0, 1), ("ssp", 1, 2), ("geo", 0, 1)],
)
def test_others_finish_all_work_when_a_worker_is_killed(tmp_path: Path, mode: str, rank: int, servers: int) -> None:
    extra = ("strategy.k_steps=5",) if mode == "geo" else ()
    with running(tmp_path, f"strategy=pserver_{mode}", f"launch.servers={servers}", GATES, *extra) as (
        process,
        run,
        everybody,
    ):
        member(run, f"workerlog.{rank}", everybody).send_signal(signal.SIGKILL)
        seen = len(points(run, "train/loss"))
        let_go(run, "first", "second")
        ended(process, tmp_path, 0)
    assert "ATTENTION" in screen(tmp_path) and f"worker {rank} was killed by SIGKILL" in screen(tmp_path)
    result = read(run / "result.json")
    assert result["status"] == "done" and list(result["lost_workers"]) == [str(rank)]
    assert len(points(run, "train/loss")) > seen
    assert (run / "model.safetensors").is_file()
    assert (run / "checkpoints" / "persistables" / "COMPLETE").is_file()
    for number in range(servers):
        told = served(run, number)
        assert list(told["lost"]) == [str(rank)]
        if mode != "geo":  # a push per batch, none twice, at each server
            assert told["pushes"] == EPOCHS * PER_EPOCH
    assert result["samples"] == EPOCHS * PER_EPOCH * 8, "also what it had trained before it died"
    check_curves(run)


@pytest.mark.all
@pytest.mark.parametrize(("mode", "at"), [("async", "persistables"), ("geo", "model")])
def test_next_worker_saves_when_the_first_dies_saving(tmp_path: Path, mode: str, at: str) -> None:
    run = tmp_path / "run"
    done = trainer(
        *(o for o in BASE if not o.startswith("launch.")),
        f"strategy=pserver_{mode}",
        "epochs=1",
        "limit_train_batches=3",
        "model._target_=tests.faults.dying.Dying",
        f"+model.at={at}",
        f"+model.run={run}",
        "launch.nproc=2",
        "launch.max_restarts=0",
        cwd=tmp_path,
        timeout=2400,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert (run / "died").exists()
    assert read(run / "result.json")["status"] == "done" and list(read(run / "result.json")["lost_workers"]) == ["0"]
    assert (run / "model.safetensors").is_file() and (run / "model.json").is_file()
    assert (run / "checkpoints" / "persistables" / "COMPLETE").is_file()


@pytest.mark.all
def test_stopped_worker_is_ended_before_others_do_its_work(tmp_path: Path) -> None:
    """It cannot wake, and go on with what another worker does in its place by then."""
    silence = patient(2)
    with running(tmp_path, "strategy=pserver_async", f"strategy.lost_after_s={silence}", GATES) as (
        process,
        run,
        everybody,
    ):
        sleeper = member(run, "workerlog.1", everybody)
        sleeper.send_signal(signal.SIGSTOP)
        wait_for(lambda: not alive([sleeper]), 15 + silence, "it is ended")
        log, why = run / "serverlog.0", f"nothing was heard of it for {silence:g} s"
        wait_for(lambda: f"worker 1 is lost: {why}" in log.read_text(), 15, "its server has heard of that")
        let_go(run, "first", "second")
        ended(process, tmp_path, 0, 120)
    assert f"worker 1 was lost and is ended: {why}" in screen(tmp_path)
    assert list(read(run / "result.json")["lost_workers"]) == ["1"]
    assert served(run)["pushes"] == EPOCHS * PER_EPOCH


@pytest.mark.all
def test_another_process_takes_the_place_of_a_stopped_worker(tmp_path: Path) -> None:
    silence = patient(2)
    options = ("strategy=pserver_async", f"strategy.lost_after_s={silence}", "launch.max_restarts=1", GATES)
    with running(tmp_path, *options) as (process, run, everybody):
        member(run, "workerlog.1", everybody).send_signal(signal.SIGSTOP)
        log = run / "workerlog.1"
        wait_for(lambda: "is there again" in log.read_text(), 60 + silence, "another one is started")
        let_go(run, "first", "second")
        ended(process, tmp_path, 0, 120)
    assert "takes part again" in log.read_text()
    assert "restart 1 of 1: worker 1 is started again; the others go on meanwhile" in screen(tmp_path)
    result = read(run / "result.json")
    assert result["lost_workers"] == {} and result["returned"] == [
        f"worker 1 was lost and is ended: nothing was heard of it for {silence:g} s (strategy.lost_after_s)"
    ]
    assert served(run)["pushes"] == EPOCHS * PER_EPOCH


def test_sync_run_stops_and_names_the_killed_worker(tmp_path: Path) -> None:
    with running(tmp_path, "strategy=pserver_sync", "epochs=1000") as (process, run, everybody):
        member(run, "workerlog.1", everybody).send_signal(signal.SIGKILL)
        ended(process, tmp_path, 1, 20)
    assert "worker 1 was killed by SIGKILL" in screen(tmp_path)
    assert "Traceback" not in screen(tmp_path)


@pytest.mark.all
@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGABRT, marks=pytest.mark.long)], ids=lambda s: s.name
)
def test_run_without_its_server_ends_and_names_it(tmp_path: Path, how: signal.Signals) -> None:
    with running(tmp_path, "strategy=pserver_async", "epochs=1000") as (process, run, everybody):
        member(run, "serverlog.0", everybody).send_signal(how)
        ended(process, tmp_path, 1, 20)
    assert "server 0" in screen(tmp_path)
    assert "Traceback" not in screen(tmp_path)


@pytest.mark.all
def test_run_with_servers_ends_whole_when_its_parent_is_ended(tmp_path: Path) -> None:
    with running(tmp_path, "strategy=pserver_async", "launch.servers=2", "epochs=1000", "checkpoint=none") as (
        process,
        run,
        _,
    ):
        process.send_signal(signal.SIGTERM)
        ended(process, tmp_path, 130, 20)
    assert read(run / "status.json")["state"] == "killed"
