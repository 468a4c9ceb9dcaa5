"""A worker's loss or gradient becomes NaN in a real run: all workers skip, or all go back, and every point is there
once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.faults.test_restarts import BASE as RUN
from tests.faults.test_restarts import sent
from tests.runs import losses, mlflow_runs, points, read, trainer
from trainer import run as run_here
from trainer.errors import UserError

BASE = [*RUN, "model._target_=tests.faults.poisoned.Poisoned", "~model.in_channels", "~model.image_size"]
TWO = ["launch.nproc=2", "+model.rank=1"]
NO_MLFLOW = "tracking=none"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[int, float]], list[str]]:
    """Updates and losses of a run by two workers with ``stop`` and finite numbers, and what the second one saw."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = trainer(*BASE, *TWO, "+model.at=[]", f"+model.folder={folder}", NO_MLFLOW, cwd=folder)
    assert done.returncode == 0, done.stderr
    return losses(folder / "run"), (folder / "seen").read_text().split()


@pytest.mark.all
def test_all_workers_skip_what_one_of_them_cannot_use(tmp_path: Path) -> None:
    two, one = tmp_path / "two", tmp_path / "one"
    for folder, which, batch in ((two, TWO, 32), (one, [], 64)):
        folder.mkdir()
        done = trainer(
            *BASE, *which, "+model.at=[3,7]", "on_nonfinite=skip", f"data.batch_size={batch}", NO_MLFLOW, cwd=folder
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "update 3 is skipped: its loss is not finite" in done.stdout
        assert "updates are left out (on_nonfinite=skip)" in done.stdout
        assert "2 updates skipped" in done.stdout and read(folder / "run" / "result.json")["skipped"] == 2
        assert points(folder / "run", "train/skipped")[:5] == [1, 1, 1, 1, 2]
    mine, truth = losses(two / "run"), losses(one / "run")
    assert [step for step, _ in mine] == [step for step in range(1, 21) if step not in (3, 7)]
    assert mine == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in truth], "one process on the global batch"
    weights = load_file(one / "run" / "model.safetensors")
    for name, tensor in load_file(two / "run" / "model.safetensors").items():
        assert tensor.allclose(weights[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.all
def test_gradient_of_one_worker_is_found_and_left_out_by_workers_that_train_apart(
    tmp_path: Path, undisturbed: tuple[list[tuple[int, float]], list[str]]
) -> None:
    options = ["strategy=local_sgd", "strategy.k_steps=2", "on_nonfinite=skip", "+model.gradient=true", NO_MLFLOW]
    done = trainer(*BASE, *TWO, *options, "+model.at=[3]", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert read(tmp_path / "run" / "result.json")["skipped"] == 1
    assert "update 3 is skipped: its gradients are not finite" in (tmp_path / "run" / "workerlog.1").read_text()
    assert "is skipped" not in (tmp_path / "run" / "workerlog.0").read_text(), "the other one takes its step"
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(1, 21))


@pytest.mark.all
def test_looking_at_finite_numbers_changes_no_bit(
    tmp_path: Path, undisturbed: tuple[list[tuple[int, float]], list[str]]
) -> None:
    done = trainer(*BASE, *TWO, "+model.at=[]", "on_nonfinite=skip", NO_MLFLOW, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == undisturbed[0] and not points(tmp_path / "run", "train/skipped")


@pytest.mark.all
def test_rewound_run_sees_other_batches_and_has_each_point_once(
    tmp_path: Path, undisturbed: tuple[list[tuple[int, float]], list[str]]
) -> None:
    """After the rewind a worker dies before the next checkpoint; the new order survives that, and the checkpoints after
    it."""
    done = trainer(
        *BASE, *TWO, "+model.at=[7]", f"+model.folder={tmp_path}", "+model.dies=3", "on_nonfinite=rewind", cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run, (plain, seen) = tmp_path / "run", undisturbed
    assert (
        "rewind 1 of 3: all processes are started again, from step-000000004, with the batches in another order"
        in done.stdout
    )
    assert "restart 1 of 3: all processes are started again, from step-000000004; " in done.stdout
    result = read(run / "result.json")
    assert (result["rewinds"], result["restarts"], result["steps"]) == (1, 1, 20)
    first, report, anew = seen[:7], seen[6:7], [*seen[7:10], *seen[4:6], seen[7]]
    assert (tmp_path / "seen").read_text().split() == [*first, *report, *anew[:3], *anew, *seen[10:]]
    assert losses(run)[:4] == plain[:4] and [step for step, _ in losses(run)] == list(range(1, 21))
    reached = dict(sent(tmp_path))
    assert {step: loss for step, loss in reached.items() if step not in (5, 6)} == dict(
        [*losses(run)[:4], *losses(run)[6:]]
    )
    assert all(reached[step] in (dict(plain)[step], dict(losses(run))[step]) for step in (5, 6)), (
        "MLflow keeps what it had"
    )
    assert len(sent(tmp_path)) == 20
    [tracked] = mlflow_runs(tmp_path)
    assert tracked.info.status == "FINISHED" and tracked.data.tags["trainer.rewinds"] == "1"
    told = read(run / "nonfinite.1.json")
    assert (told["worker"], told["epoch"], told["update"], len(told["samples"]["6"])) == (1, 0, 7, 32)
    assert not (run / "nonfinite.json").exists() and str(run / "nonfinite.1.json") in done.stdout


@pytest.mark.all
def test_numbers_that_go_wrong_again_and_again_end_the_run(tmp_path: Path) -> None:
    done = trainer(
        *BASE,
        *TWO,
        "+model.at=[3,4,5]",
        "+model.gradient=true",
        "on_nonfinite=rewind",
        "max_rewinds=2",
        "checkpoint.every_steps=1",
        NO_MLFLOW,
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "after 2 rewinds (max_rewinds): the run does not go back again" in done.stderr
    assert "The gradients are not finite (the loss is 2." in done.stderr or "gradients of worker 1 are" in done.stderr
    told, run = [], tmp_path / "run"
    for name in ("nonfinite.1.json", "nonfinite.2.json", "nonfinite.json"):
        told.append(read(run / name))
    assert [(t["worker"], t["what"], t["update"]) for t in told] == [
        (1, "gradients", 3),
        (1, "gradients", 5),
        (1, "gradients", 7),
    ]
    assert json.loads((run / "result.json").read_text())["rewinds"] == 2


@pytest.mark.all
def test_worker_that_fails_says_no_goodbye_after_which_the_others_would_train_and_save_without_it(
    tmp_path: Path,
) -> None:
    done = trainer(*BASE, *TWO, "+model.at=[7]", "strategy=pserver_sync", NO_MLFLOW, cwd=tmp_path)
    assert done.returncode == 1 and "worker 1: The loss is nan at update 7" in done.stderr, done.stderr
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(1, 7))
    assert {p.name for p in (tmp_path / "run" / "checkpoints").glob("step-*[0-9]")} == {"step-000000004"}


@pytest.mark.all
def test_push_that_a_server_refuses_ends_the_run_with_the_names_of_worker_and_values(tmp_path: Path) -> None:
    """The loss is finite, and a worker out of step looks at no gradients: the server does."""
    poison = ("+model.at=[3]", "+model.gradient=true", "strategy=pserver_async")
    done = trainer(*BASE, *TWO, *poison, NO_MLFLOW, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "server 0 refused PUSH of worker 1: values of layers.1." in done.stderr, done.stderr
    assert "are not finite (strategy.on_nonfinite=refuse)" in done.stderr and "Traceback" not in done.stderr
    assert read(tmp_path / "run" / "result.json")["status"] == "failed"


@pytest.mark.all
def test_stopped_run_goes_on_with_another_choice(tmp_path: Path) -> None:
    poison = [*BASE, "+model.at=[7]", f"+model.folder={tmp_path}", NO_MLFLOW]
    done = trainer(*poison, cwd=tmp_path)
    assert done.returncode == 1 and f"report: {tmp_path / 'run' / 'nonfinite.json'}" in done.stderr
    assert "Traceback" not in done.stderr and "The loss is nan at update 7 (epoch 0, batch 6)" in done.stderr
    assert read(tmp_path / "run" / "nonfinite.json")["forward_again"]["inputs_are_finite"]
    done = trainer(*poison, "on_nonfinite=skip", "resume=auto", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(1, 21))
    assert not (tmp_path / "run" / "nonfinite.json").exists(), "of the life before"


ELSEWHERE = "the optimizer is elsewhere. Type instead: on_nonfinite=stop"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("skip", "strategy=pserver_async", "launch.nproc=2"), ELSEWHERE),
        (("rewind", "strategy=pserver_sync", "launch.nproc=2"), ELSEWHERE),
        (("rewind", "checkpoint=none"), "there is nothing to go back to. Type instead: checkpoint=auto"),
        (
            ("skip", "strategy=collective", "strategy.comm_hook=powersgd", "launch.nproc=2"),
            "Type instead: on_nonfinite=rewind",
        ),
        (
            ("rewind", "launch.nnodes=2", "launch.nproc=1", "launch.master_port=29500"),
            "Type instead: on_nonfinite=skip",
        ),
    ],
)
def test_what_cannot_skip_or_rewind_is_refused(overrides: tuple[str, ...], said: str) -> None:
    choice, *others = overrides
    with pytest.raises(UserError) as refused:
        run_here(["+recipe=digits_lenet", NO_MLFLOW, f"on_nonfinite={choice}", *others])
    assert said in str(refused.value)
