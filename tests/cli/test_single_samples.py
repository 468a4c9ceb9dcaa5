"""A training batch that leaves a worker one sample is refused for a model that does not train with one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_bad_input import DIGITS
from tests.composed import ready
from trainer.errors import UserError

NORMED = """
from torch import nn
class Normed(nn.Sequential):
    def __init__(self, num_classes=10, norm="BatchNorm1d"):
        super().__init__(nn.Flatten(), nn.Linear(64, 8), getattr(nn, norm)(8), nn.Linear(8, num_classes))
"""
UNEVEN = "strategy=collective strategy.sync_batch_norm=true sampler.drop_last=false sampler.pad=false"
"""The variance is that of all workers' samples: 1438 = 2 x 718 + 2 = 3 x 479 + 1."""
LAST = "data.batch_size=479 sampler.drop_last=false"  # 1438 = 3 x 479 + 1


@pytest.mark.parametrize(
    ("typed", "instead"),
    [
        (LAST, "sampler.drop_last=true"),
        ("data.batch_size=1", "data.batch_size=2"),
        ("data.batch_size=718 sampler.drop_last=false sampler.pad=false launch.nproc=2", "sampler.drop_last=true"),
        ("data.global_batch_size=3 strategy.gradient_merge.k_steps=3", "data.global_batch_size=6"),
        ("data.batch_size=479 sampler.drop_last=true", None),
        (f"{LAST} max_steps=3", None),
        (f"{UNEVEN} launch.nproc=2 data.batch_size=718", None),
        (f"{UNEVEN} launch.nproc=3 data.batch_size=479", "sampler.drop_last=true"),
        (f"{LAST} +model.norm=Identity", None),
    ],
)
def test_a_batch_of_one_is_refused_where_the_model_needs_two(
    typed: str, instead: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "normed_model.py").write_text(NORMED)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    own = ("~model.in_channels", "~model.image_size", "model._target_=normed_model.Normed", "tracking=none")
    overrides = [DIGITS, *own, *typed.split()]
    if instead is None:
        ready(*overrides)
        return
    with pytest.raises(UserError, match="does not train with one") as refused:
        ready(*overrides)
    assert refused.value.instead == instead
