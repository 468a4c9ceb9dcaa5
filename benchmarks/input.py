"""How fast images are read and augmented, against the plain torchvision pipeline. Both use all cores of this machine.

    python benchmarks/input.py [--folder FOLDER] [--images 1500] [--rounds 5] [--alone] [--pictures FILE]

The rival is what people write: ImageFolder with PIL, RandomResizedCrop, flip, ToTensor, Normalize in a DataLoader, with
the number of workers that was fastest here, of 0 to twice the cores. Ours is the run's own feed with
``data.num_workers=auto``, which measures its first updates and goes on with more processes where that pays, with and
without the decoded cache. Both train the same small model on every batch. Each has a process of its own, ours with a
run's settings (``keep_memory=auto``). All alternate; medians of images/s. Aims: 1.8 of the rival without the cache, 5
with it.

``--alone``: also reading without training: ours down to uint8 batches, by as many processes as ``auto`` begins with and
by one per core; and CIFAR-10's images in whole batches against the same on PIL images with RandomCrop(32, padding=4).
Crops and antialiasing are the same. ``--pictures`` draws a sheet of augmented images: a row of torchvision's, one of
ours, and ours with RandAugment, TrivialAugment and random erasing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pickle
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets
from torchvision import transforms as v1

from trainer.cli.compose import compose, hydra_app, plain
from trainer.config import schema
from trainer.config.run_config import RunConfig
from trainer.data.auto_num_workers import Growth, Host
from trainer.data.feed import Batch, Feed
from trainer.data.images.source import MEAN, STD
from trainer.data.placement import Placement
from trainer.data.prefetch import ready_each
from trainer.data.reader import Addresses, Reader, Reading
from trainer.data.sampler import DistributedBatchSampler, EvaluationSampler
from trainer.data.sets.cifar import Cifar10
from trainer.data.sets.image_folder import ImageFolder
from trainer.data.source import DataSource, Splits
from trainer.host import hardware
from trainer.host.memory import keep_freed_memory
from trainer.planning.auto import Machine, ModelFacts, choose

BATCH = 64
Epoch = Callable[[], int]
"""Reads all images once; returns how many."""


def photographs(folder: Path, count: int) -> Path:
    """Crops of scikit-learn's two photographs as JPEGs of 500 to 750 pixels in class folders."""
    from sklearn.datasets import load_sample_images

    whole = [Image.fromarray(image).resize((1280, 854)) for image in load_sample_images().images]
    random = np.random.default_rng(0)
    for number in range(count):
        width, height = int(random.integers(500, 751)), int(random.integers(500, 751))
        left, top = int(random.integers(0, 1280 - width + 1)), int(random.integers(0, 854 - height + 1))
        target = folder / "train" / f"{number % 2}"
        target.mkdir(parents=True, exist_ok=True)
        whole[number % 2].crop((left, top, left + width, top + height)).save(target / f"{number}.jpg", quality=85)
    os.symlink(folder / "train", folder / "val")
    return folder


def cifar_files(root: Path) -> Path:
    """50,000 images of noise in CIFAR-10's files."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]:
        content = {
            "data": random.integers(0, 256, (10000, 3072), dtype=np.uint8),
            "labels": [n % 10 for n in range(10000)],
        }
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    return root


class FromArray(Dataset[Any]):
    """CIFAR as torchvision reads it: a PIL image of each sample, transformed one by one."""

    def __init__(self, images: np.ndarray, labels: Any, transform: Any) -> None:
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


class Contender:
    """A process that reads an epoch whenever it is asked to.

    Args:
        make: called there, once: an epoch, and what is to be said of it at the end.
    """

    def __init__(self, make: Callable[[], tuple[Epoch, Callable[[], str]]]) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=self._serve, args=(make, theirs))
        self.process.start()
        theirs.close()

    def _serve(self, make: Callable[[], tuple[Epoch, Callable[[], str]]], pipe: Any) -> None:
        self.pipe.close()
        epoch, said = make()
        while pipe.recv() == "read":
            began = time.perf_counter()
            pipe.send(epoch() / (time.perf_counter() - began))
        pipe.send(said())

    def read(self) -> float:
        """Images/s of one epoch."""
        self.pipe.send("read")
        return float(self.pipe.recv())

    def end(self) -> str:
        """What it has to say."""
        self.pipe.send("end")
        said = str(self.pipe.recv())
        self.process.join()
        return said


def silent(epoch: Epoch) -> tuple[Epoch, Callable[[], str]]:
    """It has nothing to say."""
    return epoch, lambda: ""


def opened(source: DataSource) -> Splits:
    facts = source.prepare(source.facts(1), lambda *_: None)
    return source.open(facts)


def node(kind: type, **given: Any) -> dict[str, Any]:
    return {k: v for k, v in asdict(kind()).items() if k != "_target_"} | given


def chosen(slow: bool) -> tuple[int, int, bool]:
    """Reading processes, batches that each keeps ready, and channels_last, as ``auto`` has them here for a ResNet-50;
    says why."""
    with hydra_app() as app:
        config = RunConfig.of(plain(compose(app, ["+recipe=resnet50_flowers"])))
    device = "cuda" if hardware.gpus() else "cpu"
    values, why = choose(config, device, ModelFacts(25_000_000, convolutional=True), Machine.here(), 1, slow)
    print(
        f"auto: num_workers={values.num_workers} ({why['num_workers']}), prefetch={values.prefetch} ({why['prefetch']})"
    )
    assert isinstance(values.num_workers, int) and isinstance(values.prefetch, int)
    return values.num_workers, values.prefetch, values.channels_last


def ours(dataset: Dataset[Any], reading: tuple[int, int, bool]) -> Epoch:
    """One epoch of the run's own reader; its processes stay for the next."""
    keep_freed_memory()
    sampler = DistributedBatchSampler(len(dataset), BATCH, drop_last=True)  # type: ignore[arg-type]
    reader = Reader(dataset, Reading(num_workers=reading[0], prefetch=reading[1]))
    return lambda: sum(len(labels) for _, labels in reader.read(Addresses(sampler)))


class Thinned(nn.Module):
    """Every 16th pixel of both directions, in a row."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(N, 3, 224, 224) to (N, 588)."""
        return images[:, :, ::16, ::16].flatten(1)


class Trained:
    """A model so small that reading decides: batches (N, 3, 224, 224) to two classes, with SGD."""

    def __init__(self) -> None:
        self.model = nn.Sequential(Thinned(), nn.Linear(3 * 14**2, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> int:
        """One update; its samples."""
        nn.functional.cross_entropy(self.model(images), labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return len(labels)


def ours_training(splits: Splits, reading: tuple[int, int, bool]) -> tuple[Epoch, Callable[[], str]]:
    """One epoch of the run's own feed, with auto's own measurement, and a training on it; what was measured."""
    keep_freed_memory()
    samples = len(splits.train)  # type: ignore[arg-type]
    growth = Growth(reading[0], 1, hardware.cores(), ready_each, Host())
    place = Placement(splits, torch.device("cpu"), torch.float32, reading[2])
    sampler = DistributedBatchSampler(samples, BATCH, drop_last=True)
    feed = Feed(
        splits,
        sampler,
        EvaluationSampler(0, BATCH),
        place,
        reading=Reading(num_workers=reading[0], prefetch=reading[1]),
        growth=growth,
    )
    trained, epochs = Trained(), count()

    def inputs(batch: Batch) -> torch.Tensor:
        assert isinstance(batch.inputs, torch.Tensor)
        return batch.inputs

    def epoch() -> int:
        every = feed.updates(next(epochs))
        return sum(trained.step(inputs(batch), batch.labels) for _, update in every for batch in update)

    return epoch, lambda: f"{growth.readers} reading at the end; {growth.said or 'the first updates did not wait'}"


def theirs_training(dataset: Dataset[Any], workers: int) -> Epoch:
    """One epoch of a DataLoader and a training on it."""
    loader, trained = loader_of(dataset, workers), Trained()
    return lambda: sum(trained.step(images, labels) for images, labels in loader)


def theirs(dataset: Dataset[Any], workers: int) -> Epoch:
    """One epoch of a DataLoader; its processes stay for the next."""
    loader = loader_of(dataset, workers)
    return lambda: sum(len(labels) for _, labels in loader)


def loader_of(dataset: Dataset[Any], workers: int) -> DataLoader[Any]:
    """What people write."""
    return DataLoader(dataset, BATCH, shuffle=True, num_workers=workers, drop_last=True, persistent_workers=workers > 0)


def best(make: Callable[[Any, int], Epoch], dataset: Any, numbers: list[int]) -> tuple[int, Contender]:
    """The number of workers that is fastest, and an epoch with it."""
    rates: dict[int, float] = {}
    for workers in numbers:
        tried = Contender(lambda workers=workers: silent(make(dataset, workers)))  # type: ignore[misc]
        tried.read()
        rates[workers] = tried.read()
        tried.end()
    fastest = max(rates, key=rates.__getitem__)
    return fastest, Contender(lambda: silent(make(dataset, fastest)))


def compare(
    title: str,
    rival: tuple[int, Contender],
    jobs: dict[str, Contender],
    rounds: int,
    aims: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Alternate, print a line for each with its ratio to the rival, and end them."""
    every = {"torchvision": rival[1], **jobs}
    for job in every.values():
        job.read()
    rates = {name: [] for name in every}  # type: dict[str, list[float]]
    for _ in range(rounds):
        for name, job in every.items():
            rates[name].append(job.read())
    base = statistics.median(rates["torchvision"])
    print(f"{title} (torchvision with {rival[0]} workers, its best)")
    for name, found in rates.items():
        rate = statistics.median(found)
        aim = f"  aim {aims[name]:g}" if name in aims else ""
        print(f"  {name:34} {rate:9,.0f} images/s  {rate / base:5.2f}  ({min(found):,.0f}-{max(found):,.0f}){aim}")
    for name, job in every.items():
        if said := job.end():
            print(f"  {name}: {said}")


def sheet(path: Path, rival: Dataset[Any], root: Path) -> None:
    """Twelve augmented images of both, and of ours with each policy, a row each."""
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (MEAN, STD))
    rows = [[((rival[n][0] * std + mean) * 255).round().clamp(0, 255).to(torch.uint8) for n in range(12)]]
    for more in ({}, {"augment": "randaugment"}, {"augment": "trivialaugment"}, {"erasing": 1.0}):
        own: Any = opened(ImageFolder(**node(schema.ImageFolderData, root=str(root), cache="none", **more))).train
        rows.append(list(own.augmented((0, 0), np.arange(12))[0]))
    whole = torch.cat([torch.cat(row, 2) for row in rows], 1).permute(1, 2, 0)
    Image.fromarray(whole.numpy()).resize((12 * 112, len(rows) * 112)).save(path, quality=85)


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--images", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--pictures", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores are meant
    cores = hardware.cores()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["TRAINER_CACHE"] = scratch
        root = arguments.folder or photographs(Path(scratch) / "photographs", arguments.images)
        plain = v1.Compose(
            [v1.RandomResizedCrop(224, (0.35, 1.0)), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(MEAN, STD)]
        )
        rival = datasets.ImageFolder(str(root / "train"), plain)
        splits = {
            c: opened(ImageFolder(**node(schema.ImageFolderData, root=str(root), cache=c))) for c in ("none", "ram")
        }
        if arguments.pictures:
            sheet(arguments.pictures, rival, root)
        numbers = list(range(2 * cores + 1))
        files = chosen(True)
        jobs, aims = {"trainer, auto": "none", "trainer, auto, decoded cache": "ram"}, (1.8, 5.0)
        compare(
            f"{len(rival)} JPEGs to 224 pixels, while a small model trains",
            best(theirs_training, rival, numbers),
            {
                name: Contender(lambda cache=cache: ours_training(splits[cache], files))  # type: ignore[misc]
                for name, cache in jobs.items()
            },
            arguments.rounds,
            dict(zip(jobs, aims, strict=True)),
        )
        if not arguments.alone:
            return
        sets, arrays = {cache: both.train for cache, both in splits.items()}, chosen(False)
        compare(
            f"{len(rival)} JPEGs to 224 pixels",
            best(theirs, rival, numbers),
            {
                f"trainer, {processes} reader{'s' if processes > 1 else ''}{said}": Contender(
                    lambda cache=cache, processes=processes: silent(ours(sets[cache], (processes, *files[1:])))  # type: ignore[misc]
                )
                for cache, said in (("none", ""), ("ram", ", decoded cache"))
                for processes in sorted({files[0], cores})
            },
            arguments.rounds,
        )
        source = Cifar10(**node(schema.Cifar10Data, root=str(cifar_files(Path(scratch))), download=False))
        train: Any = opened(source).train
        crop = v1.Compose([v1.RandomCrop(32, 4), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(MEAN, STD)])
        small = FromArray(train.images.permute(0, 2, 3, 1).numpy(), train.labels.tolist(), crop)
        compare(
            "50,000 images of 32 pixels",
            best(theirs, small, numbers),
            {"trainer, whole batches": Contender(lambda: silent(ours(train, arrays)))},
            arguments.rounds,
        )


if __name__ == "__main__":
    main()
