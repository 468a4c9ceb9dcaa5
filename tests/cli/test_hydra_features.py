"""Features of Hydra that a run does not have are refused with what to type in their place; the others work."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Run
from trainer.config.instantiate import call_target

DIGITS = "+recipe=digits_lenet"


@pytest.mark.parametrize(
    ("typed", "instead"),
    [
        ("hydra/launcher=joblib", "hydra/launcher=basic"),
        ("hydra/sweeper=optuna", "hydra/sweeper=basic"),
        ("logger=wandb", "tracking=mlflow"),
        ("+logger=wandb", "tracking=mlflow"),
        ("+hydra.job.env_set={A:b}", "NAME=VALUE python -m trainer"),
        ("hydra.job.env_copy=[NOPE]", "without hydra.job.env_copy"),
        ("+hydra.callbacks={x:{_target_:a.B}}", "callbacks=[{_target_:"),
        ("hydra.job.chdir=true", "hydra.job.chdir=false"),
        ("hydra.verbose=true", "verbosity=debug"),
        ("hydra.mode=MULTIRUN", "-m"),
        ("hydra.job.name=x", "name=NAME"),
        ("hydra/job_logging=default", "hydra/job_logging=none"),
        ("hydra.sweep.dir=x", "hydra.run.dir=x"),
        ("hydra.searchpath=[file:///nowhere]", "hydra.searchpath=[file://FOLDER]"),
        ("hydra.job.num=3", "without hydra.job.num"),
        ("+model._args_=[1]", "+model.NAME=VALUE"),
        ("+optimizer._partial_=true", "optimizer without _partial_"),
        ("callbacks=[{_target_:a.B,_partial_:true}]", "callbacks[0] without _partial_"),
        ("strategy.bucket_cap_mb=10", "launch.nproc=2"),
    ],
)
def test_a_feature_that_does_nothing_is_refused(typed: str, instead: str, run: Run) -> None:
    code, _, error = run(DIGITS, "plan=true", typed)
    assert code == 2 and f"Type instead: {instead}" in error and error.count("\n") == 1, error


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        (["name=x_${hydra:job.name}_${hydra:runtime.choices.model}"], "Plan of x_trainer_lenet"),
        (["hydra.mode=RUN", "hydra.job.chdir=false", "hydra/launcher=basic"], "Plan of digits_lenet"),
        (["strategy.bucket_cap_mb=0.01", "launch.nproc=2"], "2 buckets: 0.041"),
    ],
)
def test_the_others_work(typed: list[str], shown: str, run: Run) -> None:
    code, out, error = run(DIGITS, "plan=true", "tracking=none", *typed)
    assert (code, error) == (0, "") and shown in out, out


def test_an_argument_with_a_target_is_made_first() -> None:
    inner = {"_target_": "fractions.Fraction", "numerator": 1, "denominator": 2}
    assert call_target({"_target_": "fractions.Fraction", "numerator": inner}, "model") * 2 == 1
