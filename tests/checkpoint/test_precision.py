"""A run goes on in another precision: what that changes is told before, and it computes what plain torch does from
there."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import trainer
from tests.checkpoint import recording
from tests.checkpoint.test_identity import back_at
from trainer.checkpoint.tensor_tree import read
from trainer.errors import UserError
from trainer.models.lenet import LeNet

RUN = (
    "+recipe=digits_lenet",
    "model._target_=tests.checkpoint.recording.Recorded",
    "loss._target_=tests.checkpoint.recording.Loss",
    "scheduler=constant",
    "scheduler.warmup_epochs=0",
    "optimizer.weight_decay=0",
    "tracking=none",
    "execution.threads=1",
    "limit_train_batches=6",
    "epochs=1",
    "validation=false",
    "checkpoint.every_steps=1",
    "checkpoint.keep_last=100",
    "checkpoint.background=false",
    "verbosity=quiet",
    "device=cpu",
    "execution.channels_last=false",
)
AT = 3
CHANGES = [("fp32", "bf16"), ("bf16", "fp32"), ("fp32", "fp16"), ("fp16", "bf16"), ("fp64", "fp32"), ("fp32", "fp64")]
REFUSED = "in what matters: precision was {}, is {}"
LOST = {
    ("fp32", "fp16"): "precision=fp16 needs a loss scale, and the checkpoint has none: it begins anew",
    ("fp16", "bf16"): "the loss scale of precision=fp16, which precision=bf16 does not need",
    ("fp64", "fp32"): "what float64 has more than float32",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run in each precision."""
    folder = tmp_path_factory.mktemp("precisions")
    made = {before: folder / before for before in dict(CHANGES)}
    for precision, run in made.items():
        trainer.run([*RUN, f"precision={precision}", f"hydra.run.dir={run}"])
    return made


def by_hand(checkpoint: Path, precision: str) -> dict[str, torch.Tensor]:
    """The parameters at the end: SGD with momentum on the batches that were recorded, from the checkpoint, by torch
    alone."""
    kind = torch.float64 if precision == "fp64" else torch.float32
    saved: Any = read(checkpoint / "worker-0.safetensors")
    model = LeNet(image_size=8).to(kind)
    model.load_state_dict({name: value.to(kind) for name, value in saved["model"].items()})
    momentum = [one["momentum_buffer"].to(kind) for one in saved["strategy"]["updater"]["optimizer"]["state"].values()]
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    for images, labels in zip(recording.IMAGES, recording.LABELS, strict=True):
        with torch.autocast("cpu", kinds[precision]) if precision in kinds else nullcontext():
            loss = nn.functional.cross_entropy(model(images), labels)
        scaled = scaler.get_scale() if precision == "fp16" else 1.0
        gradients = torch.autograd.grad(loss * scaled, list(model.parameters()))
        assert all(gradient.isfinite().all() for gradient in gradients), "no step is skipped here"
        with torch.no_grad():
            for parameter, memory, gradient in zip(model.parameters(), momentum, gradients, strict=True):
                memory.mul_(0.9).add_(gradient / scaled)
                parameter -= 0.05 * memory
    return model.state_dict()


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_it_goes_on_as_torch_does_in_that_precision(
    before: str, after: str, runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "IMAGES", [])
    monkeypatch.setattr(recording, "LABELS", [])
    back_at(runs[before], AT, tmp_path / "run")
    command = [*RUN, f"precision={after}", f"hydra.run.dir={tmp_path / 'run'}", "resume=auto"]
    with pytest.raises(UserError, match=REFUSED.format(before, after)) as refused:
        trainer.run(command)
    assert LOST.get((before, after), "Type instead: the values of before") in str(refused.value)
    assert ("not carried over" in str(refused.value)) == ((before, after) in LOST)
    trainer.run([*command, "resume.allow_changes=true"])
    assert len(recording.IMAGES) == 6 - AT
    truth = by_hand(tmp_path / "run" / "checkpoints" / f"step-{AT:09d}", after)
    found = load_file(tmp_path / "run" / "model.safetensors")
    start: Any = read(runs[before] / "checkpoints" / f"step-{AT:09d}" / "worker-0.safetensors")
    for name, value in truth.items():
        moved = (value - start["model"][name]).abs().max()
        error = (found[name] - value).abs().max()
        assert error <= moved * (1e-9 if after == "fp64" else 1e-4), (name, error, moved)


def test_plan_names_what_is_not_carried_over_before_anything_starts(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    back_at(runs["fp16"], AT, tmp_path / "run")
    trainer.run(
        [
            *RUN,
            "precision=bf16",
            f"hydra.run.dir={tmp_path / 'run'}",
            "resume=auto",
            "resume.allow_changes=true",
            "plan=true",
            "verbosity=normal",
        ]
    )
    plan = " ".join(capsys.readouterr().out.split())
    assert "changed, matters precision was fp16, is bf16" in plan
    assert f"not carried over {LOST['fp16', 'bf16']}" in plan


def test_what_auto_stands_for_counts_and_not_the_word(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.planning.auto.choose_precision", lambda case: ("fp32", "for a test"))
    command = [*RUN, "precision=auto", "resume=auto", "plan=true"]
    for before, why in (("fp32", ""), ("bf16", "precision was bf16, is fp32")):
        back_at(runs[before], AT, tmp_path / before)
        error = trainer.run([*command, f"hydra.run.dir={tmp_path / before}"]).error
        assert error == "" if not why else why in error, error


def test_servers_refuse_another_size_of_numbers(runs: dict[str, Path], tmp_path: Path) -> None:
    back_at(runs["fp64"], AT, tmp_path / "run")
    with pytest.raises(
        UserError, match=r"is of precision=fp64, and servers keep float64 as it is\. Type instead: precision=fp64"
    ):
        trainer.run(
            [
                *RUN,
                "precision=fp32",
                f"hydra.run.dir={tmp_path / 'run'}",
                "resume=auto",
                "strategy=pserver_sync",
                "launch.nproc=1",
            ]
        )
