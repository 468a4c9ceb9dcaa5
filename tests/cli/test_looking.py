"""Help, the composed config, where it comes from, and shell completion."""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
import yaml

from tests.cli.conftest import Run
from tests.runs import environment
from trainer import __version__
from trainer.cli.compose import folder as shipped
from trainer.config import keys, schema
from trainer.tracking import recorder

DIGITS = "+recipe=digits_lenet"


def test_help_lists_everything_within_120_columns(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert max(len(line) for line in out.splitlines()) <= 120
    for recipe in (shipped("recipes") / "recipe").glob("*.yaml"):
        assert f"+recipe={recipe.stem}" in out
    for group in schema.GROUPS:
        for option in (shipped("conf") / group).glob("*.yaml"):
            assert f"{group}={option.stem}" in out
    for section in keys.sections():
        assert section.title in out
        for key in section.keys:
            assert f"  {key.path}={keys.spelled(key.default)}" in out
            assert " ".join(key.help.split()[:3]) in out


def test_help_lists_the_users_own_options(run: Run, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("# a net of my own\n_target_: mine.Net\n")
    _, out, _ = run("--config-dir", str(tmp_path), "--help")
    assert any("model=mine" in line and "a net of my own" in line for line in out.splitlines())


def test_help_into_a_closed_pipe_is_quiet() -> None:
    """As `python -m trainer --help | head -1`."""
    with Popen([sys.executable, "-m", "trainer", "--help"], stdout=PIPE, stderr=PIPE, env=environment()) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


def test_version(capsys: pytest.CaptureFixture[str], run: Run) -> None:
    with pytest.raises(SystemExit) as ended:
        run("--version")
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"trainer {__version__}\n"


def test_cfg_job_shows_the_composed_config(run: Run, folder: Path) -> None:
    code, out, _ = run(DIGITS, "--cfg", "job", "optimizer.lr=0.3")
    config = yaml.safe_load(out)
    assert code == 0 and "hydra" not in config
    assert config["optimizer"]["lr"] == 0.3 and config["model"]["num_classes"] == "${data.num_classes}"
    assert list(folder.iterdir()) == []


def test_resolve_replaces_interpolations(run: Run) -> None:
    config = yaml.safe_load(run(DIGITS, "--cfg", "job", "--resolve")[1])
    assert config["model"]["num_classes"] == 10


def test_package_shows_a_part(run: Run) -> None:
    _, out, _ = run(DIGITS, "--cfg", "job", "-p", "model")
    assert out.startswith("# @package model\n")
    assert yaml.safe_load(out)["_target_"] == "trainer.models.lenet.LeNet"


def test_cfg_hydra_shows_hydras_own(run: Run) -> None:
    config = yaml.safe_load(run(DIGITS, "--cfg", "hydra")[1])
    assert list(config) == ["hydra"] and config["hydra"]["job"]["chdir"] is False


@pytest.mark.parametrize(
    ("what", "part"),
    [("config", "epochs: 12"), ("defaults", "recipe/digits_lenet"), ("searchpath", "recipes"), ("plugins", "Sweeper")],
)
def test_info(what: str, part: str, run: Run) -> None:
    code, out, _ = run(DIGITS, "--info", what)
    assert code == 0 and part in out


COMPLETIONS = {
    "trainer +rec": {"+recipe="},
    "trainer +recipe=": {f"+recipe={p.stem}" for p in (shipped("recipes") / "recipe").glob("*.yaml")},
    "trainer +recipe=digits": {"+recipe=digits_lenet"},
    "trainer strategy=": {f"strategy={p.stem}" for p in (shipped("conf") / "strategy").glob("*.yaml")},
    f"trainer {DIGITS} optimizer=mo": {"optimizer=momentum"},
    f"trainer {DIGITS} epo": {"epochs="},
    f"trainer {DIGITS} optimizer.mo": {"optimizer.momentum="},
    f"trainer {DIGITS} launch.nproc": {"launch.nproc="},
}


@pytest.mark.parametrize("line", COMPLETIONS)
def test_completion(line: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    code, out, _ = run("-sc", "query=bash")
    assert code == 0 and set(out.split()) == COMPLETIONS[line]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_installs_for_the_command(shell: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/trainer"])
    code, out, _ = run("-sc", f"install={shell}")
    assert code == 0 and "trainer" in out


@pytest.mark.parametrize("argv", ["", "resend", "resend nowhere", "resend a b", "foo", "-1", "resend ."])
def test_the_recorder_says_how_it_is_called(argv: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "tracking.json").write_text("{")
    assert recorder.main(argv.split()) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Type instead: python -m trainer.tracking.recorder resend RUN_FOLDER" in error


def test_info_takes_overrides_after_it(run: Run) -> None:
    code, out, error = run("--info", "+recipe=digits_lenet")
    assert (code, error) == (0, "") and "digits_lenet" in out
