"""What a run's folder holds to go on from is lost by no command that did not ask for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trainer
from tests.composed import ready
from tests.planning.test_resume import BASE, files, interrupted, refusal
from trainer.__main__ import main
from trainer.checkpoint import store
from trainer.checkpoint.durable_folder import MARKER
from trainer.cli import sweep
from trainer.cli.compose import compose, hydra_app, named_by_time
from trainer.cli.last_lines import how_to_resume
from trainer.errors import RunFailed, UserError
from trainer.job import claim_folder, job
from trainer.job.ready import Ready
from trainer.job.restarts import begin_again

__all__ = ["interrupted"]
KEPT = ("checkpoint.keep_last=3", "checkpoint.keep_best=0")


@pytest.fixture
def run(interrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder ``run`` of a run that was killed after update 8, in the working directory."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(interrupted / "run", tmp_path / "run")


def steps(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("*step-*"))


def meets(monkeypatch: pytest.MonkeyPatch, times: int, happens: Callable[[], object]) -> None:
    """While the command waits for its folder for that time, something happens there."""
    take, left = claim_folder._take, [times]

    def take_late(*told: object) -> None:
        left[0] -= 1
        if not left[0]:
            happens()
        take(*told)  # type: ignore[arg-type]

    monkeypatch.setattr(claim_folder, "_take", take_late)


@pytest.mark.parametrize(
    "spelled", ["link", "run/../run", "link/checkpoints/step-000000006", "step", "./run/checkpoints/step-000000006"]
)
def test_its_own_checkpoint_by_another_spelling_is_its_own(run: Path, spelled: str) -> None:
    Path("link").symlink_to("run")
    Path("step").symlink_to("run/checkpoints/step-000000006")
    result = trainer.run([*BASE, *KEPT, "hydra.run.dir=run", f"resume={spelled}"])
    assert result.status == "done" and result.steps == 8
    assert "step-000000006" in steps(run)
    lives = json.loads((run / "lives.json").read_text())
    assert [life["first"] for life in lives] == [0, 6 if "6" in spelled or spelled == "step" else 8]


def test_the_runs_folder_by_another_spelling_is_its_own(run: Path) -> None:
    Path("link").symlink_to(".")
    assert trainer.run([*BASE, *KEPT, f"hydra.run.dir={run.parent}/link/run", f"resume={run}"]).steps == 8
    assert steps(run)[-1] == "step-000000008"


@pytest.mark.parametrize("state", ["running", "failed", "preempted", None])
def test_an_evaluation_does_not_clear_an_unfinished_run(run: Path, state: str | None) -> None:
    shutil.copy(run / "model.safetensors", "w.safetensors")
    (run / "status.json").write_text(json.dumps({"state": state}))
    before = files(run)
    said = refusal("mode=eval", "weights=w.safetensors", "hydra.run.dir=run")
    assert (
        "did not come to its end; its newest checkpoint is step-000000008" in said and "another hydra.run.dir" in said
    )
    assert files(run) == before
    trainer.run([*BASE, "mode=eval", "weights=w.safetensors", "hydra.run.dir=run", "resume=fresh"])
    assert not steps(run)


def test_a_run_that_begins_from_another_does_not_clear_an_unfinished_one(run: Path) -> None:
    shutil.copytree("run", "other")
    before = files(run)
    said = refusal("hydra.run.dir=run", "resume=other")
    assert "Type instead: resume=auto to go on with that run, or another hydra.run.dir" in said
    assert files(run) == before
    (run / "status.json").write_text(json.dumps({"state": "done"}))
    assert trainer.run([*BASE, "hydra.run.dir=run", "resume=other"]).steps == 8


def other_format(folder: Path) -> None:
    marker = folder / MARKER
    marker.write_text(marker.read_text().replace('"format_version": 1', '"format_version": 2'))


@pytest.mark.parametrize(
    ("break_it", "why"),
    [
        (other_format, "format version 2; this trainer reads version 1"),
        (lambda folder: (folder / "worker-0.safetensors").write_bytes(b""), "0 bytes, but"),
        (lambda folder: (folder / MARKER).unlink(), "the file is missing"),
    ],
)
def test_nothing_begins_over_checkpoints_that_cannot_be_read(
    run: Path, break_it: Callable[[Path], object], why: str
) -> None:
    for folder in store.found(run / "checkpoints"):
        break_it(folder)
    before = files(run)
    said = refusal("hydra.run.dir=run", "resume=auto")
    assert "none of its checkpoints is whole" in said and why in said and "resume=fresh to write over them" in said
    ready = SimpleNamespace(plan=SimpleNamespace(paths=SimpleNamespace(run_dir=str(run)), resume=None), secrets=set())
    with pytest.raises(RunFailed, match="is not started again"):
        begin_again(ready, None, "failed", 8, "died", 1)  # type: ignore[arg-type]
    assert files(run) == before
    trainer.run([*BASE, "hydra.run.dir=run", "resume=fresh"])
    assert store.newest_whole(run / "checkpoints") == run / "checkpoints" / "step-000000008"


def test_what_was_never_completed_is_no_checkpoint(run: Path) -> None:
    for folder in store.found(run / "checkpoints"):
        folder.rename(folder.with_name(f"{folder.name}.partial"))
    assert trainer.run([*BASE, "hydra.run.dir=run", "resume=auto", "max_steps=2"]).steps == 2


@pytest.mark.parametrize("mode", [(), ("resume=other",), ("mode=eval", "weights=w.safetensors")])
def test_a_run_that_was_waited_for_is_not_cleared(
    run: Path, monkeypatch: pytest.MonkeyPatch, mode: tuple[str, ...]
) -> None:
    shutil.copytree("run", "other")
    shutil.copy(run / "model.safetensors", "w.safetensors")
    run.rename("away")
    run.mkdir()
    meets(
        monkeypatch, 2 if mode == ("resume=other",) else 1, lambda: shutil.copytree("away", "run", dirs_exist_ok=True)
    )
    said = refusal("hydra.run.dir=run", *mode)
    assert "did not come to its end; its newest checkpoint is step-000000008" in said
    assert files(run).keys() == {
        str(run / path.relative_to(run.parent / "away")) for path in Path("away").resolve().rglob("*")
    }


def test_auto_does_not_begin_over_what_another_command_has_just_done(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "status.json").write_text(json.dumps({"state": "done"}))
    run.rename("away")
    run.mkdir()
    meets(monkeypatch, 2, lambda: shutil.copytree("away", "run", dirs_exist_ok=True))
    said = refusal("hydra.run.dir=run", "resume=auto")
    assert "another command has begun a run here meanwhile" in said and "the same command once more" in said
    assert steps(run) == steps(Path("away"))


def test_auto_gives_up_nothing_that_another_command_has_just_trained(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = run / "checkpoints" / "step-000000008"
    newest.rename("newest")
    meets(monkeypatch, 2, lambda: Path("newest").rename(newest))
    said = refusal("hydra.run.dir=run", "resume=auto")
    assert "another command has gone on here meanwhile; its newest checkpoint is step-000000008" in said
    assert newest.is_dir()


def test_a_checkpoint_of_a_training_that_was_given_up_goes_on_elsewhere(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = run / "checkpoints" / "step-000000008"
    aside = newest.rename(newest.with_name(f"aside-{newest.name}"))
    shutil.copytree("run/checkpoints/step-000000006", newest)  # another training's
    before = files(run)
    said = refusal("hydra.run.dir=run", f"resume={aside}")
    assert "is of a training that was given up" in said
    assert f"Type instead: resume={aside} hydra.run.dir=ANOTHER_FOLDER" in said
    assert files(run) == before
    result = trainer.run([*BASE, "hydra.run.dir=another", f"resume={aside}", "epochs=3", "resume.allow_changes=true"])
    assert result.steps == 12
    assert "ATTENTION: the training of aside-step-000000008 was given up" in " ".join(capsys.readouterr().out.split())
    for path in (newest, run / "checkpoints" / "step-000000006"):
        shutil.rmtree(path)
    assert "aside-step-000000008" in refusal("hydra.run.dir=run")
    assert "holds aside-step-000000008 alone" in refusal("hydra.run.dir=run", "resume=auto")
    assert aside.is_dir()


def test_a_checkpoint_that_its_run_removes_before_it_is_read_is_told(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That run goes on, and has completed a newer one."""
    begin = job.start_and_restart

    def late(*told: Any) -> dict[str, Any]:
        store._remove(run / "checkpoints" / "step-000000008")
        return begin(*told)

    monkeypatch.setattr(job, "start_and_restart", late)
    with pytest.raises(RunFailed) as failed:
        trainer.run([*BASE, "hydra.run.dir=mine", f"resume={run}"])
    assert str(failed.value).startswith(
        f"resume={run}/checkpoints/step-000000008: the run that wrote this checkpoint has removed it"
    )
    assert str(failed.value).endswith(f"Type instead: resume={run}, whose newest is then taken")
    monkeypatch.undo()
    monkeypatch.chdir(run.parent)
    assert trainer.run([*BASE, "hydra.run.dir=mine", f"resume={run}"]).steps == 8


def test_newer_ones_are_found_by_their_number_and_also_while_they_are_replaced(run: Path) -> None:
    for name in ("step-000000004", "step-1000000000"):
        shutil.copytree(run / "checkpoints" / "step-000000006", run / "checkpoints" / name, dirs_exist_ok=True)
    newest = run / "checkpoints" / "step-000000008"
    newest.rename(newest.with_name(f"{newest.name}.previous"))
    store.set_aside_newer(run / "checkpoints" / "step-000000006")
    assert steps(run) == ["aside-step-000000008", "aside-step-1000000000", "step-000000004", "step-000000006"]


def test_a_folder_that_a_file_names_is_gone_on_in(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine/recipe").mkdir(parents=True)
    Path("mine/recipe/fixed.yaml").write_text(
        "# @package _global_\ndefaults: [digits_lenet]\nhydra: {run: {dir: run}}\n"
    )
    (run / "checkpoints" / "step-000000008").rename("newest")
    typed = ["--config-dir", "mine", "+recipe=fixed", *BASE[1:], "resume=auto"]
    assert main(typed) == 0, capsys.readouterr().err
    assert steps(run)[-1] == "step-000000008" and not Path("run-1").exists()
    assert len((run / "lives.json").read_text().split('"number"')) == 3


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew_in_the_folder_that_a_file_names(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the next life would look for its checkpoints in ``run``, and this one leave them in ``run-1``."""
    Path("mine/recipe").mkdir(parents=True)
    Path("mine/recipe/fixed.yaml").write_text(
        "# @package _global_\ndefaults: [digits_lenet]\nhydra: {run: {dir: run}}\n"
    )
    shutil.rmtree(run / "checkpoints")
    typed = ["--config-dir", "mine", "+recipe=fixed", *BASE[1:], "resume=auto"]
    assert main([*typed, "max_steps=4"]) == 0, capsys.readouterr().err
    assert not Path("run-1").exists() and steps(run)[-1] == "step-000000004"
    assert main([*typed, "max_steps=6", "resume.allow_changes=true"]) == 0, capsys.readouterr().err
    assert not Path("run-1").exists() and steps(run)[-1] == "step-000000006"


@pytest.mark.parametrize("whole", [True, False])
def test_the_command_that_resumes_names_a_configs_folder_as_the_config_does(run: Path, whole: bool) -> None:
    """The copies at ``checkpoint.to`` have that name."""
    plan = SimpleNamespace(mode="train", paths=SimpleNamespace(run_dir=str(run), whole_path=whole))
    said = how_to_resume(SimpleNamespace(plan=plan), ["--config-dir", "mine", "+recipe=fixed"])  # type: ignore[arg-type]
    assert said.endswith(f"+recipe=fixed hydra.run.dir={run if whole else 'run'} resume=auto")


def test_two_runs_of_one_second_have_their_own_folders_also_with_resume_auto(run: Path) -> None:
    with hydra_app() as app:
        usual = compose(app, [BASE[0], "resume=auto"])
        fixed = compose(app, [BASE[0], "resume=auto", "hydra.run.dir=run"])
    assert named_by_time(usual, "hydra.run.dir") and named_by_time(usual, "hydra.sweep.dir")
    assert not named_by_time(fixed, "hydra.run.dir")


def test_a_damaged_checkpoint_is_passed_over_and_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = run / "checkpoints" / "step-000000008" / "worker-0.safetensors"
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    trainer.run([*BASE, *KEPT, "hydra.run.dir=run", "resume=auto"])
    out = capsys.readouterr().out
    assert "passed over: " in out and "step-000000008/worker-0.safetensors: its content is not what was written" in out
    lives = json.loads((run / "lives.json").read_text())
    assert [life["first"] for life in lives] == [0, 6] and steps(run)[-1] == "step-000000008"


def test_a_sweep_with_a_job_that_could_go_on_does_not_begin(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("sweep").mkdir()
    job = run.rename("sweep/0")
    before = files(job)
    assert main(["-m", *BASE, "hydra.sweep.dir=sweep", "seed=1,2"]) == 2
    said = capsys.readouterr().err
    assert f"hydra.run.dir={job.absolute()} in job 0 (seed=1): holds a run that did not come to its end" in said
    assert files(job) == before and not Path("sweep/1").exists()


def test_a_sweep_clears_no_job_that_could_go_on_and_came_after_the_check(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("sweep").mkdir()
    job, check, before = Path("sweep/0"), sweep.check_not_half_done, dict[str, int]()

    def checked(*told: Any) -> None:
        check(*told)
        run.rename(job)
        before.update(files(job / "checkpoints"))

    monkeypatch.setattr(sweep, "check_not_half_done", checked)
    assert main(["-m", *BASE, "hydra.sweep.dir=sweep", "seed=1,2"]) == 1
    said = capsys.readouterr().out
    assert f"job failed: hydra.run.dir={job.absolute()}: holds a run that did not come to its end" in " ".join(
        said.split()
    )
    assert files(job / "checkpoints") == before and Path("sweep/1/result.json").is_file()
    assert [line.split()[2] for line in said.splitlines() if " seed=" in line and "job" not in line] == [
        "failed",
        "done",
    ]


def elastic(run: Path, *more: str) -> Ready:
    hosts = ["launch.nnodes=1:2", "launch.master_addr=127.0.0.1", "data.global_batch_size=32"]
    typed = [*BASE, *hosts, f"hydra.run.dir={run}", *more]
    return ready(*typed, run_dir=str(run))


def test_hosts_that_come_and_go_know_the_runs_own_checkpoint_by_any_spelling(run: Path) -> None:
    Path("link").symlink_to("run")
    leads = elastic(run, "launch.node_rank=0", "resume.path=link")
    assert leads.assignment.resume == str(run / "checkpoints" / "step-000000008"), "others are told its name alone"
    assert leads.plan.resume is not None and leads.plan.resume.here
    with pytest.raises(UserError, match="did not come to its end"):
        elastic(run, "launch.node_rank=0")
    assert elastic(run, "launch.node_rank=1").plan.resume is None, "host 0 tells a host that comes late"
