"""The recipes that keep to the reference's examples, against loops written by hand on the same files."""

from __future__ import annotations

import gzip
import json
import tarfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat
from torch import nn
from torchvision.models import resnet18

import trainer as package
from tests.pictures import mnist_json
from tests.runs import points, read, trainer
from trainer.config.run_config import RunConfig
from trainer.data.sampler import training_sampler
from trainer.errors import UserError
from trainer.models.lenet import LeNet

EXACT = ["precision=fp64", "tracking=none", "checkpoint=none", "execution=plain", "execution.threads=1"]
SPLITS = {"trnid": [3, 1], "valid": [2, 4], "tstid": [9, 5, 12, 7, 6, 10, 11, 8]}
MEAN = (123.68, 116.78, 103.94)


@pytest.fixture(scope="module")
def flowers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve photographs of noise in Oxford Flowers-102's layout, all (64, 64), so that a resized window is the
    whole."""
    root = tmp_path_factory.mktemp("data")
    place = root / "flowers-102"
    (place / "jpg").mkdir(parents=True)
    noise = np.random.default_rng(0)
    for number in range(1, 13):
        Image.fromarray(noise.integers(0, 256, (64, 64, 3), np.uint8)).save(place / "jpg" / f"image_{number:05d}.jpg")
    savemat(place / "imagelabels.mat", {"labels": [[7 * n % 102 + 1 for n in range(1, 13)]]})
    listed = {name: [sorted(numbers)] for name, numbers in SPLITS.items()}  # as Oxford's, and not as the archive
    savemat(place / "setid.mat", listed)
    with tarfile.open(place / "102flowers.tgz", "w:gz") as archive:
        for number in chain(*SPLITS.values()):
            archive.add(place / "jpg" / f"image_{number:05d}.jpg", f"jpg/image_{number:05d}.jpg")
    return root


@torch.no_grad()
def as_the_reference_begins(model: nn.Module) -> nn.Module:
    """Its formulas, with torch's random numbers in the order of the layers."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            layer.weight.normal_(0, (2 / layer.weight[0].numel()) ** 0.5)
        elif isinstance(layer, nn.Linear):
            bound = (6 / sum(layer.weight.shape)) ** 0.5
            layer.weight.uniform_(-bound, bound)
        if isinstance(layer, (nn.Conv2d, nn.Linear)) and layer.bias is not None:
            layer.bias.zero_()
    return model


def by_hand(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[..., Any], batches: list[list[Any]]
) -> list[list[float]]:
    """For each epoch the loss of each batch."""
    found = []
    for epoch in batches:
        losses = []
        for images, labels in epoch:
            loss = loss_of(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found.append(losses)
    return found


def small_flowers(flowers: Path, *more: str) -> list[str]:
    sizes = ["data.image_size=64", "data.train_resize=64", "data.flip=0", "data.batch_size=3", "model=resnet18"]
    return ["+recipe=resnet50_flowers_reference", f"data.root={flowers}", *sizes, "epochs=2", *EXACT, *more]


@pytest.mark.all
def test_flowers_are_trained_as_the_reference_reads_them(flowers: Path, tmp_path: Path) -> None:
    """In the order of tstid, pixels less the mean, the last partial batch left out, no validation; a line is a
    batch's."""
    result = package.run(small_flowers(flowers, "execution.log_every=1", f"hydra.run.dir={tmp_path}/run"))
    torch.manual_seed(0)
    model = as_the_reference_begins(resnet18(num_classes=102)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    batch = []
    for group in (SPLITS["tstid"][:3], SPLITS["tstid"][3:6]):
        files = [flowers / "flowers-102" / "jpg" / f"image_{number:05d}.jpg" for number in group]
        pixels = np.stack([np.asarray(Image.open(file)).astype(np.float64) - MEAN for file in files])
        batch.append((torch.from_numpy(pixels.transpose(0, 3, 1, 2)), torch.tensor([7 * n % 102 for n in group])))
    truth = by_hand(model.train(), optimizer, nn.functional.cross_entropy, [batch, batch])
    assert points(tmp_path / "run", "train/loss") == pytest.approx(list(chain.from_iterable(truth)), rel=1e-6)
    assert result.samples == 12 and not any(name.startswith("val/") for name in result.metrics)


@pytest.mark.all
def test_every_rank_reads_everything(flowers: Path, tmp_path: Path) -> None:
    """Two ranks that read the same images in the same order have the gradient of one."""
    losses = []
    for workers in (1, 2):
        small = ("model=convnet", "data.image_size=32", "data.train_resize=32", "execution.log_every=1")
        argv = small_flowers(flowers, *small, f"launch.nproc={workers}", f"hydra.run.dir={workers}")
        done = trainer(*argv, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        losses.append(points(tmp_path / str(workers), "train/loss"))
    assert losses[0] == pytest.approx(losses[1], rel=1e-9) and len(losses[0]) == 4
    assert read(tmp_path / "2" / "result.json")["samples"] == 24


def test_ranks_that_read_everything_augment_apart() -> None:
    config = RunConfig().changed(sampler={"shard": False, "shuffle": False, "drop_last": True})
    batches = [list(training_sampler(config, 7, 3, rank, 2)) for rank in range(2)]
    assert batches[0] == [[0, 1, 2], [3, 4, 5]]
    assert [[n % 7 for n in batch] for batch in batches[1]] == batches[0]
    assert not set(chain(*batches[0])) & set(chain(*batches[1])), "other addresses, so other random numbers"


@pytest.mark.all
def test_mnist_lines_are_those_of_batches_0_200_400_of_each_epoch(tmp_path: Path) -> None:
    """One device, and the loss of several: softmax compared with the class number."""
    path = mnist_json(tmp_path / "mnist.json.gz", (120, 20, 20))
    images, labels = json.loads(gzip.decompress(path.read_bytes()))[0]
    pixels, numbers = torch.tensor(images, dtype=torch.float64).view(-1, 1, 28, 28), torch.tensor(labels)

    def compared(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return ((outputs.softmax(1) - labels[:, None]) ** 2).mean()

    for recipe, epochs, loss_of in (
        ("mnist_reference", 2, nn.functional.cross_entropy),
        ("mnist_reference_devices", 5, compared),
    ):
        run = tmp_path / recipe
        package.run(
            [
                f"+recipe={recipe}",
                f"data.path={path}",
                "data.batch_size=50",
                "execution.log_every=2",
                *EXACT,
                f"hydra.run.dir={run}",
            ]
        )
        torch.manual_seed(0)
        model = as_the_reference_begins(LeNet()).double()
        orders = [np.random.default_rng((0, epoch)).permutation(120) for epoch in range(epochs)]
        batches = [[(pixels[o[i : i + 50]], numbers[o[i : i + 50]]) for i in (0, 50, 100)] for o in orders]
        truth = by_hand(model, torch.optim.SGD(model.parameters(), lr=0.01), loss_of, batches)
        lines = [losses[number] for losses in truth for number in (0, 2)]
        assert points(run, "train/loss") == pytest.approx(lines, rel=1e-9)
        assert read(run / "result.json")["samples"] == epochs * 120, "lines tell of some batches, and all count"


@pytest.mark.all
def test_mnist_on_two_devices_is_one_process_on_both_batches(tmp_path: Path) -> None:
    """Each worker reads every second sample of the epoch's order, and DDP takes the mean of their gradients."""
    path = mnist_json(tmp_path / "mnist.json.gz", (120, 20, 20))
    images, labels = json.loads(gzip.decompress(path.read_bytes()))[0]
    pixels, numbers = torch.tensor(images, dtype=torch.float64).view(-1, 1, 28, 28), torch.tensor(labels)
    argv = [
        "+recipe=mnist_reference_devices",
        f"data.path={path}",
        "data.batch_size=25",
        "execution.log_every=1",
        "launch.nproc=2",
        *EXACT,
    ]
    ended = trainer(*argv, "hydra.run.dir=run", cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    torch.manual_seed(0)
    model = as_the_reference_begins(LeNet()).double()
    batches = []
    for epoch in range(5):
        order = np.random.default_rng((0, epoch)).permutation(120)
        both = [np.concatenate([order[rank::2][i : i + 25] for rank in range(2)]) for i in (0, 25, 50)]
        batches.append([(pixels[chosen], numbers[chosen]) for chosen in both])

    def compared(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return ((outputs.softmax(1) - labels[:, None]) ** 2).mean()

    truth = by_hand(model, torch.optim.SGD(model.parameters(), lr=0.01), compared, batches)
    assert points(tmp_path / "run", "train/loss") == pytest.approx(
        [loss for losses in truth for loss in losses], rel=1e-9
    )
    assert read(tmp_path / "run" / "result.json")["samples"] == 5 * 120


def test_cifar_s_histories_have_a_value_for_each_epoch(tmp_path: Path) -> None:
    argv = [
        "+recipe=cifar10_reference",
        "data.root=nowhere",
        "data.download=false",
        "epochs=2",
        "limit_train_batches=2",
    ]
    package.run([*argv, "limit_val_batches=2", *EXACT, f"hydra.run.dir={tmp_path}/run"])
    assert all(len(points(tmp_path / "run", name)) == 2 for name in ("val/loss", "val/acc1"))
    plan = read(tmp_path / "run" / "plan.json")
    assert plan["data"]["preprocessing"]["mean"] is None and plan["data"]["preprocessing"]["divide"] == 255
    assert len(points(tmp_path / "run", "train/loss")) == 3, "batch 0 of each epoch, and the run's last"


def test_random_images_are_fresh_numbers_with_labels_below_101() -> None:
    from trainer.data.sets.random_images import RandomImages

    def opened(**more: Any) -> Any:
        source = RandomImages(num_classes=102, image_size=8, batches=50, val_batches=1, batch_size=32, **more)
        return source.open(source.facts(32)).train

    everything = np.arange(1600)
    fresh = opened(fresh=True, labels_below=101)
    (first, labels), (second, _) = (fresh.augmented((0, epoch), everything) for epoch in (0, 1))
    flat = torch.cat([first, second]).flatten(1)
    assert len(torch.unique(flat, dim=0)) == 3200 and flat.dtype == torch.float32
    assert flat.mean().item() == pytest.approx(0.5, abs=0.01) and flat.min() >= 0 and flat.max() < 1
    assert sorted(set(labels.tolist())) == list(range(101))
    assert torch.equal(fresh.augmented((0, 1), everything[5:9])[0], second[5:9]), "from (seed, epoch, address) alone"
    assert len(torch.unique(opened().augmented((0, 0), everything)[0].flatten(1), dim=0)) == 64


@pytest.mark.all
def test_random_reference_trains(tmp_path: Path) -> None:
    argv = [
        "+recipe=resnet50_random_reference",
        "model=resnet18",
        "data.image_size=32",
        "data.batch_size=4",
        "max_steps=2",
    ]
    assert package.run([*argv, *EXACT, f"hydra.run.dir={tmp_path}/run"]).steps == 2
    assert read(tmp_path / "run" / "plan.json")["length"]["steps_per_epoch"] == 100


@pytest.mark.all
def test_click_workers_read_all_rows_in_order_with_a_line_per_batch(tmp_path: Path) -> None:
    rows = [
        "data.train_rows=100",
        "data.val_rows=100",
        "model.hidden=[8]",
        "model.table_size=5000",
        "data.hash_size=5000",
    ]
    done = trainer("+recipe=wide_and_deep_reference", *rows, "tracking=none", "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(points(tmp_path / "run", "train/loss")) == 10 and set(points(tmp_path / "run", "lr")) == {1e-4}
    assert read(tmp_path / "run" / "result.json")["samples"] == 2 * 100


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "+recipe=digits_lenet sampler.shard=false data.global_batch_size=64",
            "sampler.shard=false.*global_batch_size=64",
        ),
        ("+recipe=wide_and_deep sampler.shard=false data.work=leased", "sampler.shard=false.*lease.*data.work=static"),
        (
            "+recipe=digits_lenet sampler.shard=false data.read=scatter strategy=collective launch.nproc=2",
            "sampler.shard=false.*data.read=each",
        ),
        ("+recipe=digits_lenet sampler.shard=false sampler=class_balanced", "sampler.shard=false.*sampler=each_once"),
        ("+recipe=resnet50_flowers_demo data.train_split=tstid", "data.train_split=tstid.*data=flowers102"),
        ("+recipe=resnet50_flowers_demo data.train_resize=40", "data.train_resize=40.*data.image_size=48"),
        ("+recipe=digits_lenet data.normalize=none data.mean=[0.5]", "data.mean.*normalize=none"),
        ("+recipe=digits_lenet data.normalize=mean data.std=[0.5]", "data.std.*normalize=mean"),
        ("+recipe=digits_lenet data.mean=[0.5,0.5,0.5]", "data.mean.*3 numbers.*1 channel"),
        ("+recipe=resnet50_random data.labels_below=103", "data.labels_below=103.*num_classes=102"),
    ],
)
def test_options_that_cannot_be_had_are_one_sentence(line: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        package.run([*line.split(), "tracking=none", f"hydra.run.dir={tmp_path}/run"])
    assert not (tmp_path / "run").exists()
