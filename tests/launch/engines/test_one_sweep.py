"""A sweep as one array of Slurm: followed again, refused without a trace, and how each of its jobs has ended."""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.launch.engines.conftest import SHOWN
from tests.launch.engines.test_one_job import ACCEPTS, COMMAND, FORGETS, REFUSES, fake, type_command
from trainer.cli.submit import released
from trainer.cli.sweep_engine import cancelled_while_held, of_engine
from trainer.errors import RunFailed
from trainer.job.result import Result
from trainer.launch.engines.contract import Job, Point, State
from trainer.launch.engines.engine_folder import SubmittedJob
from trainer.launch.engines.slurm import Slurm
from trainer.launch.engines.slurm_job import SlurmArray, _elements_of


def handle_of(job: Job) -> SlurmArray:
    return SlurmArray("12", job.engine_folder, job.numbered)


def array(tmp_path: Path, **changes: object) -> Job:
    points = tuple(Point((f"seed={i}",), tmp_path / "sweep" / str(i), f"seed={i}") for i in (0, 2))
    made = Job("lenet", ("seed=0,1,2",), tmp_path / "sweep", ("trainer",), str(tmp_path), points=points, numbers=(0, 2))
    return replace(made, **changes)  # type: ignore[arg-type]


def test_array_has_the_numbers_of_the_jobs_that_are_not_done(tmp_path: Path, fakes: Path) -> None:
    fake(fakes, "sbatch", ACCEPTS)
    text = Slurm().render(array(tmp_path, parallel=1))
    assert "#SBATCH --array=0,2%1" in text and "\n2) folder=" in text and "\n1) folder=" not in text
    Slurm().submit(array(tmp_path))
    assert SubmittedJob.of(tmp_path / "sweep" / "2" / "engine") == SubmittedJob("slurm", "12_2", ("seed=2",))


def test_failed_element_shows_its_last_lines_and_its_own_log(tmp_path: Path, fakes: Path) -> None:
    fake(fakes, "scontrol", FORGETS)
    one, log = array(tmp_path), tmp_path / "sweep" / "engine" / "2.log"
    for number, code in ((0, 0), (2, 1)):
        (folder := tmp_path / "sweep" / str(number) / "engine").mkdir(parents=True)
        (folder / "code").write_text(f"{code}\n")
    log.parent.mkdir()
    log.write_text("".join(f"line {i}\n" for i in range(30)) + "error: the reason\n")
    handle = handle_of(one)
    assert handle.state() == State("ended", "", 1) and handle.log == str(log)
    said = "".join(handle.lines())
    assert f"job 2 (seed=2): ended with exit code 1. The end of {log}:\nline 19\n" in said
    assert said.endswith("error: the reason\n") and "job 0 (seed=0): ended with exit code 0\n" in said


def test_array_that_is_asked_to_end_ends_with_75_and_a_cancelled_one_does_not_come_again(
    tmp_path: Path, fakes: Path
) -> None:
    handle = handle_of(array(tmp_path))
    folders = [tmp_path / "sweep" / name / "engine" for name in ("0", "2")]
    for folder in folders:
        folder.mkdir(parents=True)
    handle.cancel()
    assert all((folder / "leave").exists() for folder in folders)
    assert (fakes / "asked").read_text() == "scancel 12\n"
    lines = [SHOWN.format("CANCELLED", "None", 0, "0:15") + f" ArrayTaskId={i}" for i in (0, 2)]
    (fakes / "shown").write_text("\n".join(lines))
    (folders[0] / "code").write_text("75\n")
    assert handle.state().code == 130
    handle.signal(signal.SIGTERM)
    assert handle.state().code == 75


SWEEP = ("-m", *COMMAND[:-1], "seed=1,2", "hydra.sweep.dir=sweep")
BOTH = (
    f"{SHOWN.format('RUNNING', 'None', 0, '0:0')} ArrayTaskId=0\n{SHOWN.format('PENDING', 'X', 0, '0:0')} ArrayTaskId=1"
)


def swept(fakes: Path, *more: str) -> Path:
    """The folder of a sweep whose array 12 was submitted by SWEEP with these further words, and lives."""
    folder, words = fakes.parent / "work" / "sweep", (*SWEEP[1:], *more)
    points = {i: Point((f"seed={i + 1}",), folder / str(i), f"seed={i + 1}") for i in (0, 1)}
    SubmittedJob("slurm", "12", words, points).write(made(folder / "engine"))
    for i, point in points.items():
        SubmittedJob("slurm", f"12_{i}", point.words).write(made(point.folder / "engine"))
    fake(fakes, "sbatch", ACCEPTS)
    (fakes / "shown").write_text(f"{BOTH}\n")
    return folder


@pytest.mark.all
def test_same_sweep_follows_the_array_that_lives(fakes: Path) -> None:
    """Both jobs end by themselves; the first one's checkpoint is of a run at work."""
    folder = swept(fakes, "launch.wait=false")
    (folder / "0" / "checkpoints" / "step-000000001").mkdir(parents=True)
    (folder / "0" / "checkpoints" / "step-000000001" / "checkpoint.json").write_text("{}")
    for i, code in ((0, 3), (1, 0)):
        (folder / str(i) / "engine" / "code").write_text(f"{code}\n")
    (folder / "engine" / "0.log").write_text("the reason\n")
    done = type_command(fakes, "resume=auto", words=SWEEP)
    assert "job 0 (seed=1): ended with exit code 3" in done.stdout and "the reason" in done.stdout, done.stderr
    assert done.returncode == 1 and not (fakes / "asked").exists() and (folder / "engine" / "shown").exists()
    assert (folder / "sweep.csv").read_text().splitlines()[1].startswith("0,seed=1,failed")


def test_array_ends_when_all_of_its_jobs_were_asked_to_leave(fakes: Path) -> None:
    folder = swept(fakes)
    for i, leaves in ((1, False), (0, True)):
        (folder / str(i) / "engine" / "leave").touch()
        found = Slurm().living([folder / "engine"])
        assert found is not None and found.leaves == leaves and list(found.points) == [0, 1]


def test_another_sweep_is_refused_while_the_array_lives(fakes: Path) -> None:
    swept(fakes, "epochs=3")
    done = type_command(fakes, "epochs=2", words=SWEEP)
    assert done.returncode == 2 and "Slurm array 12 of another command runs in this folder, or waits" in done.stderr
    follow = "python -m trainer -m +recipe=digits_lenet device=cpu tracking=none launch=slurm seed=1,2 epochs=3"
    assert f"{follow} hydra.sweep.dir=sweep, which follows it; or scancel 12\n" in done.stderr
    assert not (fakes / "asked").exists()


def test_sweep_beside_a_single_job_of_its_folder_is_refused(fakes: Path) -> None:
    folder = fakes.parent / "work" / "sweep" / "1"
    SubmittedJob("slurm", "7", (*COMMAND[:-1], "seed=9")).write(made(folder / "engine"))
    done = type_command(fakes, words=SWEEP)
    assert done.returncode == 2 and "Slurm job 7 of another command" in done.stderr
    assert "launch=slurm seed=9 hydra.run.dir=sweep/1, which follows it" in done.stderr


@pytest.mark.all
def test_refused_sweep_leaves_nothing_behind(fakes: Path) -> None:
    """Neither a folder nor a run at a tracker: sbatch is asked before anything is opened."""
    fake(fakes, "sbatch", REFUSES)
    words = [word for word in SWEEP if not word.startswith("tracking=")]
    done = type_command(fakes, "tracking.uri=sqlite:///mlflow.db", words=tuple(words))
    assert done.returncode == 2 and "no such partition" in done.stderr, done.stderr
    assert not list((fakes.parent / "work").iterdir())


@pytest.mark.all
def test_array_waits_until_its_sweep_is_open_at_the_trackers_which_stays_so_while_nobody_follows(fakes: Path) -> None:
    """MLflow's parent run is RUNNING, until a later command has shown the end of all jobs."""
    fake(fakes, "sbatch", '#!/bin/sh\necho "$@" >>$FAKES/asked\necho 12\n')
    words = [word for word in SWEEP if not word.startswith("tracking=")]
    done = type_command(fakes, "tracking.uri=sqlite:///mlflow.db", "launch.wait=false", words=tuple(words))
    folder = fakes.parent / "work" / "sweep"
    assert done.returncode == 0, done.stderr
    asked = (fakes / "asked").read_text().splitlines()
    assert asked == [f"--parsable --hold {folder}/engine/job.sh", "release 12"]
    parent = json.loads((folder / "tracking.json").read_text())["trackers"]["mlflow"]["id"]
    assert statuses(fakes) == {parent: "RUNNING"}
    for i in (0, 1):
        (folder / str(i) / "engine" / "code").write_text("0\n")
        (folder / str(i) / "config.yaml").touch()
        (folder / str(i) / "result.json").write_text(json.dumps(asdict(Result("done", str(folder / str(i))))))
    fake(fakes, "scontrol", FORGETS)
    done = type_command(fakes, "tracking.uri=sqlite:///mlflow.db", words=tuple(words))
    assert done.returncode == 0 and statuses(fakes) == {parent: "FINISHED"}, done.stdout + done.stderr


def statuses(fakes: Path) -> dict[str, str]:
    """The runs in MLflow, and their status."""
    with contextlib.closing(sqlite3.connect(fakes.parent / "work" / "mlflow.db")) as store:
        return dict(store.execute("SELECT run_uuid, status FROM runs"))


@pytest.mark.parametrize("common", ["2-5%2", "2,3-5", "2-6:1"])
def test_jobs_that_were_cancelled_while_they_waited_are_not_started(tmp_path: Path, fakes: Path, common: str) -> None:
    """Lines of a real Slurm 22.05: those that wait have one in common; none is left of them when they are cancelled."""
    points = {i: Point((), tmp_path / str(i), f"seed={i}") for i in (0, 2, 3, 4)}
    handle = SlurmArray("12", tmp_path / "engine", points)
    first, waiting = SHOWN.format("RUNNING", "None", 0, "0:0"), SHOWN.format("PENDING", "X", 0, "0:0")
    (fakes / "shown").write_text(f"{first} ArrayTaskId=0\n{waiting} ArrayTaskId={common}\n")
    handle.state()
    assert "job 3" not in "".join(handle.lines())
    (fakes / "shown").write_text(f"{first} ArrayTaskId=0\n{ALONE} ArrayTaskId=4294967294\n{ALONE} ArrayTaskId=4\n")
    assert str(handle.state()) == "running (1 running, 3 ended)"
    said = "".join(handle.lines()).splitlines()
    assert said == [f"job {i} (seed={i}): ended with exit code 130 (not started)" for i in (2, 3, 4)]


def test_array_that_waits_says_why(tmp_path: Path, fakes: Path) -> None:
    handle = SlurmArray("12", tmp_path / "engine", {i: Point((), tmp_path / str(i), f"seed={i}") for i in (0, 1)})
    (fakes / "shown").write_text(f"{SHOWN.format('PENDING', 'Resources', 0, '0:0')} ArrayTaskId=0-1%2\n")
    assert str(handle.state()) == "pending (2 pending: Resources)"
    (fakes / "shown").write_text(f"{SHOWN.format('PENDING', 'JobHeldUser', 0, '0:0')} ArrayTaskId=0-1%2\n")
    assert str(handle.state()).endswith("you hold it: scontrol release 12)")


def test_array_that_cannot_be_released_is_cancelled_and_one_that_the_user_holds_stays_held(
    tmp_path: Path, fakes: Path
) -> None:
    fake(fakes, "sbatch", ACCEPTS)
    by_the_user = Slurm().submit(array(tmp_path, held=True, options={"hold": True}))
    assert not by_the_user.held
    job = array(tmp_path, held=True)
    handle = Slurm().submit(job)
    fake(fakes, "scontrol", "#!/bin/sh\necho 'slurmctld is away' >&2\nexit 1\n")
    with pytest.raises(RunFailed, match="cannot be released: slurmctld is away"), cancelled_while_held((job, handle)):
        released(handle, job)
    assert (fakes / "asked").read_text().endswith("scancel 12\n")


def test_jobs_that_wait_are_read_from_their_common_line() -> None:
    assert [list(_elements_of(text, [7])) for text in ("0-6:2%3", "1,3-4", "1,3,...", "4294967294")] == [
        [0, 2, 4, 6],
        [1, 3, 4],
        [7, 1, 3],
        [4294967294],
    ]


ALONE = "JobId=12 JobState=CANCELLED Reason=None Restarts=0 ExitCode=0:0 NodeList= NumNodes=1"


def test_job_that_left_no_trace_has_ended(tmp_path: Path, fakes: Path) -> None:
    fake(fakes, "scontrol", FORGETS)
    points = {i: Point((), tmp_path / str(i), f"seed={i}") for i in (0, 1)}
    (made(tmp_path / "engine") / "0.log").touch()
    handle = SlurmArray("12", tmp_path / "engine", points)
    assert handle.state() == State("ended", "", 1)
    assert "".join(handle.lines()).splitlines()[-1] == "job 1 (seed=1): ended with exit code 130 (not started)"


@pytest.mark.parametrize(
    ("code", "status"), [(None, "not started"), (75, "not started"), (130, "not started"), (1, "failed")]
)
def test_job_that_was_interrupted_before_its_run_began_is_not_started(
    tmp_path: Path, code: int | None, status: str
) -> None:
    if code is not None:
        (made(tmp_path / "engine") / "code").write_text(f"{code}\n")
    assert of_engine(tmp_path, "killed").status == status
    if code != 1:
        (tmp_path / "config.yaml").touch()
        assert of_engine(tmp_path, "killed").status == "killed"


@pytest.mark.all
def test_sweep_that_resumes_submits_only_jobs_that_are_not_done(fakes: Path) -> None:
    fake(fakes, "sbatch", ACCEPTS)
    words = ("-m", "+recipe=digits_lenet", "device=cpu", "tracking=none", "max_steps=2", "hydra.sweep.dir=sweep")
    first = type_command(fakes, "seed=1", words=words)
    assert first.returncode == 0, first.stderr
    again = ("launch=slurm", "launch.wait=false", "resume=auto")
    done = type_command(fakes, "seed=1", *again, words=words)
    assert done.returncode == 0 and not (fakes / "asked").exists(), done.stderr
    done = type_command(fakes, "seed=1,2", *again, words=words)
    script = (fakes.parent / "work" / "sweep" / "engine" / "job.sh").read_text()
    assert done.returncode == 0 and "#SBATCH --array=1\n" in script, done.stderr
    assert "submitted" in done.stdout and "follow    python -m trainer -m " in done.stdout


def made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder
