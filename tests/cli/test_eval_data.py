"""What ``eval RUN`` and ``eval RUN DATA`` measure, wherever they are typed."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

import trainer as package
from tests.pictures import encoded, image_folder, picture, shard
from tests.runs import read
from trainer.cli.eval_data import other_data, own_data
from trainer.errors import UserError

SMALL = """
    model=lenet model.in_channels=3 model.image_size=32 data.image_size=32 data.batch_size=4 epochs=1 device=cpu
    checkpoint=none tracking=none
""".split()
FOLDERS = {"_target_": "ImageFolder", "root": "photos", "val": "val", "on_missing": "fallback"}
FILES = {"_target_": "Shards", "path": "d/*.tar", "val_path": None, "test_path": "t.tar"}


def tars(folder: Path, first: int, count: int) -> None:
    """Shards of each split: ``count`` images for validation and test, twice as many for training."""
    folder.mkdir(parents=True)
    for name, size in (("train-000", 2 * count), ("val-000", count), ("test-000", count)):
        shard(folder / f"{name}.tar", [(f"{n}", encoded(picture(n % 3, first + n)), n % 3) for n in range(size)])


@pytest.mark.parametrize("path", ["d/*.tar", "d/{train,val,test}-000.tar", ["d/train-000.tar", "d/*-000.tar"]])
def test_patterns_and_test_files_lead_from_where_the_run_was_started(
    path: str | list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, other = tmp_path / "a [1]", tmp_path / "other"
    if isinstance(path, str) and "," in path:
        path = "d/train-{000..000}.tar"
    tars(home / "d", 0, 6)
    other.mkdir()
    monkeypatch.chdir(other)
    data = {"path": path, "val_path": "d/val-000.tar", "test_path": ["d/test-000.tar"], "batch_size": 4}
    found = own_data(data, str(home), [], "python -m trainer eval R", refuse=True)
    assert found["val_path"] == f"{home}/d/val-000.tar" and found["test_path"] == [f"{home}/d/test-000.tar"]
    paths = found["path"] if isinstance(path, list) else [found["path"]]
    assert all("/a [" in name and name.startswith(str(tmp_path)) for name in paths)
    tars(other / "d", 50, 3)
    with pytest.raises(UserError, match="is there here, too"):
        own_data(data, str(home), [], "python -m trainer eval R", refuse=True)
    assert own_data(data, str(other), [], "", refuse=True) == data, "it is typed where the run was started"
    assert own_data(data, str(tmp_path / "gone"), [], "", refuse=True) == data


@pytest.mark.all
def test_a_run_is_measured_on_its_own_shards_and_on_all_files_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, other = tmp_path / "my home", tmp_path / "other"
    tars(home / "d", 0, 6)
    tars(other / "new", 50, 5)
    monkeypatch.chdir(home)
    package.run(["data=shards", "data.path=d/*.tar", "data.num_classes=3", *SMALL, "hydra.run.dir=my run"])
    ours = read(home / "my run" / "result.json")["metrics"]
    monkeypatch.chdir(other)
    run = "../my home/my run"
    again = package.run(["eval", run, "tracking=none", "hydra.run.dir=1"])
    assert again.samples == 6 and again.metrics["val/loss"] == ours["val/loss"]
    tested = package.run(["eval", run, "tracking=none", "eval.split=test", "hydra.run.dir=2"])
    assert tested.samples == 6 and tested.metrics["test/loss"] == ours["test/loss"]
    for split, number in (("val", "3"), ("test", "4")):
        new = package.run(
            ["eval", run, "new/val-000.tar", "tracking=none", f"eval.split={split}", f"hydra.run.dir={number}"]
        )
        assert new.samples == 5 and new.metrics[f"{split}/loss"] not in (ours["val/loss"], ours["test/loss"])
    shutil.copytree(home / "d", "d")
    with pytest.raises(UserError, match="is there here, too") as refused:
        package.run(["eval", run, "tracking=none", "plan=true"])
    assert package.run([*shlex.split(refused.value.instead)[3:], "tracking=none", "plan=true"]).status == "planned"


@pytest.mark.parametrize(
    ("folders", "root", "val"),
    [
        (("train", "val"), "", None),
        (("Training", "Validation", "test"), "", None),
        (("val", "test"), "val", "."),
        (("train", "test"), "test", "."),
        (("Train",), "Train", "."),
        ((), "", "."),
    ],
)
def test_a_folder_is_measured_by_its_validation_its_test_or_whole(
    folders: tuple[str, ...], root: str, val: str | None, tmp_path: Path
) -> None:
    for name in folders or ("",):
        for kind in ("daisy", "iris"):
            (tmp_path / name / kind).mkdir(parents=True)
    data = {**FOLDERS, "root": "photos", "val": "held"}
    found = other_data(data, str(tmp_path), "python -m trainer eval R", "val")
    assert found["root"].rstrip("/.") == str(tmp_path / root) and found["val"] == val
    assert found["on_missing"] == "error", "nothing takes the place of DATA"
    tested = other_data(data, str(tmp_path), "python -m trainer eval R", "test")
    assert (tested["root"], tested["val"]) == (str(tmp_path), None)


def test_all_keys_of_files_lead_to_data() -> None:
    found: dict[str, Any] = other_data(FILES, __file__, "python -m trainer eval R", "val")
    assert {key: value for key, value in found.items() if key != "_target_"} == dict.fromkeys(
        ("path", "val_path", "test_path"), __file__
    )
    with pytest.raises(UserError, match=r"eval 'my runs/1' nowhere: there is no such folder or file"):
        other_data(FILES, "nowhere", "python -m trainer eval 'my runs/1'", "val")


@pytest.mark.all
def test_own_classes_that_are_gone_are_said_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "project"
    image_folder(home / "photos", 4)
    (home / "net_of_mine.py").write_text("import trainer.models.lenet as m\n\nclass Net(m.LeNet): ...\n")
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(str(home))
    package.run(["data=imagefolder", "data.root=photos", *SMALL, "model._target_=net_of_mine.Net", "hydra.run.dir=run"])
    (home / "run" / "skeleton.pkl").unlink(missing_ok=True)
    home.rename(tmp_path / "moved")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "net_of_mine", raising=False)
    with pytest.raises(UserError, match="no module") as refused:
        package.run(["eval", "moved/run", "moved/photos", "tracking=none"])
    assert f"classes were in {home}, which is gone" in refused.value.__notes__[0]
