"""What only looks at the config answers without torch, torchvision, MLflow or scikit-learn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import environment

HEAVY = ("torch", "torchvision", "mlflow", "sklearn")
WRAPPER = f"""
import json, sys
from trainer.__main__ import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code or 0
print()
print(json.dumps([code, [name for name in {HEAVY} if name in sys.modules]]))
"""
DIGITS = "+recipe=digits_lenet"
ANSWERS = {
    "--help": 0,
    "--version": 0,
    "--hydra-help": 0,
    f"{DIGITS} --cfg job": 0,
    f"{DIGITS} --cfg job --resolve": 0,
    f"{DIGITS} --cfg job -p model": 0,
    f"{DIGITS} --cfg hydra": 0,
    f"{DIGITS} --info": 0,
    f"{DIGITS} --info defaults": 0,
    "-sc query=bash": 0,
    f"{DIGITS} epoch=3": 2,
    f"{DIGITS} optimizer=sgdd": 2,
    f"{DIGITS} data.batch_size=2000": 2,
    f"{DIGITS} +optimizer.foo=1": 2,
    f"{DIGITS} model._target_=torchvision.models.resnet5O": 2,
    f"-m {DIGITS} data.batch_size=16,abc epoch=1": 2,
    f"{DIGITS} strategy=single launch.nproc=2": 2,
}


ALIKE = (
    f"{DIGITS} --cfg job --resolve", f"{DIGITS} --cfg job -p model", f"{DIGITS} --info defaults",
    f"{DIGITS} optimizer=sgdd", f"{DIGITS} data.batch_size=2000", f"{DIGITS} +optimizer.foo=1",
)  # fmt: skip
"""Take the way of another one: ``--cfg job``, ``--info``, a key that there is not, a plan that cannot be."""


@pytest.mark.parametrize("typed", [pytest.param(a, marks=[pytest.mark.long] * (a in ALIKE)) for a in ANSWERS])
def test_answers_import_nothing_heavy(typed: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRAPPER, *typed.split()],
        cwd=tmp_path,
        env=environment(COMP_LINE=f"trainer {DIGITS} epo"),
        capture_output=True,
        text=True,
        timeout=600,
    )
    code, heavy = json.loads(done.stdout.splitlines()[-1])
    assert (code, heavy) == (ANSWERS[typed], []), done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
