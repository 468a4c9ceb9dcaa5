"""Test samples are measured once, at the end, each exactly once, with the weights of the best model."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_model
from sklearn import metrics as truth

import trainer as package
from tests.pace import wait_for
from tests.runs import points, read, start, trainer
from trainer.data.sets.digits import MEAN, STD, Digits
from trainer.data.source import Splits
from trainer.errors import UserError
from trainer.job.plan_table import rows
from trainer.models.lenet import LeNet
from trainer.planning.plan import Plan
from trainer.tracking.logged_model import chosen
from trainer.worker import final_test
from trainer.worker.nonfinite import Stop
from trainer.worker.state import BeforeValidation
from trainer.worker.training import FinalTest, Watchers

TESTED = ["+recipe=digits_lenet", "tracking=none", "data.test_fraction=0.1"]
NAMES = {"test/loss", "test/acc1", "test/acc5", "test/f1"}


def splits() -> Splits:
    source = Digits(val_fraction=0.2, test_fraction=0.1, split_seed=0)
    return source.open(source.facts(1))


@torch.no_grad()
def measured(weights: Path) -> dict[str, float]:
    """What torch and scikit-learn say of these weights on the test samples."""
    test: Any = splits().test
    model = LeNet(10, 1, 8)
    load_model(model, str(weights))
    scores = model.eval()((test.inputs - MEAN[0]) / STD[0])
    labels, guesses = test.labels.numpy(), scores.argmax(1).numpy()
    loss = torch.nn.functional.cross_entropy(scores, test.labels).item()
    return {
        "test/loss": loss,
        "test/acc1": truth.accuracy_score(labels, guesses),
        "test/f1": truth.f1_score(labels, guesses, average="macro"),
    }


def assert_of(found: dict[str, float], weights: Path) -> None:
    assert {name for name in found if name.startswith("test/")} == NAMES
    for name, value in measured(weights).items():
        assert found[name] == pytest.approx(value, abs=1e-6), name


def test_the_three_parts_of_the_digits_share_no_sample() -> None:
    whole, usual = splits(), Digits(val_fraction=0.2, split_seed=0)
    val: Any = usual.open(usual.facts(1)).val
    assert torch.equal(val.inputs, whole.val.inputs), "the validation samples stay the same"  # type: ignore[union-attr]
    parts: list[Any] = [whole.train, whole.val, whole.test]
    assert [len(part) for part in parts] == [1258, 359, 180]
    rows = np.concatenate([part.inputs.flatten(1).numpy() for part in parts])
    assert len(np.unique(rows, axis=0)) == 1797


@pytest.fixture(scope="module")
def falling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose best model is not its last one: its learning rate is far too high in the end."""
    folder = tmp_path_factory.mktemp("tested") / "run"
    wild = ["scheduler=constant", "optimizer.lr=0.8", "limit_train_batches=4", "seed=3"]
    package.run([*TESTED, "epochs=4", *wild, f"hydra.run.dir={folder}"])
    return folder


def test_the_best_model_is_tested_once(falling: Path) -> None:
    result = read(falling / "result.json")
    assert result["best_step"] < result["steps"], "another one is the last"
    assert_of(result["metrics"], falling / "checkpoints" / "best.safetensors")
    assert len(points(falling, "test/acc1")) == 1
    assert "the best model, of update" in (falling / "workerlog.0").read_text()


def test_eval_measures_the_split_that_it_is_told(falling: Path, tmp_path: Path) -> None:
    best = f"weights={falling}/checkpoints/best.safetensors"
    result = package.run([*TESTED, "mode=eval", "eval.split=test", best, f"hydra.run.dir={tmp_path}/test"])
    assert result.metrics == {k: v for k, v in read(falling / "result.json")["metrics"].items() if k in NAMES}
    assert result.samples == 180 and (tmp_path / "test" / "per_class.csv").exists()
    result = package.run([*TESTED, "mode=eval", best, f"hydra.run.dir={tmp_path}/val"])
    assert result.samples == 359 and not NAMES & set(result.metrics)
    with pytest.raises(UserError, match=r"eval\.split=test: scikit-learn's handwritten digits has no test samples"):
        package.run([*TESTED[:2], "mode=eval", "eval.split=test", best])
    with pytest.raises(UserError, match=r"eval\.split=test: mode=train does not take it"):
        package.run([*TESTED, "eval.split=test"])


class Unpicklable(LeNet):
    """A model of one's own that leaves no skeleton; it counts how often it is made."""

    made = 0

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.function = lambda inputs: inputs
        Unpicklable.made += 1


@pytest.mark.all
def test_best_weights_are_tested_in_the_trained_model_and_no_second_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wild = ["scheduler=constant", "optimizer.lr=0.8", "limit_train_batches=4", "seed=3"]
    own = [f"model._target_={__name__}.Unpicklable", f"hydra.run.dir={tmp_path}/run"]
    seen: list[int] = []
    own_test = final_test.test
    monkeypatch.setattr("trainer.worker.final_test.test", lambda *all: (seen.append(Unpicklable.made), own_test(*all)))
    package.run([*TESTED, "epochs=4", *wild, *own])
    assert seen == [Unpicklable.made]
    result = read(tmp_path / "run" / "result.json")
    assert result["best_step"] < result["steps"] and "skeleton.pkl" not in os.listdir(tmp_path / "run")
    assert_of(result["metrics"], tmp_path / "run" / "checkpoints" / "best.safetensors")


def test_checkpoint_of_a_test_that_is_left_has_the_trained_weights() -> None:
    model = LeNet(10, 1, 8)
    run: Any = SimpleNamespace(model=model, watchers=Watchers(Stop()), final_test=FinalTest())
    before, own = BeforeValidation(run, alone=True), {n: t.clone() for n, t in model.state_dict().items()}
    run.final_test.trained = {n: t.clone() for n, t in own.items()}
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7.0)
    with before.restored(run):
        assert all(torch.equal(t, own[n]) for n, t in model.state_dict().items())


@pytest.mark.all
def test_best_weights_by_another_metric_are_not_tested(tmp_path: Path) -> None:
    """The file of the best model is still there, and it is that of the metric before."""
    run = [*TESTED, "scheduler=constant", "epochs=1", "limit_train_batches=4", f"hydra.run.dir={tmp_path}/run"]
    package.run(run)
    again = package.run([*run, "resume=auto", "best.metric=val/loss", "resume.allow_changes=true"])
    said = (tmp_path / "run" / "workerlog.0").read_text().splitlines()[-1]
    assert "the model at the end, no best one by val/loss" in said and "the best model" not in said
    assert_of(again.metrics, tmp_path / "run" / "model.safetensors")


@pytest.mark.all
def test_without_validations_the_model_at_the_end_is_tested_and_with_test_false_none(tmp_path: Path) -> None:
    short = [*TESTED, "max_steps=3", "validation=false"]
    result = package.run([*short, f"hydra.run.dir={tmp_path}/run"])
    assert_of(result.metrics, tmp_path / "run" / "model.safetensors")
    result = package.run([*short, "test=false", f"hydra.run.dir={tmp_path}/none"])
    assert not NAMES & set(result.metrics)
    assert dict(rows(Plan.of(read(tmp_path / "none" / "plan.json"))))["  test"] == "not measured (test=false)"
    streams = Plan.of(read(tmp_path / "run" / "plan.json"))
    streams = streams.changed(data={"facts": replace(streams.data.facts, test_samples=0, iterable=True)})
    assert dict(rows(streams))["  test"].endswith(", if the data source opens test samples")


@pytest.mark.parametrize(("limit", "said"), [(2, "; a part of the samples: limit_val_batches=2"), (3, "")])
def test_a_test_of_a_part_of_the_samples_says_so(
    limit: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """180 samples are three batches of 64."""
    package.run(
        [*TESTED, "max_steps=1", f"limit_val_batches={limit}", "data.val_batch_size=64", f"hydra.run.dir={tmp_path}"]
    )
    line = [line for line in (tmp_path / "workerlog.0").read_text().splitlines() if "] test " in line]
    assert len(line) == 1 and line[0].endswith(f"by val/acc1{said})")
    assert f"at most {limit} batches of each worker in a validation and the test" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_run_that_goes_on_after_its_last_update_is_tested_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first life is broken between the last update and the test."""
    run = [*TESTED, "max_steps=30", "ema.decay=0.9", "best.metric=val_ema/acc1", f"hydra.run.dir={tmp_path}/run"]

    def broken(*args: Any) -> None:
        raise OSError("as if the host were gone")

    monkeypatch.setattr("trainer.worker.final_test.test", broken)
    with pytest.raises(Exception, match="as if the host were gone"):
        package.run(run)
    assert not points(tmp_path / "run", "test/acc1")
    monkeypatch.undo()
    result = package.run([*run, "resume=auto"])
    assert_of(result.metrics, tmp_path / "run" / "checkpoints" / "best.safetensors")
    assert len(points(tmp_path / "run", "test/acc1")) == 1 and result.steps == 30


def test_a_run_that_is_resumed_after_it_was_done_keeps_its_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = [*TESTED, "max_steps=30", f"hydra.run.dir={tmp_path}/run"]
    first = package.run(run)
    measured: list[Any] = []
    monkeypatch.setattr("trainer.worker.final_test.measure", lambda *args: measured.append(args))
    again = package.run([*run, "resume=auto"])
    assert again.metrics == first.metrics and set(again.metrics) >= NAMES and not measured
    assert len(points(tmp_path / "run", "test/acc1")) == 1
    package.run([*run, "limit_val_batches=2", "resume=auto", "resume.allow_changes=true"])
    assert len(measured) == 1, "other samples"


@pytest.mark.all
def test_a_signal_while_the_test_data_are_measured_leaves_them_to_the_next_life(tmp_path: Path) -> None:
    slow = ["data._target_=tests.e2e.own_data.SlowTest", "data.val_batch_size=20", "data.num_workers=0"]
    command = [*TESTED, *slow, "epochs=1", "limit_train_batches=3", "hydra.run.dir=run"]
    process = start(*command, cwd=tmp_path)
    try:
        wait_for(lambda: (tmp_path / "tests").exists() or process.poll() is not None, 90, "the test has begun")
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    finally:
        process.kill()
    screen = (tmp_path / "screen.txt").read_text()
    assert code == 75 and "resume=auto" in screen.splitlines()[-1], screen
    assert read(tmp_path / "run" / "result.json")["status"] == "preempted"
    assert not points(tmp_path / "run", "test/acc1")
    done = trainer(*command, "resume=auto", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_of(read(tmp_path / "run" / "result.json")["metrics"], tmp_path / "run" / "checkpoints" / "best.safetensors")
    assert len(points(tmp_path / "run", "test/acc1")) == 1


@pytest.mark.parametrize("strategy", ["collective", "pserver_async"])
def test_several_workers_test_each_sample_exactly_once(tmp_path: Path, strategy: str) -> None:
    done = trainer(*TESTED, f"strategy={strategy}", "launch.workers=2", "epochs=1", "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_of(read(tmp_path / "run" / "result.json")["metrics"], tmp_path / "run" / "checkpoints" / "best.safetensors")
    assert len(points(tmp_path / "run", "test/acc1")) == 1 and "test/acc1" in done.stdout


def test_the_test_is_of_the_best_model_in_mlflow_too(falling: Path) -> None:
    best, last = (chosen(falling, which, "net") for which in ("best", "last"))
    assert best is not None and last is not None and best.step < last.step
    named = [{name for point in choice.points for name in point["metrics"]} for choice in (best, last)]
    assert named[0] >= NAMES and "val/acc1" in named[0] and not NAMES & named[1]
