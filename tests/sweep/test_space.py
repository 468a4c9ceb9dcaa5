"""The space of a search is what was typed, in YAML or as Hydra's own sweeps."""

from __future__ import annotations

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from trainer.cli import sweep_space
from trainer.cli.compose import compose, hydra_app, plain
from trainer.cli.sweep_space import Choice, Interval
from trainer.errors import UserError


@pytest.mark.parametrize(
    ("value", "is_read"),
    [
        ("log 1e-4..1", Interval("k", 1e-4, 1.0, log=True)),
        ("0.1..0.9", Interval("k", 0.1, 0.9)),
        ("0.1 .. 0.9 step 0.2", Interval("k", 0.1, 0.9, step=0.2)),
        ("1..9 step 2", Interval("k", 1, 9, whole=True, step=2)),
        ("log 8..512", Interval("k", 8, 512, whole=True, log=True)),
        ("-1..1", Interval("k", -1, 1, whole=True)),
        ([16, 32, 16], Choice("k", ("16", "32"))),
        ([None, True, 0.5, "adam", "a b"], Choice("k", ("null", "true", "0.5", "adam", "'a b'"))),
    ],
)
def test_a_space_in_yaml(value: object, is_read: object) -> None:
    assert sweep_space.parse("k", value) == is_read


@pytest.mark.parametrize(
    ("typed", "is_read"),
    [
        ("k=choice(16,32)", Choice("k", ("16", "32"))),
        ("k=adam,sgd", Choice("k", ("adam", "sgd"))),
        ("k=range(1,7,2)", Choice("k", ("1", "3", "5"))),
        ("k=interval(0.1,1)", Interval("k", 0.1, 1.0)),
        ("k=tag(log,interval(0.001,1))", Interval("k", 0.001, 1.0, log=True)),
        ("k=int(interval(1,8))", Interval("k", 1, 8, whole=True)),
    ],
)
def test_hydras_own_sweeps(typed: str, is_read: object) -> None:
    assert sweep_space.of_override(OverridesParser.create().parse_override(typed)) == is_read


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("1..1", "has to begin below its end"),
        ("log 0..1", "logarithmic scale has no values"),
        ("log 1..9 step 2", "a step is above zero"),
        ("fast", "neither a list of values nor a range"),
        ([], "a list without values"),
    ],
)
def test_a_space_without_values_is_refused_and_what_is_proposed_can_be_typed(value: object, why: str) -> None:
    with pytest.raises(UserError, match=why) as refused:
        sweep_space.parse("optimizer.lr", value)
    assert searched(refused.value.instead)


def searched(advice: str) -> list[sweep_space.Dimension]:
    """The space that a word of a shell gives a search."""
    [word] = shlex.split(advice)
    with hydra_app() as app:
        return sweep_space.of_search(
            plain(compose(app, ["+recipe=digits_lenet", "sweep=optuna", word]))["sweep"]["space"], []
        )


def test_a_key_has_its_values_once() -> None:
    typed = [OverridesParser.create().parse_override("optimizer.lr=0.1,0.2")]
    with pytest.raises(UserError, match="has its values twice"):
        sweep_space.of_search({"optimizer": {"lr": "0.1..1"}}, typed)
    with pytest.raises(UserError, match="no key with several values") as refused:
        sweep_space.of_search({}, [])
    assert len(searched(refused.value.instead)) == 3


def test_a_grid_has_every_combination_and_no_range_without_end() -> None:
    space = [Choice("a", ("x", "y")), Interval("b", 0.1, 0.3, step=0.1)]
    assert [tuple(one.values()) for one in sweep_space.grid(space)] == [
        (a, b) for a in ("x", "y") for b in (0.1, 0.2, 0.3)
    ]
    with pytest.raises(UserError, match="no end of values") as refused:
        sweep_space.grid([Interval("b", 0.1, 0.3)])
    assert searched(refused.value.instead.partition(", or ")[2]) == [Choice("b", ("0.1", "0.3"))]
    assert sweep_space.words({"a": "'a b'", "b": 0.1, "c": 3}) == ["a='a b'", "b=0.1", "c=3"]
