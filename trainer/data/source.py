"""The interface of a data source: cheap facts before the start, one preparation, then data sets in each worker."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from trainer.config.own_keys import OwnKeys
from trainer.config.run_config import typed
from trainer.config.schema import DataConfig, PicturesData
from trainer.wording import counted

if TYPE_CHECKING:
    import torch
    from torch.utils.data import Dataset

    from trainer.data.picture_preprocessing import Preprocessing

OnProgress = Callable[[str, int, int], None]
"""Called during a long preparation: (what is done, number done, number of all)."""


@dataclass(frozen=True)
class Facts:
    """Facts about the data that are known before samples are read: shapes, classes, numbers of samples.

    Attributes:
        source: what the samples really are, in a few words; shown in the plan and in the run's tags.
        kind: word by which the source tells its workers which data it uses, e.g. ``real`` or ``embedded``.
        train_samples, val_samples, test_samples: samples of each split; 0 without a test split.
        shape: of one input, e.g. (3, 224, 224); of a sample with several inputs, name -> shape.
        val_shape: of one validation input; None: the same.
        classes: number of classes; of ``multi_label`` labels, of ``regression`` numbers of a sample.
        stand_in: why other data than the configured ones are used, shown as a warning; empty: they are not.
        slow: samples are decoded one by one, so that reading processes pay.
        task: what labels are. ``classification``: (N,) from 0 to classes - 1. ``binary``: (N,) of 0 and 1, and the
            model makes one logit (N,). ``multi_label``: (N, classes) of 0 and 1. ``regression``: numbers (N,) or (N,
            classes).
        integers: names of the inputs that are int64 ids.
        ceiling: metric -> the best value that any model can reach on the validation samples, if known.
        streams: workers lease blocks of the training data, which have no sample indices; ``train_samples`` may be an
            estimate.
        cache: what is kept in memory, in a few words for the plan.
        cached: whether decoded samples are kept in memory; None: decided by ``prepare``.
        left_out: name -> reason of broken samples, which do not count.
        iterable: the training data are a stream, an IterableDataset or a function that returns an iterator.
            ``train_samples`` is 0 if its length is unknown, ``val_samples`` if the validation data are a stream.
        measured: key of ``data`` that was ``auto`` -> value measured on the training data. A resumed run, and a run
            that uses the weights, get the same values.
        undecodable: why a GPU cannot decode the training samples (data.decode); empty: they are JPEGs.
        resident: bytes of decoded samples that each device keeps (data.cache=device); 0: none, or not known yet.
        splits: where validation and test samples come from, for the plan.
        estimated: names of the splits with estimated numbers of samples, until ``prepare`` has counted them.
        attention: what is odd about the data but no reason to refuse them; shown with the plan.
    """

    source: str
    kind: str
    train_samples: int
    val_samples: int
    shape: tuple[int, ...] | dict[str, tuple[int, ...]]
    classes: int
    stand_in: str = ""
    slow: bool = False
    task: str = "classification"
    integers: tuple[str, ...] = ()
    ceiling: dict[str, float] = field(default_factory=dict)
    streams: bool = False
    cache: str = ""
    cached: bool | None = False
    left_out: dict[str, str] = field(default_factory=dict)
    val_shape: tuple[int, ...] | None = None
    attention: str = ""
    iterable: bool = False
    test_samples: int = 0
    measured: dict[str, Any] = field(default_factory=dict)
    splits: str = ""
    estimated: tuple[str, ...] = ()
    resident: int = 0
    undecodable: str = "the samples are no JPEGs"

    @property
    def sizes(self) -> str:
        """The number of samples in each split, in words."""
        train, val, test = ("about " if name in self.estimated else "" for name in ("train", "val", "test"))
        if not self.test_samples:
            return f"{train}{self.train_samples} training and {val}{counted(self.val_samples, 'validation sample')}"
        return (
            f"{train}{self.train_samples} training, {val}{self.val_samples} validation and "
            f"{test}{counted(self.test_samples, 'test sample')}"
        )

    @property
    def targets(self) -> str:
        """How many classes, labels or numbers there are, in words."""
        return counted(self.classes, {"multi_label": "label", "regression": "number"}.get(self.task, "class"))

    @staticmethod
    def of(plain: Mapping[str, Any]) -> Facts:
        """Make Facts of plain data, also after JSON has turned tuples into lists."""
        made = Facts(**plain)
        return replace(
            made,
            shape=_tuples(made.shape),
            val_shape=_tuples(made.val_shape),
            integers=tuple(made.integers),
            estimated=tuple(made.estimated),
        )


def _tuples(shape: Any) -> Any:
    if isinstance(shape, Mapping):
        return {name: tuple(size) for name, size in shape.items()}
    return None if shape is None else tuple(shape)


def reader_of(source: DataSource, facts: Facts) -> dict[str, Any] | None:
    """The config node of a source's row reader, with what was measured in place of ``auto``; None if it reads no
    rows."""
    node = source.row_reader()
    return node and {**node, **{key: value for key, value in facts.measured.items() if key in node}}


ABOUT_READING = ("resident", "undecodable")
"""Facts that depend on how samples are read, and not on the data."""
READING = {f.name for f in fields(PicturesData)}
"""Keys of ``data`` that change how samples are read, but not which samples there are."""


def digest_of(*parts: Any) -> str:
    """The digest of plain data for a :class:`DataSource`'s fingerprint: 32 hexadecimal digits of a SHA-256."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def listed(folder: Path) -> list[tuple[str, int]]:
    """The files of a :class:`DataSource`'s folder as sorted (name, size), for its fingerprint."""
    files = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
    return sorted((path.relative_to(folder).as_posix(), path.stat().st_size) for path in files)


def held_out(options: Any, of: str, also: str = "") -> str:
    """The sentence of ``Facts.splits`` for a source that holds out ``data.val_fraction`` of its samples."""
    share = f"validation is {options.val_fraction:g} of {of} (data.val_fraction){also}"
    return f"{share}, held out by data.split_seed={options.split_seed}"


def named_sizes(paths: Sequence[str | Path]) -> list[tuple[str, int]]:
    """(name, size) of each of these files, for a :class:`DataSource`'s fingerprint; names are relative to the folder of
    all."""
    whole = [os.path.abspath(path) for path in paths]
    above = os.path.commonpath([os.path.dirname(path) for path in whole]) if whole else ""
    return [(path[len(above) :].lstrip(os.sep), os.stat(path).st_size) for path in whole]


@dataclass
class Splits:
    """The training, validation and test data sets of a worker, and the normalisation of their images.

    Attributes:
        train, val: map-style, each item (input, label); or with ``batch(indices)`` that returns a whole batch; or with
            ``augmented((seed, epoch), addresses)``, which does so for addresses modulo the set's length.
            With ``Facts.iterable`` ``train`` is a stream, and ``val`` may be one; a function may take ``epoch``.
            Inputs of type uint8 are divided by 255 and normalised on the device. Inputs may be a dict of tensors by
            name: floating ones are converted to the run's precision, others stay as they are.
        test: like ``val``; measured once, at the end of the training. None: there are no test samples.
        mean, std: per channel, in units of the divided input; None: no normalisation.

    ``val`` may be None for runs with ``validation=false``.
    """

    train: Dataset[Any]
    val: Dataset[Any] | None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    test: Dataset[Any] | None = None

    def resident(self, device: torch.device, trains: bool, validates: bool, tests: bool) -> Splits:
        """The data sets with their samples on a device (data.cache=device), of those that are used."""

        def there(dataset: Any) -> Any:
            return None if dataset is None else dataset.resident(device)

        val, test = there(self.val) if validates else self.val, there(self.test) if tests else self.test
        return replace(self, train=there(self.train) if trains else self.train, val=val, test=test)


class DataSource(ABC):
    """Base class of data sources: where samples come from. Its modules and constructors import nothing heavy.

    Args:
        config: the ``data`` node of the config, resolved, without ``_target_``.

    Attributes:
        options: the keys that ``Options`` declares, typed; further keys of a user's source are in ``config``.
    """

    Options: ClassVar[type[DataConfig]] = DataConfig
    options: DataConfig

    def __init__(self, **config: Any) -> None:
        self.config = OwnKeys("data", config)
        self.options = typed(self.Options, config)

    @abstractmethod
    def facts(self, global_batch_size: int) -> Facts:
        """Return what can be known of the data without writing anything.

        Raises:
            UserError: the data is missing, empty or not what it should be.
        """

    def class_names(self, facts: Facts) -> Sequence[str]:
        """The names of the classes in the order of the labels; empty if they have none."""
        return ()

    def fingerprint(self, facts: Facts) -> str:
        """A text of at most 36 characters that changes with the data, but not with augmentation or where the data lie.

        The default is a digest of config and facts. A source of files should return a digest of their names and sizes
        (``listed``), or of their contents. Called after ``prepare``, but in mode=predict without it. A run is not
        resumed if the fingerprint has changed.
        """
        asked = {k: v for k, v in self.config.items() if k not in READING}
        about = {k: v for k, v in asdict(facts).items() if k not in ABOUT_READING}
        return digest_of(type(self).__qualname__, asked, about)

    @property
    def knows_its_data(self) -> bool:
        """Whether the fingerprint depends on the data: the default one depends only on the config and the facts."""
        return type(self).fingerprint is not DataSource.fingerprint

    sees_pictures: ClassVar[bool] = False
    """Samples are images, and ``preprocessing`` makes a model input of any image file, for mode=predict."""

    def preprocessing(self, facts: Facts) -> Preprocessing:
        """Return how a user's picture becomes a model input, as in validation. May import what it needs."""
        raise NotImplementedError(f"{type(self).__name__} sees no pictures")

    def image_preprocessing(self, facts: Facts) -> dict[str, Any]:
        """The preprocessing of a validation image as plain data, for the plan and ``model.json``; empty: no images.

        ``resize``: pixels of the shorter side; ``crop``: height and width of the centre crop; ``channels``: 3, or 1 for
        grey; ``divide``: divisor of the pixels; ``mean``, ``std``: subtracted, then divided by, for each channel. None:
        not done. The default takes these values from ``preprocessing``.
        """
        if not self.sees_pictures:
            return {}
        found = self.preprocessing(facts)
        view = {
            name: getattr(found.transform, key, None)
            for name, key in (("resize", "resize"), ("crop", "size"), ("channels", "channels"))
        }
        mean, std = (None if t is None else list(t) for t in (found.mean, found.std))
        return {**view, "divide": 255, "mean": mean, "std": std}

    def row_reader(self) -> dict[str, Any] | None:
        """The config node of a ``trainer.data.rows.RowReader``; None if this source reads no rows.
        It is for mode=predict and the logged model. Its keys besides ``_target_`` are keys of ``data``."""
        return None

    def pictures_of(self, table: str) -> tuple[str, list[str]] | None:
        """The folder of the images that a table names, and their paths in it, for mode=predict; None: it reads no
        tables."""
        return None

    def reading_rate(self, facts: Facts) -> float:
        """Measure for a moment how many training samples one reading process gives in a second; 0: not known. Called
        before a run on GPUs, after torch is imported."""
        return 0.0

    def prepare(self, facts: Facts, progress: OnProgress) -> Facts:
        """Download or draw the data, once per run before the workers start. Returns the facts afterwards."""
        return facts

    @abstractmethod
    def open(self, facts: Facts) -> Splits:
        """Open the data sets. Called in each worker."""
