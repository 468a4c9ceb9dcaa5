"""data.cache=device: samples lie on the device, where batches are cut; a seed gives the same losses and pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import trainer
from tests.composed import ready
from tests.pictures import config, image_folder, silent
from tests.refusals import Case, cases
from tests.runs import losses
from trainer.config import schema
from trainer.data.arrays.augmented import AugmentedArrays
from trainer.data.arrays.tensors import ArrayDataset
from trainer.data.augment.views import Augmentation, resized_in_float
from trainer.data.images.dataset import ImageSet
from trainer.data.sets.image_folder import ImageFolder
from trainer.errors import UserError
from trainer.host import hardware
from trainer.host.visible_gpus import Gpu

FLOWERS = """
    model=lenet model.in_channels=3 model.image_size=32 data=embedded_flowers data.image_size=32 data.per_class=1
    data.batch_size=16 epochs=2 data.train_split=trnid tracking=none device=cpu execution.threads=1
    execution.log_every=1 data.erasing=0.5 data.mixup=0.2 data.cutmix=1.0 optimizer.lr=0.01
""".split()
CIFAR = """
    model=lenet model.in_channels=3 model.image_size=32 data=cifar10 data.download=false data.root=nowhere
    data.batch_size=64 epochs=1 limit_train_batches=8 tracking=none device=cpu execution.threads=1
    execution.log_every=1 data.erasing=0.5 data.mixup=0.2 optimizer.lr=0.01
""".split()


@pytest.mark.all
@pytest.mark.parametrize("typed", [FLOWERS, CIFAR], ids=["decoded", "arrays"])
def test_losses_are_those_of_the_ordinary_path(warm: None, tmp_path: Path, typed: list[str]) -> None:
    for cache in ("ram", "device"):
        trainer.run([*typed, f"data.cache={cache}", f"hydra.run.dir={tmp_path / cache}"])
    assert losses(tmp_path / "ram") == losses(tmp_path / "device") != []


@pytest.mark.all
def test_two_workers_and_a_resumed_run_see_the_same_samples(warm: None, tmp_path: Path) -> None:
    """Each worker has the whole set on its device, and the sampler shares out the numbers."""
    typed = [*CIFAR, "launch.nproc=2", "data.batch_size=32", "optimizer=momentum"]
    for cache in ("ram", "device"):
        trainer.run([*typed, f"data.cache={cache}", f"hydra.run.dir={tmp_path / cache}"])
    halves = [*typed, "data.cache=device", f"hydra.run.dir={tmp_path / 'halves'}"]
    trainer.run([*halves, "max_steps=3"])
    trainer.run([*halves, "resume=auto", "resume.allow_changes=true", "max_steps=8"])
    whole = losses(tmp_path / "ram")
    assert losses(tmp_path / "device") == whole != []
    assert losses(tmp_path / "halves") == whole


def test_arrays_are_shifted_mirrored_and_erased_alike() -> None:
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (50, 3, 9, 7), dtype=torch.uint8, generator=random)
    augmentation = Augmentation(0.5, None, 0.5, torch.tensor([9, 99, 199], dtype=torch.uint8))
    host = AugmentedArrays(images, torch.arange(50), 3, augmentation)
    there, numbers = host.resident(torch.device("cpu")), np.random.default_rng(1).permutation(150)[:80]
    (ours, labels), (theirs, same) = there.augmented((5, 1), numbers), host.augmented((5, 1), numbers)
    assert torch.equal(ours, theirs) and torch.equal(labels, same) and not torch.equal(ours, images[numbers % 50])
    evaluated = ArrayDataset(images, torch.arange(50)).resident(torch.device("cpu"))
    assert torch.equal(evaluated.batch(np.array([3, 1]))[0], images[[3, 1]])  # type: ignore[arg-type]


def test_decoded_images_are_cut_from_one_tensor_and_at_most_one_of_255_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU they are resized as floating numbers, which is the same code on the CPU."""
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    options = {"image_size": 32, "cache": "device", "erasing": 0.5}
    source = ImageFolder(**config(schema.ImageFolderData, root=str(image_folder(tmp_path / "d")), **options))
    facts = source.prepare(source.facts(1), silent)
    assert facts.cached and not facts.slow and "on the device of each worker" in facts.cache
    host = source.open(facts)
    there = host.resident(torch.device("cpu"), True, True, True)
    sizes = sum(split.image(n).numel() for split in (host.train, host.val) for n in range(len(split)))  # type: ignore
    assert facts.resident == sizes, "the images are all of one size"
    for ours, theirs in ((there.train, host.train), (there.val, host.val)):
        assert isinstance(ours, ImageSet) and isinstance(theirs, ImageSet)
        numbers = np.arange(len(theirs))
        assert torch.equal(ours.augmented((7, 2), numbers)[0], theirs.augmented((7, 2), numbers)[0])
        ours.view.resize = resized_in_float  # type: ignore[attr-defined]
        apart = (ours.augmented((7, 2), numbers)[0].int() - theirs.augmented((7, 2), numbers)[0].int()).abs()
        assert 0 < int(apart.max()) <= 1


REFUSED = """
    data.augment=randaugment | changes images one by one on the CPU => data.cache=ram
    data.num_workers=2 | no process reads with data.cache=device => data.num_workers=auto
    data.read=scatter launch.nproc=2 | the first worker reads for all => data.read=each
"""


@pytest.mark.parametrize("case", cases("", REFUSED), ids=lambda case: case.typed)
def test_what_it_cannot_do_is_refused(case: Case) -> None:
    with pytest.raises(UserError) as error:
        ready(*CIFAR, "data.cache=device", *case.typed.split())
    assert all(said in str(error.value) for said in case.says) and case.instead in str(error.value)


def test_samples_that_do_not_fit_the_gpu_are_refused_with_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    typed, size = [*CIFAR, "data.cache=device", "device=cuda"], 2000 * 3 * 32 * 32
    for memory in (size / 0.79, 0):  # 0: the driver does not say
        monkeypatch.setattr(hardware, "gpus", lambda memory=int(memory): (Gpu("a GPU", (9, 0), memory),))
        assert ready(*typed).plan.data.facts.resident == size
    monkeypatch.setattr(hardware, "gpus", lambda: (Gpu("a GPU", (9, 0), int(size / 0.81)),))
    with pytest.raises(UserError, match=r"data.cache=device: the samples take 6\.1 MB of each GPU, which has 7\.6 MB"):
        ready(*typed)


def test_the_plan_says_what_it_takes() -> None:
    plan = ready(*CIFAR, "data.cache=device").plan
    assert plan.data.facts.cache == "6 MiB as uint8, on the device of each worker"
    assert plan.chosen.num_workers == 0
