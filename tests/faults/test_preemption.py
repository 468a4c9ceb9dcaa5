"""A run that is asked to leave its machine saves a checkpoint, says how it goes on, and does so."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.ledgers import applied
from tests.pace import wait_for
from tests.runs import TORCHRUN, alive, family, kill, losses, mlflow_runs, points, read, start, torchrun, trainer
from tests.zygote import Started
from trainer.run_folder import tracking_file

BASE = [
    "+recipe=digits_lenet",
    "limit_train_batches=12",
    "epochs=3",
    "execution.log_every=1",
    "execution.threads=1",
    "execution.deterministic=true",
    "checkpoint.every_epochs=null",
]
GATE = "callbacks=[{_target_:tests.faults.gate.Gate,at:15,until:go}]"


@contextlib.contextmanager
def at_the_gate(folder: Path, *overrides: str) -> Iterator[tuple[Started, Path]]:
    """A run whose workers wait in their 15th update, in the second epoch."""
    process = start(*BASE, GATE, "hydra.run.dir=run", *overrides, cwd=folder)
    everybody: list[psutil.Process] = []
    try:
        wait_for(lambda: waits(folder / "run", process, folder), 90, "the workers wait")
        everybody = family(process.pid)
        yield process, folder / "run"
        wait_for(lambda: not alive(everybody), 15, f"{alive(everybody)} end")
    finally:
        process.kill()
        kill(alive(everybody))


def waits(run: Path, process: Started, folder: Path) -> bool:
    assert process.poll() is None, (folder / "screen.txt").read_text()
    return (run / "metrics.jsonl").exists() and len(points(run, "train/loss")) >= 15


def ended(process: Started, folder: Path) -> list[str]:
    """What the screen has when the run has ended."""
    process.wait(60)
    return (folder / "screen.txt").read_text().splitlines()


def resumed(folder: Path, line: str) -> Path:
    """The run that a ``resume`` line resumes, done; the gate is open."""
    name, *words = line.split()
    assert name == "resume" and words[:3] == ["python", "-m", "trainer"] and words[-1] == "resume=auto"
    (folder / "run" / "go").touch()
    done = trainer(*(word.strip("'") for word in words[3:]), cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    """Updates and losses of the run by one worker that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = trainer(*BASE, "tracking=none", "hydra.run.dir=run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return losses(folder / "run")


@pytest.mark.all
@pytest.mark.parametrize("launch", [pytest.param("in_process", marks=pytest.mark.long), "forkserver"])
def test_preempted_run_saves_says_so_and_goes_on_as_if_nothing_had_been(
    tmp_path: Path, launch: str, undisturbed: list[tuple[int, float]]
) -> None:
    number = signal.SIGTERM if launch == "in_process" else signal.SIGUSR1
    with at_the_gate(tmp_path, f"launch={launch}", "resume=fresh") as (process, run):
        wait_for(lambda: tracking_file.position(run).id, 90, "the MLflow run is opened")
        process.send_signal(number)
        wait_for(lambda: f"got {number.name}" in (tmp_path / "screen.txt").read_text(), 20, "it says so")
        (run / "go").touch()
        screen = ended(process, tmp_path)
    assert process.returncode == 75, screen
    assert read(run / "status.json")["state"] == "preempted"
    result = read(run / "result.json")
    assert (result["status"], result["steps"], result["error"]) == ("preempted", 15, "")
    assert (run / "checkpoints" / "latest").read_text() == "step-000000015\n"
    [tracked] = mlflow_runs(tmp_path)
    assert tracked.info.status == "KILLED" and tracked.data.tags["trainer.state"] == "PREEMPTED"
    assert "preempted: a checkpoint was saved after update 15" in screen
    [line] = [
        line for line in screen if line.startswith("resume ")
    ]  # after it, the tests' recorder may warn of its own
    assert "resume=fresh" not in line and line.count("hydra.run.dir=") == 1
    assert losses(resumed(tmp_path, line.replace("resume=auto", "tracking=none resume=auto"))) == undisturbed


@pytest.mark.all
@pytest.mark.parametrize("launch", [pytest.param("in_process", marks=pytest.mark.long), "forkserver"])
def test_signal_before_a_process_has_done_an_update_ends_it_at_once_and_a_scheduler_may_begin_it_again(
    tmp_path: Path, launch: str, undisturbed: list[tuple[int, float]]
) -> None:
    """Of the lives of one run the first has nothing to save, the second saves, the third has nothing new, the last
    ends."""
    command = (
        *BASE,
        "model._target_=tests.faults.holding.Holding",
        "tracking=none",
        f"launch={launch}",
        "hydra.run.dir=run",
        "resume=auto",
    )
    one, other = (signal.SIGUSR1, signal.SIGTERM) if launch == "in_process" else (signal.SIGTERM, signal.SIGUSR1)

    def preempted(number: signal.Signals, updates: int) -> list[str]:
        (tmp_path / "holds").unlink(missing_ok=True)
        (tmp_path / "hold").write_text(str(updates))
        process = start(*command, cwd=tmp_path)
        try:
            wait_for(lambda: (tmp_path / "holds").exists() or process.poll() is not None, 90, "its training waits")
            process.send_signal(number)
            wait_for(lambda: f"got {number.name}" in (tmp_path / "screen.txt").read_text(), 20, "it says so")
            if updates:
                (tmp_path / "hold").unlink()
            screen = ended(process, tmp_path)
        finally:
            process.kill()
        assert process.returncode == 75, screen
        assert [
            read(tmp_path / "run" / name)[key] for name, key in (("status.json", "state"), ("result.json", "status"))
        ] == ["preempted"] * 2
        return screen

    nothing = "preempted: got {} while nothing was trained: there is nothing new to save"
    assert preempted(one, 0)[-2:] == [
        nothing.format(one.name),
        "there is no checkpoint yet: the same command begins the run again",
    ]
    assert preempted(other, 15)[-2] == "preempted: a checkpoint was saved after update 16"
    said, resumes = preempted(other, 0)[-2:]
    assert said == nothing.format(other.name) and resumes.startswith("resume ")
    (tmp_path / "hold").unlink()
    assert losses(resumed(tmp_path, resumes)) == undisturbed


@pytest.mark.all
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.long)])
def test_scheduler_that_signals_every_process_lets_the_run_save(tmp_path: Path, number: signal.Signals) -> None:
    """As scancel and srun do: also the tracking process and multiprocessing's tracker of resources."""
    with at_the_gate(tmp_path, "launch.nproc=2", "data.num_workers=1") as (process, run):
        wait_for(lambda: tracking_file.position(run).id, 90, "the MLflow run is opened")
        began = family(process.pid)
        time.sleep(1)
        everybody = alive(began)  # without those that only ask something, such as git of MLflow
        assert len(everybody) >= 8, "the launcher, its forkserver, two workers, two readers, two trackers"
        for other in everybody:
            other.send_signal(number)
        wait_for(lambda: f"got {number.name}" in (tmp_path / "screen.txt").read_text(), 20, "it says so")
        assert alive(everybody) == everybody
        (run / "go").touch()
        screen = ended(process, tmp_path)
    assert process.returncode == 75 and not any("killed" in line for line in screen), screen
    [tracked] = mlflow_runs(tmp_path)
    assert tracked.data.tags["trainer.state"] == "PREEMPTED"
    assert read(run / "result.json")["status"] == "preempted"
    assert (run / "checkpoints" / "step-000000016" / "worker-1.safetensors").is_file(), screen


@pytest.mark.all
@pytest.mark.parametrize(
    ("mode", "number"), [pytest.param("async", signal.SIGTERM, marks=pytest.mark.long), ("sync", signal.SIGUSR1)]
)
def test_signal_to_the_whole_process_group_takes_no_update_from_a_server(
    tmp_path: Path, mode: str, number: signal.Signals
) -> None:
    # Where work is handed out, worker 1 at a gate of its own could have taken what worker 0 needs to come to its.
    gate = "callbacks=[{_target_:tests.faults.gate.Gate,at:15,until:go,rank:0}]"
    servers = ("launch.servers=2", "strategy.ledger=true", "strategy.persistables=false", gate)
    with at_the_gate(tmp_path, f"strategy=pserver_{mode}", *servers, "launch.nproc=2", "tracking=none") as (
        process,
        run,
    ):
        ledgers = [run / f"ledger.{server}.tsv" for server in range(2)]
        before = [ledger.read_text() for ledger in ledgers]
        for other in family(process.pid):
            other.send_signal(number)
        wait_for(lambda: f"got {number.name}" in (tmp_path / "screen.txt").read_text(), 20, "it says so")
        (run / "go").touch()
        screen = ended(process, tmp_path)
    assert process.returncode == 75, screen
    result = read(run / "result.json")
    assert (result["status"], result["restarts"]) == ("preempted", 0), screen
    for ledger, lines in zip(ledgers, before, strict=True):
        assert len(lines.splitlines()) > 15 and ledger.read_text().startswith(lines)
    [line] = [line for line in screen if line.startswith("resume ")]
    resumed(tmp_path, line)
    for ledger in ledgers:
        every = applied(ledger)
        assert mode == "sync" or set(every.values()) == {1}
        assert (every.total() or len(ledger.read_text().splitlines()[1:])) == 2 * 3 * 12


@pytest.mark.all
def test_worker_alone_that_gets_the_signal_passes_it_on(tmp_path: Path) -> None:
    with at_the_gate(tmp_path, "launch.nproc=2", "tracking=none") as (process, run):
        worker = next(p for p in family(process.pid) if writes(p, run / "workerlog.1"))
        worker.send_signal(signal.SIGTERM)
        (run / "go").touch()
        screen = ended(process, tmp_path)
    assert process.returncode == 75, screen
    assert screen[-1].startswith("resume ")


def writes(process: psutil.Process, log: Path) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/fd/1").readlink() == log
    return False


@pytest.mark.parametrize("nproc", [1, 2])
def test_grace_time_ends_a_run_that_does_not_come_to_its_checkpoint(tmp_path: Path, nproc: int) -> None:
    with at_the_gate(
        tmp_path,
        f"launch.nproc={nproc}",
        "tracking=none",
        "checkpoint.every_steps=10",
        "checkpoint.background=false",
        "checkpoint.grace_s=0.2",
    ) as (process, run):
        process.send_signal(signal.SIGTERM)
        screen = ended(process, tmp_path)
    assert process.returncode == 130, screen
    assert screen[-2] == "interrupted: got SIGTERM" and read(run / "status.json")["state"] == "killed"
    assert screen[-1].startswith("resume ") and screen[-1].endswith(" resume=auto")


@pytest.mark.all
@pytest.mark.parametrize("overrides", [["checkpoint=none"], []], ids=["no checkpoints", "Ctrl-C"])
def test_as_ever_without_checkpoints_and_by_ctrl_c(tmp_path: Path, overrides: list[str]) -> None:
    with at_the_gate(tmp_path, "tracking=none", *overrides) as (process, run):
        process.send_signal(signal.SIGTERM if overrides else signal.SIGINT)
        screen = ended(process, tmp_path)
    assert process.returncode == 130 and screen[-1].startswith("interrupted: got SIG"), screen
    assert not (run / "checkpoints" / "latest").exists() and not (run / "model.safetensors").exists()


@pytest.mark.all
def test_preempted_job_ends_its_sweep(tmp_path: Path) -> None:
    process = start("-m", *BASE, GATE, "tracking=none", "hydra.sweep.dir=sweep", "optimizer.lr=0.1,0.2", cwd=tmp_path)
    try:
        wait_for(lambda: waits(tmp_path / "sweep" / "0", process, tmp_path), 90, "the first job waits")
        process.send_signal(signal.SIGTERM)
        (tmp_path / "sweep" / "0" / "go").touch()
        screen = ended(process, tmp_path)
    finally:
        process.kill()
    assert process.returncode == 75, screen
    assert not (tmp_path / "sweep" / "1").exists()
    assert [line.split(",")[2] for line in (tmp_path / "sweep" / "sweep.csv").read_text().splitlines()] == [
        "status",
        "preempted",
        "not started",
    ]
    assert screen[-1].endswith(" optimizer.lr=0.1 hydra.run.dir=sweep/0 resume=auto")


@pytest.mark.all
def test_torchruns_ranks_save_when_its_agent_is_ended(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(*torchrun(*BASE, GATE, "tracking=none", "hydra.run.dir=run"), cwd=tmp_path, **TORCHRUN)
    try:
        wait_for(
            lambda: (run / "metrics.jsonl").exists() and len(points(run, "train/loss")) >= 15, 90, "the ranks wait"
        )
        process.terminate()
        wait_for(lambda: "got SIGTERM" in (run / "workerlog.0").read_text(), 30, "it says so")
        (run / "go").touch()
        process.wait(60)
    finally:
        process.kill()
    assert read(run / "result.json")["status"] == "preempted", (tmp_path / "screen.txt").read_text()
    assert len(list((run / "checkpoints").glob("step-*/worker-*.safetensors"))) >= 1
