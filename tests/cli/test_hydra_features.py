"""Features of Hydra that a run has. Those that it does not have are refused: ``test_bad_input.FEATURES_OF_HYDRA``."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Run
from trainer.config.instantiate import call_target

DIGITS = "+recipe=digits_lenet"


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        (["name=x_${hydra:job.name}_${hydra:runtime.choices.model}"], "Plan of x_trainer_lenet"),
        (["hydra.mode=RUN", "hydra.job.chdir=false", "hydra/launcher=basic"], "Plan of digits_lenet"),
        (["strategy.bucket_cap_mb=0.01", "launch.nproc=2"], "2 buckets: 0.041"),
    ],
)
def test_interpolations_and_usual_values_of_hydras_keys_work(typed: list[str], shown: str, run: Run) -> None:
    code, out, error = run(DIGITS, "plan=true", "tracking=none", *typed)
    assert (code, error) == (0, "") and shown in out, out


def test_an_argument_with_a_target_is_made_first() -> None:
    inner = {"_target_": "fractions.Fraction", "numerator": 1, "denominator": 2}
    assert call_target({"_target_": "fractions.Fraction", "numerator": inner}, "model") * 2 == 1
