"""A run that is asked to leave in a validation saves its state before it, and ends as one that was never
interrupted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import runs
from tests.checkpoint import leaving
from tests.checkpoint.test_identity import DIGITS, check_equal, lines
from tests.ledgers import applied
from trainer.checkpoint import store
from trainer.optim.averaged import AveragedWeights
from trainer.worker.nonfinite import Stop
from trainer.worker.state import BeforeValidation
from trainer.worker.training import FinalTest, Watchers

EVERYTHING = (
    *DIGITS,
    "model._target_=tests.checkpoint.leaving.Leaving",
    "epochs=2",
    "tracking=none",
    "execution.threads=1",
    "checkpoint.every_epochs=null",
    "checkpoint.every_minutes=1000",
    "checkpoint.background=false",
    "verbosity=quiet",
)
AVERAGED = ("ema.decay=0.9", "strategy.buffers=average")
CASES = {
    "collective": (("strategy=collective", "launch.nproc=2", "execution.val_every_steps=3", *AVERAGED), "1 0", 3),
    "collective of six": (("strategy=collective", "launch.nproc=6", "data.batch_size=4", *AVERAGED), "2 1", 7),
}
"""The options of a run, who is asked to leave and when, and after which update that is. More are in
``test_grid.py``."""
# of six equal numbers the mean in fp32 may be another number: buffers must be saved as they were before the agreement
LONG = ("collective of six",)


def run(folder: Path, *command: str, code: int = 0) -> None:
    ended = runs.trainer(*EVERYTHING, *command, cwd=folder)
    assert ended.returncode == code, ended.stdout[-1500:] + ended.stderr[-3000:]


@pytest.mark.all
@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.long if case in LONG else ()) for case in CASES])
def test_left_validation_is_done_by_the_next_life_as_if_nothing_had_happened(case: str, tmp_path: Path) -> None:
    command, who, update = CASES[case]
    run(tmp_path, *command, "hydra.run.dir=whole")
    (tmp_path / leaving.LEAVE).write_text(who)
    run(tmp_path, *command, "hydra.run.dir=run", code=75)
    about = store.about(store.found(tmp_path / "run" / "checkpoints")[0])
    assert (about.step, about.epoch, about.update) == (update, (update - 1) // 7, (update - 1) % 7 + 1)
    assert not any("val/loss" in values for step, _, values in lines(tmp_path / "run") if step == update)
    run(tmp_path, *command, "hydra.run.dir=run", "resume=auto")
    check_equal(tmp_path / "whole", tmp_path / "run")


def test_state_before_a_validation_is_saved_also_while_the_averaged_weights_are_validated() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    ema = AveragedWeights(model, 0.5)
    run: Any = SimpleNamespace(model=model, watchers=Watchers(Stop(), ema=ema), final_test=FinalTest())
    for average in ema.average[: ema.buffers]:
        average.add_(1.0)
    weights, averages = ({n: p.detach().clone() for n, p in model.named_parameters()}, [a.clone() for a in ema.average])
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    before, drawn = BeforeValidation(run, alone=False), torch.rand(3, generator=None)
    model[1].running_mean.fill_(7.0)
    with ema.in_place():
        assert not torch.equal(model[0].weight, weights["0.weight"])
        with before.restored(run):
            for live, kept in ((model.named_parameters(), weights), (model.named_buffers(), buffers)):
                assert all(torch.equal(tensor, kept[name]) for name, tensor in live)
            assert all(
                torch.equal(one, other) for one, other in zip(ema.average[: ema.buffers], averages, strict=False)
            )
            assert torch.equal(torch.rand(3), drawn)
        assert not torch.equal(model[0].weight, weights["0.weight"])


@pytest.mark.all
def test_workers_without_a_common_step_leave_a_validation_together_and_apply_each_batch_once(tmp_path: Path) -> None:
    command = (
        "strategy=pserver_async",
        "launch.nproc=2",
        "launch.servers=2",
        "strategy.ledger=true",
        "strategy.persistables=false",
        "hydra.run.dir=run",
    )
    (tmp_path / leaving.LEAVE).write_text("0 1")
    run(tmp_path, *command, code=75)
    newest = store.found(tmp_path / "run" / "checkpoints")[0]
    assert store.about(newest).epoch == 0, "that of the validation: each worker is before it"
    run(tmp_path, *command, "resume=auto")
    for server in range(2):
        every = applied(tmp_path / "run" / f"ledger.{server}.tsv")
        assert set(every.values()) == {1} and every.total() == 2 * 2 * 7
    assert runs.read(tmp_path / "run" / "lives.json")[0]["how"] == "preempted"
