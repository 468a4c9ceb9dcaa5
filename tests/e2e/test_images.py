"""Images on the command line: the same numbers whoever reads them and how; every source runs; a summary of what was
left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.pictures import cifar, encoded, image_folder, mnist, mnist_json, picture, shard, weights
from tests.runs import trainer

EXACT = ["precision=fp64", "tracking=none", "execution.log_every=1", "execution.threads=1", "optimizer.lr=0.01"]
SMALL = ["model=convnet", "~model.zero_init_residual", "data.image_size=32", "epochs=2"]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_folder(tmp_path_factory.mktemp("pictures"), per_class=8)


def run(folder: Path, name: str, *overrides: str) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """A run's result and its points."""
    done = trainer(
        *overrides, f"hydra.run.dir={folder / name}", cwd=folder, timeout=2400, TRAINER_CACHE=str(folder / "cache")
    )
    assert done.returncode == 0, done.stdout + done.stderr
    points = [json.loads(line)["metrics"] for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return json.loads((folder / name / "result.json").read_text()), points


def losses(points: list[dict[str, float]]) -> list[float]:
    return [p[k] for p in points for k in ("train/loss", "val/loss") if k in p]


JITTER = "data.transforms=[{_target_:torchvision.transforms.v2.ColorJitter,brightness:0.4,hue:0.1}]"
ALL = ["data.augment=trivialaugment", "data.erasing=0.3", "data.min_scale=0.5", JITTER]
READERS = {
    "one worker": ["data.batch_size=8", "strategy=single"],
    "two workers": ["data.batch_size=4", "strategy=collective", "launch.nproc=2"],
    "scattered": ["data.batch_size=4", "strategy=collective", "launch.nproc=2", "data.read=scatter"],
    "without cache": ["data.batch_size=8", "strategy=single", "data.cache=none", "data.num_workers=2"],
    "in the process": ["data.batch_size=8", "strategy=single", "data.num_workers=0"],
}


@pytest.mark.all
@pytest.mark.parametrize(
    "others", [("scattered", "without cache"), pytest.param(("two workers", "in the process"), marks=pytest.mark.long)]
)
def test_the_numbers_are_the_same_whoever_reads_the_images(
    others: tuple[str, ...], pictures: Path, tmp_path: Path
) -> None:
    """float64 with all augmentation: workers, reading processes, scattering and the cache do not show."""
    seen = {}
    for name, how in ((name, READERS[name]) for name in ("one worker", *others)):
        _, points = run(
            tmp_path,
            name.replace(" ", "_"),
            "+recipe=resnet50_imagefolder",
            "model=convnet",
            "~model.zero_init_residual",
            "loss.label_smoothing=0.1",
            f"data.root={pictures}",
            "data.image_size=32",
            "epochs=2",
            *ALL,
            *EXACT,
            *how,
        )
        seen[name] = losses(points)
    assert len(seen["one worker"]) == 8
    for name, values in seen.items():
        assert values == pytest.approx(seen["one worker"], abs=1e-9), name


@pytest.mark.all
def test_mixed_and_balanced_batches_train_on_two_workers_as_scattered(pictures: Path, tmp_path: Path) -> None:
    extra = [
        "data.mixup=0.2",
        "data.cutmix=1.0",
        "sampler=class_balanced",
        "strategy=collective",
        "launch.nproc=2",
        "data.batch_size=4",
    ]
    both = [
        run(
            tmp_path,
            how,
            "+recipe=resnet50_imagefolder",
            "model=convnet",
            "~model.zero_init_residual",
            f"data.root={pictures}",
            "data.image_size=32",
            "epochs=2",
            *EXACT,
            *extra,
            f"data.read={how}",
        )[1]
        for how in ("each", "scatter")
    ]
    assert losses(both[0]) == pytest.approx(losses(both[1]), abs=1e-12)


@pytest.mark.all
def test_shards_and_folder_of_the_same_images_give_the_same_run(pictures: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        files = sorted((pictures / split).rglob("*.jpg"))
        names = sorted({f.parent.name for f in files})
        shard(
            tmp_path / f"{split}.tar",
            [(f"{n:04d}", f.read_bytes(), names.index(f.parent.name)) for n, f in enumerate(files)],
        )
    common = [
        "model=convnet",
        "~model.zero_init_residual",
        "data.image_size=32",
        "epochs=1",
        "data.batch_size=8",
        *EXACT,
    ]
    _, folder = run(tmp_path, "folder", "+recipe=resnet50_imagefolder", f"data.root={pictures}", *common)
    _, tar = run(
        tmp_path,
        "tar",
        "+recipe=resnet50_imagefolder",
        "data=shards",
        f"data.path={tmp_path}/train.tar",
        f"data.val_path={tmp_path}/val.tar",
        *common,
    )
    assert losses(folder) == losses(tar)


@pytest.mark.all
@pytest.mark.parametrize("extra", [["optimizer=momentum"], ["optimizer=adagrad", "loss=squared_error"]], ids=" ".join)
def test_reference_file_and_its_losses_run(extra: list[str], tmp_path: Path) -> None:
    path = mnist_json(tmp_path / "mnist.json.gz", (120, 40, 40))
    common = (f"data.path={path}", "epochs=1", "tracking=none", "data.batch_size=50")
    result, _ = run(tmp_path, "run", "+recipe=mnist_json", *common, *extra)
    assert result["samples"] == 120 and result["steps"] == 3, "the last partial batch is kept"


@pytest.mark.all
def test_finetuning_starts_from_the_weights(pictures: Path, tmp_path: Path) -> None:
    file = weights(tmp_path / "resnet18.pt", "resnet18")
    run(
        tmp_path,
        "frozen",
        "+recipe=resnet50_finetune",
        "model.name=resnet18",
        f"model.weights={file}",
        "model.freeze=backbone",
        f"data.root={pictures}",
        "data.image_size=32",
        "data.batch_size=8",
        "max_steps=2",
        "tracking=none",
        "execution.threads=1",
    )
    trained, given = load_file(tmp_path / "frozen" / "model.safetensors"), torch.load(file, weights_only=True)
    assert all(torch.equal(trained[k], v) for k, v in given.items() if not k.startswith("fc."))
    assert trained["fc.weight"].shape == (3, 512)


@pytest.mark.all
def test_a_finetuned_backbone_learns_at_a_lower_rate(pictures: Path, tmp_path: Path) -> None:
    """Of one and the same gradient, from the pretrained weights: a tenth of the step, the head's as it was."""
    file = weights(tmp_path / "resnet18.pt", "resnet18")
    given = torch.load(file, weights_only=True)
    common = [
        "+recipe=resnet50_finetune",
        "model.name=resnet18",
        f"model.weights={file}",
        f"data.root={pictures}",
        "data.image_size=32",
        "data.batch_size=8",
        "data.num_workers=0",
        "max_steps=1",
        "scheduler=constant",
        "scheduler.warmup_epochs=0",
        "optimizer=sgd",
        "optimizer.weight_decay=0",
        *EXACT,
    ]
    for name, factors in (("plain", "{}"), ("slower", "{*: 0.1, fc: 1}")):
        run(tmp_path, name, *common, f"optimizer.lr_factors={factors}")
    plain, slower = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "slower"))
    backbone = [n for n in given if not n.startswith("fc.") and n.rpartition(".")[2] in ("weight", "bias")]
    for name in backbone:
        step = plain[name] - given[name].double()
        assert step.abs().max() > 0 and torch.allclose(
            slower[name] - given[name].double(), 0.1 * step, rtol=1e-6, atol=1e-14
        ), name
    assert torch.equal(plain["fc.weight"], slower["fc.weight"])


@pytest.mark.parametrize(
    ("name", "files", "samples"),
    [("cifar10_convnet", cifar, 64), ("mnist_lenet", lambda root: mnist(root, train=250), 200)],
)
def test_recipes_of_small_images_train(name: str, files: Any, samples: int, tmp_path: Path) -> None:
    """Two updates of the recipe's batch, on files in the set's own format; then a validation."""
    files(tmp_path / "data")
    result, _ = run(
        tmp_path,
        "run",
        f"+recipe={name}",
        "data.download=false",
        f"data.root={tmp_path}/data",
        "max_steps=2",
        "tracking=none",
    )
    assert (result["status"], result["steps"], result["samples"], result["stand_in"]) == ("done", 2, samples, "")
    assert 0 < result["metrics"]["val/loss"] < 4 and 0 <= result["metrics"]["val/acc1"] <= 1
    trained = load_file(tmp_path / "run" / "model.safetensors")
    assert 10 in {len(tensor) for tensor in trained.values()} and all(t.isfinite().all() for t in trained.values())


def test_broken_images_end_the_run_with_their_names_or_are_left_out_loudly(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "d")
    (root / "train" / "iris" / "3.jpg").write_bytes(encoded(picture(0, 0))[:200])
    common = [
        "+recipe=resnet50_imagefolder",
        "model=convnet",
        "~model.zero_init_residual",
        f"data.root={root}",
        "data.image_size=32",
        "data.batch_size=4",
        "epochs=1",
        "tracking=none",
        "data.verify=true",
    ]
    refused = trainer(*common, cwd=tmp_path, TRAINER_CACHE=str(tmp_path / "cache"))
    assert refused.returncode == 2 and "iris/3.jpg" in refused.stdout + refused.stderr, refused.stdout + refused.stderr
    done = trainer(
        *common,
        "data.on_bad=skip",
        f"hydra.run.dir={tmp_path / 'r'}",
        cwd=tmp_path,
        TRAINER_CACHE=str(tmp_path / "cache"),
    )
    assert done.returncode == 0 and "ATTENTION: 1 of 24 images" in done.stdout, done.stdout + done.stderr
    assert json.loads((tmp_path / "r" / "plan.json").read_text())["data"]["facts"]["train_samples"] == 17
