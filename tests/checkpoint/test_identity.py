"""What ends a run early, and averages, of a run that goes on from a checkpoint: as if it had never been interrupted
(``test_grid.py``)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import trainer
from tests import runs
from trainer.checkpoint import store, tensor_tree
from trainer.weights import server_files

DIGITS = (
    "+recipe=digits_lenet",
    "data.batch_size=16",
    "limit_train_batches=7",
    "limit_val_batches=3",
    "execution.log_every=2",
)
DROPPING = ("model._target_=tests.checkpoint.dropping.Dropping",)
ALONE = {
    "plain": (*DIGITS, "scheduler=cosine", "scheduler.warmup_epochs=1"),
    "dropout, average, early stop": (
        *DIGITS,
        *DROPPING,
        "ema.decay=0.9",
        "execution.val_every_steps=3",
        "early_stop.metric=val/loss",
        "early_stop.min_delta=100",
        "early_stop.patience=7",
    ),
    "merged, plateau, adam": (
        *DIGITS,
        "strategy.gradient_merge.k_steps=2",
        "optimizer=adam",
        "scheduler=plateau",
        "scheduler.patience=0",
        "scheduler.metric=val/loss",
        "scheduler.gamma=0.5",
    ),
    "balanced classes, bf16": (
        *DIGITS,
        *DROPPING,
        "sampler=class_balanced",
        "precision=bf16",
        "optimizer=adamw",
        "execution.val_every_steps=2",
    ),
    "repeated augmentation, fp16": (
        *DIGITS,
        "sampler=repeated_augmentation",
        "precision=fp16",
        "optimizer.momentum=0.9",
    ),
    "mixed images": (
        "+recipe=cifar10_convnet",
        "data.download=false",
        "data.num_workers=1",
        "data.mixup=0.2",
        "data.cutmix=1.0",
        *DIGITS[1:],
    ),
    "reading process": (*DIGITS, *DROPPING, "data.num_workers=1", "data.prefetch=2", "optimizer=rmsprop"),
}
"""Runs of one worker, which ``tests/gpu`` plays."""
COMMANDS = {
    "collective": (*DIGITS, "launch.nproc=2", "ema.decay=0.9", *DROPPING),
    "local_sgd": (*DIGITS, "launch.nproc=2", "strategy=local_sgd", "strategy.k_steps=3", "ema.decay=0.9", *DROPPING),
}
"""Runs of several workers."""
EVERYTHING = (
    "epochs=3",
    "tracking=none",
    "execution.threads=1",
    "checkpoint.every_steps=1",
    "checkpoint.every_epochs=null",
    "checkpoint.keep_last=100",
    "checkpoint.background=false",
    "verbosity=quiet",
)


def lines(run: Path) -> list[tuple[int, int, dict[str, float]]]:
    """What metrics.jsonl tells, without times."""
    told = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    kept = [
        (
            p["step"],
            p["epoch"],
            {k: v for k, v in p["metrics"].items() if not k.startswith(("perf/", "system/", "server"))},
        )
        for p in told
    ]
    return [line for line in kept if line[2]]


def back_at(whole: Path, step: int, folder: Path) -> None:
    """The folder as a run leaves it that was killed some time after that checkpoint."""
    shutil.copytree(whole, folder)
    for checkpoint in (folder / "checkpoints").glob("step-*"):
        if int(checkpoint.name.partition("-")[2]) > step:
            shutil.rmtree(checkpoint)
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps({**status, "state": "running"}))
    for left in ("model.safetensors", "model_ema.safetensors", "result.json"):
        (folder / left).unlink(missing_ok=True)


def check_equal(one: Path, other: Path) -> None:
    assert lines(one) == lines(other)
    for name in ("model.safetensors", "model_ema.safetensors", "checkpoints/best.safetensors"):
        assert (one / name).exists() == (other / name).exists(), name
        if (one / name).exists():
            ours, theirs = load_file(one / name), load_file(other / name)
            assert {k for k in ours if not torch.equal(ours[k], theirs[k])} == set(), name


CUT = {
    "one worker": ALONE["dropout, average, early stop"],
    "merged": (*DIGITS, "strategy.gradient_merge.k_steps=2", "optimizer=adam"),
    "collective": COMMANDS["collective"],
    "local_sgd": COMMANDS["local_sgd"],
    "pserver_sync": (*DIGITS, "strategy=pserver_sync", "launch.nproc=1", "optimizer=adam"),
    "async, static work": (*DIGITS, "strategy=pserver_async", "launch.nproc=1", "data.work=static"),
    "async, leased work": (*DIGITS, "strategy=pserver_async", "launch.nproc=1", "data.lease_batches=2"),
}
"""Runs that max_steps ends inside the second epoch, after 10 updates, or 6 merged ones."""


SAVED = [pytest.param(case, True, marks=pytest.mark.long) for case in ("local_sgd", "async, static work")]
"""Killed when all was saved, too."""


@pytest.mark.all
@pytest.mark.parametrize(
    ("case", "saved"), [*((case, case == "one worker") for case in CUT if case != "async, static work"), *SAVED]
)
def test_max_steps_inside_an_epoch_is_kept_wherever_the_run_was_killed(case: str, saved: bool, tmp_path: Path) -> None:
    """After the last update and before its validation; of some, also when all was saved."""
    steps = 6 if case == "merged" else 10
    command = (*CUT[case], *EVERYTHING, f"max_steps={steps}")

    def run(*told: str) -> Path:
        ended = runs.trainer(*command, *told, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        folder = tmp_path / told[0].partition("=")[2]
        assert runs.read(folder / "result.json")["steps"] == steps
        return folder

    whole = run("hydra.run.dir=whole")
    back_at(whole, steps, tmp_path / "last")
    check_equal(whole, run("hydra.run.dir=last", "resume=auto"))
    if saved:
        by_epochs = ("checkpoint.every_epochs=1", "checkpoint.every_steps=null")
        back_at(run("hydra.run.dir=by_epochs", *by_epochs), steps, tmp_path / "saved")
        check_equal(whole, run("hydra.run.dir=saved", "resume=auto", *by_epochs))


@pytest.mark.all
@pytest.mark.parametrize(
    "case", ["one worker", pytest.param("merged", marks=pytest.mark.long), "collective", "async, static work"]
)
def test_more_updates_than_max_steps_go_on_within_its_epoch(case: str, tmp_path: Path) -> None:
    """The rest of the epoch that was cut is trained on, not left out."""
    some, more = (6, 9) if case == "merged" else (10, 17)
    command = (
        *CUT[case],
        *EVERYTHING,
        "checkpoint.every_epochs=1",
        "checkpoint.every_steps=null",
        "early_stop.metric=null",
        "scheduler=constant",
    )
    for folder, told in (("whole", (f"max_steps={more}",)), ("some", (f"max_steps={some}",))):
        ended = runs.trainer(*command, *told, f"hydra.run.dir={folder}", cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
    again = (f"max_steps={more}", "hydra.run.dir=some", "resume=auto", "resume.allow_changes=true")
    ended = runs.trainer(*command, *again, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert runs.read(tmp_path / "some" / "result.json")["steps"] == more
    ours, theirs = (load_file(tmp_path / folder / "model.safetensors") for folder in ("whole", "some"))
    assert {name for name in ours if not torch.equal(ours[name], theirs[name])} == set()


@pytest.mark.all
def test_leased_epoch_that_max_steps_has_cut_is_named(tmp_path: Path) -> None:
    """Its blocks were counted for the cut: a larger max_steps goes on with the next epoch, and says so."""
    command = (*CUT["async, leased work"], *EVERYTHING, "hydra.run.dir=run")
    assert runs.trainer(*command, "max_steps=10", cwd=tmp_path).returncode == 0
    refused = runs.trainer(*command, "max_steps=17", "resume=auto", cwd=tmp_path)
    assert refused.returncode == 2 and "the rest of the epoch that max_steps=10 has cut" in refused.stderr
    again = runs.trainer(
        *command, "max_steps=17", "resume=auto", "resume.allow_changes=true", "verbosity=normal", cwd=tmp_path
    )
    assert again.returncode == 0 and "the rest of the epoch that max_steps=10 has cut" in again.stdout
    assert runs.read(tmp_path / "run" / "result.json")["steps"] == 14, (
        "two blocks of the second epoch, 7 updates of the first and 3 of the third"
    )


@pytest.mark.all
def test_early_stop_is_kept_and_decided_anew_by_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is of the very update whose validation ended the run."""
    monkeypatch.chdir(tmp_path)
    command = (*ALONE["dropout, average, early stop"], "early_stop.patience=3", *EVERYTHING)
    assert trainer.run([*command, "hydra.run.dir=whole"]).steps == 9, "validations after 3, 6, 7 and 9 updates"
    for place, told, steps in (
        ("same", (), 9),
        ("patient", ("early_stop.patience=4",), 12),
        ("without", ("early_stop.metric=null",), 21),
        ("other", ("early_stop.metric=val/acc1",), 18),
    ):
        back_at(Path("whole"), 9, Path(place))
        changes = ("resume.allow_changes=true",) if told else ()
        result = trainer.run([*command, *told, *changes, f"hydra.run.dir={place}", "resume=auto"])
        assert result.steps == steps, place
        assert ("early stop at update" in result.ended) == (place != "without")
    check_equal(Path("whole"), Path("same"))
    assert runs.read(Path("same/result.json"))["ended"] == runs.read(Path("whole/result.json"))["ended"]


@pytest.mark.all
def test_what_a_callback_asked_for_is_kept(tmp_path: Path) -> None:
    """Worker 1 asks after the eighth update, all hear it with the line after the ninth. A callback of other arguments
    asks anew."""

    def run(stop_at: int, *told: str) -> None:
        asks = f"callbacks=[{{_target_:tests.e2e.own_callbacks.Recorder,stop_at:{stop_at}}}]"
        ended = runs.trainer(*COMMANDS["collective"], *EVERYTHING, asks, *told, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr

    run(8, "hydra.run.dir=whole")
    whole = runs.read(tmp_path / "whole" / "result.json")
    assert whole["ended"] == "stopped by a callback at update 9: worker 1 has seen enough"
    for place, step, stop_at in (("asked", 8, 8), ("agreed", 9, 8), ("other", 9, 12)):
        back_at(tmp_path / "whole", step, tmp_path / place)
        run(stop_at, f"hydra.run.dir={place}", "resume=auto", "resume.allow_changes=true")
        if stop_at == 8:
            check_equal(tmp_path / "whole", tmp_path / place)
        ended = runs.read(tmp_path / place / "result.json")["ended"]
        assert ended == whole["ended"].replace("update 9", f"update {9 if stop_at == 8 else 13}")


@pytest.mark.parametrize(
    ("case", "starts"),
    [
        ("one worker", (10,)),
        ("one worker", (14, 15)),
        ("local_sgd", (10,)),
        ("pserver_sync", (15,)),
        pytest.param("local_sgd", (14, 15), marks=pytest.mark.long),
        pytest.param("pserver_sync", (10, 14), marks=pytest.mark.long),
    ],
)
def test_average_that_is_switched_on_begins_with_the_checkpoints_weights(
    case: str, starts: tuple[int, ...], tmp_path: Path
) -> None:
    """By hand in float64, from the weights in the checkpoints that follow."""
    command = (*CUT[case], *EVERYTHING, "early_stop.metric=null", "max_steps=15", "scheduler=constant")
    ended = runs.trainer(*command, "ema.decay=null", "hydra.run.dir=whole", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    for start in starts:  # 10: within an epoch, 14: at its end, 15: nothing is left to train
        back_at(tmp_path / "whole", start, tmp_path / f"from{start}")
        again = ("ema.decay=0.8", f"hydra.run.dir=from{start}", "resume=auto", "resume.allow_changes=true")
        ended = runs.trainer(*command, *again, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        check_average(tmp_path / f"from{start}", range(start, 16), 2 if case == "local_sgd" else 1)


def check_average(run: Path, steps: range, workers: int) -> None:
    """Of decay 0.8 over the weights after these updates, which servers have where there are such; of several workers
    the mean."""
    averages = []
    for worker in range(workers):
        models = []
        for step in steps:
            folder = store.folder_of(run / "checkpoints", step)
            model = tensor_tree.read(folder / store.part_of(worker), ["model"])["model"]
            models.append(server_files.parameters(folder, model) if list(folder.glob("server-*")) else model)
        average = {name: value.double() for name, value in models[0].items()}
        for model in models[1:]:
            average = {name: 0.8 * value + 0.2 * model[name].double() for name, value in average.items()}
        averages.append(average)
    found = load_file(run / "model_ema.safetensors")
    for name in averages[0]:
        mean = torch.stack([average[name] for average in averages]).mean(0)
        torch.testing.assert_close(found[name].double(), mean, rtol=1e-5, atol=1e-6)


def test_average_of_a_run_that_was_all_done_is_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = (*DIGITS, *EVERYTHING, "checkpoint.every_steps=null", "checkpoint.every_epochs=1", "hydra.run.dir=run")
    trainer.run([*command])
    trainer.run([*command, "resume=auto", "ema.decay=0.9", "resume.allow_changes=true"])
    model, average = (load_file(f"run/{name}.safetensors") for name in ("model", "model_ema"))
    assert {name for name in model if not torch.equal(model[name], average[name])} == set()
