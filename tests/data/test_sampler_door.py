"""``sampler._target_``: any order of samples is shared out, padded, leased and resumed; no order at all is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainer
from tests import composed
from tests.runs import points, read
from trainer.config.run_config import RunConfig
from trainer.data.epoch_order import EpochOrder, earlier_uses, epoch_order
from trainer.data.sample_orders import Weighted
from trainer.data.sampler import training_sampler, undivided_sampler
from trainer.errors import UserError

HERE = __name__
DIGITS = """
    +recipe=digits_lenet tracking=none epochs=2 data.batch_size=32 execution.log_every=1 execution.threads=1
    precision=fp64 verbosity=quiet device=cpu
""".split()


class Halved:
    """Every second sample, each twice in a row: half as many positions as samples."""

    def length(self, samples: int) -> int:
        return samples // 2

    def __call__(self, labels: Any, samples: int, seed: int, epoch: int) -> torch.Tensor:
        order = np.random.default_rng((seed, epoch)).permutation(samples // 2)[: samples // 4 + 1] * 2
        return torch.from_numpy(np.repeat(order, 2)[: samples // 2])


def descending(labels: Any, samples: int, seed: int, epoch: int, step: int = 1) -> list[int]:
    return [n * step % samples for n in range(samples)][::-1]


def unrepeatable(labels: Any, samples: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.permutation(samples)


def outside(labels: Any, samples: int, seed: int, epoch: int) -> np.ndarray:
    return np.arange(samples) + 1


def shares(labels: Any, samples: int, seed: int, epoch: int) -> np.ndarray:
    return np.linspace(0, 1, samples)


def short(labels: Any, samples: int, seed: int, epoch: int) -> np.ndarray:
    return np.arange(10)


def broken(labels: Any, samples: int, seed: int, epoch: int) -> np.ndarray:
    raise KeyError("weights")


def nothing(labels: Any, samples: int, seed: int, epoch: int) -> None:
    return None


REFUSED = {
    "unrepeatable": ("is not deterministic", "default_rng"),
    "outside": ("position 1438 at index 1437 of epoch 0", ""),
    "shares": ("an array of float64 (1438,), not positions", "int64"),
    "short": ("returned 10 positions, and its data have 1438", "length(samples)"),
    "broken": ("breaks in", ""),
    "nothing": ("returned None, not positions", "int64"),
    "absent": ("has no 'absent'", ""),
}


def check(*typed: str) -> Any:
    return composed.ready(*DIGITS, *typed)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_order_is_refused_before_anything_starts(name: str) -> None:
    why, instead = REFUSED[name]
    with pytest.raises(UserError) as caught:
        check(f"sampler._target_={HERE}.{name}")
    assert f"{HERE}.{name}" in caught.value.what and why in caught.value.why and instead in caught.value.instead


def test_keys_of_a_sampler_are_its_arguments() -> None:
    config = check(f"sampler._target_={HERE}.descending", "+sampler.step=5").checked.config
    assert epoch_order(config, 7)(0).tolist() == descending(None, 7, 0, 0, step=5)
    with pytest.raises(UserError, match="Halved does not take this value"):
        check(f"sampler._target_={HERE}.Halved", "+sampler.step=5")


@pytest.mark.parametrize("typed", [(), ("data.batch_size=null", "data.global_batch_size=24"), ("sampler.pad=false",)])
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_together_read_the_order_of_any_sampler(typed: tuple[str, ...], workers: int) -> None:
    config: RunConfig = check(f"sampler._target_={HERE}.Halved", "sampler.drop_last=false", *typed).checked.config
    samples = 101
    order = EpochOrder(samples, 0, Halved())
    samplers = [training_sampler(config, samples, 8, rank, workers, order) for rank in range(workers)]
    for sampler in samplers:
        sampler.set_epoch(1)
    everything = order(1)
    padding = workers > 1 and config.sampler.pad and config.data.global_batch_size is None
    padded = np.concatenate([everything, everything[: -len(everything) % workers if padding else 0]])
    shares = [
        batch[:size] for sampler in samplers for batch, size in zip(sampler.arrays(), sampler.sizes(), strict=True)
    ]
    assert Counter(np.concatenate(shares).tolist()) == Counter(padded.tolist())
    leased = undivided_sampler(config, samples, 8, order)
    leased.set_epoch(1)
    assert np.concatenate(list(leased.arrays())).tolist() == everything.tolist()


def test_each_use_of_a_sample_in_an_epoch_has_an_address_of_its_own() -> None:
    order = EpochOrder(9, 0, lambda **_: np.resize([3, 1, 3], 9))
    assert order(0).tolist() == [3, 1, 12, 21, 10, 30, 39, 19, 48], "3, 3 + 9, 3 + 18, ..."
    random = np.random.default_rng(0).integers(0, 5, 200)
    assert earlier_uses(random).tolist() == [random[:n].tolist().count(random[n]) for n in range(200)]


@pytest.mark.parametrize("strategy", ["strategy=single", pytest.param("strategy=pserver_async", marks=pytest.mark.all)])
def test_an_epoch_trains_as_many_samples_as_its_sampler_has_positions(strategy: str, tmp_path: Path) -> None:
    trainer.run([*DIGITS, strategy, f"sampler._target_={HERE}.Halved", f"hydra.run.dir={tmp_path}"])
    assert read(tmp_path / "result.json")["samples"] == 2 * (719 // 32) * 32


def test_two_workers_train_on_the_batches_of_one(tmp_path: Path) -> None:
    losses = []
    for workers in (1, 2):
        trainer.run(
            [
                *DIGITS,
                *"data.batch_size=null data.global_batch_size=32 model=lenet epochs=1".split(),
                f"sampler._target_={HERE}.Halved",
                f"launch.nproc={workers}",
                f"hydra.run.dir={tmp_path / str(workers)}",
            ]
        )
        losses.append(points(tmp_path / str(workers), "train/loss"))
    assert len(losses[0]) == 22 and losses[0] == pytest.approx(losses[1], rel=1e-9)


@pytest.mark.all
def test_a_run_that_resumes_inside_an_epoch_reads_the_rest_of_the_order(tmp_path: Path) -> None:
    sampled = (*DIGITS, f"sampler._target_={HERE}.Halved", "scheduler=constant", "checkpoint.every_steps=1")
    trainer.run([*sampled, f"hydra.run.dir={tmp_path / 'whole'}"])
    trainer.run([*sampled, "max_steps=13", f"hydra.run.dir={tmp_path / 'part'}"])
    resumed = ("resume.allow_changes=true", f"resume.path={tmp_path / 'part'}")  # max_steps was 13
    trainer.run([*sampled, f"hydra.run.dir={tmp_path / 'rest'}", *resumed])
    whole, rest = points(tmp_path / "whole", "train/loss"), points(tmp_path / "rest", "train/loss")
    assert len(whole) == 44 and rest == whole


class Columns:
    """Training data with a column of weights."""

    def __init__(self, weights: Any) -> None:
        self.weights = weights

    def __len__(self) -> int:
        return len(self.weights)

    def column(self, name: str) -> Any:
        assert name == "quality"
        return self.weights


def test_samples_are_drawn_as_often_as_their_weights_say(tmp_path: Path) -> None:
    weights = np.array([0.0, 1.0, 3.0, 6.0])
    np.save(tmp_path / "w.npy", weights)
    (tmp_path / "w.txt").write_text("0\n1\n3.0\n6e0\n")
    orders = []
    for sampler in (
        Weighted(column="quality", draws=50_000),
        Weighted(path=str(tmp_path / "w.npy"), draws=50_000),
        Weighted(path=str(tmp_path / "w.txt"), draws=50_000),
    ):
        sampler.prepare(Columns(weights))
        orders.append(EpochOrder(4, 1, sampler)(2) % 4)
    assert all(np.array_equal(orders[0], order) for order in orders)
    assert np.bincount(orders[0], minlength=4) / 50_000 == pytest.approx(weights / 10, abs=0.01)
    once = Weighted(column="quality", draws=3, replacement=False)
    once.prepare(Columns(weights))
    assert all(sorted(EpochOrder(4, 0, once)(epoch).tolist()) == [1, 2, 3] for epoch in range(20))


@pytest.mark.parametrize(
    ("weights", "keys", "why"),
    [
        ([1, -1], {}, "the weight of training sample 1 is -1.0"),
        ([1, float("nan")], {}, "sample 1 is nan"),
        ([0, 0], {}, "all weights are 0"),
        ([[1, 2], [3, 4]], {}, "holds 2 x 2 weights, and there are 2 training samples"),
        (["a", "b"], {}, "does not hold numbers"),
        ([0, 1], {"replacement": False}, "an epoch draws 2 samples, and 1 have a weight above 0"),
    ],
)
def test_weights_that_are_none_are_refused(weights: Any, keys: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError) as caught:
        Weighted(column="quality", **keys).prepare(Columns(weights))
    assert why in caught.value.why


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        (("sampler=weighted",), "needs the weights"),
        (("sampler=weighted", "sampler.path=absent.npy"), "cannot be read"),
        (("sampler=weighted", "sampler.column=quality"), "have no columns"),
    ],
)
def test_a_weighted_sampler_without_weights_is_refused_before_the_start(typed: tuple[str, ...], why: str) -> None:
    with pytest.raises(UserError) as caught:
        check(*typed)
    assert why in caught.value.why
