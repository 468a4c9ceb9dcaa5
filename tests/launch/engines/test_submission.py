"""One command at a time submits for a folder; what it inherits stays with it; how an ended job is shown again."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.launch.engines.conftest import SHOWN
from tests.launch.engines.test_follow import Clock, Scripted
from trainer.cli import last_lines
from trainer.cli.after_job import BEGIN_AGAIN, how_to_go_on, is_open
from trainer.cli.submit import living_job
from trainer.cli.sweep_points import check_not_half_done
from trainer.errors import Interrupted, RunPreempted, UserError
from trainer.launch.engines.contract import Point, State
from trainer.launch.engines.engine_folder import SubmittedJob
from trainer.launch.engines.follow import follow
from trainer.launch.engines.slurm import Slurm
from trainer.launch.engines.slurm_job import SlurmArray, SlurmJob
from trainer.launch.engines.submission import outside_of_tasks, refuse_tasks, submitting


def test_second_command_waits_until_the_first_has_submitted(tmp_path: Path) -> None:
    folder, seen, inside = tmp_path / "run" / "engine", list[str](), threading.Event()

    def second() -> None:
        with submitting(folder, "hydra.run.dir", seen.append):
            seen.append((folder / "job").read_text())

    with submitting(folder, "hydra.run.dir"):
        other = threading.Thread(target=second)
        other.start()
        assert not inside.wait(0.5) and not (folder / "job").exists()
        (folder / "job").write_text("12")
    other.join(60)
    assert seen == ["waits for another command that submits a job for this folder", "12"]
    assert [path.name for path in folder.iterdir()] == ["job"]


def test_refused_submission_leaves_no_folder_and_lets_the_next_one_begin(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "engine"
    with pytest.raises(UserError, match="no"), submitting(folder, "hydra.run.dir"):
        raise UserError("x", "no")
    assert not folder.parent.exists()
    with submitting(folder, "hydra.run.dir"):
        assert folder.is_dir()


@pytest.mark.parametrize("name", [None, "run/engine/secret"])
def test_full_disk_at_the_submission_is_a_sentence(tmp_path: Path, name: str | None) -> None:
    with (
        pytest.raises(UserError, match=r"hydra.run.dir=.*run: cannot be written: No space left.*ANOTHER_FOLDER"),
        submitting(tmp_path / "run" / "engine", "hydra.run.dir"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device", name and str(tmp_path / name))


def test_folder_below_a_file_is_a_sentence_and_an_error_of_another_file_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"), submitting(tmp_path / "file" / "run" / "engine", "x"):
        pass
    with pytest.raises(PermissionError), submitting(tmp_path / "run" / "engine", "x"):
        raise PermissionError(errno.EACCES, "Permission denied", "/usr/bin/sbatch")


def test_one_of_several_tasks_submits_nothing() -> None:
    with pytest.raises(UserError, match=r"launch=slurm: srun has started this command as 2 tasks .*SLURM_PROCID=1"):
        refuse_tasks("launch=slurm", {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"})
    with pytest.raises(UserError, match="as 4 tasks"):
        refuse_tasks("launch=ray", {"WORLD_SIZE": "4", "RANK": "0"})
    refuse_tasks("launch=slurm", {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"})
    refuse_tasks("launch=slurm", {"NNODES": "2"})


def test_job_inherits_nothing_of_the_task_that_submits_it() -> None:
    kept = {"PATH": "/bin", "SLURM_CONF": "/c", "FOO": "1"}
    task = {"SLURM_JOB_ID": "7", "SLURM_CPU_BIND": "none", "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    assert outside_of_tasks({**kept, **task, "TRAINER_RANKS": "srun", "TRAINER_RESUME": "auto"}) == kept
    assert outside_of_tasks({**kept, "SLURM_MPI_TYPE": "pmix"}) == {**kept, "SLURM_MPI_TYPE": "pmix"}


@pytest.mark.parametrize(
    "said", ["Kill job error on job id 71: Invalid job id specified", "Job/step already completing or completed"]
)
def test_signals_and_cancellation_of_a_job_that_is_over_are_no_error(tmp_path: Path, fakes: Path, said: str) -> None:
    (fakes / "scancel").write_text(f"#!/bin/sh\necho 'scancel: error: {said}' >&2\nexit 1\n")
    job, array = SlurmJob("71", tmp_path), SlurmArray("71", tmp_path, {0: Point((), tmp_path, "seed=0")})
    for one in (job, array):
        one.signal(15)
        one.cancel()


@pytest.mark.parametrize(("code", "again", "shows"), [(0, True, True), (3, False, False)])
@pytest.mark.parametrize("wait", [True, False])
def test_end_of_a_job_that_is_done_is_shown_each_time(
    tmp_path: Path, fakes: Path, code: int, again: bool, shows: bool, wait: bool
) -> None:
    SubmittedJob("slurm", "12", ("seed=1",)).write(tmp_path)
    (tmp_path / "code").write_text(f"{code}\n")
    (tmp_path / "shown").touch()
    (fakes / "shown").write_text(SHOWN.format("COMPLETED", "None", 0, "0:0"))
    found = living_job(Slurm(wait=wait), [tmp_path], "hydra.run.dir", ["seed=1"])
    assert (found is not None) == shows
    assert living_job(Slurm(), [tmp_path], "hydra.run.dir", ["seed=1", "resume=auto"]) is None


@pytest.mark.parametrize(
    ("last", "codes", "is_done"), [("12_1", (0, 0), True), ("12_1", (0, 75), False), ("13", (0, 0), False)]
)
def test_array_is_done_until_another_job_is_submitted_for_one_of_its_folders(
    tmp_path: Path, fakes: Path, last: str, codes: tuple[int, int], is_done: bool
) -> None:
    points = {i: Point((f"seed={i}",), tmp_path / str(i), f"seed={i}") for i in (0, 1)}
    for i, number in ((0, "12_0"), (1, last)):
        (folder := tmp_path / str(i) / "engine").mkdir(parents=True)
        SubmittedJob("slurm", number, ()).write(folder)
        (folder / "code").write_text(f"{codes[i]}\n")
    (own := tmp_path / "engine").mkdir()
    SubmittedJob("slurm", "12", (), points).write(own)
    (own / "shown").touch()
    (fakes / "shown").write_text(SHOWN.format("COMPLETED", "None", 0, "0:0"))
    found = Slurm().living([own])
    assert (found is not None and found.is_done) == is_done


def point(folder: Path, name: str, status: str, **more: Any) -> Any:
    (folder / name).mkdir()
    if status:
        (folder / name / "result.json").write_text(json.dumps({"status": status, "run_dir": name}))
    config = SimpleNamespace(mode="train", resume=SimpleNamespace(path=None), **more)
    return SimpleNamespace(subdir=name, ready=SimpleNamespace(checked=SimpleNamespace(config=config)))


@pytest.mark.parametrize(
    ("statuses", "refused"),
    [(("done", "preempted"), True), (("done", ""), True), (("done", "done"), False), (("", "failed"), False)],
)
def test_half_done_sweep_is_not_trained_again_without_a_word(
    tmp_path: Path, statuses: tuple[str, ...], refused: bool
) -> None:
    points = [point(tmp_path, str(i), status) for i, status in enumerate(statuses)]
    if not refused:
        check_not_half_done(points, tmp_path)
        return
    with pytest.raises(UserError, match=r"of 2 jobs 1 are done.*resume=auto.*another hydra.sweep.dir"):
        check_not_half_done(points, tmp_path)
    points[0].ready.checked.config.resume.path = "auto"
    check_not_half_done(points, tmp_path)


@pytest.mark.parametrize("closed", [True, False])
def test_run_that_was_killed_before_its_end_at_the_trackers_is_open(tmp_path: Path, closed: bool) -> None:
    assert not is_open(tmp_path)
    position = {"id": "a", "sent_bytes": 0, "error": ""}
    (tmp_path / "tracking.json").write_text(json.dumps({"run": {}, "trackers": {"mlflow": position}}))
    assert is_open(tmp_path)
    result = {"status": "preempted", "run_dir": "r", "tracking": {"mlflow": {"id": "a"}} if closed else {}}
    (tmp_path / "result.json").write_text(json.dumps(result))
    assert is_open(tmp_path) != closed


def test_without_a_checkpoint_the_same_command_begins_again(tmp_path: Path) -> None:
    assert how_to_go_on(tmp_path, "resume x", always=False) == BEGIN_AGAIN
    assert how_to_go_on(tmp_path, "resume x", always=True) == "resume x"


def test_cancelled_job_is_followed_while_it_winds_up(capsys: pytest.CaptureFixture[str]) -> None:
    import io
    import signal

    def pressed() -> State:
        signal.raise_signal(signal.SIGINT)
        return State("running")

    job, out, clock = (
        Scripted(State("running"), pressed, State("running"), State("ended", "", 130)),
        io.StringIO(),
        Clock(),
    )
    job.winds_up_s = 60.0
    with pytest.raises(Interrupted):
        follow(job, out, clock, clock.sleep)
    assert job.states == [State("ended", "", 130)] and job.done == ["cancelled", "shown"]


@pytest.mark.parametrize(("asked", "says"), [(False, False), (True, True)])
def test_run_that_is_requeued_does_not_say_how_to_resume_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool, says: bool
) -> None:
    monkeypatch.setenv("TRAINER_SUBMITTED", "slurm")
    (tmp_path / "engine").mkdir()
    if asked:
        (tmp_path / "engine" / "leave").touch()
    plan = SimpleNamespace(paths=SimpleNamespace(run_dir=str(tmp_path)), mode="train")
    ready: Any = SimpleNamespace(plan=plan)
    assert bool(last_lines.how_to_go_on(RunPreempted("x"), ready, [])) == says
