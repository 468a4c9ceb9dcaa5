"""One job of Slurm at a time in a run's folder: a second command follows it or is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.engines.conftest import SHOWN
from tests.runs import environment
from trainer.cli.submit import living_job
from trainer.errors import UserError
from trainer.launch.engines.engine_folder import SubmittedJob
from trainer.launch.engines.slurm import Slurm

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


@pytest.mark.all
def test_without_waiting_the_line_to_follow_is_printed_and_the_job_is_noted(fakes: Path) -> None:
    fake(fakes, "sbatch", ACCEPTS)
    done = type_command(fakes, "launch.wait=false")
    again = "python -m trainer +recipe=digits_lenet device=cpu tracking=none launch=slurm hydra.run.dir=run"
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == f"follow    {again}", done.stderr
    noted = json.loads((fakes.parent / "work" / "run" / "engine" / "job").read_text())
    assert noted == {"engine": "slurm", "number": "12", "words": [*COMMAND, "launch.wait=false"]}


def test_job_that_has_ended_or_is_forgotten_lives_only_until_a_command_has_shown_its_end(
    tmp_path: Path, fakes: Path
) -> None:
    SubmittedJob("slurm", "12", ()).write(tmp_path)
    (fakes / "shown").write_text(SHOWN.format("COMPLETED", "None", 0, "0:0"))
    found = Slurm().living([tmp_path])
    assert found is not None and found.is_over
    (tmp_path / "shown").touch()
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


@pytest.mark.all
@pytest.mark.parametrize("before", [pytest.param(False, marks=pytest.mark.long), True])
def test_refused_job_leaves_everything_as_before(fakes: Path, before: bool) -> None:
    fake(fakes, "sbatch", REFUSES)
    folder = fakes.parent / "work" / "run" / "engine"
    if before:
        folder.mkdir(parents=True)
        for name in ("log", "code", "ended.0.0", "secret"):
            (folder / name).write_text(name)
    (fakes / "partition").write_text("PartitionName=low Default=YES PreemptMode=REQUEUE GraceTime=1\n")
    (fakes / "config").touch()
    done = type_command(fakes)
    assert done.returncode == 2 and "no such partition" in done.stderr
    assert "ATTENTION" not in done.stdout + done.stderr, "a concern about a job that there is not"
    left = {path.name: path.read_text() for path in folder.iterdir()} if before else {}
    assert left == ({name: name for name in ("log", "code", "ended.0.0", "secret")} if before else {})
    assert before or not folder.parent.exists()


@pytest.mark.all
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


@pytest.mark.all
def test_plan_is_printed_here_and_resume_auto_needs_a_folder(fakes: Path) -> None:
    fake(fakes, "sbatch", ACCEPTS)
    done = type_command(fakes, "plan=true", "launch.nnodes=2", "launch.nproc=4", "data.batch_size=8")
    assert done.returncode == 0 and "8 per worker x 8 workers = 64 global" in done.stdout, done.stderr
    done = type_command(fakes, "resume=auto", words=COMMAND[:-1])
    assert done.returncode == 2 and "the folder has the time in its name" in done.stderr
    assert not (fakes / "asked").exists() and not list((fakes.parent / "work").iterdir())


@pytest.mark.all
def test_end_that_nobody_has_seen_is_shown_once_to_the_same_command(fakes: Path) -> None:
    """The command that launch.wait=false has printed is typed when the job has ended: it must not train again."""
    folder = lives(fakes, "launch.wait=false", state="COMPLETED")
    (folder / "log").write_text("its lines\n")
    (folder / "code").write_text("3\n")
    done = type_command(fakes)
    assert done.returncode == 3 and "its lines\n" in done.stdout and not (fakes / "asked").exists(), done.stderr
    done = type_command(fakes, "launch.wait=false")
    assert done.returncode == 0 and (fakes / "asked").read_text() == "12\n" and not (folder / "shown").exists()


@pytest.mark.parametrize(
    ("more", "wait", "follows"),
    [((), True, True), (("resume=auto",), True, False), (("epochs=2",), True, False), ((), False, False)],
)
def test_end_of_a_job_is_not_for_another_command(
    tmp_path: Path, fakes: Path, more: tuple[str, ...], wait: bool, follows: bool
) -> None:
    SubmittedJob("slurm", "12", COMMAND).write(tmp_path)
    (fakes / "shown").write_text(SHOWN.format("COMPLETED", "None", 0, "0:0"))
    found = living_job(Slurm(wait=wait), [tmp_path], "hydra.run.dir", [*COMMAND, *more])
    assert (found is not None) == follows
