"""Texts for people: one thing is singular."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import trainer
from trainer.wording import counted


@pytest.mark.parametrize(
    ("number", "thing", "said"),
    [
        (0, "epoch", "0 epochs"), (1, "epoch", "1 epoch"), (2, "worker", "2 workers"), (1, "class", "1 class"),
        (3, "class", "3 classes"), (2, "more process", "2 more processes"), (2, "batch", "2 batches"),
    ],
)  # fmt: skip
def test_one_is_singular(number: int, thing: str, said: str) -> None:
    assert counted(number, thing) == said


def test_no_text_leaves_the_choice_to_its_reader() -> None:
    for path in Path(trainer.__file__).parent.rglob("*.py"):
        texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        assert not [
            text for text in texts if isinstance(text, str) and re.search(r"\w\(e?s\)", text) and "sqrt(s)" not in text
        ], path
