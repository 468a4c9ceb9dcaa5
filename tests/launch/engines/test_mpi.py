"""launch=mpi: mpirun's line as Open MPI and hydra spell it, and a run by an mpirun that starts its tasks here."""

from __future__ import annotations

import shlex
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.launch.engines.apart import end_with, left_on_disks, python_apart
from tests.launch.engines.jobs import job_with
from tests.pace import wait_for
from tests.runs import SMALL, read, trainer
from trainer.errors import UserError
from trainer.launch.engines.contract import ENDED, RUNNING, Handle, Job, Needs, State
from trainer.launch.engines.copies import Away, Copies
from trainer.launch.engines.mpi import Mpi

MPIRUN = """#!/bin/sh
# Starts each task here, with the variables of Open MPI, and passes SIGUSR1 on to the group of each, as mpirun does.
[ "$1" != --version ] || { echo "mpirun (Open MPI) 5.0.11"; exit; }
while [ "$1" != sh ]; do
    [ "$1" != -n ] || size=$2
    shift
done
trap 'kill -s USR1 -- $tasks' USR1
for number in $(seq 0 $((size - 1))); do
    export OMPI_COMM_WORLD_RANK=$number OMPI_COMM_WORLD_SIZE=$size OMPI_COMM_WORLD_LOCAL_SIZE=1 PMIX_NAMESPACE=job$$
    setsid "$@" &
    tasks="$tasks -$!"
done
[ -e quiet ] || echo "mpirun itself"
for task in $tasks; do wait "${task#-}" || wait "${task#-}"; done # a signal ends a wait
exit 0
"""
TASK = """
import os, signal, sys, time
assert sys.argv[1:3] == ["-m", "trainer"]
host, what = int(os.environ["OMPI_COMM_WORLD_RANK"]), sys.argv[3]
if what == "environment":
    secret = os.environ["TRAINER_RUN_SECRET"]
    print(host, os.environ["TRAINER_SUBMITTED"], os.environ["TRAINER_RUN_DIR"], len(secret) >= 32, *sys.argv[4:])
elif what == "sleep":
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
    print("begun", flush=True)
    while True:
        time.sleep(0.05)
elif what == "bar":
    print("10%", end="", flush=True)
    while not os.path.exists("go on"):
        time.sleep(0.05)
    print("\\r20%", end="")
else:
    print("line of host", host)
    sys.exit(int(what.split(",")[host]))
"""


@pytest.fixture
def mpirun(tmp_path: Path) -> str:
    (path := tmp_path / "mpirun").write_text(MPIRUN)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return job_with(TASK, tmp_path)


def line(job: Job, **config: Any) -> list[str]:
    """The words of mpirun's line, without the task's."""
    text = Mpi(**config).render(job)
    words = shlex.split(text[text.index("exec ") :])
    return words[1 : words.index("sh")]


def test_mpirun_starts_one_task_on_each_host_in_both_spellings(job: Job) -> None:
    job = replace(job, started_in="/home/ann", options={"tag-output": True, "launcher": "rsh"})
    forwarded = "-x TRAINER_SUBMITTED -x TRAINER_RUN_DIR -x TRAINER_RUN_SECRET -x TRAINER_WORDS"
    assert line(job, hosts="a,b") == shlex.split(
        f"mpirun -n 2 --map-by ppr:1:node --bind-to none --wdir /home/ann {forwarded} --host a,b "
        "--tag-output --launcher rsh"
    )
    assert line(job, hostfile="hosts", flavour="mpich", mpirun="mpiexec.hydra -v") == shlex.split(
        "mpiexec.hydra -v -n 2 -ppn 1 -bind-to none -wdir /home/ann -f hosts -tag-output -launcher rsh"
    )


def test_the_line_is_a_script_that_a_shell_can_read(job: Job) -> None:
    text = Mpi().render(replace(job, setup=("module load cuda 'x y'",)))
    assert subprocess.run(["sh", "-n"], input=text, text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("change", "config", "instead"),
    [
        ({"needs": Needs(cores=4)}, {"cores": 4}, "the command without launch.cores"),
        ({"max_preemptions": 2}, {"max_preemptions": 2}, "the command without launch.max_preemptions"),
        ({"points": (("seed=1",),)}, {}, "one command for each run of the sweep"),
        ({"least_hosts": 1}, {}, "launch.nnodes=2"),
        ({}, {"hosts": "a,b,c"}, "launch.nnodes=3"),
        ({}, {"hosts": "a,b", "hostfile": "hosts"}, "one of the two"),
        ({"copies": "s3://b/r"}, {"wait": False}, "nohup python -m trainer ... without launch.wait=false"),
    ],
)
def test_what_mpirun_cannot_do_is_refused(
    job: Job, change: dict[str, Any], config: dict[str, Any], instead: str
) -> None:
    with pytest.raises(UserError) as refused:
        Mpi(**config).render(replace(job, **change))
    assert refused.value.instead == instead


def test_an_mpirun_of_the_other_kind_is_named(job: Job, mpirun: str) -> None:
    with pytest.raises(UserError) as refused:
        Mpi(mpirun=mpirun, flavour="mpich").submit(job)
    assert refused.value.instead == "launch.flavour=openmpi" and not job.folder.exists()


def test_without_mpirun_nothing_is_written(job: Job) -> None:
    with pytest.raises(UserError, match="no command mpirun-of-nobody"):
        Mpi(mpirun="mpirun-of-nobody").submit(job)
    assert not job.folder.exists()


@pytest.fixture
def ended(mpirun: str) -> Iterator[Any]:
    """Submit a job and wait for its end; returns its state and the lines of host 0 and mpirun."""

    def submitted(job: Job) -> tuple[State, str]:
        handle = Mpi(mpirun=mpirun).submit(job)
        wait_for(lambda: handle.state().phase == ENDED, 10, "mpirun has not ended")
        return handle.state(), "".join(handle.lines())

    yield submitted


def test_tasks_have_the_folder_and_the_secret_which_is_on_no_command_line(job: Job, ended: Any) -> None:
    state, lines = ended(job)
    assert state == State(ENDED)
    assert lines == f"0 mpi {job.folder} True name='a $b c'\nmpirun itself\n"
    assert (job.engine_folder / "host.1.log").read_text().startswith("1 mpi")
    secret = (job.engine_folder / "secret").read_text()
    assert len(secret) >= 32 and secret not in (job.engine_folder / "job.sh").read_text()
    assert (job.engine_folder / "secret").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("codes", "code", "reason"),
    [("0,0", 0, ""), ("75,75", 75, ""), ("1,0", 1, ""), ("1,3", 1, "host 1 ended with exit code 3: "), ("0,1", 0, "")],
)
def test_the_exit_code_is_that_of_host_0(job: Job, ended: Any, codes: str, code: int, reason: str) -> None:
    state, lines = ended(replace(job, words=(codes,)))
    assert (state.phase, state.code) == (ENDED, code)
    assert state.reason.startswith(reason) and bool(state.reason) == bool(reason)
    assert "line of host 0\n" in lines and "line of host 1" not in lines


def test_mpirun_that_fails_before_its_tasks_is_a_failure(job: Job, tmp_path: Path) -> None:
    (path := tmp_path / "broken").write_text('#!/bin/sh\n[ "$1" != --version ] || exec echo Open MPI\nexit 213\n')
    path.chmod(0o755)
    handle = Mpi(mpirun=str(path)).submit(job)
    wait_for(lambda: handle.state().phase == ENDED, 10, "mpirun has not ended")
    assert handle.state() == State(ENDED, "host 0 left no exit code; host 1 left no exit code", 213)


def test_lines_without_an_end_are_shown_apart_from_those_of_mpirun(
    mpirun: str, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quiet").touch()
    handle = Mpi(mpirun=mpirun).submit(replace(job, words=("bar",)))
    found: list[str] = []

    def shows(text: str) -> bool:
        found.extend(handle.lines())
        return "".join(found) == text

    wait_for(lambda: shows("10%"), 10, "no progress bar")
    with (job.engine_folder / "log").open("a") as log:
        log.write("mpirun itself\n")
    wait_for(lambda: shows("10%\nmpirun itself\n"), 10, "no line of mpirun")
    (tmp_path / "go on").touch()
    wait_for(lambda: shows("10%\nmpirun itself\n\r20%"), 10, "no last line")


def begun(mpirun: str, job: Job) -> Handle:
    """A job that runs until it is asked to end."""
    handle = Mpi(mpirun=mpirun).submit(replace(job, words=("sleep",)))
    logs = [job.engine_folder / f"host.{host}.log" for host in range(job.hosts)]
    wait_for(lambda: all(log.exists() and "begun" in log.read_text() for log in logs), 10, "the tasks have not begun")
    return handle


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_all_tasks_as_sigusr1_and_their_code_is_the_jobs(mpirun: str, job: Job, number: int) -> None:
    handle = begun(mpirun, job)
    assert handle.state() == State(RUNNING)
    handle.signal(number)
    wait_for(lambda: handle.state().phase == ENDED, 10, "mpirun has not ended")
    assert handle.state() == State(ENDED, "", 75)
    assert [(job.engine_folder / f"ended.{host}").read_text() for host in range(2)] == ["75\n", "75\n"]


def test_hosts_without_a_common_disk_bring_lines_and_exit_codes_by_the_address(
    job: Job, mpirun: str, tmp_path: Path
) -> None:
    end_with(tmp_path, 1, 3)
    python = python_apart(tmp_path, "OMPI_COMM_WORLD_RANK")
    away = replace(job, command=(python,), copies=f"file://{tmp_path}/store", started_in="/not/there")
    forwarded = "-x TRAINER_SUBMITTED -x TRAINER_RUN_SECRET -x TRAINER_CARRIED"
    wanted = shlex.split(f"mpirun -n 2 --map-by ppr:1:node --bind-to none --wdir / {forwarded}")
    assert line(away) == wanted
    handle = Away(Mpi(mpirun=mpirun).submit(away), [Copies(away.copies, away.folder)], print)
    wait_for(lambda: handle.state().phase == ENDED, 60, "mpirun has not ended")
    state = handle.state()
    assert (state.phase, state.code) == (ENDED, 1) and state.reason.startswith("host 1 ended with exit code 3: ")
    assert "words of host 0 ['environment', \"name='a $b c'\"]" in "".join(handle.lines())
    assert (away.engine_folder / "host.1.log").read_text().startswith("words of host 1")
    assert (away.folder / "result.json").exists() and left_on_disks(tmp_path) == []
    stored = "".join(path.read_text() for path in (tmp_path / "store").rglob("*") if path.is_file())
    assert (away.engine_folder / "secret").read_text() not in stored


@pytest.mark.all
@pytest.mark.parametrize(
    "apart", [pytest.param(False, marks=pytest.mark.long), True], ids=["one disk", "no common disk"]
)
def test_two_hosts_of_mpirun_find_each_other_and_train(apart: bool, mpirun: str, tmp_path: Path) -> None:
    where = ["launch=mpi", f"launch.mpirun={mpirun}", "launch.nnodes=2", "launch.nproc=1", "hydra.run.dir=run"]
    where += ["launch.shared_storage=false", f"checkpoint.to=file://{tmp_path}/store"] if apart else []
    done = trainer(*SMALL, "tracking=none", "max_steps=4", "device=cpu", "execution.threads=1", *where, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert read(tmp_path / "run" / "result.json")["steps"] == 4 and (tmp_path / "run" / "workerlog.1").exists()
    checkpoints = (tmp_path / "store" / "run") if apart else (tmp_path / "run" / "checkpoints")
    assert [path.parent.name for path in checkpoints.glob("step-*/COMPLETE")] == ["step-000000004"]
