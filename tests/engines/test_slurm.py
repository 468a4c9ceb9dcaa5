"""launch=slurm and srun on a real Slurm of three nodes on this host."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.slurm_cluster import Cluster, cluster, missing

pytestmark = [pytest.mark.engines, pytest.mark.skipif(bool(missing()), reason=f"Slurm is not installed: {missing()}")]

TRAIN = [sys.executable, "-m", "trainer", "+recipe=digits_lenet", "tracking=none"]
TWO = ["launch=slurm", "launch.nnodes=2", "launch.options.partition=low", "checkpoint.grace_s=10"]
SLOW = "callbacks=[{_target_: tests.engines.slow.Slow}]"
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with (
        tempfile.TemporaryDirectory(prefix="slurm", ignore_cleanup_errors=True) as root,
        cluster(Path(root), 3) as made,
    ):
        yield made


def wait(condition: Callable[[], object], what: str | Path, patience_s: float = PATIENCE_S) -> None:
    """Wait for a condition.

    Args:
        what: of a test that fails; a folder: what the command there has said by then.
    """
    until = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < until, said(what) if isinstance(what, Path) else what
        time.sleep(0.2)


def started(slurm: Cluster, folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start a command, whose output goes to FOLDER/said."""
    out = (folder / "said").open("a")
    return subprocess.Popen([*TRAIN, *words], cwd=folder, env=slurm.environment, stdout=out, stderr=out, text=True)


def said(folder: Path) -> str:
    return (folder / "said").read_text()


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def undisturbed(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two nodes that nothing disturbs; its folder."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = slurm.run(*TRAIN, *TWO, "epochs=20", "hydra.run.dir=run", cwd=folder, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def test_preempted_job_of_two_nodes_is_requeued_and_ends_as_if_nothing_had_happened(
    slurm: Cluster, undisturbed: Path, tmp_path: Path
) -> None:
    command = started(slurm, tmp_path, *TWO, "epochs=20", "hydra.run.dir=run")
    wait(lambda: "[Epoch 2" in said(tmp_path), tmp_path)
    higher = slurm.run("srun", "-p", "high", "-N3", "-c2", "true", timeout=120)
    assert higher.returncode == 0, higher.stderr
    assert command.wait(PATIENCE_S) == 0, said(tmp_path)
    assert (tmp_path / "run" / "engine" / "lives").read_text().splitlines() == ["0 75 ", "1 0 "]
    assert "slurm: requeued" in said(tmp_path) and "requeued" in said(tmp_path).split("slurm: requeued")[1]
    assert weights(tmp_path / "run") == weights(undisturbed)


@pytest.mark.long
def test_preempted_job_on_nodes_without_a_common_disk_ends_as_if_nothing_had_happened(
    slurm: Cluster, undisturbed: Path, tmp_path: Path
) -> None:
    """Each node writes below a folder for temporary files of its own, and what the first life has left is gone."""
    disks = tmp_path / "disks"
    setup = f"launch.setup='export TMPDIR={disks}/$SLURM_JOB_NODELIST.$SLURM_RESTART_COUNT; mkdir -p $TMPDIR'"
    where = ["launch.shared_storage=false", f"checkpoint.to=file://{tmp_path}/store", setup]
    command = started(slurm, tmp_path, *TWO, *where, "epochs=20", "hydra.run.dir=run")
    wait(lambda: "[Epoch 2" in said(tmp_path), tmp_path)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["engine"], "the hosts see no run folder"
    higher = slurm.run("srun", "-p", "high", "-N3", "-c2", "true", timeout=120)
    assert higher.returncode == 0, higher.stderr
    for disk in disks.glob("*."):  # of the first life
        disk.rename(tmp_path / f"gone.{disk.name}")
    assert command.wait(PATIENCE_S) == 0, said(tmp_path)
    assert (tmp_path / "run" / "engine" / "lives").read_text().splitlines() == ["0 75 ", "1 0 "]
    assert weights(tmp_path / "run") == weights(undisturbed)
    assert (tmp_path / "run" / "workerlog.1").read_text().count("[Epoch 0, batch 0]") == 1
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*")), "checkpoints stay at the address"


@pytest.mark.long
def test_job_goes_on_without_a_node_that_has_died(slurm: Cluster, undisturbed: Path, tmp_path: Path) -> None:
    words = [*TWO, "epochs=20", "hydra.run.dir=run", "strategy.timeout_s=10", "checkpoint.grace_s=5"]
    command = started(slurm, tmp_path, *words)
    wait(lambda: "[Epoch 2" in said(tmp_path), tmp_path)
    slurm.kill_node("n2")
    began = time.monotonic()
    wait(lambda: "slurm: requeued" in said(tmp_path), tmp_path)
    assert time.monotonic() - began < 10 + 30
    slurm.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=dead")  # as after SlurmdTimeout
    try:
        assert command.wait(PATIENCE_S) == 0, said(tmp_path)
    finally:
        slurm.start_node("n2")
        wait(lambda: slurm.run("sinfo", "-h", "-t", "idle", "-p", "low", "-o", "%D").stdout.strip() == "3", "n2")
    assert (tmp_path / "run" / "engine" / "lives").read_text().splitlines() == ["0 1 n2", "1 0 "]
    assert weights(tmp_path / "run") == weights(undisturbed)


@pytest.mark.long
def test_job_goes_on_when_the_host_of_its_batch_script_has_died(
    slurm: Cluster, undisturbed: Path, tmp_path: Path
) -> None:
    """Slurm itself requeues it."""
    words = [*TWO, "epochs=20", "hydra.run.dir=run", "strategy.timeout_s=10", "checkpoint.grace_s=5", SLOW]
    command = started(slurm, tmp_path, *words)
    wait(lambda: "[Epoch 2" in said(tmp_path), tmp_path)
    [first] = slurm.run("squeue", "-h", "-o", "%B").stdout.split()
    slurm.kill_node(first)
    slurm.run("scontrol", "update", f"NodeName={first}", "State=DOWN", "Reason=dead")  # as after SlurmdTimeout
    try:
        assert command.wait(PATIENCE_S) == 0, said(tmp_path)
    finally:
        slurm.start_node(first)
        wait(lambda: slurm.run("sinfo", "-h", "-t", "idle", "-p", "low", "-o", "%D").stdout.strip() == "3", first)
    assert (tmp_path / "run" / "engine" / "lives").read_text().splitlines() == ["1 0 "]
    assert "requeued" in said(tmp_path) and weights(tmp_path / "run") == weights(undisturbed)


@pytest.mark.long
def test_job_goes_on_when_its_command_has_died_and_the_same_command_follows_it(slurm: Cluster, tmp_path: Path) -> None:
    """Once while it runs, and once when it has ended meanwhile; then the same command is a new job."""
    words = [*TWO, "epochs=6", "hydra.run.dir=run", SLOW]
    command = started(slurm, tmp_path, *words)
    wait(lambda: "[Epoch 1" in said(tmp_path), tmp_path)
    command.kill()
    assert command.wait(PATIENCE_S) == -signal.SIGKILL
    (tmp_path / "said").unlink()
    command = started(slurm, tmp_path, *words)
    wait(lambda: "[Epoch 2" in said(tmp_path), tmp_path)
    command.kill()
    command.wait(PATIENCE_S)
    wait(lambda: (tmp_path / "run" / "engine" / "code").exists(), "the job has not ended")
    done = slurm.run(*TRAIN, *words, cwd=tmp_path, timeout=300)
    assert done.returncode == 0 and "[Epoch 5" in done.stdout and "ended with exit code 0" in done.stdout, done.stderr
    assert (tmp_path / "run" / "engine" / "lives").read_text().splitlines() == ["0 0 "]
    number = json.loads((tmp_path / "run" / "engine" / "job").read_text())["number"]
    again = slurm.run(*TRAIN, *words, "launch.wait=false", cwd=tmp_path, timeout=300)
    assert again.returncode == 0 and json.loads((tmp_path / "run" / "engine" / "job").read_text())["number"] != number
    slurm.run("scancel", json.loads((tmp_path / "run" / "engine" / "job").read_text())["number"])
    wait(lambda: not slurm.run("squeue", "-h").stdout.strip(), "the job is still there")


@pytest.mark.long
def test_sweep_is_followed_again_and_says_which_jobs_were_not_started(slurm: Cluster, tmp_path: Path) -> None:
    """Jobs are cancelled while they wait: one by itself, and the last one alone."""
    words = ["-m", "launch=slurm", "seed=1,2,3,4", "sweep.parallel=1", "hydra.sweep.dir=sweep", "epochs=12", SLOW]
    store = f"tracking.uri=sqlite:///{tmp_path}/mlflow.db"
    kept = [word for word in TRAIN if word != "tracking=none"]

    def begun() -> subprocess.Popen[str]:
        out = (tmp_path / "said").open("a")
        command = [*kept, *words, "tracking=mlflow", store]
        return subprocess.Popen(command, cwd=tmp_path, env=slurm.environment, stdout=out, stderr=out, text=True)

    command = begun()
    wait(lambda: "job 0 (seed=1): running" in said(tmp_path), tmp_path)
    command.kill()
    command.wait(PATIENCE_S)
    number = json.loads((tmp_path / "sweep" / "engine" / "job").read_text())["number"]
    slurm.run("scancel", f"{number}_1", f"{number}_2")
    (tmp_path / "said").unlink()
    command = begun()
    wait(lambda: "job 2 (seed=3): ended with exit code 130 (not started)" in said(tmp_path), tmp_path)
    slurm.run("scancel", f"{number}_3")
    assert command.wait(PATIENCE_S) == 130, said(tmp_path)
    rows = [line.split(",") for line in (tmp_path / "sweep" / "sweep.csv").read_text().splitlines()[1:]]
    assert [(row[1], row[2]) for row in rows] == [
        ("seed=1", "done"),
        *((f"seed={seed}", "not started") for seed in (2, 3, 4)),
    ]
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as runs:
        found = list(runs.execute("SELECT status FROM runs ORDER BY start_time"))
    assert found == [("KILLED",), ("FINISHED",)], "the parent run is the first one, and ends with the last command"


@pytest.mark.long
def test_job_that_runs_out_of_time_goes_on(slurm: Cluster, undisturbed: Path, tmp_path: Path) -> None:
    """Slurm signals 40 s before the end, as the job asks for, or up to 30 s earlier: it checks limits so often."""
    command = started(slurm, tmp_path, *TWO, "epochs=20", "hydra.run.dir=run", "launch.options.time=10", SLOW)
    wait(lambda: "[Epoch 2" in said(tmp_path), tmp_path)
    [number] = slurm.run("squeue", "-h", "-o", "%i").stdout.split()
    shorter = slurm.run("scontrol", "update", f"JobId={number}", "EndTime=now+60seconds")
    assert shorter.returncode == 0, shorter.stderr
    wait(lambda: "slurm: requeued" in said(tmp_path), tmp_path)
    slurm.run("scontrol", "update", f"JobId={number}", "TimeLimit=10")  # Slurm keeps the shorter limit
    assert command.wait(PATIENCE_S) == 0, said(tmp_path)
    assert (tmp_path / "run" / "engine" / "lives").read_text().splitlines() == ["0 75 ", "1 0 "]
    assert "got SIGUSR1" in said(tmp_path) and "got SIGTERM" not in said(tmp_path)
    assert weights(tmp_path / "run") == weights(undisturbed)


@pytest.mark.long
def test_parameter_server_runs_on_three_nodes(slurm: Cluster, tmp_path: Path) -> None:
    words = ["strategy=pserver_sync", "launch=slurm", "launch.nnodes=3", "launch.servers=2", "launch.nproc=1"]
    done = slurm.run(*TRAIN, *words, "epochs=1", "hydra.run.dir=run", cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "done"


@pytest.mark.long
def test_sweep_is_an_array_of_which_so_many_run_at_a_time(slurm: Cluster, tmp_path: Path) -> None:
    words = ["launch=slurm", "seed=1,2,3,4,5,6", "sweep.parallel=3", "hydra.sweep.dir=sweep", "epochs=1"]
    done = slurm.run(TRAIN[0], "-m", "trainer", "-m", *TRAIN[3:], *words, cwd=tmp_path, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads((tmp_path / "sweep" / str(i) / "result.json").read_text()) for i in range(6)]
    assert [result["status"] for result in results] == ["done"] * 6
    assert "6 ended" not in done.stdout and "3 running" in done.stdout and "4 running" not in done.stdout


@pytest.mark.long
def test_preemption_of_the_last_job_of_a_sweep_leaves_the_others_alone(slurm: Cluster, tmp_path: Path) -> None:
    """Its number is that of the whole array, too."""
    words = ["launch=slurm", "launch.options.partition=low", "seed=1,2,3", "hydra.sweep.dir=sweep", "epochs=4", SLOW]
    command = started(slurm, tmp_path, "-m", *words)
    logs = [tmp_path / "sweep" / "engine" / f"{i}.log" for i in range(3)]
    wait(lambda: all(log.exists() and "[Epoch 1" in log.read_text() for log in logs), tmp_path)
    [number] = {line.partition("_")[0] for line in slurm.run("squeue", "-h", "-o", "%i").stdout.splitlines()}
    node = slurm.run("squeue", "-h", "-j", f"{number}_2", "-o", "%N").stdout.strip()
    higher = slurm.run("srun", "-p", "high", "-w", node, "-c2", "true", timeout=120)
    assert higher.returncode == 0, higher.stderr
    assert command.wait(PATIENCE_S) == 0, said(tmp_path)
    lives = [(tmp_path / "sweep" / str(i) / "engine" / "lives").read_text() for i in range(3)]
    assert lives == ["0 0 \n", "0 0 \n", "0 75 \n1 0 \n"]


@pytest.mark.long
def test_job_that_is_cancelled_in_another_shell_does_not_come_again(slurm: Cluster, tmp_path: Path) -> None:
    """The run has the time to save a checkpoint, and the batch script to decide: Slurm's default, 30 s."""
    slurm.configure("KillWait=5", "KillWait=30")
    try:
        command = started(slurm, tmp_path, *TWO, "epochs=500", "hydra.run.dir=run")
        wait(lambda: "[Epoch 1" in said(tmp_path), tmp_path)
        slurm.run("scancel", said(tmp_path).partition("cancel: scancel ")[2].partition(")")[0])
        assert command.wait(PATIENCE_S) == 130, said(tmp_path)
    finally:
        slurm.configure("KillWait=30", "KillWait=5")
    assert (tmp_path / "run" / "engine" / "lives").read_text() == "0 75 \n" and "requeued" not in said(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, 75)])
def test_signals_to_the_command_end_the_job(slurm: Cluster, tmp_path: Path, number: int, code: int) -> None:
    command = started(slurm, tmp_path, *TWO, "epochs=500", "hydra.run.dir=run")
    wait(lambda: "[Epoch 1" in said(tmp_path), tmp_path)
    command.send_signal(number)
    assert command.wait(PATIENCE_S) == code, said(tmp_path)
    wait(lambda: not slurm.run("squeue", "-h").stdout.strip(), "the job is still there")
    assert any((tmp_path / "run" / "checkpoints").glob("step-*")) and "requeued" not in said(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("how", [["-N1", "-n2"], ["-N2", "-n2"], ["-N2", "-n4"]])
def test_srun_never_trains_twice_and_all_hosts_share_the_default_folder(
    slurm: Cluster, tmp_path: Path, how: list[str]
) -> None:
    done = slurm.run("srun", *how, *TRAIN, "epochs=1", cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    [run] = (tmp_path / "outputs" / "digits_lenet").iterdir()
    plan = json.loads((run / "plan.json").read_text())
    assert plan["topology"]["roles"]["worker"] == int(how[1][2:])
    assert [path.name for path in (run / "checkpoints").glob("step-*/COMPLETE")] == ["COMPLETE"]
