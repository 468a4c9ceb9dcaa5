"""The code blocks of the documentation's pages, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

from tests.runs import ROOT

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"\A(?:# @package _global_\n)?# ([\w./-]+\.(?:py|yaml))\b")


def blocks(page: str, language: str = "python") -> list[str]:
    """The page's blocks of a language, in their order."""
    text = (ROOT / "docs" / page).read_text()
    return [code for found, code in BLOCK.findall(text) if found == language]


def write_files(page: str, folder: Path) -> list[str]:
    """Every block that begins with a file's name (after Hydra's ``@package``), written under it; returns the names."""
    names = []
    for code in (*blocks(page, "yaml"), *blocks(page, "python")):
        if named := NAMED.match(code):
            path = folder / named[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(code)
            names.append(named[1])
    return names
