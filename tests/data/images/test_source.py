"""Images in files: decoding, views, the decoded cache, folders, broken files."""

from __future__ import annotations

import io
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision import datasets
from torchvision.transforms import v2

from tests.pictures import CLASSES, config, encoded, flowers_102, image_folder, picture, shard, silent
from trainer.config import schema
from trainer.data.augment.views import Augmentation, CentreView
from trainer.data.images import source as images
from trainer.data.images.decode import decode
from trainer.data.images.header import BadImage, size_of
from trainer.data.sets.flowers import Flowers102
from trainer.data.sets.image_folder import ImageFolder
from trainer.data.sets.shards import Shards, braces
from trainer.data.source import DataSource, Facts, Splits
from trainer.errors import RunFailed, UserError
from trainer.host import in_use


def folder(root: Path, **options: Any) -> ImageFolder:
    return ImageFolder(**config(schema.ImageFolderData, root=str(root), image_size=32, **options))


def opened(source: DataSource) -> tuple[Facts, Splits]:
    facts = source.prepare(source.facts(1), silent)
    return facts, source.open(facts)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


MODES = [tuple(kind.split()) for kind in "JPEG RGB/JPEG L/PNG RGB/PNG RGBA/PNG P/PNG L/GIF P".split("/")]
MODES += [(kind, "RGB") for kind in ("WEBP", "BMP", "TIFF", "PPM")]


@pytest.mark.parametrize(("kind", "mode"), MODES)
def test_every_format_is_decoded_as_pillow_does(kind: str, mode: str) -> None:
    content = encoded(picture(1, 0).convert(mode), kind)
    truth = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    assert np.array_equal(decode(content).permute(1, 2, 0).numpy(), truth)
    assert size_of(content) == truth.shape[:2]


@pytest.mark.parametrize(("kind", "mode"), [("AVIF", "RGB"), ("JPEG", "CMYK"), ("PNG", "LA")])
def test_rarer_formats_are_decoded_as_pillow_does(kind: str, mode: str) -> None:
    image = picture(1, 0).convert(mode)
    if mode == "LA":
        image.putalpha(Image.fromarray(np.tile(np.arange(56, dtype=np.uint8) * 4, (40, 1))))
    content = encoded(image, kind)
    opened_ = Image.open(io.BytesIO(content))
    truth = np.asarray((opened_.convert("L") if mode == "LA" else opened_).convert("RGB"))
    assert np.array_equal(decode(content).permute(1, 2, 0).numpy(), truth), "transparency is left out"
    assert size_of(content) == truth.shape[:2] == (40, 56)


@pytest.mark.parametrize(("channels", "kind"), [(1, 0), (2, 4), (3, 2), (4, 6)])
def test_png_of_16_bits_is_scaled_to_8(channels: int, kind: int) -> None:
    values = np.random.default_rng(0).integers(0, 2**16, (10, 12, channels)).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    parts = ((b"IHDR", struct.pack(">2I5B", 12, 10, 16, kind, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    chunks = [struct.pack(">I", len(d)) + name + d + struct.pack(">I", zlib.crc32(name + d)) for name, d in parts]
    content = b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
    colours = np.round(values[..., : 3 if channels > 2 else 1] / 257)
    assert np.array_equal(decode(content).permute(1, 2, 0).numpy(), np.broadcast_to(colours, (10, 12, 3)))
    assert size_of(content) == (10, 12)


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_orientation_of_the_camera_is_followed(kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    content = encoded(picture(0, 0), kind, exif=exif)
    truth = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB"))
    assert np.array_equal(decode(content).permute(1, 2, 0).numpy(), truth)
    assert size_of(content) == truth.shape[:2] == (56, 40)


@pytest.mark.parametrize(
    "content", [b"", b"no image", encoded(picture(0, 0))[:300], encoded(picture(0, 0), "PNG")[:200], b"BM broken"]
)
def test_broken_images_are_refused_with_a_reason(content: bytes) -> None:
    with pytest.raises(BadImage, match=r"\w"):
        decode(content)


@pytest.mark.parametrize("size", [(40, 56), (56, 40), (64, 64), (33, 200)])
def test_centre_view_is_torchvisions(size: tuple[int, int]) -> None:
    image = torch.from_numpy(np.asarray(picture(1, 3, *size)).copy()).permute(2, 0, 1)
    theirs = v2.Compose([v2.Resize(36, antialias=True), v2.CenterCrop(32)])
    assert torch.equal(CentreView(36, 32).one(image), theirs(image))


def test_validation_sees_images_of_its_own_size(tmp_path: Path) -> None:
    facts, splits = opened(folder(image_folder(tmp_path / "d"), val_size=24, val_resize=30))
    assert (facts.shape, facts.val_shape) == ((3, 32, 32), (3, 24, 24))
    assert splits.train.augmented((0, 0), np.arange(2))[0].shape == (2, 3, 32, 32)
    for options, resize, side in (({"val_size": 24, "val_resize": 30}, 30, 24), ({"val_size": 28}, 32, 28)):
        val = opened(folder(tmp_path / "d", **options))[1].val
        theirs = v2.Compose([v2.Resize(resize, antialias=True), v2.CenterCrop(side)])
        assert torch.equal(val[3][0], theirs(val.image(3)))
    assert opened(folder(tmp_path / "d"))[0].val_shape is None


def test_training_view_crops_resizes_and_flips_as_torchvision(tmp_path: Path) -> None:
    from trainer.data.augment.boxes import random_crops
    from trainer.data.augment.draws import uniform
    from trainer.data.augment.views import COUNT, FIRST, FLIP

    _, splits = opened(folder(image_folder(tmp_path / "d")))
    addresses = np.arange(18)
    batch, _ = splits.train.augmented((5, 2), addresses)
    drawn = uniform((5, 2), addresses, COUNT)
    assert len(set((drawn[:, FLIP] < 0.5).tolist())) == 2
    for number in addresses.tolist():
        image = splits.train.image(number)
        box = random_crops(
            drawn[[number], FIRST], *(np.array([s]) for s in image.shape[1:]), (0.35, 1.0), (0.75, 4 / 3)
        )
        crop = v2.functional.resized_crop(image, *box[0].tolist(), [32, 32], antialias=True)
        assert torch.equal(batch[number], crop.flip(-1) if drawn[number, FLIP] < 0.5 else crop)


@pytest.mark.parametrize("policy", ["randaugment", "trivialaugment", "autoaugment"])
def test_policies_depend_on_seed_epoch_and_sample_alone(tmp_path: Path, policy: str) -> None:
    plain = opened(folder(image_folder(tmp_path / "d"), flip=0.0))[1].train
    changed = opened(folder(tmp_path / "d", augment=policy, flip=0.0))[1].train
    state = torch.random.get_rng_state()
    whole, _ = changed.augmented((0, 1), np.arange(12))
    assert torch.equal(torch.random.get_rng_state(), state)
    parts = torch.cat([changed.augmented((0, 1), np.array([n]))[0] for n in range(12)])
    assert torch.equal(whole, parts)
    assert not torch.equal(whole, changed.augmented((0, 2), np.arange(12))[0])
    assert not torch.equal(whole, plain.augmented((0, 1), np.arange(12))[0])


JITTER = {"_target_": "torchvision.transforms.v2.ColorJitter", "brightness": 0.4, "hue": 0.1}
GREY = {"_target_": "torchvision.transforms.v2.RandomGrayscale", "p": 0.5}


def test_own_transforms_are_torchvisions_between_policy_and_erasing(tmp_path: Path) -> None:
    from trainer.data.augment.draws import uniform
    from trainer.data.augment.views import COUNT, TRANSFORMS

    root, addresses = image_folder(tmp_path / "d"), np.arange(18)
    before = opened(folder(root, augment="randaugment"))[1].train.augmented((3, 1), addresses)[0]
    ours = opened(folder(root, augment="randaugment", transforms=[JITTER, GREY]))[1].train
    after = ours.augmented((3, 1), addresses)[0]
    drawn = uniform((3, 1), addresses, COUNT)[:, TRANSFORMS]
    assert len(set(drawn)) == 18
    for n in addresses.tolist():
        torch.manual_seed(int(drawn[n] * 2**53))
        truth = v2.RandomGrayscale(0.5)(v2.ColorJitter(brightness=0.4, hue=0.1)(before[n]))
        assert torch.equal(after[n], truth) and not torch.equal(after[n], before[n])
    erased = opened(folder(root, augment="randaugment", transforms=[JITTER, GREY], erasing=1.0))[1].train
    images_ = erased.augmented((3, 1), addresses)[0]
    changed = (images_ != after).any(1, keepdim=True)
    mean = Augmentation.of(schema.ImageFolderData(), images.MEAN).mean.view(1, 3, 1, 1)
    assert changed.any() and torch.equal(images_, torch.where(changed, mean, after)), "the patch is not jittered"


class Drawing:
    """Adds what it draws from every generator."""

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image + int(100 * torch.rand(()) + 100 * random.random() + 100 * np.random.rand())


@pytest.mark.parametrize("readers", [1, 2])
def test_own_transforms_do_not_depend_on_who_reads(tmp_path: Path, readers: int) -> None:
    from trainer.data.feed import Feed
    from trainer.data.placement import Placement
    from trainer.data.reader import Reading
    from trainer.data.sampler import DistributedBatchSampler, EvaluationSampler

    drawing = {"_target_": f"{__name__}.Drawing"}
    _, splits = opened(folder(image_folder(tmp_path / "d"), transforms=[JITTER, drawing]))
    place = Placement(Splits(splits.train, splits.val), torch.device("cpu"), torch.float32, False)

    def epoch(readers: int, batch: int, seed: int = 0) -> torch.Tensor:
        sampler = DistributedBatchSampler(18, batch, shuffle=False)
        feed = Feed(splits, sampler, EvaluationSampler(0, 1), place, reading=Reading(seed, readers))
        try:
            return torch.cat([b.inputs for _, bs in feed.updates(1) for b in bs])
        finally:
            feed.close()

    before = random.getstate()
    truth = epoch(0, 6)
    assert random.getstate() == before
    assert torch.equal(epoch(readers, 3), truth) and not torch.equal(epoch(0, 6, seed=1), truth)


POLICIES = [
    ({"augment": "randaugment"}, lambda fill: v2.RandAugment(2, 9, fill=fill)),
    (
        {"augment": "randaugment", "randaugment_ops": 4, "randaugment_magnitude": 21},
        lambda fill: v2.RandAugment(4, 21, fill=fill),
    ),
    ({"augment": "trivialaugment"}, lambda fill: v2.TrivialAugmentWide(fill=fill)),
    ({"augment": "autoaugment"}, lambda fill: v2.AutoAugment(fill=fill)),
]


@pytest.mark.parametrize(("options", "make"), POLICIES, ids=[" ".join(map(str, g.values())) for g, _ in POLICIES])
def test_policies_are_torchvisions(tmp_path: Path, options: dict[str, Any], make: Any) -> None:
    from trainer.data.augment.draws import uniform
    from trainer.data.augment.views import COUNT, POLICY

    root, addresses = image_folder(tmp_path / "d"), np.arange(18)
    plain = opened(folder(root))[1].train.augmented((3, 1), addresses)[0]
    ours = opened(folder(root, **options))[1].train.augmented((3, 1), addresses)[0]
    policy = make([round(255 * m) for m in images.MEAN])
    for image, changed, number in zip(plain, ours, uniform((3, 1), addresses, COUNT)[:, POLICY], strict=True):
        torch.manual_seed(int(number * 2**53))
        assert torch.equal(changed, policy(image))
    assert sum(torch.equal(a, b) for a, b in zip(plain, ours, strict=True)) < 9


def test_erased_patches_are_the_mean_colour(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "d")
    plain = opened(folder(root, flip=0.0))[1].train.augmented((0, 0), np.arange(18))[0]
    erased = opened(folder(root, flip=0.0, erasing=0.5))[1].train.augmented((0, 0), np.arange(18))[0]
    differing = [n for n in range(18) if not torch.equal(plain[n], erased[n])]
    assert 3 <= len(differing) <= 15
    mean = Augmentation.of(schema.ImageFolderData(), images.MEAN).mean
    for n in differing:
        changed = (plain[n] != erased[n]).any(0)
        assert (erased[n][:, changed] == mean[:, None]).all()


def test_decoded_cache_gives_the_same_batches_and_is_made_once(tmp_path: Path, own_cache: Path) -> None:
    root = image_folder(tmp_path / "d")
    facts, cached = opened(folder(root, cache="ram"))
    plain_facts, plain = opened(folder(root, cache="none"))
    assert facts.cached and not plain_facts.cached and "GiB decoded" in facts.cache
    for draw in ((0, 0), (1, 3)):
        for ours, theirs in ((cached.train, plain.train), (cached.val, plain.val)):
            addresses = np.arange(len(ours))
            assert torch.equal(ours.augmented(draw, addresses)[0], theirs.augmented(draw, addresses)[0])
    made = {p: p.stat().st_mtime_ns for p in own_cache.rglob("pixels.bin")}
    assert len(made) == 2
    opened(folder(root, cache="ram"))
    assert {p: p.stat().st_mtime_ns for p in own_cache.rglob("pixels.bin")} == made


def test_decoded_cache_follows_a_changed_file_and_drops_the_old_pixels(tmp_path: Path, own_cache: Path) -> None:
    root = image_folder(tmp_path / "d")
    _, before = opened(folder(root, cache="ram"))
    old = before.train.image(0).clone()
    in_use.HERE.leave()  # that run has ended
    (root / "train" / CLASSES[0] / "0.jpg").write_bytes(encoded(picture(2, 9, 50, 50)))
    _, after = opened(folder(root, cache="ram"))
    assert after.train.image(0).shape[1:] == (50, 50) and old.shape[1:] == (40, 56)
    assert len(list(own_cache.rglob("pixels.bin"))) == 2


def test_cache_is_chosen_by_what_fits_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = image_folder(tmp_path / "d")
    assert folder(root).facts(1).cached
    monkeypatch.setattr(images, "free_of_machine", lambda: 1000)
    facts = folder(root).facts(1)
    assert not facts.cached and "do not fit" in facts.cache
    monkeypatch.setattr(images, "free_disk", lambda where: 1000)
    with pytest.raises(UserError, match="do not fit"):
        folder(root, cache="ram").facts(1)


def test_folders_are_read_as_by_torchvision(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "d", classes=["b", "a", "c"])
    (root / "train" / "a" / "notes.txt").write_text("no image")
    (root / "train" / "a" / "deep").mkdir()
    (root / "train" / "a" / "deep" / "x.png").write_bytes(encoded(picture(0, 0), "PNG"))
    truth = datasets.ImageFolder(str(root / "train"))
    source = folder(root)
    facts, splits = opened(source)
    assert source.class_names(facts) == truth.classes
    assert list(zip(splits.train.listing.names, splits.train.labels.tolist(), strict=True)) == truth.samples
    assert facts.train_samples == 19 and facts.val_samples == 6


def test_part_of_each_class_is_held_out_where_there_is_no_validation_folder(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "d", per_class=10)
    facts, splits = opened(folder(root / "train", val_fraction=0.2))
    assert (facts.train_samples, facts.val_samples) == (24, 6)
    assert np.bincount(splits.val.labels).tolist() == [2, 2, 2]
    both = {*splits.train.listing.names, *splits.val.listing.names}
    assert len(both) == 30
    other = opened(folder(root / "train", val_fraction=0.2, split_seed=1))[1]
    assert set(other.val.listing.names) != set(splits.val.listing.names)


def broken(root: Path) -> Path:
    """A folder of pictures of which two cannot be decoded."""
    image_folder(root)
    (root / "train" / "iris" / "1.jpg").write_bytes(b"no image")
    whole = root / "val" / "rose" / "0.jpg"
    whole.write_bytes(whole.read_bytes()[:400])
    return root


@pytest.mark.parametrize("cache", ["ram", "none"])
def test_broken_images_are_counted_and_named(tmp_path: Path, cache: str) -> None:
    source = folder(broken(tmp_path / "d"), cache=cache, verify=True)
    with pytest.raises(UserError, match=r"2 of 24 images cannot be decoded.*iris/1\.jpg.*rose/0\.jpg") as caught:
        source.prepare(source.facts(1), silent)
    assert "data.on_bad=skip" in caught.value.instead


@pytest.mark.parametrize("cache", ["ram", "none"])
def test_broken_images_are_left_out_only_where_that_is_asked_for(
    tmp_path: Path, cache: str, capsys: pytest.CaptureFixture[str]
) -> None:
    facts, splits = opened(folder(broken(tmp_path / "d"), cache=cache, verify=True, on_bad="skip"))
    assert (facts.train_samples, facts.val_samples, len(facts.left_out)) == (17, 5, 2)
    assert "ATTENTION: 2 of 24" in capsys.readouterr().out
    truth = opened(folder(image_folder(tmp_path / "whole"), cache="none"))[1].train
    kept = [n for n in range(18) if n != 7]
    for ours, theirs in enumerate(kept):
        assert torch.equal(splits.train.image(ours), truth.image(theirs))
    assert splits.train.labels.tolist() == [truth.labels[n] for n in kept]


def test_a_broken_image_in_training_is_named(tmp_path: Path) -> None:
    _, splits = opened(folder(broken(tmp_path / "d"), cache="none"))
    with pytest.raises(RunFailed, match=r"iris/1\.jpg cannot be read.*data\.verify=true"):
        splits.train.augmented((0, 0), np.arange(18))


def shards(**options: Any) -> Shards:
    return Shards(**config(schema.ShardsData, image_size=32, **options))


@pytest.mark.parametrize("labels", ["cls", "json"])
@pytest.mark.parametrize("cache", ["ram", "none"])
def test_shards_hold_each_sample_once_with_its_label(tmp_path: Path, labels: str, cache: str) -> None:
    contents = [(f"p{n:02d}", encoded(picture(n % 3, n), quality=95), n % 3) for n in range(30)]
    for number in range(3):
        shard(tmp_path / f"t-{number:03d}.tar", contents[number * 10 : number * 10 + 10], labels)
    shard(tmp_path / "v.tar", contents[:6], labels)
    source = shards(path=str(tmp_path / "t-{000..002}.tar"), val_path=str(tmp_path / "v*.tar"), cache=cache)
    facts, splits = opened(source)
    assert (facts.train_samples, facts.val_samples, facts.classes) == (30, 6, 3)
    for number, (_, content, label) in enumerate(contents):
        assert torch.equal(splits.train.image(number), decode(content))
        assert splits.train.labels[number] == label


@pytest.mark.parametrize("label", ["2.5", "true", "null", '"daisy"', "[1]"])
def test_labels_in_json_are_whole_numbers(tmp_path: Path, label: str) -> None:
    import tarfile

    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        for name, data in (("p.jpg", encoded(picture(0, 0))), ("p.json", f'{{"label": {label}}}'.encode())):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    with pytest.raises(UserError, match=r"1 of 1 samples have no label .*p has .* in p\.json"):
        shards(path=str(tmp_path / "t.tar")).facts(1)


def flowers(root: Path, labels: list[int], train: list[int], val: list[int]) -> Flowers102:
    flowers_102(root, labels, train, val)
    return Flowers102(**config(schema.Flowers102Data, root=str(root), cache="none"))


def test_flowers_are_read_by_their_own_lists_and_refused_where_these_are_wrong(tmp_path: Path) -> None:
    facts, splits = opened(flowers(tmp_path / "good", [102, 7, 1, 7], [4, 1], [3]))
    assert (facts.train_samples, facts.val_samples) == (2, 1)
    assert splits.train.labels.tolist() == [6, 101] and splits.val.labels.tolist() == [0]
    with pytest.raises(UserError, match=r"2 of 4 labels are not 1 to 102; the first is 103, of image 2"):
        flowers(tmp_path / "far", [1, 103, 0, 2], [1], [2]).facts(1)
    with pytest.raises(UserError, match=r"lists images that imagelabels\.mat does not have"):
        flowers(tmp_path / "short", [1, 2], [1], [3]).facts(1)
    cut = flowers(tmp_path / "cut", [1, 2], [1], [2])
    (tmp_path / "cut" / "flowers-102" / "setid.mat").write_bytes(b"no list")
    with pytest.raises(UserError, match="is damaged"):
        cut.facts(1)


def test_digest_of_images_in_files_does_not_depend_on_where_they_lie(tmp_path: Path) -> None:
    def digest(root: Path, **options: Any) -> str:
        source = folder(root, verify=True, on_bad="skip", **options)
        return source.fingerprint(source.prepare(source.facts(1), silent))

    one = digest(broken(tmp_path / "a"))
    assert digest(broken(tmp_path / "b"), flip=0.1, cache="none") == one
    (tmp_path / "b" / "train" / "iris" / "2.jpg").write_bytes(b"broken as well")
    assert digest(tmp_path / "b") != one


def test_braces_are_webdatasets() -> None:
    assert braces("a-{008..011}-{0..1}.tar") == [f"a-{n:03d}-{m}.tar" for n in range(8, 12) for m in range(2)]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"path": "none-*.tar"}, "there are no such files"),
    ({"path": "text.tar"}, "is not a plain tar file"),
    ({"path": "bare.tar"}, r"1 of 1 samples have no label .*bare\.tar:p0 has an image but no label"),
    ({"path": "word.tar"}, r"1 of 1 samples have no label .*word\.tar:p0 has b'daisy' in p0\.cls"),
    (
        {"path": ["bare.tar", "good.tar", "half.tar", "word.tar"]},
        r"3 of 6 samples have no label .*bare\.tar:p0 has .*; half\.tar:p0 has b'2\.5' in p0\.cls; word",
    ),
    (
        {"path": "many.tar"},
        r"7 of 7 samples have no label .*(many.tar:m\d has a label of 31 digits in m\d.cls; ){5}and 2 more",
    ),
    ({"path": "empty.tar"}, "holds no samples"),
    ({"path": "good.tar", "num_classes": 2}, r"1 of 3 samples have a label outside 0 to 1: good\.tar:p2\.jpg with 2"),
]


@pytest.mark.parametrize(("options", "says"), REFUSED, ids=[str(g["path"]) for g, _ in REFUSED])
def test_wrong_shards_are_refused_with_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], says: str
) -> None:
    import tarfile

    monkeypatch.chdir(tmp_path)
    content = encoded(picture(0, 0))
    shard(tmp_path / "good.tar", [(f"p{n}", content, n) for n in range(3)])
    shard(tmp_path / "empty.tar", [])
    shard(tmp_path / "many.tar", [(f"m{n}", content, 10**30) for n in range(7)])
    (tmp_path / "text.tar").write_text("this is no tar file" * 100)
    for name, label in (("bare", None), ("word", b"daisy"), ("half", b"2.5")):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as tar:
            for member, data in (("p0.jpg", content), ("p0.cls", label)):
                if data is not None:
                    info = tarfile.TarInfo(member)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    with pytest.raises(UserError, match=says):
        shards(**options).facts(1)
    assert not (tmp_path / "cache").exists(), "facts write nothing"


def test_samples_are_named_by_their_files_relative_to_the_data(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "d")
    splits = opened(folder(root))[1]
    assert [splits.val.sample_name(n) for n in (0, 5)] == ["val/daisy/0.jpg", "val/rose/1.jpg"]
    held_out = opened(folder(root / "train"))[1].val
    assert {held_out.sample_name(n) for n in range(3)} == {
        name.removeprefix(f"{root}/train/") for name in held_out.listing.names
    }
    shard(tmp_path / "v.tar", [(f"a/p{n}", encoded(picture(n, n)), n) for n in range(3)])
    shard(tmp_path / "t.tar", [(f"p{n}", encoded(picture(n % 3, n)), n % 3) for n in range(6)])
    splits = opened(shards(path=str(tmp_path / "t.tar"), val_path=str(tmp_path / "v.tar")))[1]
    assert splits.val.sample_name(2) == "v.tar:a/p2.jpg"
    splits = opened(flowers(tmp_path / "f", [102, 7, 1, 7], [4, 1], [3]))[1]
    assert splits.val.sample_name(0) == "jpg/image_00003.jpg"
