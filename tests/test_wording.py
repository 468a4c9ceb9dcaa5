"""Texts for people: one thing is singular."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

import trainer
from trainer.wording import counted, typed


@pytest.mark.parametrize(
    ("number", "thing", "said"),
    [
        (0, "epoch", "0 epochs"),
        (1, "epoch", "1 epoch"),
        (2, "worker", "2 workers"),
        (1, "class", "1 class"),
        (3, "class", "3 classes"),
        (2, "more process", "2 more processes"),
        (2, "batch", "2 batches"),
    ],
)
def test_one_is_singular(number: int, thing: str, said: str) -> None:
    assert counted(number, thing) == said


@pytest.mark.parametrize(
    "value",
    [
        "my runs/x",
        "it's",
        "a,b",
        "a=b",
        "${HOME}",
        "$HOME `x`",
        "sqlite:///a%20b.db",
        "-x",
        "{a: 1}",
        "[x]",
        'a"b',
        "a\\",
        "12",
    ],
)
def test_what_is_typed_is_what_was_meant(value: str) -> None:
    """The shell's own words, and what Hydra and OmegaConf make of them."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    printed = subprocess.run(["bash", "-c", f"printf '%s\\n' {typed('x', value)}"], capture_output=True, text=True)
    [word] = printed.stdout.splitlines()
    found = OverridesParser.create().parse_override(word).value()
    assert OmegaConf.create({"x": getattr(found, "text", found)}).x == value


@pytest.mark.parametrize("value", ["outputs/digits_lenet/TIME", "sqlite:////tmp/mlflow.db", "http://host:5000"])
def test_what_needs_no_quotes_has_none(value: str) -> None:
    assert typed("x", value) == f"x={value}"


@pytest.mark.all
def test_no_text_leaves_the_choice_to_its_reader() -> None:
    for path in Path(trainer.__file__).parent.rglob("*.py"):
        texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        assert not [
            text for text in texts if isinstance(text, str) and re.search(r"\w\(e?s\)", text) and "sqrt(s)" not in text
        ], path
