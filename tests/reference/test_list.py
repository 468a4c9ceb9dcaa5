"""Each thing that the reference's users see is the same here, or another and said so, or not there and said so; each is
shown."""

from __future__ import annotations

import ast
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.conftest import Run, folder, logging_restored, run
from tests.composing import once
from tests.reference.test_distributed_strategy import HEADING

ROOT = Path(__file__).resolve().parents[2]
ITEMS: list[dict[str, Any]] = yaml.safe_load((ROOT / "tests" / "reference" / "list.yaml").read_text())
PAGE = ROOT / "docs" / "coming-from-paddle-fleet.md"
COMMAND = "python -m trainer "
FIELDS = {"name", "kind", "page", "reference", "here", "ours", "shown_by"}
COMMANDS = sorted({item["shown_by"] for item in ITEMS if item["shown_by"].startswith(COMMAND)})
__all__ = ["folder", "logging_restored", "run"]


@pytest.fixture(scope="module", autouse=True)
def composed_once() -> Iterator[None]:
    with once():
        yield


@cache
def functions_of(path: Path) -> set[str]:
    """The tests of a file, without those that are always skipped."""
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    skipped = {
        f.name for f in functions for d in f.decorator_list if re.search(r"mark\.(skip|xfail)\b", ast.unparse(d))
    }
    return {f.name for f in functions if f.name.startswith("test_")} - skipped


@cache
def rows() -> list[str]:
    """The left column of the page's tables, without that of the fields (test_distributed_strategy.py)."""
    before, _, fields = PAGE.read_text().partition(HEADING)
    text = before + fields[fields.index("\n## ") :]
    return [cells[1] for line in text.splitlines() if len(cells := line.split(" | ")[0].split("| ", 1)) > 1]


def words(text: str) -> str:
    return " ".join(text.split())


def test_the_list_has_224_items_and_each_has_all_that_belongs_to_it() -> None:
    assert sum(item["page"] < 6 for item in ITEMS) >= 224
    for item in ITEMS:
        assert {*item} - {"expects"} == FIELDS and all(str(item[field]).strip() for field in FIELDS), item
        assert item["page"] in range(1, 7) and item["here"] in ("same", "different", "not there"), item
        assert item["kind"] in "api argument data env file flag log metric semantics value".split(), item
        assert item["shown_by"].startswith(COMMAND) == bool(item.get("expects")), item
    twice = Counter((item["page"], item["name"]) for item in ITEMS)
    assert [name for name, count in twice.items() if count > 1] == []


def test_no_text_of_the_reference_is_in_the_list() -> None:
    """Its pages are in Chinese; names and figures are what is taken from them."""
    assert not re.search("[\u3000-\u9fff]", (ROOT / "tests" / "reference" / "list.yaml").read_text())


@pytest.mark.parametrize("item", [i for i in ITEMS if not i["shown_by"].startswith(COMMAND)], ids=lambda i: i["name"])
def test_the_test_that_shows_an_item_is_there(item: dict[str, Any]) -> None:
    path, _, name = item["shown_by"].partition("::")
    assert (ROOT / path).is_file() and name in functions_of(ROOT / path), item


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_command_shows(command: str, run: Run) -> None:
    typed = shlex.split(command.removeprefix(COMMAND))
    expected = [text for item in ITEMS if item["shown_by"] == command for text in item["expects"]]
    code, out, error = run(*typed)
    if "--cfg" in typed and not code:
        config = yaml.safe_load(out)
        for text in expected:
            key, _, value = text.partition("=")
            found: Any = config
            for part in key.split("."):
                found = found[part]
            assert found == yaml.safe_load(value) or str(found) == value, f"{key} is {found}"
        return
    refused = code == 2 and not out
    assert refused or ("plan=true" in typed and code == 0), error
    shown = words(error if refused else out)
    assert [text for text in expected if text not in shown] == [], shown


@pytest.mark.parametrize("item", [i for i in ITEMS if i["kind"] in ("api", "flag", "env")], ids=lambda i: i["name"])
def test_the_page_has_a_row_for_each_name(item: dict[str, Any]) -> None:
    row = next((row for row in rows() if f"`{item['name']}" in row), "")
    assert row, f"{item['name']} is in no left column of {PAGE.name}"


def test_each_row_of_the_page_is_on_the_list() -> None:
    """So that each of its sentences has what shows it."""
    names = [item["name"] for item in ITEMS]
    unproven = [
        row
        for row in rows()
        if row not in ("Fleet", "Fleet's example")
        and not row.startswith("---")
        and not any(f"`{name}" in row or name == row for name in names)
    ]
    assert unproven == []


def test_what_is_not_there_is_said_on_the_page() -> None:
    page = PAGE.read_text()
    for item in ITEMS:
        if item["here"] == "not there" and item["kind"] in ("api", "flag", "env"):
            row = next(
                line
                for line in page.splitlines()
                if line.startswith("| ") and f"`{item['name']}" in line.split(" | ")[0]
            )
            assert "not there" in row.lower() or "not read" in row.lower(), row


def test_every_difference_is_on_the_page() -> None:
    """Nobody reads a list of tests to learn what differs."""
    page = words(PAGE.read_text())
    silent = [item["name"] for item in ITEMS if item["here"] != "same" and f"{item['name']}" not in page]
    assert silent == []
