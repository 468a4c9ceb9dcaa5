"""``eval RUN`` and ``predict RUN INPUT`` need the run's folder alone: no recipe, no --config-dir, and no working
folder."""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import trainer as package
from tests.pictures import CLASSES, image_folder
from tests.runs import read, trainer
from trainer.cli.commands import chosen
from trainer.cli.saved_run import Words
from trainer.errors import UserError
from trainer.run_folder import tracking_file

DIGITS = ["+recipe=digits_lenet", "epochs=1", "max_steps=20", "checkpoint=none"]
MODEL = """
import torch

class Mine(torch.nn.Module):
    def __init__(self, num_classes, width):
        super().__init__()
        wide, last = torch.nn.Linear(64, width), torch.nn.Linear(width, num_classes)
        self.layers = torch.nn.Sequential(torch.nn.Flatten(), wide, last)

    def forward(self, images):
        return self.layers(images) * SIGN
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run whose model is a class beside the working folder, and whose recipe is the user's
    own."""
    place, patch = tmp_path_factory.mktemp("project"), pytest.MonkeyPatch()
    (place / "own_of_run.py").write_text(f"SIGN = 1\n{MODEL}")
    patch.chdir(place)
    patch.syspath_prepend(str(place))
    own = "~model.in_channels ~model.image_size ~model.init model._target_=own_of_run.Mine +model.width=12".split()
    package.run(
        [*DIGITS, *own, f"tracking.uri=sqlite:///{place}/mlflow.db", "hydra.run.dir=run", "data.val_fraction=0.3"]
    )
    patch.undo()
    sys.modules.pop("own_of_run")
    return place / "run"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that is not the run's, with another module of the same name."""
    (tmp_path / "own_of_run.py").write_text(f"SIGN = -1\n{MODEL}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "own_of_run", None)  # what is imported is forgotten at the end
    sys.modules.pop("own_of_run")
    return tmp_path


@pytest.mark.all
def test_eval_measures_what_the_training_measured(trained: Path, elsewhere: Path) -> None:
    result = package.run(["eval", str(trained), "tracking=none", "hydra.run.dir=told"])
    theirs = read(trained / "result.json")["metrics"]
    assert {k: v for k, v in result.metrics.items() if k.startswith("val/")} == {
        k: v for k, v in theirs.items() if k.startswith("val/")
    }
    assert result.samples == 539, "the run's data.val_fraction"
    assert not {str(trained.parent), str(trained)} & set(sys.path), (
        "the run's folders are searched for this command alone"
    )


@pytest.mark.all
def test_an_mlflow_run_id_and_a_checkpoint_stand_for_the_folder(trained: Path, elsewhere: Path, capsys: Any) -> None:
    run_id, uri = tracking_file.position(trained).id or "", f"tracking.uri=sqlite:///{trained.parent}/mlflow.db"
    result = package.run(["eval", run_id, uri, "tracking=none"])
    assert result.metrics["val/loss"] == read(trained / "result.json")["metrics"]["val/loss"]
    assert f"repeat    python -m trainer eval {run_id} {uri} tracking=none\n" in capsys.readouterr().out
    assert package.run(["eval", str(trained / "model.safetensors"), "tracking=none", "plan=true"]).status == "planned"
    with pytest.raises(UserError, match=r"there is no such run at tracking\.uri=sqlite:///.*another tracking\.uri"):
        package.run(["eval", "0" * 32, uri])


@pytest.mark.all
def test_predict_names_the_classes_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    image_folder(tmp_path / "photos", 4)
    common = """
        model=lenet model.in_channels=3 model.image_size=32 data=imagefolder data.image_size=32
        data.batch_size=4 epochs=1 device=cpu
    """.split()
    package.run([*common, "data.root=photos", "tracking=none", "hydra.run.dir=run", "checkpoint=none"])
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    assert package.run(["eval", "../run"]).samples == 6, "there are no photos here"
    (other / "photos").mkdir()
    with pytest.raises(UserError) as refused:
        package.run(["eval", "../run"])
    assert str(refused.value) == (
        f"data.root=photos: is relative to {tmp_path}, where the run was started, and is there here, too. "
        f"Type instead: python -m trainer eval ../run data.root={tmp_path}/photos"
    )
    assert package.run(refused.value.instead.split()[3:]).samples == 6
    shutil.copytree(tmp_path / "photos" / "train", "new=ones")
    assert package.run(["eval", "../run", "new=ones"]).samples == 12, "a folder of classes is measured whole"
    (tmp_path / "photos").rename(tmp_path / "gone")
    predicted = package.run(["predict", "../run", "../gone/val", "data.batch_size=2"])
    table = list(csv.DictReader((Path(predicted.run_dir) / "predictions.csv").open()))
    assert len(table) == 6 and {row["class1"] for row in table} <= set(CLASSES)
    with pytest.raises(UserError, match=r"is a run of mode=predict, which leaves no weights. Type instead: .* eval /"):
        package.run(["eval", predicted.run_dir])


def test_a_value_of_the_environment_is_the_runs_and_a_secret_is_typed_again(
    trained: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(trained, "run")
    for name in ("config.yaml", ".hydra/config.yaml"):
        text = Path("run", name).read_text().replace("  uri: sqlite", "  uri: postgresql://me:(hidden)@db/x #")
        Path("run", name).write_text(text)
    with pytest.raises(UserError, match=r"tracking.uri of run: is a secret.*eval run tracking.uri=VALUE"):
        package.run(["eval", "run", "plan=true"])
    assert package.run(["eval", "run", "tracking=none", "plan=true"]).status == "planned"
    composed = Path("run/.hydra/config.yaml")
    composed.write_text(composed.read_text().replace("width: 12", "width: ${oc.env:WIDTH_OF_MINE,5}"))
    assert package.run(["eval", "run", "tracking=none"]).status == "done"


def test_workers_of_another_process_find_the_runs_own_class(trained: Path, tmp_path: Path) -> None:
    done = trainer("eval", str(trained), "tracking=none", "launch.nproc=2", "hydra.run.dir=told", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    theirs, mine = read(trained / "result.json")["metrics"], read(tmp_path / "told" / "result.json")["metrics"]
    assert mine["val/acc1"] == theirs["val/acc1"]
    assert f"python -m trainer eval {trained} tracking=none launch.nproc=2 hydra.run.dir=told" in done.stdout


REFUSED = {
    "eval": "eval: needs the folder of a run, or its MLflow run id. Type instead: python -m trainer eval RUN [DATA]",
    "predict run": "needs a folder of images, or a file of rows. Type instead: python -m trainer predict run FOLDER",
    "predict run a.jpg b.jpg": "takes one folder or file after the run, not 2",
    "eval nowhere": "there is no such folder, and an MLflow run id has 32 hexadecimal digits",
    "eval .": "holds 1 run, and is none itself. Type instead: python -m trainer eval run",
    "eval empty": "is no folder of a run: it has no config.yaml and plan.json",
    "eval run run": (
        "trainer.data.sets.digits.Digits reads no folder of yours. Type instead: python -m trainer eval run"
    ),
    "eval run +recipe=digits_lenet": "eval takes the recipe from the run",
    "eval run mode=train": "mode=train: eval is a mode",
    "eval run data.batch=3": "data.batch=3: there is no such key",
    "eval run epochs=none": "epochs=none: must be a whole number",
    "eval weightless": "no model.safetensors, which a run leaves when it is done, and no whole checkpoint",
    "eval garbled": "garbled/config.yaml: cannot be read",
    "eval nested": "nested/plan.json: cannot be read",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_is_one_sentence(trained: Path, elsewhere: Path, words: str) -> None:
    (elsewhere / "empty").mkdir()
    for name in {"run", *words.split()} & {"run", "weightless", "garbled", "nested"}:
        shutil.copytree(trained, name)
    if os.path.isdir("weightless"):
        os.unlink("weightless/model.safetensors")
    if os.path.isdir("garbled"):
        Path("garbled/config.yaml").write_text("a: [b\n")
    if os.path.isdir("nested"):
        Path("nested/plan.json").write_text("[" * 200_000)
    before = {str(path) for path in elsewhere.rglob("*")}
    with pytest.raises(UserError) as refused:
        package.run(words.split())
    assert REFUSED[words] in str(refused.value) and refused.value.exit_code == 2
    assert {str(path) for path in elsewhere.rglob("*")} == before


def test_words_are_told_from_overrides_and_paths_that_look_like_them(elsewhere: Path) -> None:
    os.makedirs("multirun/lr=0.1")
    asked = Words.of(["tracking=none", "eval", "multirun/lr=0.1", "data.batch_size=3"])
    assert (asked.run, asked.input, asked.overrides) == ("multirun/lr=0.1", "", ["tracking=none", "data.batch_size=3"])
    with chosen(["mode=eval", "weights=predict"]) as overrides:
        assert overrides.overrides == ["mode=eval", "weights=predict"]


def test_the_plan_keeps_where_the_run_was_started_and_its_own_code(trained: Path) -> None:
    plan = json.loads((trained / "plan.json").read_text())
    assert plan["paths"]["started_in"] == str(trained.parent) and plan["paths"]["own_code"] == [str(trained.parent)]
