"""Pages name files that exist, link to headings that exist, and show the floors that import-linter checks."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml

from trainer.config.schema import CheckpointConfig, LaunchConfig
from trainer.job import claim_folder
from trainer.launch import lobby, supervisor
from trainer.strategies.pserver.server import increments
from trainer.worker import checkpoints, nonfinite

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*DOCS, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "recipes/README.md"))]
PICTURES = sorted((ROOT / "docs").glob("*.svg"))
ROOMS = ("trainer", "tests", "benchmarks", "docs", "conf", "recipes", ".ci")
CODE = {str(p.relative_to(ROOT)) for room in ROOMS for p in (ROOT / room).rglob("*.py")}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of the page's headings, as GitHub and the site make them."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    }


def links(page: Path) -> Iterator[str]:
    """What the page links to, pictures included, without addresses of other sites."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not re.match(r"https?:", target):
            yield target


@pytest.mark.parametrize("page", [*PAGES, *PICTURES], ids=name)
def test_every_source_file_that_a_page_names_exists(page: Path) -> None:
    text = re.sub(r"https?://\S+", "", page.read_text())
    named = {
        found
        for found in re.findall(r"[\w./-]+\.py\b", text)
        if not found.startswith(("my_package/", "tests/test_my_", "make_table"))
    }
    assert [n for n in named if n not in CODE and not any(path.endswith(f"/{n}") for path in CODE)] == []
    whole = {found for found in named if found.partition("/")[0] in ROOMS}
    assert whole <= CODE


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_folder_and_module_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    folders = set(re.findall(r"`((?:trainer|tests|conf|recipes|benchmarks)/[\w/]*)`", text))
    assert [f for f in folders if not (ROOT / f).is_dir()] == []
    for dotted in set(re.findall(r"\btrainer(?:\.\w+){2,}", text)):
        *path, last = dotted.split(".")
        if not any(
            found in CODE for found in (f"{'/'.join((*path, last))}.py", f"{'/'.join((*path, last))}/__init__.py")
        ):
            code = ROOT / f"{'/'.join(path)}.py"  # a class or function of that module
            assert code.is_file() and re.search(
                rf"^(?:class|def) {last}\b|= \"{dotted}\"$", code.read_text(), re.MULTILINE
            ), dotted


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name)
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


@pytest.mark.parametrize("page", DOCS, ids=name)
def test_pages_read_the_same_on_the_site_as_in_the_repository(page: Path) -> None:
    assert [target for target in links(page) if target.startswith("..")] == [], "the site has the pages of docs/ alone"
    assert not re.search(r"`[^`\n]*\\\|[^`\n]*`", prose(page)), "the site shows the backslash of a bar in code"


def test_the_page_about_the_architecture_shows_the_rooms_and_the_floors_as_they_are() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    shown = re.search(r"^## The floors\n\n((?:    .*\n)+)", page, re.MULTILINE)
    assert shown is not None
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert [line.strip() for line in shown[1].splitlines()] == contracts[0]["layers"]
    rooms = set(re.findall(r"^\| `trainer/([\w/]+)/` \|", page, re.MULTILINE))
    folders = {p.parent.relative_to(ROOT / "trainer") for p in (ROOT / "trainer").rglob("__init__.py")}
    assert {str(f) for f in folders if len(f.parts) == 1} <= rooms
    servers = {str(f) for f in folders if f.parts[:2] == ("strategies", "pserver") and len(f.parts) == 3}
    assert servers <= rooms


def words_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("words", ROOT / ".ci" / "words.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_and_their_sentences_are_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert words_script().main(["--check"]) == 0, capsys.readouterr().out


def test_a_sentence_ends_at_a_full_stop_a_cell_an_item_and_a_paragraph() -> None:
    page = "# Task\n\n    python -m trainer one two\n\nOne `a b` two. Three\nfour ([five](six.md)).\n"
    page += "\n- six, e.g. seven\n| eight | nine |\n"
    assert [s for s in words_script().sentences(page) if re.search(r"\w", s)] == [
        "# Task",
        "One code two.",
        "Three four (five).",
        "- six, e.g seven",
        "eight",
        "nine",
    ]


def test_every_page_is_in_the_sites_menu_once() -> None:
    def pages(node: object) -> list[str]:
        if isinstance(node, str):
            return [node]
        children = node.values() if isinstance(node, dict) else node
        return [page for child in children for page in pages(child)]  # type: ignore[attr-defined]

    menu = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(menu) == [page.name for page in DOCS]


def defaults() -> dict[str, set[str]]:
    """What docs/config.md, which is made of the schema, has as the default of each key: several where options
    differ."""
    found: dict[str, set[str]] = {}
    for key, default in re.findall(
        r"^\| `([\w.]+)` \|.*?\| `([^`]*)` \|", (ROOT / "docs/config.md").read_text(), re.MULTILINE
    ):
        found.setdefault(key, set()).add(default.removesuffix(".0"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_number_of_seconds_behind_a_key_is_its_default(page: Path) -> None:
    told = re.findall(r"`(\w+\.[\w.]+)` \(([\d.]+) s\b", page.read_text())
    assert [(key, seconds) for key, seconds in told if seconds not in defaults().get(key, ())] == []


NUMBERS = {
    "checkpoints.md": {
        "`checkpoint.keep_last={}`": CheckpointConfig.keep_last,
        "`checkpoint.keep_best={}`": CheckpointConfig.keep_best,
        "`checkpoint.grace_s={:g}`": CheckpointConfig.grace_s,
        "every epoch and its validation, and every {:g} minutes": CheckpointConfig.every_minutes,
        "the training waits {:g} s for it": checkpoints.SLOW_S,
        "A server with {} MiB of rows and more": increments.LEAST >> 20,
        "`launch.max_restarts={}` times within an hour": LaunchConfig.max_restarts,
        "does not end within {} s": supervisor.STAY_S,
        "After {} skipped updates in a row the run ends": nonfinite.MOST_SKIPS,
        "A second one waits {:g} s": claim_folder.PATIENCE_S,
        "loss scale begins at {:.0f}": torch.amp.GradScaler("cpu").get_scale(),
    },
    "hosts.md": {"shows no sign of life for {:g} s": lobby.LOST_S},
}
"""Numbers that are promised, as the pages tell them."""


@pytest.mark.parametrize(("page", "told"), [(page, told) for page, of in NUMBERS.items() for told in of])
def test_a_promised_number_is_that_of_the_code(page: str, told: str) -> None:
    assert told.format(NUMBERS[page][told]) in " ".join((ROOT / "docs" / page).read_text().split())
