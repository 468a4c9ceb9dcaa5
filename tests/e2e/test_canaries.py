"""Thirty secrets in thirty places, a run and a sweep that break no other way: none is in anything that they leave.

Looked through: the screen, every file below the working folder (run and sweep folders, MLflow's database and
artifacts), and the arguments of all processes.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import time
from pathlib import Path

import psutil
import pytest

from tests.pace import wait_for
from tests.runs import ROOT, family, mlflow_runs, read, start_afresh, trainer

SIGN = "c4nary"
"""In every canary, so that one is found where it is not looked for."""
OWN = r"""
import json, logging, os, shlex, sys, traceback, urllib.parse, warnings
from torch import nn

def tell(what):
    text = str(what)
    for spelled in (what, repr(what), json.dumps(what), urllib.parse.quote(text), shlex.quote(text), text.upper()[:1]):
        print(spelled, end=" ")
    print(what, file=sys.stderr)

class Net(nn.Module):
    def __init__(self, num_classes, breaks=False, **more):
        super().__init__()
        self.breaks, self.more = breaks, more
        tell(more)
        for value in more.values():
            tell(value)
            warnings.warn(f"deprecated: {value}")
            logging.getLogger("own").error("cannot use %s", value)
        print(os.environ.get("MY_TOKEN"), os.environ.get("PLAIN"))
        try:
            raise ValueError(f"refused: {more}")
        except ValueError:
            traceback.print_exc()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))

    def forward(self, images):
        if self.breaks and self.training and not images.is_meta and images.any():
            raise RuntimeError(f"cannot log in with {self.more}")
        return self.layers(images)
"""
PLACES = {
    "+model.hub_token": "#",
    "+model.credentials": "{user: #, value: #}",
    "+model.tokens": "[#, #]",
    "+model.headers": "[Authorization: Bearer #, X-Api-Key: #]",
    "+model.dsn": "'host=h;user=u;pwd=#;x=1'",
    "+model.url": "https://someone:#@host/x",
    "+model.with_slash": "'https://someone:#/and@host:1/x'",
    "+model.with_query": "'https://host/x?password=#&sig=#'",
    "+model.api_key": '"it\'s # \\"so\\""',
    "+model.git": "https://#@host/x",
    "+model.remotes": "[{name: a, auth: {kind: #, n: 1}}]",
    "+model.clientSecret": "#",
    "+model.bearer": "#",
    "+model.cookie": "#",
    "+model.passphrase": "'# with spaces'",
    "+model.aws.secret_access_key": "#",
    "+model.pat": "#",
    "+model.private_key": "'BEGIN #'",
    "+model.webhook": "https://hooks.example/#/x",
    "+model.jdbc": "'jdbc:postgresql://h/d?user=u&password=#'",
    "+model.plain_key_name": "'password=# x'",
    "+tracking.tags.access_token": "#",
    "+tracking.tags.note": "'log in with token=# there'",
    "+model.token_from_default": "${oc.env:NO_TOKEN,#}",
}
"""Where a canary is put, for each #."""


def planted() -> tuple[list[str], list[str]]:
    """The overrides, and the canaries in them."""
    canaries: list[str] = []

    def canary(_: object) -> str:
        canaries.append(f"{SIGN}{len(canaries):02d}Zq")
        return canaries[-1]

    return [f"{key}={re.sub('#', canary, form)}" for key, form in PLACES.items()], canaries


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working folder after a run of two workers and a sweep whose jobs break, and the arguments that were seen."""
    folder = tmp_path_factory.mktemp("canaries")
    (folder / "own").mkdir()
    (folder / "own" / "own_net.py").write_text(OWN)
    (folder / "own" / "vocabulary" / "tracking").mkdir(parents=True)
    (folder / "own" / "vocabulary" / "tracking" / "mine.yaml").write_text(
        "defaults:\n  - mlflow\n  - tensorboard\ntags:\n  service: {password: " + SIGN + "96Zq}\n"
    )
    overrides, canaries = planted()
    assert len(canaries) + 6 >= 30
    secret = {"MY_TOKEN": f"{SIGN}97Zq", "PLAIN": f"{SIGN}98Zq", "PYTHONPATH": f"{ROOT}:{folder / 'own'}"}
    (folder / "work").mkdir()
    base = [
        "+recipe=digits_lenet",
        "model._target_=own_net.Net",
        "~model.in_channels",
        "~model.image_size",
        "+model.thing=${oc.env:MY_TOKEN}",
        "+model.password=${oc.env:PLAIN}",
        *overrides,
    ]
    process = start_afresh(
        "--config-dir",
        str(folder / "own" / "vocabulary"),
        *base,
        "hydra.run.dir=run",
        "launch.nproc=2",
        "max_steps=2",
        "tracking=mine",
        f"tracking.uri='sqlite:///mlflow.db?password={SIGN}99Zq'",
        "tracking.flush_timeout_s=200",
        cwd=folder / "work",
        **secret,
    )
    seen: set[str] = set()
    wait_for(lambda: process.poll() is not None or (folder / "work" / "run" / "config.yaml").exists(), 100, "it begins")
    while process.poll() is None:
        try:
            seen |= {" ".join(p.cmdline()) for p in family(process.pid)}
        except psutil.NoSuchProcess:
            pass
        time.sleep(0.1)
    screen = (folder / "work" / "screen.txt").read_text()
    assert process.returncode == 0, screen
    (folder / "work" / "arguments.txt").write_text("\n".join(sorted(seen)))
    done = trainer(
        "-m",
        *base,
        "+model.breaks=true",
        "hydra.sweep.dir=sweep",
        "max_steps=2",
        f"+model.otp={SIGN}94Zq,{SIGN}95Zq",
        "tracking=none",
        cwd=folder / "work",
        timeout=200,
        **secret,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    (folder / "work" / "screen_of_sweep.txt").write_text(done.stdout + done.stderr)
    return folder / "work"


def test_no_canary_is_in_anything_that_is_left(left: Path) -> None:
    files = [path for path in left.rglob("*") if path.is_file()]
    names = {str(path.relative_to(left)) for path in files}
    assert {
        "screen.txt",
        "screen_of_sweep.txt",
        "arguments.txt",
        "mlflow.db",
        "run/config.yaml",
        "run/.hydra/config.yaml",
        "run/workerlog.1",
        "run/tracking.json",
        "sweep/multirun.yaml",
        "sweep/sweep.csv",
        "sweep/0/.hydra/overrides.yaml",
        "sweep/1/result.json",
        "sweep/1/workerlog.0",
    } <= names
    found = {str(p.relative_to(left)): p.read_bytes() for p in files}
    assert {
        name: content[max(0, (at := content.lower().find(SIGN.encode())) - 60) : at + 60]
        for name, content in found.items()
        if SIGN.encode() in content.lower()
    } == {}


def test_what_is_not_secret_is_still_there(left: Path) -> None:
    """An over-eager eye would make the files useless."""
    config = (left / "run" / "config.yaml").read_text()
    assert "url: https://(hidden)@host/x" in config and "with_slash: https://(hidden)@host:1/x" in config
    assert "jdbc: jdbc:postgresql://h/d?user=(hidden)&password=(hidden)" in config
    assert "dsn: host=h;user=u;pwd=(hidden);x=1" in config and "name: a" in config and "lr: 0.05" in config
    assert config.count("(hidden)") < 45
    assert "password: ${oc.env:PLAIN}" in (left / "run" / ".hydra" / "config.yaml").read_text()
    log = (left / "run" / "workerlog.1").read_text()
    assert "refused: {'thing': '(hidden)', 'password': '(hidden)'" in log and "cannot use (hidden)" in log
    sweep = (left / "screen_of_sweep.txt").read_text()
    assert "RuntimeError: cannot log in with {'thing': '(hidden)', 'password': '(hidden)'" in sweep
    of_point = (left / "sweep" / "1" / ".hydra" / "overrides.yaml").read_text().replace("\\", "")  # Hydra's own quoting
    assert "+model.thing=${oc.env:MY_TOKEN}" in of_point, "taken from the environment, as it was typed"
    screen = (left / "screen.txt").read_text()
    repeat = next(line for line in screen.splitlines() if line.startswith("repeat"))
    assert "+model.thing='${oc.env:MY_TOKEN}'" in repeat.replace("'+model.thing=", "+model.thing='"), (
        "it can be typed again"
    )
    assert shlex.split(repeat) and "+model.hub_token=(hidden)" in repeat
    [run] = mlflow_runs(left)
    assert (
        run.data.tags["trainer.recipe"] == "digits_lenet"
        and run.data.params["model.aws.secret_access_key"] == "(hidden)"
    )
    assert read(left / "run" / "result.json")["status"] == "done"


def test_files_with_configs_are_for_their_owner_alone(left: Path) -> None:
    private = [
        "run/config.yaml",
        "run/plan.json",
        "run/model.json",
        "run/tracking.json",
        "run/.hydra/config.yaml",
        "run/.hydra/hydra.yaml",
        "run/.hydra/overrides.yaml",
        "sweep/multirun.yaml",
        "sweep/sweep.csv",
        "sweep/0/config.yaml",
        "sweep/0/.hydra/config.yaml",
        "sweep/1/.hydra/hydra.yaml",
        "sweep/1/.hydra/overrides.yaml",
    ]
    assert {name: oct(stat.S_IMODE(os.stat(left / name).st_mode)) for name in private} == dict.fromkeys(
        private, "0o600"
    )


def test_the_arguments_of_all_processes_were_seen(left: Path) -> None:
    seen = (left / "arguments.txt").read_text()
    assert "trainer.tracking.recorder" in seen and "forkserver" in seen
    assert "+model.hub_token=**********" in seen and "+recipe=digits_lenet" in seen
