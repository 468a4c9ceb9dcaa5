"""A mistyped key of a class of the user's own is answered with the keys of that class, and with no shipped option."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.test_bad_input import assert_refused
from tests.refusals import Case

CLASSES = """
from trainer.tasks.summed import Summed

class Quantiles(Summed):
    def outputs(self, facts):
        return len(self.config["quantiles"]) + self.config.get("more", 0)

class Whole(Summed):
    def metrics(self, facts):
        return ["loss"]

    def sums(self, outputs, labels):
        return outputs.sum(0)

    def summary(self, sums, samples):
        return {}

class Needy(Whole):
    def outputs(self, facts):
        return len(self.config["quantiles"])

class Broken(Whole):
    def outputs(self, facts):
        return 1 // 0

class Exact:
    def __init__(self, classes=10, hidden=3):
        pass
"""
YAMLS = {
    "task/quantiles": "defaults: [/schema/TaskConfig@_here_, _self_]\n_target_: own_part.Quantiles\nquantiles: [0.5]\n",
    "model/exact": "_target_: own_part.Exact\nclasses: 10\n",
}
TYPED = {  # what is typed, what the class takes, what to type instead
    "task=quantiles task.threshold=0.3": ("quantiles, more;", "+task.threshold=0.3"),
    "task._target_=own_part.Quantiles task.threshold=0.3": ("more, quantiles;", "+task.threshold=0.3"),
    "task=quantiles task.quantils=[0.1]": ("quantiles, more.", "'task.quantiles=[0.1]'"),
    "task=quantiles task.mor=2": ("quantiles, more;", "+task.more=2"),
    "task=quantiles task.batch_size=2": ("quantiles, more.", "data.batch_size=2"),
    "model=exact model.hiden=4": ("classes, hidden, zero_init_residual;", "+model.hidden=4"),
    "model=exact model.classs=4": ("classes, hidden, zero_init_residual.", "model.classes=4"),
    "model=exact model.zero_init_residual=true": ("zero_init_residual;", "+model.zero_init_residual=true"),
    "model=exact model.drop_path_rate=0.3": ("classes, hidden, zero_init_residual.", ""),
}


@pytest.mark.parametrize("typed", TYPED)
def test_a_mistyped_key_is_answered_with_the_keys_of_the_own_class(
    typed: str, run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_part.py").write_text(CLASSES)
    for name, text in YAMLS.items():
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / f"{name}.yaml").write_text(text)
    takes, instead = TYPED[typed]
    code, _, error = run("--config-dir", str(tmp_path / "mine"), "+recipe=digits_lenet", *typed.split())
    assert_refused(Case("", ("there is no such key; own_part.", takes), instead), code, error, folder)
    assert error.endswith(f"Type instead: {instead}\n" if instead else f"{takes}\n")


def test_a_shipped_option_without_keys_says_so(run: Run, folder: Path) -> None:
    for typed in ("task.foo=1", "+task.foo=1"):
        code, _, error = run("+recipe=digits_lenet", typed)
        assert_refused(Case("", ("task.foo", "no keys.")), code, error, folder)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (
            "Needy",
            "task.quantiles: the class of task needs it, and it has no value. Type instead: +task.quantiles=VALUE",
        ),
        ("Broken", "task=broken: its outputs breaks in "),
    ],
)
def test_a_key_that_an_own_class_needs_and_a_method_that_breaks_are_sentences(
    target: str, says: str, run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_part.py").write_text(CLASSES)
    code, _, error = run("+recipe=digits_lenet", f"task._target_=own_part.{target}")
    assert_refused(Case("", (says,)), code, error, folder)
