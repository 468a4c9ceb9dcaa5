"""Runs are called by what differs from their recipe, in 30 letters; in a sweep by what is swept."""

from __future__ import annotations

import itertools

import pytest

from trainer.config.keys import key_of
from trainer.tracking.naming import model_name, run_name, sweep_name

RECIPE = "+recipe=digits_lenet"


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([RECIPE], "digits_lenet"),
        ([RECIPE, "optimizer.lr=0.1", "data.batch_size=64", "strategy=local_sgd"], "lr=0.1 b64 local_sgd"),
        ([RECIPE, "launch.nproc=2", "strategy=pserver_async", "launch.servers=1"], "w2 pserver_async s1"),
        ([RECIPE, "epochs=400", "launch=queue", "launch.wait=false", "launch.nproc=2"], "400ep w2"),
        (
            [RECIPE, "tracking.uri=http://x", "hydra.run.dir=a/b", "+tracking.tags.a=b", "verbosity=quiet"],
            "digits_lenet",
        ),
        (
            [RECIPE, "compile=true", "precision=bf16", "data.shuffle=false", "~model.dropout"],
            "compile bf16 no shuffle +1",
        ),
        ([RECIPE, "optimizer.lr=0.1", "scheduler.lr=0.2"], "optimizer…=0.1 scheduler.…=0.2"),
        ([RECIPE, "model._target_='own_net.Net'", "epochs=3"], "_target_=own_net.Net 3ep"),
        ([RECIPE, "a.one=1", "a.two=2", "a.three=3", "a.four=4", "a.five=5"], "one=1 two=2 three=3 four=4 +1"),
        ([RECIPE, "data.path='a\nb\x1b[31m'"], "path=a b [31m"),
        ([RECIPE, "seed=3", "seed=4"], "seed=4"),
    ],
)
def test_a_run_is_called_by_what_differs(overrides: list[str], name: str) -> None:
    assert run_name("digits_lenet", overrides) == name and len(name) <= 30


def test_a_sweep_is_called_by_what_is_swept() -> None:
    swept = {"optimizer.lr", "data.batch_size"}
    typed = [RECIPE, "epochs=3", "optimizer.lr=0.1,0.05", "data.batch_size=16,32"]
    assert sweep_name(typed, swept) == "sweep lr=0.1,0.05 b16,32"
    assert (
        run_name("digits_lenet", [RECIPE, "epochs=3", "optimizer.lr=0.1", "data.batch_size=16"], swept) == "lr=0.1 b16"
    )


def test_every_part_of_three_is_seen_and_no_name_is_longer_than_30() -> None:
    keys = ["optimizer.lr", "strategy.some_very_long_name_of_a_key", "data.batch_size", "model._target_"]
    values = ["0.1", "package.module.Class.of.great.length", "64", "[a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p]"]
    for count in range(1, 5):
        for chosen in itertools.product(itertools.permutations(keys, count), itertools.permutations(values, count)):
            name = run_name("r" * 50, [f"{k}={v}" for k, v in zip(*chosen, strict=True)])
            assert 0 < len(name) <= 30
            if count <= 3:
                assert len(name.split()) == count
    assert len(run_name("r" * 50, [], first="drawn")) == 30


@pytest.mark.parametrize("name", ["digits_lenet", 'my run/2.0: "best" 100%\'s', "///"])
def test_model_names_are_such_as_mlflow_takes(name: str) -> None:
    from mlflow.utils.validation import _validate_logged_model_name

    for which in ("best", "last"):
        _validate_logged_model_name(model_name(name, which))
    assert model_name("digits_lenet", "best") == "digits_lenet" and model_name("a", "last") == "a-last"
    assert key_of("+db@data.x=3") == "db"
