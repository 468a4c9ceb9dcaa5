"""data: what is learnt from, and in which portions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, Optional  # OmegaConf reads them

from trainer.config.schema.declare import AUTO, LONG, MOST_PROCESSES, WIDEST, key


def _source(target: str) -> Any:
    return key(target, "class, a trainer.data.source.DataSource")


def _classes(number: int) -> Any:
    return key(number, "number of classes", "classes", ge=1, le=10_000_000)


def _seed(what: str) -> Any:
    return key(0, f"seed of {what}", ge=0, le=LONG)


@dataclass
class DataConfig:
    """data: what is learnt from, and in which portions."""

    _target_: str = _source("???")
    num_classes: Optional[int] = key(
        None, "number of classes (null: as many as the data have)", "classes", ge=1, le=10_000_000
    )
    batch_size: Optional[Any] = key(
        None,
        "samples per worker and batch (null: from global_batch_size, else 32; auto: as many as fit into memory)",
        "samples",
        ge=1,
        or_auto=True,
    )
    memory_limit_gib: Optional[float] = key(
        None,
        "with batch_size=auto: memory of each GPU, or of this host for the whole run (null: what is free)",
        "GiB",
        gt=0,
    )
    global_batch_size: Optional[int] = key(
        None,
        "samples per update, for any workers and gradient_merge.k_steps; shared unevenly if need be",
        "samples",
        ge=1,
    )
    val_batch_size: Optional[int] = key(
        None, "samples per worker and evaluation batch (null: as batch_size)", "samples", ge=1
    )
    num_workers: Optional[Any] = key(
        "auto",
        "processes that read data, per worker (auto, null: by the cores, and more if the first updates wait)",
        "processes",
        ge=0,
        le=MOST_PROCESSES,
        or_auto=True,
    )
    prefetch: Any = key(
        "auto", "batches that each of these processes keeps ready", "batches", ge=1, le=10_000, or_auto=True
    )
    work: str = key(
        "auto",
        "split before the epoch, or leased in blocks during it (auto: leased if strategy and sampler can)",
        choices=("auto", "static", "leased"),
    )
    lease_batches: Optional[int] = key(
        None, "batches in a leased block (null: 8 blocks per worker and epoch, of at most 64)", "batches", ge=1
    )
    steps_per_epoch: Optional[int] = key(
        None,
        "of a stream: updates of an epoch (null: from its number of samples, where the source knows it)",
        "updates",
        ge=1,
    )
    shard: str = key(
        "samples",
        "of a stream: workers take its samples in turn, or read files of their own, or all of it each",
        choices=("samples", "files", "none"),
    )
    shuffle_buffer: Optional[int] = key(
        None,
        "of a stream: samples among which the next one is drawn (null: the stream's own order)",
        "samples",
        ge=2,
        le=100_000_000,
    )
    on_lost_worker: str = key(
        "take_over",
        "leased work of a worker that died: others take it over, or it is dropped",
        choices=("take_over", "drop"),
    )
    pin_memory: Any = key("auto", "page-locked batches for faster copies to a GPU", choices=AUTO)
    read: str = key(
        "each",
        "each worker reads its own samples, or the first reads all and scatters them",
        choices=("each", "scatter"),
    )


@dataclass
class PicturesData(DataConfig):
    """data: limits and normalisation of images, also of those that mode=predict reads."""

    max_pixels: int = key(
        150_000_000, "greatest width x height of an image; a larger one counts as broken", "pixels", ge=1
    )
    max_file_mib: int = key(
        256, "greatest size of a file that is read whole, and of a packed one when unpacked", "MiB", ge=1
    )
    normalize: str = key(
        "mean_std",
        "of pixels between 0 and 1: subtract the mean and divide by the std, the mean alone, or none",
        choices=("mean_std", "mean", "none"),
    )
    mean: Optional[List[float]] = key(None, "mean of each channel (null: of the data's kind)", ge=-1e6, le=1e6)
    std: Optional[List[float]] = key(None, "std of each channel (null: of the data's kind)", gt=0, le=1e6)


@dataclass
class DigitsData(PicturesData):
    """data=digits: the 1,797 handwritten digits that scikit-learn ships, (1, 8, 8)."""

    _target_: str = _source("trainer.data.sets.digits.Digits")
    num_classes: Optional[int] = _classes(10)
    val_fraction: float = key(0.2, "share held out for validation", gt=0, le=0.9)
    test_fraction: float = key(0.0, "share held out for the test (0: none)", ge=0, le=0.5)
    split_seed: int = _seed("the split")


@dataclass
class RandomImagesData(DataConfig):
    """data=random_images: noise of (3, S, S) with random labels, for throughput."""

    _target_: str = _source("trainer.data.sets.random_images.RandomImages")
    num_classes: Optional[int] = _classes(102)
    image_size: int = key(224, "height and width", "pixels", ge=1, le=WIDEST)
    fresh: bool = key(False, "new noise for each sample in every epoch; false: the same 64 images in turn")
    labels_below: Optional[int] = key(
        None, "labels are drawn below this (null: num_classes)", "classes", ge=1, le=10_000_000
    )
    batches: int = key(
        100, "global batches per epoch, of batch_size * workers * gradient_merge.k_steps samples", "batches", ge=1
    )
    val_batches: int = key(5, "global batches per validation, of as many samples", "batches", ge=1)


@dataclass
class AugmentedData(PicturesData):
    """data: augmentation of training images."""

    flip: float = key(0.5, "probability of a horizontal flip", ge=0, le=1)
    augment: str = key(
        "none", "policy of further changes", choices=("none", "randaugment", "trivialaugment", "autoaugment")
    )
    randaugment_ops: int = key(2, "changes of an image by randaugment", "changes", ge=1, le=100)
    randaugment_magnitude: int = key(9, "strength of randaugment's changes, of 30", ge=0, le=30)
    erasing: float = key(0.0, "probability of an erased patch", ge=0, le=1)
    mixup: float = key(0.0, "alpha of mixup within a worker's batch (0: none; usual: 0.2)", ge=0, le=1000)
    cutmix: float = key(0.0, "alpha of cutmix within a worker's batch (0: none; usual: 1.0)", ge=0, le=1000)
    mix_probability: float = key(1.0, "probability of a batch to be mixed, where mixup or cutmix is on", ge=0, le=1)


@dataclass
class ImagesData(AugmentedData):
    """data: sources of image files. Training images are (3, S, S) uint8 until they are on the device."""

    image_size: int = key(224, "height and width of a training image", "pixels", ge=16, le=WIDEST)
    val_size: Optional[int] = key(
        None, "height and width of a validation image (null: image_size)", "pixels", ge=16, le=WIDEST
    )
    val_resize: Optional[int] = key(
        None, "shorter side before the centre crop (null: 8/7 of val_size)", "pixels", ge=16, le=WIDEST
    )
    min_scale: float = key(0.35, "least share of an image's area in a random crop", gt=0, le=1)
    train_resize: Optional[int] = key(
        None,
        "shorter side before a window of image_size is cut at random (null: a random part is resized)",
        "pixels",
        ge=16,
        le=WIDEST,
    )
    min_ratio: float = key(0.75, "least width / height of a random crop; the greatest is its inverse", gt=0, le=1)
    transforms: List[Any] = key(
        [], "further changes of training images: [{_target_: torchvision.transforms.v2.ColorJitter, hue: 0.1}]"
    )
    cache: str = key(
        "auto",
        "decode once and keep the pixels in memory of the host, or of each GPU (auto: the host's, where they fit)",
        choices=("auto", "ram", "device", "none"),
    )
    decode: str = key(
        "auto",
        "where JPEGs of the training are decoded: by reading processes, or by the GPU with NVJPEG",
        choices=("auto", "cpu", "gpu"),
    )
    cache_dir: Optional[str] = key(None, "folder of the decoded pixels (null: in the user's cache, $TRAINER_CACHE)")
    verify: bool = key(False, "decode every image before the training and name those that are broken")
    on_bad: str = key(
        "error", "what to do with broken images that were found: end, or leave them out", choices=("error", "skip")
    )


@dataclass
class FlowersData(ImagesData):
    """data=flowers102 and data=embedded_flowers: 102 classes of flowers, (3, S, S)."""

    num_classes: Optional[int] = _classes(102)
    order: str = key(
        "listed",
        "order of the training images: of the official list, or as in 102flowers.tgz beside them",
        choices=("listed", "archive"),
    )
    train_split: str = key(
        "trnid",
        "lists to train on; validation uses valid (with trnid+valid: tstid), the test the list that is left",
        choices=("trnid", "tstid", "trnid+valid"),
    )


@dataclass
class Flowers102Data(FlowersData):
    """data=flowers102: Oxford Flowers-102, or the embedded flowers where it cannot be had."""

    _target_: str = _source("trainer.data.sets.flowers.Flowers102")
    root: str = key("${oc.env:TRAINER_DATA,data}", "folder that holds flowers-102/ as torchvision lays it out")
    download: bool = key(True, "fetch the set when it is missing and its site can be reached")
    on_missing: str = key("embedded", "what to do when the set cannot be had", choices=("embedded", "error"))


@dataclass
class EmbeddedFlowersData(FlowersData):
    """data=embedded_flowers: procedurally drawn flowers, the same on every machine."""

    _target_: str = _source("trainer.data.sets.flowers.EmbeddedFlowers")
    draw_seed: int = _seed("the drawing")
    per_class: int = key(10, "images per class and split", "images", ge=1, le=10_000)
    drawn_size: int = key(500, "shorter side of the drawn images", "pixels", ge=16, le=4096)
    num_classes: Optional[int] = key(
        102, "number of classes; below 102 as many different ones are drawn", "classes", ge=1, le=10_000_000
    )
    species: Optional[int] = key(
        None, "kinds of flowers that are drawn (null: num_classes)", "classes", ge=1, le=102, example=34
    )
    labels: str = key(
        "class",
        "label of a flower: its class, the red, green and blue of its petals, or its traits",
        choices=("class", "colour", "traits"),
    )


@dataclass
class ImageFolderData(ImagesData):
    """data=imagefolder: any folder of class folders, with train/ and val/ or without."""

    _target_: str = _source("trainer.data.sets.image_folder.ImageFolder")
    root: str = key(
        "???", "folder that holds train/CLASS/ and val/CLASS/ (in any case, and their usual other names), or CLASS/"
    )
    val: Optional[str] = key(
        None, "name of the validation folder in root (null: found by its name, such as val or dev)"
    )
    val_fraction: float = key(0.2, "share of each class held out, where there is no validation folder", gt=0, le=0.9)
    split_seed: int = _seed("that split")


@dataclass
class TableData(ImagesData):
    """data=table: images by the paths in a column of a CSV or Parquet file, labels by another column."""

    _target_: str = _source("trainer.data.sets.table.Table")
    path: str = key("???", "CSV (commas, semicolons or tabs; UTF-8) or Parquet file of the training images")
    image: str = key("image", "column of the paths of images")
    label: Any = key("label", "column of the labels, or a list of columns of numbers", texts=True)
    label_kind: str = key(
        "auto",
        "classes or numbers (auto: whole numbers and texts are classes, other numbers are numbers)",
        choices=("auto", "class", "number"),
    )
    label_separator: Optional[str] = key(
        None, "separator between the names of a set (null: labels are no sets)", example="'|'"
    )
    root: Optional[str] = key(None, "folder from which the paths of images lead (null: the table's)")
    split: Optional[str] = key(None, "column that says train, val or test (null: there is none)")
    val_path: Optional[str] = key(None, "table of the validation images (null: data.split, else val_fraction)")
    test_path: Optional[str] = key(None, "table of the test images (null: data.split, else none)")
    val_fraction: float = key(0.2, "share of each class held out, where nothing names validation images", gt=0, le=0.9)
    split_seed: int = _seed("that split")


@dataclass
class ShardsData(ImagesData):
    """data=shards: tar files in WebDataset's layout (NAME.jpg with NAME.cls or NAME.json)."""

    _target_: str = _source("trainer.data.sets.shards.Shards")
    max_label_kib: int = key(1024, "greatest size of a label (NAME.cls, NAME.json)", "KiB", ge=1)
    max_depth: int = key(64, "greatest depth of lists and mappings in NAME.json", "levels", ge=1)
    path: Any = key("???", "a tar file, a pattern such as DIR/train-{000..099}.tar, or a list of these", texts=True)
    val_path: Optional[Any] = key(
        None,
        "the same, for validation (null: files of path by their names, such as val-*.tar; else val_fraction)",
        texts=True,
    )
    test_path: Optional[Any] = key(
        None, "the same, for the test (null: files of path by their names, such as test-*.tar; else none)", texts=True
    )
    val_fraction: float = key(0.1, "share of each class held out, where there are no validation files", gt=0, le=0.9)
    split_seed: int = _seed("that split")


@dataclass
class ArraysData(AugmentedData):
    """data=cifar10 and data=mnist: small images in memory, augmented a whole batch at a time."""

    num_classes: Optional[int] = _classes(10)
    pad_crop: int = key(
        0, "zeros around the image, from which a window of the image's size is cut", "pixels", ge=0, le=1024
    )
    val_fraction: Optional[float] = key(
        None,
        "share of the training images held out for validation (null: the set's test images validate)",
        gt=0,
        le=0.9,
        example=0.1,
    )
    split_seed: int = _seed("that split")
    cache: str = key("ram", "keep the images in memory of the host, or of each GPU", choices=("ram", "device"))
    root: str = key("${oc.env:TRAINER_DATA,data}", "folder that holds the set as torchvision lays it out")
    download: bool = key(True, "fetch the set when it is missing and its site can be reached")
    on_missing: str = key("embedded", "what to do when the set cannot be had", choices=("embedded", "error"))


@dataclass
class Cifar10Data(ArraysData):
    """data=cifar10: CIFAR-10, (3, 32, 32); where it cannot be had, small drawn flowers."""

    _target_: str = _source("trainer.data.sets.cifar.Cifar10")
    pad_crop: int = key(
        4, "zeros around the image, from which a window of the image's size is cut", "pixels", ge=0, le=1024
    )


@dataclass
class MnistData(ArraysData):
    """data=mnist: MNIST, (1, 28, 28); where it cannot be had, scikit-learn's digits drawn larger."""

    _target_: str = _source("trainer.data.sets.mnist.Mnist")
    flip: float = key(0.0, "probability of a horizontal flip", ge=0, le=1)


@dataclass
class MnistJsonData(DataConfig):
    """data=mnist_json: MNIST as one JSON file, plain or .gz, of three parts [[images, labels], ...]."""

    _target_: str = _source("trainer.data.sets.mnist_json.MnistJson")
    num_classes: Optional[int] = _classes(10)
    path: str = key("${oc.env:TRAINER_DATA,data}/mnist.json.gz", "the file")
    max_file_mib: int = key(4096, "greatest size of the file, unpacked", "MiB", ge=1)
    val_split: str = key(
        "valid", "part that is used for validation; with valid the test is eval", choices=("valid", "eval")
    )


@dataclass
class CriteoRows(DataConfig):
    """data=criteo and data=synthetic_criteo: rows of a label, 13 integers and 26 tokens, any of which may be empty."""

    num_classes: Optional[int] = _classes(2)
    hash_size: Optional[int] = key(
        1000001, "slot and token are hashed to ids below this (null: of 63 bits)", "ids", ge=2, le=LONG
    )
    cache: bool = key(True, "convert the text once into arrays in the user's cache; false: read it anew in every epoch")
    cache_dir: Optional[str] = key(None, "folder of these arrays (null: in the user's cache, $TRAINER_CACHE)")
    block_mib: int = key(
        16, "block of a text file that a worker leases at a time, without cache", "MiB", ge=1, le=1_000_000
    )
    max_bad_fraction: float = key(0.01, "share of rows that may be malformed; they are left out", ge=0, le=1)


@dataclass
class CriteoData(CriteoRows):
    """data=criteo: Criteo's click logs as text, plain or .gz."""

    _target_: str = _source("trainer.data.criteo.source.Criteo")
    path: Any = key("???", "a file, a folder, a pattern such as day_*.gz, or a list of these", texts=True)
    val_path: Optional[Any] = key(None, "the same, for validation (null: val_fraction of the rows)", texts=True)
    test_path: Optional[Any] = key(None, "the same, for the test at the end (null: none)", texts=True)
    val_fraction: float = key(
        0.1, "share of the rows held out for validation, where there is no val_path", gt=0, le=0.9
    )
    dense_min: Optional[Any] = key(
        None,
        "each integer's value that becomes 0 (auto: the training rows' least; null: the reference's)",
        ge=-1e18,
        le=1e18,
        length=13,
        or_auto=True,
        example="auto",
    )
    dense_max: Optional[Any] = key(
        None,
        "each integer's value that becomes 1 (auto: the training rows' greatest; null: the reference's)",
        ge=-1e18,
        le=1e18,
        length=13,
        or_auto=True,
        example="auto",
    )


@dataclass
class SyntheticCriteoData(CriteoRows):
    """data=synthetic_criteo: rows in Criteo's format drawn by a teacher whose AUC is known."""

    _target_: str = _source("trainer.data.criteo.synthetic.SyntheticCriteo")
    train_rows: int = key(500000, "rows for training", "rows", ge=100, le=10**11)
    val_rows: int = key(100000, "rows for validation", "rows", ge=100, le=10**11)
    draw_seed: int = _seed("the teacher and of the rows")
