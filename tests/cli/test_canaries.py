"""Whatever is refused or shown, and however a secret was typed: nothing printed holds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run

DIGITS = ["+recipe=digits_lenet", "tracking=none", "plan=true"]
OWN = """
from torch import nn

class Picky(nn.Module):
    def __init__(self, num_classes, **more):
        raise RuntimeError(f"cannot log in at {more} with %s" % [*more.values()][0])
"""
CASES = {
    "key that is not there": ["optimizer.password=c4naryA1"],
    "key that is not there, nested": ["optimizer.credentials={user: c4naryB1, value: 'c4nary B2'}"],
    "wrong type": ["+tracking.tags.token=c4naryC1", "seed=abc"],
    "parse error": ["+model.password=c4naryD1,[x", "seed=1"],
    "parse error in quotes": ["+model.hub_token='c4nary E1"],
    "parse error in a list": ["+model.tokens=[c4naryF1, c4naryF2", "epochs=2"],
    "parse error in a mapping": ["+model.auth={user:c4naryG1 x,value:'c4naryG2'"],
    "parse error beside it": ["+model.pat=c4naryH1", "seed=[1"],
    "sweep without -m": ["+model.api_key=c4naryI1,c4naryI2"],
    "interpolation that leads nowhere": ["+model.secret=c4naryJ1", "seed=${nowhere.c4naryJ1}"],
    "address with a query": ["tracking=mlflow", "tracking.uri=foo://u:c4naryK1@h/x?password=c4naryK2&sig=c4naryK3"],
    "address with a slash in the password": ["tracking=mlflow", "tracking.uri='http://u:c4nary/L1@127.0.0.1:1/x'"],
    "constructor": [
        "model._target_=own_picky.Picky",
        "+model.hub_token=c4naryM1",
        "+model.headers=[Authorization: Bearer c4naryM2]",
        "~model.in_channels",
        "~model.image_size",
    ],
    "constructor, more": """
        model._target_=own_picky.Picky +model.dsn='host=h;pwd=c4naryN1;x=y' +model.url=https://c4naryN2@host/x
        ~model.in_channels ~model.image_size
    """.split(),
    "constructor, from the environment": """
        model._target_=own_picky.Picky +model.thing=${oc.env:MY_TOKEN} +model.password=${oc.env:PLAIN}
        +model.z=${oc.env:NO_TOKEN,c4naryO3} ~model.in_channels ~model.image_size
    """.split(),
    "constructor's argument that it does not take": ["+loss.webhook=https://hooks.example/c4naryP1/x"],
    "config shown": [
        "--cfg",
        "job",
        "+model.x.apiKey=c4naryQ1",
        "+model.cookie=c4naryQ2",
        "+model.many=[{name: a, auth: {kind: c4naryQ3}}]",
    ],
    "config shown, resolved": """
        --cfg job --resolve +model.bearer=c4naryR1 +model.a=${model.bearer} +model.t=${oc.env:MY_TOKEN}
    """.split(),
    "hydra's own shown": ["--cfg", "all", "+model.bearer=c4naryS1"],
    "info": ["--info", "all", "+model.access_key=c4naryT1"],
    "flag that is not there": ["--pasword=c4naryU1", "+model.password=c4naryU1"],
    "a sweep's job that is refused": ["-m", "+model.hub_token=c4naryV1,c4naryV2", "seed=1,abc"],
    "debug": ["debug=true", "+model.hub_token=c4naryW1", "data.batch_size=x"],
    "plan": ["+tracking.tags.access_token=c4naryX1", "name=c4naryX1"],
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_printed_holds_a_secret(
    case: str, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "own_picky.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MY_TOKEN", "c4naryO1")
    monkeypatch.setenv("PLAIN", "c4naryO2")
    code, out, error = run(*DIGITS, *CASES[case])
    assert "c4nary" not in out + error, out + error
    assert "Traceback" not in error or case == "debug"
    assert out + error and (code == 2) == ("shown" not in case and case not in ("info", "plan")), error
    assert case in ("flag that is not there", "interpolation that leads nowhere") or "(hidden)" in out + error or code
    assert list(folder.iterdir()) == []


def test_a_secret_in_a_file_of_ones_own_is_hidden_as_well(run: Run, tmp_path: Path) -> None:
    own = tmp_path / "own"
    (own / "model").mkdir(parents=True)
    (own / "model" / "mine.yaml").write_text(
        "_target_: trainer.models.lenet.LeNet\nnum_classes: 10\nlogin: {password: c4naryA2}\nurl: https://c4naryA3@h\n"
    )
    code, out, error = run("--config-dir", str(own), *DIGITS, "model=mine")
    assert code == 2 and "login" in error
    assert "c4nary" not in out + error
    code, out, error = run("--config-dir", str(own), *DIGITS, "model=mine", "--cfg", "job")
    assert code == 0 and "password: (hidden)" in out
    assert "c4nary" not in out + error


@pytest.mark.parametrize("name", ["[/red]x", "[red]y", ":smile:", "[link=x]y"])
def test_names_are_no_markup(run: Run, name: str) -> None:
    code, out, error = run(*DIGITS, f"'name=\"{name}\"'".strip("'"))
    assert code == 0, error
    assert f"Plan of {name}" in out


def test_control_characters_of_a_name_are_spelled_out(run: Run) -> None:
    code, out, error = run(*DIGITS, 'name="a\x1b[2Jb\u202ec\x07"', "epochs=x\ny")
    assert code == 2 and "\x1b" not in out + error and error.count("\n") == 1
