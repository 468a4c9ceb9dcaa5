"""One job of Slurm at a time in a run's folder: a second command follows it or is refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.launch.engines.conftest import SHOWN
from tests.runs import environment
from trainer.errors import UserError
from trainer.launch.engines.contract import Job, Point, State
from trainer.launch.engines.engine_folder import SubmittedJob
from trainer.launch.engines.slurm import Slurm, SlurmArray

COMMAND = ("+recipe=digits_lenet", "device=cpu", "tracking=none", "launch=slurm", "hydra.run.dir=run")
ACCEPTS = "#!/bin/sh\necho 12 | tee -a $FAKES/asked\n"
REFUSES = "#!/bin/sh\necho 'sbatch: error: no such partition' >&2\nexit 1\n"
FORGETS = "#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2\nexit 1\n"


def fake(fakes: Path, name: str, text: str) -> None:
    (fakes / name).write_text(text)
    (fakes / name).chmod(0o755)


def type_command(fakes: Path, *more: str, words: tuple[str, ...] = COMMAND) -> subprocess.CompletedProcess[str]:
    (work := fakes.parent / "work").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "trainer", *words, *more]
    return subprocess.run(
        command, cwd=work, env=environment(), capture_output=True, text=True, timeout=200, check=False
    )


def lives(fakes: Path, *words: str, state: str = "RUNNING") -> Path:
    """The folder of a run whose job 12 lives, of a command with these further words."""
    folder = fakes.parent / "work" / "run" / "engine"
    folder.mkdir(parents=True)
    SubmittedJob("slurm", "12", (*COMMAND, *words)).write(folder)
    fake(fakes, "sbatch", ACCEPTS)
    (fakes / "shown").write_text(SHOWN.format(state, "None", 0, "0:0") + "\n")
    return folder


def test_same_command_follows_the_job_that_lives(fakes: Path) -> None:
    folder = lives(fakes, "launch.wait=false")
    (folder / "log").write_text("its lines\n")
    (folder / "code").write_text("3\n")
    done = type_command(fakes)
    assert "its lines\n" in done.stdout and "Slurm job 12: ended with exit code 3" in done.stdout, done.stderr
    assert done.returncode == 3 and not (fakes / "asked").exists()


def test_another_command_is_refused_while_the_job_lives(fakes: Path) -> None:
    folder = lives(fakes, "epochs=3")
    done = type_command(fakes, "epochs=2")
    assert done.returncode == 2 and "Slurm job 12 of another command" in done.stderr
    assert "epochs=3 hydra.run.dir=run, which follows it; or scancel 12" in done.stderr
    assert not (fakes / "asked").exists() and [path.name for path in folder.iterdir()] == ["job"]


def test_without_waiting_the_line_to_follow_is_printed_and_the_job_is_noted(fakes: Path) -> None:
    fake(fakes, "sbatch", ACCEPTS)
    done = type_command(fakes, "launch.wait=false")
    again = "python -m trainer +recipe=digits_lenet device=cpu tracking=none launch=slurm hydra.run.dir=run"
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == f"follow    {again}", done.stderr
    noted = json.loads((fakes.parent / "work" / "run" / "engine" / "job").read_text())
    assert noted == {"engine": "slurm", "number": "12", "words": [*COMMAND, "launch.wait=false"]}


def test_job_that_slurm_has_forgotten_or_that_ended_is_not_followed(tmp_path: Path, fakes: Path) -> None:
    SubmittedJob("slurm", "12", ()).write(tmp_path)
    (fakes / "shown").write_text(SHOWN.format("COMPLETED", "None", 0, "0:0"))
    assert Slurm().living([tmp_path]) is None
    fake(fakes, "scontrol", FORGETS)
    assert Slurm().living([tmp_path]) is None
    fake(fakes, "scontrol", "#!/bin/sh\nexit 1\n")
    with pytest.raises(UserError, match="Slurm job 12 may still run in this folder, and Slurm does not answer"):
        Slurm().living([tmp_path])


@pytest.mark.parametrize(
    ("state", "leave", "ends"), [("RUNNING", False, False), ("RUNNING", True, True), ("COMPLETING", False, True)]
)
def test_job_that_ends_is_to_be_waited_for(tmp_path: Path, fakes: Path, state: str, leave: bool, ends: bool) -> None:
    SubmittedJob("slurm", "12", ()).write(tmp_path)
    (fakes / "shown").write_text(SHOWN.format(state, "None", 0, "0:0"))
    if leave:
        (tmp_path / "leave").touch()
    found = Slurm().living([tmp_path])
    assert found is not None and found.leaves == ends


@pytest.mark.parametrize("before", [False, True])
def test_refused_job_leaves_everything_as_before(fakes: Path, before: bool) -> None:
    fake(fakes, "sbatch", REFUSES)
    folder = fakes.parent / "work" / "run" / "engine"
    if before:
        folder.mkdir(parents=True)
        for name in ("log", "code", "ended.0.0", "secret"):
            (folder / name).write_text(name)
    done = type_command(fakes)
    assert done.returncode == 2 and "no such partition" in done.stderr
    left = {path.name: path.read_text() for path in folder.iterdir()} if before else {}
    assert left == ({name: name for name in ("log", "code", "ended.0.0", "secret")} if before else {})
    assert before or not folder.parent.exists()


def test_unfinished_folder_is_refused_at_the_submission(fakes: Path) -> None:
    fake(fakes, "sbatch", ACCEPTS)
    words = ("+recipe=digits_lenet", "device=cpu", "tracking=none", "hydra.run.dir=run", "max_steps=2")
    made = type_command(fakes, "checkpoint.every_steps=1", words=words)
    assert made.returncode == 0, made.stderr
    status = fakes.parent / "work" / "run" / "status.json"
    status.write_text(status.read_text().replace('"done"', '"running"'))
    done = type_command(fakes, "max_steps=2")
    assert done.returncode == 2 and "holds a run that did not come to its end" in done.stderr
    done = type_command(fakes, "max_steps=2", "checkpoint.every_steps=1", "resume=auto", "optimizer.lr=0.7")
    assert done.returncode == 2 and "optimizer.lr was 0.05, is 0.7" in done.stderr
    assert not (fakes / "asked").exists()


def test_plan_is_printed_here_and_resume_auto_needs_a_folder(fakes: Path) -> None:
    fake(fakes, "sbatch", ACCEPTS)
    done = type_command(fakes, "plan=true", "launch.nnodes=2", "launch.nproc=4", "data.batch_size=8")
    assert done.returncode == 0 and "8 per worker x 8 workers = 64 global" in done.stdout, done.stderr
    done = type_command(fakes, "resume=auto", words=COMMAND[:-1])
    assert done.returncode == 2 and "the folder has the time in its name" in done.stderr
    assert not (fakes / "asked").exists() and not list((fakes.parent / "work").iterdir())


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
    handle = SlurmArray("12", one)
    assert handle.state() == State("ended", "", 1) and handle.log == str(log)
    said = "".join(handle.lines())
    assert f"job 2 (seed=2): ended with exit code 1. The end of {log}:\nline 19\n" in said
    assert said.endswith("error: the reason\n") and "job 0 (seed=0): ended with exit code 0\n" in said


def test_array_that_is_asked_to_end_ends_with_75_and_a_cancelled_one_does_not_come_again(
    tmp_path: Path, fakes: Path
) -> None:
    handle = SlurmArray("12", array(tmp_path))
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


def test_sweep_is_refused_while_its_array_lives(fakes: Path) -> None:
    fake(fakes, "sbatch", ACCEPTS)
    SubmittedJob("slurm", "12", ()).write(made(fakes.parent / "work" / "sweep" / "engine"))
    SubmittedJob("slurm", "12_0", ()).write(made(fakes.parent / "work" / "sweep" / "0" / "engine"))
    done = type_command(fakes, words=("-m", *COMMAND[:-1], "seed=1,2", "hydra.sweep.dir=sweep"))
    assert done.returncode == 2 and "Slurm job 12 runs in this folder, or waits" in done.stderr
    assert "resume=auto when it has ended; or scancel 12\n" in done.stderr and not (fakes / "asked").exists()


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
