"""What only looks at the config answers without torch, torchvision, MLflow or scikit-learn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.plugins import Plugins

from tests.runs import environment
from trainer.cli import compose

HEAVY = ("torch", "torchvision", "mlflow", "sklearn")
WRAPPER = f"""
import contextlib, io, json, sys
from trainer.__main__ import main
for line in sys.argv[1:]:
    error = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
        try:
            code = main(line.split())
        except SystemExit as end:
            code = end.code or 0
    print(json.dumps([line, code, [name for name in {HEAVY} if name in sys.modules], error.getvalue()]))
"""
"""Answers several command lines one after another: what one of them imports stays, and is seen."""
DIGITS = "+recipe=digits_lenet"
ANSWERS = {
    "--help": 0,
    "--version": 0,
    "--hydra-help": 0,
    f"{DIGITS} --cfg job": 0,
    f"{DIGITS} --info": 0,
    "-sc query=bash": 0,
    f"{DIGITS} epoch=3": 2,
    f"{DIGITS} data.batch_size=2000": 2,
    f"{DIGITS} model._target_=torchvision.models.resnet5O": 2,
    f"-m {DIGITS} data.batch_size=16,abc epoch=1": 2,
    f"{DIGITS} strategy=single launch.nproc=2": 2,
}


@pytest.mark.all
def test_answers_import_nothing_heavy(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRAPPER, *ANSWERS],
        cwd=tmp_path,
        env=environment(COMP_LINE=f"trainer {DIGITS} epo"),
        capture_output=True,
        text=True,
        timeout=600,
    )
    answered = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line: code for line, code, _, _ in answered} == ANSWERS, done.stderr
    for line, _, heavy, error in answered:
        assert heavy == [] and "Traceback" not in error, f"{line}: {heavy} {error}"
    assert list(tmp_path.iterdir()) == []


def test_a_command_does_not_look_for_hydra_s_plugins_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with compose.hydra_app():
        plugins = Plugins.instance()
        monkeypatch.setattr(Plugins, "_initialize", lambda plugins: pytest.fail("looks for them again"))
    assert Plugins.instance() is plugins
