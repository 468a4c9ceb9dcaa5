"""Every key of the schema with the values that break things: accepted, or refused with a sentence that names the
key."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.composed import composed as composed_of
from trainer.config import keys, schema
from trainer.config.keys import leaves
from trainer.errors import UserError
from trainer.host import hardware
from trainer.planning import validate
from trainer.planning.key_checks import check_group, check_keys
from trainer.planning.validate import check

LARGE_OR_SMALL = (10**30, -(10**30), 10**400, 2**63, -1, 0, 1.5, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf)
HOSTILE: tuple[Any, ...] = (
    *LARGE_OR_SMALL,
    *("", " ", "\0", "1e400", None, True),
    *([], [0.9], [math.nan], ["a"], {}, {"a": 1}),
)


@pytest.fixture(scope="module")
def composed() -> dict[str, Any]:
    """The digits recipe, as plain data."""
    return composed_of("+recipe=digits_lenet")


WHOLE = {"num_classes": 10}
"""Keys that take their number from another; every other value that is filled in is a text."""


def nodes() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each option's name, its group and its keys with their defaults."""
    for group, classes in schema.GROUPS.items():
        for declared in classes:
            yield declared.__name__, group, defaults(declared)


def defaults(declared: type) -> dict[str, Any]:
    found = {}
    for f in fields(declared):
        value = f.default if f.default is not MISSING else f.default_factory()  # type: ignore[misc]
        found[f.name] = defaults(type(value)) if is_dataclass(value) else value
    return {
        name: value if not isinstance(value, str) or ("$" not in value and value != "???") else WHOLE.get(name, "a.b")
        for name, value in found.items()
    }


def put(node: dict[str, Any], path: str, value: Any) -> None:
    *parents, leaf = path.split(".")
    for part in parents:
        node = node[part]
    node[leaf] = value


OPTIONS = {name: (group, node) for name, group, node in nodes()}


def refused_rightly(error: UserError, path: str, value: Any) -> bool:
    """One line that names the key, and proposes something else than what was refused."""
    sentence = str(error)
    return path in sentence and sentence.isprintable() and error.instead != f"{path}={keys.spelled(value)}"


@pytest.mark.all
@pytest.mark.parametrize("option", ["Config", *OPTIONS])
def test_a_value_is_taken_or_refused_by_the_name_of_its_key(option: str, composed: dict[str, Any]) -> None:
    group, node = OPTIONS.get(option, ("", {}))
    declared = next(c for c in schema.GROUPS[group] if c.__name__ == option) if group else schema.Config
    for key in keys.keys(declared, f"{group}." if group else "", own=True):
        for value in HOSTILE if key.path not in schema.GROUPS else ():
            config = copy.deepcopy({**composed, **({group: node} if group else {})})
            put(config, key.path, value)
            try:
                check_group(config, group) if group else check_keys(config)
            except UserError as error:
                assert refused_rightly(error, key.path, value), (value, str(error))
            except Exception as error:
                raise AssertionError(f"{key.path}={value!r}") from error


EXTREMES = (10**12, 2**63 - 1, 65536, 1e308, 1e6, 5e-324, 0, 1, "", " ", "\0", "x" * 5000)


@pytest.mark.all
@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.long)])
def test_what_the_ranges_let_through_is_taken_or_refused_in_a_sentence(
    every: int, composed: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware, "gpus", lambda: ())
    monkeypatch.setattr(validate, "check_targets", lambda *_: None)
    taken = 0
    for number, (path, _) in enumerate(leaves(composed, "")):  # of a run and its plan, by turns the one or the other
        for value, plan in [*itertools.product(EXTREMES, (False, True))][number % every :: every]:
            config = copy.deepcopy(composed) | {"plan": plan}
            put(config, path, value)
            try:
                check(config)
                taken += 1
            except UserError as error:
                assert str(error).isprintable(), (path, value, str(error))
            except Exception as error:
                raise AssertionError(f"{path}={value!r}, plan={plan}") from error
    assert taken > 300 / every
    assert list(tmp_path.iterdir()) == []
