"""Every command line that the documentation shows can be typed: its config composes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from trainer import run
from trainer.__main__ import main
from trainer.cli import queue_verbs, runs_verbs, serve

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "recipes" / "README.md"]
ELSEWHERE = {"-m", "--help", "--cfg", "--config-dir", "..."}
"""Sweeps and flags; the folder of a page's example; what a reader fills in."""
FIRST_READ = ("README", "getting-started", "strategies")


def commands(page: Path) -> list[list[str]]:
    """What follows ``python -m trainer`` on the page's lines of commands."""
    typed = re.findall(r"^ *(?:[A-Z_]+=\S+ )?python -m trainer (.*)$", page.read_text(), re.MULTILINE)
    found = (shlex.split(line, comments=True) for line in typed)
    return [words for words in found if not ELSEWHERE & set(words) and "+recipe=NAME" not in words]


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, id=p.stem, marks=[pytest.mark.all] * (p.stem not in FIRST_READ)) for p in PAGES if commands(p)],
)
def test_documented_commands_compose(
    page: Path, a_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hidden")
    monkeypatch.chdir(a_run.parent)
    for words in commands(page):
        if words[0] == queue_verbs.SUBMIT:
            words = queue_verbs.submitted(words[1:])
        elif words[0] in queue_verbs.VERBS:
            assert queue_verbs.parsed(words[0], words[1:])
            continue
        elif words[0] == "serve":
            assert serve.parsed(words[1:])
            continue
        elif words[0] == "runs":
            assert runs_verbs.parsed(words[1], words[2:])
            continue
        assert main([*words, "--cfg", "job"]) == 0, (words, capsys.readouterr().err)


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run called RUN, and beside it data of others."""
    place, patch = tmp_path_factory.mktemp("documented"), pytest.MonkeyPatch()
    patch.chdir(place)
    run(["+recipe=digits_lenet", "epochs=1", "max_steps=2", "tracking=none", "hydra.run.dir=RUN"])
    patch.undo()
    config = (place / "RUN" / "config.yaml").read_text()
    for name in ("config.yaml", ".hydra/config.yaml"):  # as of data that lie in a folder
        (place / "RUN" / name).write_text(
            config.replace("data:\n", "data:\n  root: photos\n").replace(
                "sets.digits.Digits", "sets.image_folder.ImageFolder"
            )
        )
    (place / "photos").mkdir()
    (place / "sweeps" / "lr").mkdir(parents=True)
    (place / "sweeps" / "lr" / "2").symlink_to(place / "RUN")
    (place / "RUN" / "checkpoints" / "step-000000080").mkdir()
    return place / "RUN"


ENGINES = [p for p in PAGES if p.stem.startswith("engines-")]


@pytest.mark.parametrize("page", [p for p in ENGINES if commands(p)], ids=lambda p: p.stem)
def test_documented_commands_of_engines_pass_their_dry_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run makes all checks of a submission; without a GPU here device=cuda is refused only on the hosts."""
    monkeypatch.chdir(tmp_path)
    typed = [words for words in commands(page) if any(word.startswith("launch=") for word in words)]
    for words in typed:
        assert main([*words, "launch.dry_run=true"]) == 0, (words, capsys.readouterr().err)
    assert typed
