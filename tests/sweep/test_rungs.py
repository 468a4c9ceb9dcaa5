"""Jobs wait at rungs of epochs, and of n that have come to one, n / reduction go on: the best."""

from __future__ import annotations

from trainer.cli.sweep_objective import Objective
from trainer.cli.sweep_rungs import Rungs

LOSS = Objective("val/loss", is_less_better=True)


def rungs(*values: float) -> Rungs:
    """Rungs at 1 and 3 of 9 epochs; each value is that of a job which waits at the first."""
    found = Rungs(LOSS, 1, 3, 9)
    for number, value in enumerate(values):
        assert found.reaches(number, [(0, value)]) == [(1, value)]
        if found.is_to_wait(number):
            found.waits(number)
    return found


def test_rungs_are_below_the_last_epoch() -> None:
    assert (Rungs(LOSS, 1, 3, 27).epochs, Rungs(LOSS, 2, 4, 33).epochs, Rungs(LOSS, 1, 3, 1).epochs) == (
        [1, 3, 9],
        [2, 8, 32],
        [],
    )


def test_one_of_three_goes_on_and_it_is_the_best() -> None:
    assert rungs(0.5, 0.3).promoted(False) is None
    three = rungs(0.5, 0.3, 0.4)
    assert three.promoted(False) == 1 and three.promoted(False) is None and three.waiting == {0, 2}


def test_a_job_that_is_the_best_so_far_does_not_stop() -> None:
    assert rungs(0.5, 0.3, 0.1).waiting == {0, 1}


def test_the_higher_rung_goes_first_and_its_value_is_the_best_up_to_it() -> None:
    found = rungs(0.5, 0.3, 0.4, 0.6, 0.7, 0.2)
    assert found.waiting == {0, 1, 2, 3, 4} and found.promoted(False) == 1
    assert found.reaches(1, [(0, 0.3), (1, 0.1), (2, 0.25), (3, 0.01)]) == [(3, 0.1)]
    assert found.is_to_wait(1)
    found.waits(1)
    assert found.promoted(True) == 1, "no other job comes to this rung"


def test_at_the_end_one_job_of_each_rung_goes_on() -> None:
    found = rungs(0.5, 0.3)
    assert found.promoted(True) == 1 and found.promoted(True) is None and found.waiting == {0}


def test_a_job_whose_loss_is_no_number_waits() -> None:
    assert float("nan") not in rungs(0.5, 0.4).values[0].values()
    found = Rungs(LOSS, 1, 3, 9)
    assert found.reaches(0, [(0, float("nan"))]) == [(1, float("inf"))] and found.is_to_wait(0)
