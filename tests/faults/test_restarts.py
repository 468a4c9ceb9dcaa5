"""A process that dies or hangs: all are started again from the newest checkpoint, and the numbers are the undisturbed
ones."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.held_up import held_up
from tests.pace import patient, wait_for
from tests.runs import alive, losses, mlflow_runs, points, read, trainer
from tests.zygote import Started
from trainer.run_folder import tracking_file

BASE = [
    "+recipe=digits_lenet",
    "limit_train_batches=10",
    "epochs=2",
    "execution.log_every=1",
    "execution.threads=1",
    "execution.deterministic=true",
    "checkpoint.every_steps=4",
    "checkpoint.background=false",
    "hydra.run.dir=run",
]
TWO = "launch.nproc=2"
GATE = "callbacks=[{_target_:tests.faults.gate.Gate,at:7,until:go}]"
BREAKS = ["model._target_=tests.faults.deadly.Deadly", "~model.in_channels", "~model.image_size"]


def writes(process: psutil.Process, log: Path) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/fd/1").readlink() == log
    return False


@contextlib.contextmanager
def at_the_gate(folder: Path, *overrides: str) -> Iterator[tuple[Started, Path, list[psutil.Process]]]:
    """A run whose workers wait in their seventh update; it has ended afterwards, and its output is on the screen."""

    def waits(run: Path) -> bool:
        return (run / "metrics.jsonl").exists() and len(points(run, "train/loss")) >= 7

    with held_up(folder, waits, *BASE, GATE, *overrides, ends_s=90) as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    """Updates and losses of the run by two workers that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = trainer(*BASE, TWO, "tracking=none", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "restarts       at most 3 within an hour, when a process dies" in done.stdout
    return losses(folder / "run")


@pytest.mark.all
def test_all_go_on_from_the_checkpoint_when_one_is_killed(tmp_path: Path, undisturbed: list[tuple[int, float]]) -> None:
    with at_the_gate(tmp_path, TWO) as (process, run, everybody):
        wait_for(lambda: tracking_file.position(run).id, 90, "the MLflow run is opened")
        next(p for p in everybody if writes(p, run / "workerlog.1")).kill()
        (run / "go").touch()
    screen = (tmp_path / "screen.txt").read_text()
    assert process.returncode == 0, screen
    assert "ATTENTION: worker 1 was killed by SIGKILL" in screen
    assert "restart 1 of 3: all processes are started again, from step-000000004" in screen
    assert losses(run) == undisturbed
    assert read(run / "result.json")["restarts"] == 1
    first, second = json.loads((run / "lives.json").read_text())
    assert (first["how"], first["last"], second["how"], second["first"]) == ("failed", 7, "done", 4)
    log = (run / "workerlog.0").read_text()
    assert "[Epoch 0, batch 0]" in log and "goes on from" in log, "both lives are in the log"
    assert "[Epoch 0, batch 0]" not in screen.partition("restart 1 of 3")[2], "the first life is not shown again"
    [tracked] = mlflow_runs(tmp_path)
    assert tracked.info.status == "FINISHED" and tracked.data.tags["trainer.restarts"] == "1"
    assert sent(tmp_path) == undisturbed


@pytest.mark.long
def test_workers_that_outlive_their_forkserver_do_not_outlive_the_life(
    tmp_path: Path, undisturbed: list[tuple[int, float]]
) -> None:
    with at_the_gate(tmp_path, TWO, "tracking=none") as (process, run, everybody):
        workers = [p for p in everybody if writes(p, run / "workerlog.0") or writes(p, run / "workerlog.1")]
        assert len(workers) == 2 and workers[0].ppid() == workers[1].ppid() != process.pid
        psutil.Process(workers[0].ppid()).kill()
        wait_for(lambda: len(json.loads((run / "lives.json").read_text())) == 2, 60, "the next life begins")
        assert not alive(workers)
        (run / "go").touch()
    assert process.returncode == 0, (tmp_path / "screen.txt").read_text()
    assert losses(run) == undisturbed


def sent(folder: Path, run_id: str = "") -> list[tuple[int, float]]:
    """The losses that MLflow has of a run; without its id, of the only one."""
    from mlflow import MlflowClient

    if not run_id:
        [run] = mlflow_runs(folder)
        run_id = run.info.run_id
    history = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}").get_metric_history(run_id, "train/loss")
    return sorted((point.step, point.value) for point in history)


def test_worker_alone_is_started_again_from_the_beginning_without_a_checkpoint(tmp_path: Path) -> None:
    done = trainer(
        *(o for o in BASE if not o.startswith("checkpoint.")),
        *BREAKS,
        f"+model.deaths={tmp_path}",
        "+model.at=[3,5]",
        "+model.rank=0",
        "launch=forkserver",
        "checkpoint=none",
        "tracking=none",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("from the beginning: there is no checkpoint yet") == 2
    assert read(tmp_path / "run" / "result.json")["restarts"] == 2
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(1, 21))


@pytest.mark.all
@pytest.mark.parametrize(
    ("at", "most", "restarts", "why"),
    [
        ("[6,2]", 3, 1, "worker 1 died after update 5 twice in a row: the run is not started again"),
        ("[2,6]", 1, 1, "after 1 restart within an hour (launch.max_restarts): the run is not started again"),
        pytest.param("[2]", 0, 0, "worker 1 was killed by SIGKILL", marks=pytest.mark.long),
    ],
)
def test_deaths_that_repeat_end_the_run(tmp_path: Path, at: str, most: int, restarts: int, why: str) -> None:
    done = trainer(
        *BASE,
        TWO,
        *BREAKS,
        f"+model.deaths={tmp_path}",
        f"+model.at={at}",
        "+model.rank=1",
        f"launch.max_restarts={most}",
        "tracking=none",
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert why in done.stderr and "worker 1 was killed by SIGKILL" in done.stderr
    assert read(tmp_path / "run" / "result.json")["restarts"] == restarts


@pytest.mark.all
def test_error_of_its_own_is_no_death(tmp_path: Path) -> None:
    done = trainer(
        *BASE,
        TWO,
        "model._target_=tests.e2e.own_models.Breaks",
        *BREAKS[1:],
        "+model.rank=1",
        "tracking=none",
        cwd=tmp_path,
    )
    assert done.returncode == 1 and "the model broke on purpose" in done.stderr
    assert read(tmp_path / "run" / "result.json")["restarts"] == 0


@pytest.mark.all
def test_stopped_worker_is_found_named_and_replaced(tmp_path: Path, undisturbed: list[tuple[int, float]]) -> None:
    with at_the_gate(tmp_path, TWO, "tracking=none", f"launch.hang_timeout_s={patient(3)}") as (
        process,
        run,
        everybody,
    ):
        next(p for p in everybody if writes(p, run / "workerlog.1")).send_signal(signal.SIGSTOP)
        (run / "go").touch()
    screen = (tmp_path / "screen.txt").read_text()
    assert process.returncode == 0, screen
    assert "ATTENTION: worker 1 does not even answer: it is stopped, after 7 updates" in screen
    assert "(most recent call first)" in (run / "workerlog.0").read_text(), "where the others wait is in their logs"
    assert losses(run) == undisturbed


UNDER_WAY = ("strategy=collective", "checkpoint.every_steps=7", "checkpoint.background=true")
"""The first worker waits for the stopped one's part of a checkpoint, too."""
SYNC = ("strategy=pserver_sync", "strategy.persistables=false")
FOUR = "from step-000000004"


@pytest.mark.all
@pytest.mark.parametrize(
    ("strategy", "log", "names", "missed", "whence"),
    [
        (UNDER_WAY, "workerlog.1", "worker 1", "worker 0: worker 1 did not arrive at", "from the beginning"),
        pytest.param(
            SYNC,
            "workerlog.1",
            "worker 1",
            "worker 1 was lost: nothing was heard of it for {:g} s",
            FOUR,
            marks=pytest.mark.long,
        ),
        pytest.param(SYNC, "serverlog.0", "server 0", "server 0 did not answer", FOUR, marks=pytest.mark.long),
    ],
    ids=["collective-worker", "sync-worker", "sync-server"],
)
def test_stopped_process_that_the_others_miss_before_the_launcher_does_is_named_and_replaced(
    tmp_path: Path,
    undisturbed: list[tuple[int, float]],
    strategy: tuple[str, ...],
    log: str,
    names: str,
    missed: str,
    whence: str,
) -> None:
    silence = patient(2)
    waits = f"strategy.lost_after_s={silence}" if "nothing was heard" in missed else f"strategy.timeout_s={patient(3)}"
    with at_the_gate(tmp_path, TWO, *strategy, waits, "tracking=none") as (process, run, everybody):
        next(p for p in everybody if writes(p, run / log)).send_signal(signal.SIGSTOP)
        (run / "go").touch()
    screen = (tmp_path / "screen.txt").read_text()
    assert process.returncode == 0, screen
    attention = next(line for line in screen.splitlines() if line.startswith("ATTENTION"))
    assert attention.startswith(f"ATTENTION: {names} does not even answer: it is stopped, after 7 updates; "), attention
    assert missed.format(silence) in attention
    assert f"restart 1 of 3: all processes are started again, {whence}" in screen
    assert read(run / "result.json")["restarts"] == 1
    assert [step for step, _ in losses(run)] == list(range(1, 21))
    assert [loss for _, loss in losses(run)] == pytest.approx([loss for _, loss in undisturbed], rel=1e-4)


@pytest.mark.all
@pytest.mark.parametrize(("rank", "launch"), [(1, TWO), pytest.param(0, "launch=forkserver", marks=pytest.mark.long)])
def test_worker_that_is_stuck_is_named_with_where_it_is(tmp_path: Path, rank: int, launch: str) -> None:
    done = trainer(
        *BASE,
        launch,
        *BREAKS,
        f"+model.deaths={tmp_path}",
        "+model.at=[3]",
        f"+model.rank={rank}",
        "+model.how=sleep",
        "launch.max_restarts=0",
        f"launch.hang_timeout_s={patient(3)}",
        "tracking=none",
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"worker {rank} hangs, after 2 updates" in done.stderr and "in sleeps_for_ever" in done.stderr
