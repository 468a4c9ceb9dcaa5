"""Every command line that the documentation shows can be typed: its config composes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from trainer.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "recipes" / "README.md"]
ELSEWHERE = {"-m", "--help", "--cfg", "--config-dir", "..."}
"""Sweeps and flags; the folder of a page's example; what a reader fills in."""


def commands(page: Path) -> list[list[str]]:
    """What follows ``python -m trainer`` on the page's lines of commands."""
    typed = re.findall(r"^ *(?:[A-Z_]+=\S+ )?python -m trainer (.*)$", page.read_text(), re.MULTILINE)
    found = (shlex.split(line, comments=True) for line in typed)
    return [words for words in found if not ELSEWHERE & set(words) and "+recipe=NAME" not in words]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.stem)
def test_documented_commands_compose(page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setenv("HF_TOKEN", "hidden")
    for words in commands(page):
        assert main([*words, "--cfg", "job"]) == 0, (words, capsys.readouterr().err)
