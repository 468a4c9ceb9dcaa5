"""mode=eval says of saved weights what training said; mode=predict guesses as the model does; both with any number of
workers."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_model, save_file
from sklearn import metrics as truth

import trainer as package
from tests.pictures import CLASSES, image_folder
from tests.runs import TORCHRUN, points, read, torchrun, trainer
from trainer.config.instantiate import call_target, for_saved_weights
from trainer.data.sets.digits import MEAN, STD, Digits
from trainer.data.source import Facts
from trainer.errors import UserError
from trainer.metrics.confusion import Examination
from trainer.metrics.validation_file import read as findings
from trainer.models.lenet import LeNet

RECIPE = ["+recipe=digits_lenet", "tracking=none"]
WORKERS = [1, pytest.param(2, marks=pytest.mark.long), 3]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs, its folder."""
    folder = tmp_path_factory.mktemp("trained")
    assert package.run([*RECIPE, "epochs=2", f"hydra.run.dir={folder}/run"]).status == "done"
    return folder / "run"


def model_of(run_dir: Path) -> LeNet:
    model = LeNet(10, 1, 8)
    load_model(model, str(run_dir / "model.safetensors"))
    return model.eval()


@torch.no_grad()
def validated(run_dir: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels, guesses and losses of the validation samples, by torch alone."""
    facts = Facts("", "", 1438, 359, (1, 8, 8), 10)
    val: Any = Digits(val_fraction=0.2, split_seed=0).open(facts).val
    scores = model_of(run_dir)((val.inputs - MEAN[0]) / STD[0])
    losses = torch.nn.functional.cross_entropy(scores, val.labels, reduction="none")
    return val.labels.numpy(), scores.argmax(1).numpy(), losses.numpy()


def assert_found(run_dir: Path, trained: Path) -> None:
    """What the run's files say of its last validation is what scikit-learn says of the trained model."""
    labels, guesses, losses = validated(trained)
    found = findings(run_dir, "last")
    assert found is not None and Examination.of(found.arrays).confusion is not None
    np.testing.assert_array_equal(
        Examination.of(found.arrays).confusion[:, :-1], truth.confusion_matrix(labels, guesses)
    )
    assert read(run_dir / "result.json")["metrics"]["val/f1"] == pytest.approx(
        truth.f1_score(labels, guesses, average="macro"), abs=1e-12
    )
    wrong = np.flatnonzero(labels != guesses)
    worst = wrong[np.argsort(-losses[wrong], kind="stable")][:24]
    assert [m.number for m in Examination.of(found.arrays).mistakes] == worst.tolist()
    by_class = list(csv.DictReader((run_dir / "per_class.csv").open()))
    recall = truth.recall_score(labels, guesses, average=None)
    assert [float(row["accuracy"]) for row in by_class] == pytest.approx(recall, abs=1e-6)
    for name in ("confusion.png", "mistakes.png", "mistakes.csv"):
        assert (run_dir / name).stat().st_size


@pytest.mark.all
@pytest.mark.parametrize("workers", WORKERS)
def test_eval_gives_the_numbers_of_the_validation_at_the_end_of_training(
    trained: Path, tmp_path: Path, workers: int
) -> None:
    done = trainer(
        *RECIPE,
        "mode=eval",
        f"weights={trained}",
        f"launch.nproc={workers}",
        "hydra.run.dir=run",
        cwd=tmp_path,
        timeout=2400,
    )
    assert done.returncode == 0, done.stderr
    mine, theirs = read(tmp_path / "run" / "result.json"), read(trained / "result.json")
    names = [name for name in theirs["metrics"] if name.startswith("val/")]
    assert set(names) == {"val/loss", "val/acc1", "val/acc5", "val/f1"}
    for name in names:
        exact = 0.0 if workers == 1 or name != "val/loss" else 1e-6  # other batches, other rounding of their mean loss
        assert mine["metrics"][name] == pytest.approx(theirs["metrics"][name], abs=exact, rel=0)
    assert mine["status"] == "done" and mine["mode"] == "eval" and mine["samples"] == 359
    assert points(tmp_path / "run", "val/f1") == [mine["metrics"]["val/f1"]]
    assert_found(tmp_path / "run", trained)
    assert not (tmp_path / "run" / "checkpoints").exists() and not (tmp_path / "run" / "model.safetensors").exists()
    assert "done 359 samples evaluated in" in done.stdout


@pytest.mark.all
def test_eval_under_torchrun_gives_the_same(trained: Path, tmp_path: Path) -> None:
    told = torchrun(*RECIPE, "mode=eval", f"weights={trained}", "hydra.run.dir=run")
    done = trainer(*told, cwd=tmp_path, **TORCHRUN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_found(tmp_path / "run", trained)


def test_a_finetuned_model_needs_its_pretrained_weights_no_more() -> None:
    node = {
        "_target_": "trainer.models.finetune.finetuned",
        "name": "squeezenet1_1",
        "weights": "gone.pt",
        "num_classes": 3,
    }
    model = call_target(for_saved_weights(node), "model")
    assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 3)
    timm = {"_target_": "timm.create_model", "model_name": "resnet10t", "pretrained": True, "num_classes": 3}
    assert for_saved_weights(timm) == {**timm, "pretrained": False}
    fetched = {"_target_": "torchvision.models.resnet18", "weights": "DEFAULT"}
    assert for_saved_weights(fetched) == {**fetched, "weights": None}
    assert for_saved_weights({"_target_": "torchvision.models.resnet18", "a": 1}) == {
        "_target_": "torchvision.models.resnet18",
        "a": 1,
    }


@pytest.mark.all
def test_a_model_of_timm_is_kept_without_its_pretrained_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib.metadata import version

    from trainer.tracking.logged_model import _requirements

    fetched: list[Any] = []
    monkeypatch.setattr("timm.models._builder.load_pretrained", lambda *args, **kwargs: fetched.append(args))
    typed = [
        "model=timm",
        "~model.image_size",
        "model.model_name=resnet10t",
        "+model.in_chans=1",
        "model.pretrained=true",
    ]
    common = [*RECIPE, *typed, "limit_val_batches=2"]
    trained = package.run([*common, "max_steps=1", f"hydra.run.dir={tmp_path}/run"])
    assert fetched, "the training begins with timm's weights"
    kept = read(tmp_path / "run" / "model.json")["model"]
    assert kept["_target_"] == "timm.create_model" and kept["pretrained"] is False
    assert f"timm=={version('timm')}" in _requirements(kept["_target_"], {})
    assert not any(line.startswith("timm") for line in _requirements("torchvision.models.resnet18", {}))
    fetched.clear()
    result = package.run([*common, "mode=eval", f"weights={tmp_path}/run", f"hydra.run.dir={tmp_path}/eval"])
    assert not fetched and result.metrics["val/loss"] == trained.metrics["val/loss"]


def test_training_leaves_the_same_findings(trained: Path) -> None:
    assert_found(trained, trained)


def test_the_best_validation_is_kept_beside_the_last_where_it_is_another(tmp_path: Path) -> None:
    package.run(
        [
            *RECIPE,
            "epochs=2",
            "optimizer.lr=1.5",
            "scheduler=step",
            "scheduler.every_epochs=0.01",
            "scheduler.gamma=1.0",
            "limit_train_batches=3",
            "seed=3",
            f"hydra.run.dir={tmp_path}/run",
        ]
    )
    accuracies = points(tmp_path / "run", "val/acc1")
    best, last = findings(tmp_path / "run", "best"), findings(tmp_path / "run", "last")
    assert last is not None and Examination.of(last.arrays).metrics["acc1"] == accuracies[-1]
    assert (best is None) == (accuracies[1] > accuracies[0])
    assert best is None or Examination.of(best.arrays).metrics["acc1"] == accuracies[0]
    assert (tmp_path / "run" / "best_confusion.png").exists() == (best is not None)


@pytest.mark.parametrize("name", ["alone.pt", "wrapped.bin", "nested.ckpt", "both.pth", "wrapped.safetensors"])
def test_state_dict_of_torch_gives_the_same(trained: Path, tmp_path: Path, name: str) -> None:
    tensors = model_of(trained).state_dict()
    named = {f"module.{k}": v for k, v in tensors.items()} if name.startswith(("wrapped", "both")) else tensors
    if name.endswith(".safetensors"):
        save_file(named, tmp_path / name)
    else:
        content = {"state_dict": named, "epoch": 3} if name.startswith(("nested", "both")) else named
        torch.save(content, tmp_path / name)
    result = package.run([*RECIPE, "mode=eval", f"weights={tmp_path}/{name}", f"hydra.run.dir={tmp_path}/run"])
    assert result.metrics["val/loss"] == read(trained / "result.json")["metrics"]["val/loss"]


def test_a_models_own_name_is_no_wrapper(tmp_path: Path) -> None:
    from trainer.weights import fit

    saved, model = (torch.nn.Sequential() for _ in range(2))
    for one in (saved, model):
        one.add_module("module", torch.nn.Linear(2, 3))
    torch.save(saved.state_dict(), tmp_path / "own.pt")
    fit.load(tmp_path / "own.pt", model)
    assert torch.equal(model.state_dict()["module.weight"], saved.state_dict()["module.weight"])


@pytest.mark.all
def test_recipe_of_a_parameter_server_is_evaluated_by_plain_workers(tmp_path: Path) -> None:
    served = [*RECIPE, "strategy=pserver_sync", "launch.servers=1", "launch.workers=1", "epochs=1"]
    done = trainer(*served, "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = package.run([*served, "mode=eval", f"weights={tmp_path}/run", f"hydra.run.dir={tmp_path}/eval"])
    theirs = read(tmp_path / "run" / "result.json")["metrics"]
    assert result.metrics["val/loss"] == pytest.approx(theirs["val/loss"], abs=1e-6)
    assert read(tmp_path / "eval" / "plan.json")["topology"]["roles"] == {"worker": 1}
    assert result.metrics["val/acc1"] == theirs["val/acc1"]


@pytest.mark.all
def test_click_rows_are_evaluated_with_their_own_metrics(tmp_path: Path) -> None:
    clicks = [
        "+recipe=wide_and_deep",
        "tracking=none",
        "data.train_rows=2000",
        "data.val_rows=1000",
        "data.hash_size=1000",
        "model.table_size=1000",
        "strategy=single",
        "launch.workers=1",
        "launch.servers=null",
        "data.batch_size=100",
        "epochs=1",
        "model.hidden=[8]",
    ]
    trained = package.run([*clicks, f"hydra.run.dir={tmp_path}/run"])
    result = package.run([*clicks, "mode=eval", f"weights={tmp_path}/run", f"hydra.run.dir={tmp_path}/eval"])
    assert result.metrics == {k: v for k, v in trained.metrics.items() if k.startswith("val/")}
    assert "val/auc" in result.metrics
    with pytest.raises(UserError, match=r"predict\.input=.*: is a folder without files"):
        package.run([*clicks, "mode=predict", f"weights={tmp_path}/run", f"predict.input={tmp_path}"])
    with pytest.raises(UserError, match=r"model\.table_size=null: mode=eval holds the model whole"):
        package.run([*clicks[:5], "mode=eval", f"weights={tmp_path}/run", "model.table_size=null"])
    with pytest.raises(UserError, match=r"data\.hash_size=500: the run that left the weights had data\.hash_size=1000"):
        package.run([*clicks, "mode=eval", f"weights={tmp_path}/run", "data.hash_size=500"])


def draw(folder: Path) -> dict[str, np.ndarray]:
    """30 pictures in folders of folders, of several kinds, each with the input that it must become; two broken ones."""
    draw = np.random.default_rng(0)
    inputs = {}
    for number in range(30):
        pixels = draw.integers(0, 256, (8, 8), dtype=np.uint8)
        place = folder / ("z", "a/b", ".", "a")[number % 4]
        place.mkdir(parents=True, exist_ok=True)
        path = place / f"{29 - number:02d}.{('png', 'bmp', 'PNG', 'tiff')[number % 4]}"
        Image.fromarray(pixels).save(path)
        inputs[path.relative_to(folder).as_posix()] = pixels / 255.0
    (folder / "a" / "text.jpg").write_text("no picture")
    (folder / "cut.png").write_bytes(
        path.with_suffix(".png").read_bytes()[:40] if path.suffix == ".png" else b"\x89PNG\r\n\x1a\n"
    )
    (folder / "notes.txt").write_text("not looked at")
    return inputs


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("pictures")
    return folder, draw(folder)


@pytest.mark.all
@pytest.mark.parametrize("workers", WORKERS)
def test_predict_writes_the_models_guesses_in_the_order_of_the_paths(
    trained: Path, tmp_path: Path, pictures: tuple[Path, dict[str, np.ndarray]], workers: int
) -> None:
    folder, inputs = pictures
    done = trainer(
        *RECIPE,
        "mode=predict",
        f"weights={trained}",
        f"predict.input={folder}",
        "data.batch_size=4",
        f"launch.nproc={workers}",
        "hydra.run.dir=run",
        cwd=tmp_path,
        timeout=2400,
    )
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "run" / "predictions.csv").open()))
    assert [row["file"] for row in rows] == sorted([*inputs, "a/text.jpg", "cut.png"])
    model = model_of(trained)
    for row in rows:
        if row["file"] not in inputs:
            assert row["error"] and row["class1"] == row["probability5"] == ""
            continue
        pixels = torch.from_numpy(inputs[row["file"]]).float().reshape(1, 1, 8, 8)
        with torch.no_grad():
            likely = model((pixels - MEAN[0]) / STD[0]).double().softmax(1)[0]
        best = likely.argsort(descending=True)[:5]
        assert [row[f"class{k}"] for k in range(1, 6)] == [str(c) for c in best.tolist()]
        assert [float(row[f"probability{k}"]) for k in range(1, 6)] == pytest.approx(likely[best].tolist(), abs=2e-6)
        assert row["error"] == ""
    result = read(tmp_path / "run" / "result.json")
    assert result["unreadable"] == ["a/text.jpg", "cut.png"] and result["samples"] == 32
    assert result["metrics"] == {"predict/files": 32.0, "predict/unreadable": 2.0}
    assert "2 of 32 files could not be read: a/text.jpg, cut.png" in done.stdout
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith(".pred")]


@pytest.mark.all
def test_predictions_of_flowers_have_names_and_the_validations_preprocessing(tmp_path: Path) -> None:
    from torchvision.models import resnet18
    from torchvision.transforms import v2

    from trainer.data.drawn_flowers.species import class_names

    torch.manual_seed(0)
    model = resnet18(num_classes=34).eval()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    (tmp_path / "in").mkdir()
    pixels = np.random.default_rng(1).integers(0, 256, (70, 90, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "in" / "one.png")
    package.run(
        [
            "+recipe=resnet50_flowers_demo",
            "model=resnet18",
            "tracking=none",
            "mode=predict",
            f"weights={tmp_path}/weights.pt",
            f"predict.input={tmp_path}/in",
            f"predict.output={tmp_path}/guesses.csv",
            "precision=fp32",
            f"hydra.run.dir={tmp_path}/run",
            "data.image_size=32",
            "data.val_resize=40",
        ]
    )
    image = v2.CenterCrop(32)(v2.Resize(40)(torch.from_numpy(pixels).permute(2, 0, 1)))
    mean, std = torch.tensor([0.485, 0.456, 0.406])[:, None, None], torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    with torch.no_grad():
        likely = model(((image / 255 - mean) / std).unsqueeze(0)).softmax(1)[0]
    [row] = csv.DictReader((tmp_path / "guesses.csv").open())
    assert row["class1"] == class_names(34)[int(likely.argmax())]
    assert float(row["probability1"]) == pytest.approx(float(likely.max()), abs=1e-5)
    assert not (tmp_path / "run" / "predictions.csv").exists()


@pytest.mark.all
def test_classes_have_their_names_where_the_training_images_are_gone(tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "images")
    images = [
        "+recipe=resnet50_imagefolder",
        "model=convnet",
        "~model.zero_init_residual",
        f"data.root={folder}",
        "data.image_size=32",
        "tracking=none",
    ]
    package.run([*images, "max_steps=1", "data.batch_size=4", "data.read=scatter", f"hydra.run.dir={tmp_path}/run"])
    looked = [*images, "mode=predict", f"predict.input={folder}/val", "precision=fp32"]
    package.run([*looked, f"weights={tmp_path}/run", "data.read=scatter", f"hydra.run.dir={tmp_path}/with"])
    folder.rename(tmp_path / "elsewhere")
    looked[-2] = f"predict.input={tmp_path}/elsewhere/val"
    for number, weights in enumerate(("run", "run/checkpoints/best.safetensors")):
        package.run([*looked, f"weights={tmp_path}/{weights}", f"hydra.run.dir={tmp_path}/without{number}"])
        assert (tmp_path / f"without{number}" / "predictions.csv").read_text() == (
            tmp_path / "with" / "predictions.csv"
        ).read_text()
    for row in csv.DictReader((tmp_path / "with" / "predictions.csv").open()):
        assert {row["class1"], row["class2"], row["class3"]} == set(CLASSES) and row["class4"] == ""
    with pytest.raises(UserError, match=r"data\.root=.*there is no such folder"):
        package.run([*images, "mode=eval", f"weights={tmp_path}/run"])


def test_blocks_are_put_together_in_order(
    trained: Path, tmp_path: Path, pictures: tuple[Path, dict[str, np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*RECIPE, "mode=predict", f"weights={trained}", f"predict.input={pictures[0]}"]
    package.run([*arguments, f"hydra.run.dir={tmp_path}/whole"])
    monkeypatch.setattr("trainer.worker.predict.BLOCK", 5)
    package.run([*arguments, f"hydra.run.dir={tmp_path}/parts"])
    whole, parts = (list(csv.reader((tmp_path / d / "predictions.csv").open())) for d in ("whole", "parts"))
    assert [row[:2] for row in whole] == [row[:2] for row in parts]
    for one, other in zip(whole[1:], parts[1:], strict=True):  # batches of other sizes round otherwise
        assert [float(p or 0) for p in one[2:12:2]] == pytest.approx([float(p or 0) for p in other[2:12:2]], abs=2e-6)


BAD = {
    "not_there": ("weights=nowhere", r"weights=nowhere: there is no such file or folder"),
    "folder": ("weights=FOLDER", r"this folder has no model\.safetensors"),
    "kind": ("weights=FOLDER/x.onnx", r"is none of the kinds \.safetensors, \.pt, \.pth, \.bin, \.ckpt"),
    "no_safetensors": ("weights=FOLDER/text.safetensors", r"cannot be read as safetensors"),
    "no_pickle": ("weights=FOLDER/text.pt", r"cannot be read by torch\.load\(weights_only=True\)"),
    "evil": ("weights=FOLDER/evil.pt", r"cannot be read by torch\.load\(weights_only=True\)"),
    "nested": ("weights=FOLDER/nested.pt", r"holds parts, step and no state_dict"),
    "missing": (
        "weights=FOLDER/missing.pt",
        r"does not fit the model .*: of its \d+ tensors 1 are missing\. .*\n +missing +fc\.\w+",
    ),
    "unknown": ("weights=FOLDER/unknown.pt", r"1 are unknown to the model\. .*\n +unknown +extra"),
    "shape": (
        "weights=FOLDER/shape.pt",
        r"1 have another shape\. .*\n +shape +fc\.bias is \(7,\) there and \(10,\) here",
    ),
}


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("was_here",)


@pytest.mark.parametrize("name", BAD)
def test_weights_that_do_not_fit_are_refused_before_anything_starts(
    name: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = model_of(trained).state_dict()
    head = next(key for key in state if key.endswith("bias") and state[key].shape == (10,))
    (tmp_path / "in").mkdir()
    for file in ("x.onnx", "text.safetensors", "text.pt"):
        (tmp_path / "in" / file).write_text("neither")
    torch.save({"parts": [state], "step": 3}, tmp_path / "in" / "nested.pt")
    torch.save({"x": Evil()}, tmp_path / "in" / "evil.pt")
    torch.save({k: v for k, v in state.items() if k != head}, tmp_path / "in" / "missing.pt")
    torch.save({**state, "extra": torch.zeros(1)}, tmp_path / "in" / "unknown.pt")
    torch.save({**state, head: torch.zeros(7)}, tmp_path / "in" / "shape.pt")
    typed, says = BAD[name]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError, match=says.replace(r"fc\.\w+", head).replace(r"fc\.bias", head)):
        package.run([*RECIPE, "mode=eval", typed.replace("FOLDER", str(tmp_path / "in"))])
    assert list((tmp_path / "here").iterdir()) == []


def test_the_run_that_made_the_weights_is_not_written_over(trained: Path) -> None:
    before = (trained / "result.json").read_bytes()
    with pytest.raises(UserError, match=r"^weights=.*: lies in the run's own folder .*hydra\.run\.dir=ANOTHER"):
        package.run([*RECIPE, "mode=eval", f"weights={trained}", f"hydra.run.dir={trained}"])
    assert (trained / "result.json").read_bytes() == before
