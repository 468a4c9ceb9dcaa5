"""The typed config: every key, its type, default, unit and one line of help, in this one place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional  # OmegaConf reads them


def key(
    default: Any,
    help: str,
    unit: str = "",
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: tuple[Any, ...] = (),
    texts: bool = False,
    or_auto: bool = False,
    length: int | None = None,
    example: Any = None,
) -> Any:
    """Declare a config key: its default, one line of help, its unit, and the values it accepts.

    Limits of a list hold for each of its items; ``length``: how many it has (None: one or more). ``texts``: a text or a
    list of texts; ``or_auto``: a whole number or the word auto. The annotation of both is Any. ``example``: what is
    proposed instead of a refused value (None: the default).
    """
    metadata = {
        "help": help, "unit": unit, "ge": ge, "gt": gt, "le": le, "lt": lt, "choices": choices, "texts": texts,
        "or_auto": or_auto, "length": length, "example": example,
    }  # fmt: skip
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


AUTO = ("auto", True, False)
LONG = 2**63 - 1
"""The largest number of 64 bits: what torch takes as a seed, and numpy as an id."""
LONGEST_S = 1_000_000
"""Eleven days: no wait is longer. In milliseconds it is a number of 32 bits, which ZeroMQ takes."""
MOST_PROCESSES = 4096
"""On a host."""
MOST_HOSTS = 100_000
WIDEST = 65_536
"""Pixels of a side of an image."""


# --- model, loss, optimizer, scheduler: open groups, further keys go to the constructor -----------------------------


@dataclass
class ModelConfig:
    """model: what is trained. Further keys are arguments of the constructor."""

    _target_: str = key("???", "class or function that returns a torch.nn.Module")


@dataclass
class LeNetModel(ModelConfig):
    """model=lenet: two convolutions 5x5 and one linear layer."""

    _target_: str = key("trainer.models.lenet.LeNet", "class or function that returns a torch.nn.Module")
    num_classes: Optional[int] = key(
        "${data.num_classes}", "outputs (null: the data's classes)", "classes", ge=1, le=10_000_000
    )
    in_channels: int = key(1, "channels of an image", "channels", ge=1, le=1_000_000)
    image_size: int = key(28, "height and width of an image, a multiple of 4", "pixels", ge=4, le=WIDEST)


@dataclass
class ResNet18Model(ModelConfig):
    """model=resnet18: ResNet-18 of torchvision."""

    _target_: str = key("torchvision.models.resnet18", "class or function that returns a torch.nn.Module")
    num_classes: Optional[int] = key(
        "${data.num_classes}", "outputs (null: the data's classes)", "classes", ge=1, le=10_000_000
    )
    zero_init_residual: bool = key(False, "residual blocks start as identities: their last norms begin at zero")


@dataclass
class ResNet50Model(ResNet18Model):
    """model=resnet50: ResNet-50 of torchvision, with the keys of model=resnet18."""

    _target_: str = key("torchvision.models.resnet50", "class or function that returns a torch.nn.Module")


@dataclass
class ConvnetModel(ModelConfig):
    """model=convnet: three convolutions 3x3 and two linear layers, for images of 32 pixels."""

    _target_: str = key("trainer.models.convnet.Convnet", "class or function that returns a torch.nn.Module")
    num_classes: Optional[int] = key(
        "${data.num_classes}", "outputs (null: the data's classes)", "classes", ge=1, le=10_000_000
    )


@dataclass
class FinetuneModel(ModelConfig):
    """model=finetune: a model of torchvision with pretrained weights and a new head."""

    _target_: str = key("trainer.models.finetune.finetuned", "class or function that returns a torch.nn.Module")
    name: str = key("resnet50", "its name in torchvision.models")
    weights: str = key("DEFAULT", "name of torchvision's weights, e.g. IMAGENET1K_V2, or a file of weights")
    freeze: str = key("none", "parts that stay as they are: none, or all but the head", choices=("none", "backbone"))
    num_classes: Optional[int] = key(
        "${data.num_classes}", "outputs (null: the data's classes)", "classes", ge=1, le=10_000_000
    )


@dataclass
class TimmModel(ModelConfig):
    """model=timm: any model of timm, which is installed as trainer[timm]."""

    _target_: str = key("timm.create_model", "class or function that returns a torch.nn.Module")
    model_name: str = key("???", "its name in timm, e.g. convnext_tiny")
    pretrained: bool = key(False, "with timm's weights")
    num_classes: Optional[int] = key(
        "${data.num_classes}", "outputs (null: the data's classes)", "classes", ge=1, le=10_000_000
    )


@dataclass
class TorchvisionModel(ModelConfig):
    """model=torchvision: any of torchvision's classification models."""

    _target_: str = key("trainer.models.classifiers.classifier", "class or function that returns a torch.nn.Module")
    name: str = key("???", "its name in torchvision.models, e.g. mobilenet_v3_small")
    num_classes: Optional[int] = key(
        "${data.num_classes}", "outputs (null: the data's classes)", "classes", ge=1, le=10_000_000
    )
    zero_init_residual: bool = key(False, "residual blocks start as identities: their last norms begin at zero")


@dataclass
class WideAndDeepModel(ModelConfig):
    """model=wide_and_deep: a linear model beside a network on embedded ids, for click-through data."""

    _target_: str = key("trainer.models.wide_and_deep.WideAndDeep", "class or function that returns a torch.nn.Module")
    table_size: Optional[int] = key(1000001, "rows of the table that all slots share (null: any id, on servers)", "rows")  # fmt: skip
    embedding_dim: int = key(10, "columns of the table", "columns", ge=1, le=1_000_000)
    dense_features: int = key(13, "numbers of a sample", "features", ge=1, le=1_000_000)
    sparse_slots: int = key(26, "ids of a sample", "slots", ge=1, le=1_000_000)
    hidden: List[int] = key([400, 400, 400], "widths of the network's layers", "units", ge=1, le=1_000_000)
    init_scale: float = key(0.01, "fresh rows are uniform between this and its negative", ge=0)


@dataclass
class LossConfig:
    """loss: what is minimised. Further keys are arguments of the constructor."""

    _target_: str = key("torch.nn.CrossEntropyLoss", "torch.nn.Module called with (outputs, labels), mean over samples")


@dataclass
class CrossEntropyLoss(LossConfig):
    """loss=cross_entropy: for class numbers, or with mixup and cutmix, shares of classes."""

    label_smoothing: float = key(0.0, "share of the label that is spread over all classes", ge=0, le=1)


@dataclass
class SquaredErrorLoss(LossConfig):
    """loss=squared_error: mean over samples and classes of (output - 1 or 0)^2."""

    _target_: str = key("trainer.models.squared_error.SquaredError", "torch.nn.Module called with (outputs, labels), mean over samples")  # fmt: skip


@dataclass
class BinaryCrossEntropyLoss(LossConfig):
    """loss=binary_cross_entropy: for labels 0 and 1 and one logit."""

    _target_: str = key(
        "torch.nn.BCEWithLogitsLoss", "torch.nn.Module called with (outputs, labels), mean over samples"
    )


@dataclass
class OptimizerConfig:
    """optimizer: how a gradient becomes a step. Further keys are arguments of the constructor."""

    _target_: str = key("torch.optim.SGD", "torch.optim.Optimizer called with (parameters, lr=..., ...)")
    lr: float = key(0.01, "learning rate that the scheduler multiplies", gt=0)
    weight_decay: float = key(0.0, "L2 decay; never of sparse embedding tables", ge=0)
    decay_norms_and_biases: bool = key(False, "weight decay also of norms, biases and all else that has one dimension")
    lr_factors: Dict[str, float] = key(
        {}, "factors on lr by parameter name, e.g. {backbone.*: 0.1, stem: 0} (0: frozen)"
    )
    layer_decay: Optional[float] = key(
        None, "factor on lr from each layer to the one before it (null: none)", gt=0, le=1
    )
    lr_scaling: str = key("none", "lr grows with the samples per update / lr_base_batch, or with its root", choices=("none", "linear", "sqrt"))  # fmt: skip
    lr_base_batch: int = key(256, "samples per update for which lr is meant, with lr_scaling", "samples", ge=1)
    sparse: str = key("auto", "rule for embedding tables with sparse gradients (auto: the optimizer's counterpart)", choices=("auto", "sgd", "adagrad", "rowwise_adagrad", "adam"))  # fmt: skip


@dataclass
class MomentumOptimizer(OptimizerConfig):
    """optimizer=momentum: SGD with momentum."""

    lr: float = key(0.1, "learning rate that the scheduler multiplies", gt=0)
    momentum: float = key(0.9, "share of the last step that is kept", ge=0)
    nesterov: bool = key(False, "Nesterov's momentum")


@dataclass
class RMSpropOptimizer(OptimizerConfig):
    """optimizer=rmsprop: steps are divided by a running mean of the gradient's size."""

    _target_: str = key("torch.optim.RMSprop", "torch.optim.Optimizer called with (parameters, lr=..., ...)")
    alpha: float = key(0.99, "decay of the running mean of the squared gradient", ge=0, le=1)
    eps: float = key(1e-8, "added to the denominator", ge=0)
    momentum: float = key(0.0, "share of the last step that is kept", ge=0)
    centered: bool = key(False, "divide by the deviation instead of the size")


@dataclass
class AdamOptimizer(OptimizerConfig):
    """optimizer=adam."""

    _target_: str = key("torch.optim.Adam", "torch.optim.Optimizer called with (parameters, lr=..., ...)")
    lr: float = key(0.001, "learning rate that the scheduler multiplies", gt=0)
    betas: List[float] = key([0.9, 0.999], "decay of the running means of gradient and squared gradient", ge=0, lt=1, length=2)  # fmt: skip
    eps: float = key(1e-8, "added to the denominator", ge=0)


@dataclass
class AdamWOptimizer(AdamOptimizer):
    """optimizer=adamw: Adam with decoupled weight decay."""

    _target_: str = key("torch.optim.AdamW", "torch.optim.Optimizer called with (parameters, lr=..., ...)")
    weight_decay: float = key(0.01, "decoupled decay; never of sparse embedding tables", ge=0)


@dataclass
class AdagradOptimizer(OptimizerConfig):
    """optimizer=adagrad: steps shrink with what a parameter has moved, which suits features that are rare."""

    _target_: str = key("torch.optim.Adagrad", "torch.optim.Optimizer called with (parameters, lr=..., ...)")
    initial_accumulator_value: float = key(0.0, "sum of squared gradients at the start", ge=0)
    eps: float = key(1e-10, "added to the denominator", ge=0)


@dataclass
class TorchOptimizer(OptimizerConfig):
    """optimizer=torch: any of torch.optim's classes."""

    _target_: str = key("trainer.optim.by_name.by_name", "torch.optim.Optimizer called with (parameters, lr=..., ...)")
    name: str = key("???", "its name in torch.optim, e.g. RMSprop")


@dataclass
class SchedulerConfig:
    """scheduler: a factor on optimizer.lr at every update."""

    _target_: str = key("trainer.optim.schedules.Constant", "class with factor(step) -> float")
    warmup_epochs: float = key(0.0, "linear warm-up before the schedule", "epochs", ge=0, le=1e9)
    warmup_steps: Optional[int] = key(None, "linear warm-up, instead of warmup_epochs", "updates", ge=0)
    warmup_start: float = key(0.0, "factor at the first update of the warm-up", ge=0, le=1)


@dataclass
class StepSchedule(SchedulerConfig):
    """scheduler=step: drops by gamma every so many epochs."""

    _target_: str = key("trainer.optim.schedules.Step", "class with factor(step) -> float")
    every_epochs: float = key(30.0, "epochs between two drops", "epochs", gt=0, le=1e9)
    gamma: float = key(0.1, "factor of each drop", gt=0, le=1)


@dataclass
class MultiStepSchedule(SchedulerConfig):
    """scheduler=multistep: drops by gamma at given epochs."""

    _target_: str = key("trainer.optim.schedules.MultiStep", "class with factor(step) -> float")
    milestones: List[float] = key([30.0, 60.0, 90.0], "epochs of the drops, from the start of the run", gt=0, le=1e9)
    gamma: float = key(0.1, "factor of each drop", gt=0, le=1)


@dataclass
class PolynomialSchedule(SchedulerConfig):
    """scheduler=polynomial: a power of what is left of the run; power 1 is a straight line."""

    _target_: str = key("trainer.optim.schedules.Polynomial", "class with factor(step) -> float")
    power: float = key(1.0, "power of the share of updates that are left", gt=0, le=1000)
    final: float = key(0.0, "factor at the last update", ge=0, le=1)


@dataclass
class OneCycleSchedule(SchedulerConfig):
    """scheduler=one_cycle: up to lr and down again; optimizer.lr is the peak."""

    _target_: str = key("trainer.optim.schedules.OneCycle", "class with factor(step) -> float")
    rise: float = key(0.3, "share of the updates that lead up", ge=0, le=1)
    initial: float = key(0.04, "factor at the first update", ge=0, le=1)
    final: float = key(4e-6, "factor at the last update", ge=0, le=1)
    anneal: str = key("cos", "shape of both ways", choices=("cos", "linear"))


@dataclass
class PlateauSchedule(SchedulerConfig):
    """scheduler=plateau: drops by gamma when a validation metric has stopped getting better."""

    _target_: str = key("trainer.optim.schedules.Plateau", "class with factor(step) -> float")
    metric: str = key("val/loss", "validation metric that is watched")
    gamma: float = key(0.1, "factor of each drop", gt=0, le=1)
    patience: int = key(10, "validations without a better value that are borne", "validations", ge=0)
    min_delta: float = key(1e-4, "a value counts as better only when it is better by more than this", ge=0)
    cooldown: int = key(0, "validations after a drop that count as neither", "validations", ge=0)
    least: float = key(0.0, "the factor does not fall below this", ge=0, le=1)


@dataclass
class CosineSchedule(SchedulerConfig):
    """scheduler=cosine: half a cosine down to final at the last update."""

    _target_: str = key("trainer.optim.schedules.Cosine", "class with factor(step) -> float")
    final: float = key(0.0, "factor at the last update", ge=0, le=1)


# --- data, sampler --------------------------------------------------------------------------------------------------


@dataclass
class DataConfig:
    """data: what is learnt from, and in which portions."""

    _target_: str = key("???", "class, a trainer.data.source.DataSource")
    num_classes: Optional[int] = key(
        None, "number of classes (null: as many as the data have)", "classes", ge=1, le=10_000_000
    )
    batch_size: Optional[int] = key(None, "samples per worker and batch (null: from global_batch_size, else 32); more workers, larger and fewer updates", "samples", ge=1)  # fmt: skip
    global_batch_size: Optional[int] = key(None, "samples per update, whatever the workers and gradient_merge.k_steps: shared out once, unevenly if need be", "samples", ge=1)  # fmt: skip
    val_batch_size: Optional[int] = key(None, "samples per worker and evaluation batch (null: as batch_size)", "samples", ge=1)  # fmt: skip
    num_workers: Optional[Any] = key("auto", "processes that read data, per worker (auto, null: from the cores, and more where first updates wait)", "processes", ge=0, le=MOST_PROCESSES, or_auto=True)  # fmt: skip
    prefetch: Any = key(
        "auto", "batches that each of these processes keeps ready", "batches", ge=1, le=10_000, or_auto=True
    )
    work: str = key("auto", "split beforehand, or leased in blocks while the epoch lasts (auto: where the strategy can)", choices=("auto", "static", "leased"))  # fmt: skip
    lease_batches: Optional[int] = key(None, "batches in a leased block (null: 8 blocks per worker and epoch, of at most 64)", "batches", ge=1)  # fmt: skip
    on_lost_worker: str = key("take_over", "leased work of a worker that died: others take it over, or it is dropped", choices=("take_over", "drop"))  # fmt: skip
    pin_memory: Any = key("auto", "page-locked batches for faster copies to a GPU", choices=AUTO)
    read: str = key("each", "each worker reads its own samples, or the first reads all and scatters them", choices=("each", "scatter"))  # fmt: skip


@dataclass
class PicturesData(DataConfig):
    """data: what may come from outside as pictures, of which mode=predict looks at any."""

    max_pixels: int = key(150_000_000, "greatest width x height of an image; a larger one counts as broken", "pixels", ge=1)  # fmt: skip
    max_file_mib: int = key(256, "greatest size of a file that is read whole, and of a packed one when unpacked", "MiB", ge=1)  # fmt: skip


@dataclass
class DigitsData(PicturesData):
    """data=digits: the 1,797 handwritten digits that scikit-learn ships, (1, 8, 8)."""

    _target_: str = key("trainer.data.sets.digits.Digits", "class, a trainer.data.source.DataSource")
    num_classes: Optional[int] = key(10, "number of classes", "classes", ge=1, le=10_000_000)
    val_fraction: float = key(0.2, "share held out for validation", gt=0, le=0.9)
    split_seed: int = key(0, "seed of the split", ge=0, le=LONG)


@dataclass
class RandomImagesData(DataConfig):
    """data=random_images: noise of (3, S, S) with random labels, for throughput."""

    _target_: str = key("trainer.data.sets.random_images.RandomImages", "class, a trainer.data.source.DataSource")
    num_classes: Optional[int] = key(102, "number of classes", "classes", ge=1, le=10_000_000)
    image_size: int = key(224, "height and width", "pixels", ge=1, le=WIDEST)
    batches: int = key(100, "global batches per epoch, of batch_size * workers * gradient_merge.k_steps samples", "batches", ge=1)  # fmt: skip
    val_batches: int = key(5, "global batches per validation, of as many samples", "batches", ge=1)


@dataclass
class AugmentedData(PicturesData):
    """data: what all sets of images can do to their training images."""

    flip: float = key(0.5, "probability of a horizontal flip", ge=0, le=1)
    augment: str = key("none", "policy of further changes", choices=("none", "randaugment", "trivialaugment", "autoaugment"))  # fmt: skip
    randaugment_ops: int = key(2, "changes of an image by randaugment", "changes", ge=1, le=100)
    randaugment_magnitude: int = key(9, "strength of randaugment's changes, of 30", ge=0, le=30)
    erasing: float = key(0.0, "probability of an erased patch", ge=0, le=1)
    mixup: float = key(0.0, "alpha of mixup within a worker's batch (0: none; usual: 0.2)", ge=0, le=1000)
    cutmix: float = key(0.0, "alpha of cutmix within a worker's batch (0: none; usual: 1.0)", ge=0, le=1000)
    mix_probability: float = key(1.0, "probability of a batch to be mixed, where mixup or cutmix is on", ge=0, le=1)


@dataclass
class ImagesData(AugmentedData):
    """data: what all sets of image files can do. Training images are (3, S, S) uint8 until they are on the device."""

    image_size: int = key(224, "height and width of a training image", "pixels", ge=16, le=WIDEST)
    val_size: Optional[int] = key(
        None, "height and width of a validation image (null: image_size)", "pixels", ge=16, le=WIDEST
    )
    val_resize: Optional[int] = key(None, "shorter side before the centre crop (null: 8/7 of val_size)", "pixels", ge=16, le=WIDEST)  # fmt: skip
    min_scale: float = key(0.35, "least share of an image's area in a random crop", gt=0, le=1)
    min_ratio: float = key(0.75, "least width / height of a random crop; the greatest is its inverse", gt=0, le=1)
    transforms: List[Any] = key([], "further changes of training images: [{_target_: torchvision.transforms.v2.ColorJitter, hue: 0.1}]")  # fmt: skip
    cache: str = key("auto", "decode once and keep the pixels in memory (auto: what fits)", choices=("auto", "ram", "none"))  # fmt: skip
    cache_dir: Optional[str] = key(None, "folder of the decoded pixels (null: in the user's cache, $TRAINER_CACHE)")
    verify: bool = key(False, "decode every image before the training and name those that are broken")
    on_bad: str = key("error", "what to do with broken images that were found: end, or leave them out", choices=("error", "skip"))  # fmt: skip


@dataclass
class FlowersData(ImagesData):
    """data=flowers102 and data=embedded_flowers: 102 classes of flowers, (3, S, S)."""

    num_classes: Optional[int] = key(102, "number of classes", "classes", ge=1, le=10_000_000)


@dataclass
class Flowers102Data(FlowersData):
    """data=flowers102: Oxford Flowers-102 if it is there or can be had, else the embedded flowers, said loudly."""

    _target_: str = key("trainer.data.sets.flowers.Flowers102", "class, a trainer.data.source.DataSource")
    root: str = key("${oc.env:TRAINER_DATA,data}", "folder that holds flowers-102/ as torchvision lays it out")
    download: bool = key(True, "fetch the set when it is missing and its site can be reached")
    on_missing: str = key("embedded", "what to do when the set cannot be had", choices=("embedded", "error"))


@dataclass
class EmbeddedFlowersData(FlowersData):
    """data=embedded_flowers: procedurally drawn flowers, the same on every machine."""

    _target_: str = key("trainer.data.sets.flowers.EmbeddedFlowers", "class, a trainer.data.source.DataSource")
    draw_seed: int = key(0, "seed of the drawing", ge=0, le=LONG)
    per_class: int = key(10, "images per class and split", "images", ge=1, le=100_000)


@dataclass
class ImageFolderData(ImagesData):
    """data=imagefolder: any folder of class folders, with train/ and val/ or without."""

    _target_: str = key("trainer.data.sets.image_folder.ImageFolder", "class, a trainer.data.source.DataSource")
    root: str = key("???", "folder that holds train/CLASS/ and val/CLASS/ (or valid, test), or CLASS/")
    val: Optional[str] = key(None, "name of the validation folder in root (null: the first of val, valid, validation, test)")  # fmt: skip
    val_fraction: float = key(0.2, "share of each class held out, where there is no validation folder", gt=0, le=0.9)
    split_seed: int = key(0, "seed of that split", ge=0, le=LONG)


@dataclass
class ShardsData(ImagesData):
    """data=shards: tar files in WebDataset's layout (NAME.jpg with NAME.cls or NAME.json)."""

    _target_: str = key("trainer.data.sets.shards.Shards", "class, a trainer.data.source.DataSource")
    max_label_kib: int = key(1024, "greatest size of a label (NAME.cls, NAME.json)", "KiB", ge=1)
    max_depth: int = key(64, "how often lists and mappings may lie in one another in NAME.json", "levels", ge=1)
    path: Any = key("???", "a tar file, a pattern such as DIR/train-{000..099}.tar, or a list of these", texts=True)
    val_path: Optional[Any] = key(None, "the same, for validation (null: val_fraction of the samples)", texts=True)
    val_fraction: float = key(0.1, "share of each class held out, where there is no val_path", gt=0, le=0.9)
    split_seed: int = key(0, "seed of that split", ge=0, le=LONG)


@dataclass
class ArraysData(AugmentedData):
    """data=cifar10 and data=mnist: small images in memory, augmented a whole batch at a time."""

    num_classes: Optional[int] = key(10, "number of classes", "classes", ge=1, le=10_000_000)
    pad_crop: int = key(0, "a window of the image's size in the image with a frame of so many zeros", "pixels", ge=0, le=1024)  # fmt: skip
    root: str = key("${oc.env:TRAINER_DATA,data}", "folder that holds the set as torchvision lays it out")
    download: bool = key(True, "fetch the set when it is missing and its site can be reached")
    on_missing: str = key("embedded", "what to do when the set cannot be had", choices=("embedded", "error"))


@dataclass
class Cifar10Data(ArraysData):
    """data=cifar10: CIFAR-10, (3, 32, 32); where it cannot be had, small drawn flowers, said loudly."""

    _target_: str = key("trainer.data.sets.cifar.Cifar10", "class, a trainer.data.source.DataSource")
    pad_crop: int = key(4, "a window of the image's size in the image with a frame of so many zeros", "pixels", ge=0, le=1024)  # fmt: skip


@dataclass
class MnistData(ArraysData):
    """data=mnist: MNIST, (1, 28, 28); where it cannot be had, scikit-learn's digits drawn larger, said loudly."""

    _target_: str = key("trainer.data.sets.mnist.Mnist", "class, a trainer.data.source.DataSource")
    flip: float = key(0.0, "probability of a horizontal flip", ge=0, le=1)


@dataclass
class MnistJsonData(DataConfig):
    """data=mnist_json: MNIST as one JSON file, plain or .gz, of three parts [[images, labels], ...]."""

    _target_: str = key("trainer.data.sets.mnist_json.MnistJson", "class, a trainer.data.source.DataSource")
    num_classes: Optional[int] = key(10, "number of classes", "classes", ge=1, le=10_000_000)
    path: str = key("${oc.env:TRAINER_DATA,data}/mnist.json.gz", "the file")
    max_file_mib: int = key(4096, "greatest size of the file, unpacked", "MiB", ge=1)
    val_split: str = key("valid", "part that is used for validation", choices=("valid", "eval"))


@dataclass
class CriteoRows(DataConfig):
    """data=criteo and data=synthetic_criteo: rows of a label, 13 integers and 26 tokens, any of which may be empty."""

    num_classes: Optional[int] = key(2, "number of classes", "classes", ge=1, le=10_000_000)
    hash_size: Optional[int] = key(1000001, "slot and token are hashed to ids below this (null: of 63 bits)", "ids", ge=2, le=LONG)  # fmt: skip
    cache: bool = key(True, "convert the text once into arrays in the user's cache; false: read it anew in every epoch")
    cache_dir: Optional[str] = key(None, "folder of these arrays (null: in the user's cache, $TRAINER_CACHE)")
    block_mib: int = key(16, "piece of a text file that a worker takes at a time, without cache", "MiB", ge=1, le=1_000_000)  # fmt: skip
    chunk_rows: int = key(8192, "rows that are parsed at a time, without cache", "rows", ge=1, le=100_000_000)
    max_bad_fraction: float = key(0.01, "share of rows that may be malformed; they are left out", ge=0, le=1)


@dataclass
class CriteoData(CriteoRows):
    """data=criteo: Criteo's click logs as text, plain or .gz."""

    _target_: str = key("trainer.data.criteo.source.Criteo", "class, a trainer.data.source.DataSource")
    path: Any = key("???", "a file, a folder, a pattern such as day_*.gz, or a list of these", texts=True)
    val_path: Optional[Any] = key(None, "the same, for validation (null: val_fraction of the rows)", texts=True)
    val_fraction: float = key(0.1, "share of the rows held out for validation, where there is no val_path", gt=0, le=0.9)  # fmt: skip


@dataclass
class SyntheticCriteoData(CriteoRows):
    """data=synthetic_criteo: rows in Criteo's format drawn by a teacher whose AUC is known."""

    _target_: str = key("trainer.data.criteo.synthetic.SyntheticCriteo", "class, a trainer.data.source.DataSource")
    train_rows: int = key(500000, "rows for training", "rows", ge=100, le=10**11)
    val_rows: int = key(100000, "rows for validation", "rows", ge=100, le=10**11)
    draw_seed: int = key(0, "seed of the teacher and of the rows", ge=0, le=LONG)


@dataclass
class SamplerConfig:
    """sampler: which worker sees which sample when."""

    shuffle: bool = key(True, "a new order each epoch, from (seed, epoch)")
    drop_last: bool = key(
        True, "leave out the epoch's last batch (with data.global_batch_size: update) when it is not full"
    )
    pad: bool = key(
        True, "with data.batch_size: repeat samples so that all workers get equally many; false: unequal, weighted"
    )
    order: str = key("each_once", "each sample once, every class equally often, or some samples several times", choices=("each_once", "class_balanced", "repeated_augmentation"))  # fmt: skip
    repeats: int = key(3, "uses of a sample side by side, with order=repeated_augmentation", "uses", ge=1, le=1000)


# --- strategy -------------------------------------------------------------------------------------------------------


@dataclass
class GradientMerge:
    """strategy.gradient_merge: several batches make one update."""

    k_steps: int = key(1, "batches (of data.batch_size each) per update", "batches", ge=1)
    avg: bool = key(True, "average over the merged batches; false: their sum")


@dataclass
class StrategyConfig:
    """strategy: how the workers' gradients become shared parameters (Fleet's DistributedStrategy)."""

    _target_: str = key("trainer.strategies.builtin.Single", "class, a trainer.strategies.contract.Declaration")
    gradient_merge: GradientMerge = key(GradientMerge, "several batches make one update")
    clip_norm: Optional[float] = key(None, "greatest L2 norm of the whole gradient of an update", gt=0)
    clip_value: Optional[float] = key(None, "greatest magnitude of each element of an update's gradient", gt=0)


@dataclass
class GroupStrategy(StrategyConfig):
    """strategy: what each one with a process group declares."""

    _target_: str = key("???", "class, a trainer.strategies.contract.Declaration")
    timeout_s: float = key(600.0, "longest wait at a meeting point of the workers", "seconds", gt=0, le=LONGEST_S)
    init: str = key("broadcast", "equal start: broadcast rank 0's parameters, or draw them from the same seed everywhere", choices=("broadcast", "same_seed"))  # fmt: skip
    buffers: str = key("rank0", "batch-norm statistics after a step: rank 0's, or their average", choices=("rank0", "average"))  # fmt: skip
    sync_batch_norm: bool = key(False, "batch-norm statistics over the global batch")


@dataclass
class PowerSgd:
    """strategy.powersgd: PowerSGD's compression of gradients, with error feedback."""

    rank: int = key(1, "rank of the two factors that stand for a matrix of gradients", "columns", ge=1, le=1_000_000)  # fmt: skip
    start_step: int = key(10, "updates with whole gradients before compression begins", "updates", ge=2)


@dataclass
class CollectiveStrategy(GroupStrategy):
    """strategy=collective: DDP, gradients averaged over all workers at every update."""

    _target_: str = key("trainer.strategies.builtin.Collective", "class, a trainer.strategies.contract.Declaration")
    bucket_cap_mb: float = key(25.0, "size of a gradient bucket that is reduced while backward goes on", "MiB", gt=0, le=1_000_000)  # fmt: skip
    find_unused_parameters: bool = key(False, "the model has parameters that a step may not use")
    static_graph: bool = key(False, "every step uses the same parameters, which DDP learns from the first")
    gradient_as_bucket_view: bool = key(
        True, "gradients lie in the buckets themselves; false: are copied there and back"
    )
    comm_hook: str = key("none", "what travels: gradients as they are, as fp16 or bf16, or PowerSGD's low-rank factors", choices=("none", "fp16", "bf16", "powersgd"))  # fmt: skip
    powersgd: PowerSgd = key(PowerSgd, "with comm_hook=powersgd: how gradients are compressed")


@dataclass
class LocalSgdStrategy(GroupStrategy):
    """strategy=local_sgd: workers train apart and average their parameters."""

    _target_: str = key("trainer.strategies.builtin.LocalSgd", "class, a trainer.strategies.contract.Declaration")
    k_steps: int = key(4, "updates between two averages of the parameters", "updates", ge=1)
    begin_step: int = key(0, "average after every update until this one", "updates", ge=0)


@dataclass
class Entry:
    """strategy.entry: when an id becomes a row of a sparse table."""

    count: int = key(1, "pushes of an id until it becomes a row; until then it reads as a fresh one", "pushes", ge=1)
    probability: float = key(1.0, "chance of a push of an absent id to make it a row", gt=0, le=1)


@dataclass
class PserverStrategy(StrategyConfig):
    """strategy=pserver_*: what all parameter-server modes declare."""

    _target_: str = key("???", "class, a trainer.strategies.contract.Declaration")
    timeout_s: float = key(600.0, "longest wait at a meeting point of the workers", "seconds", gt=0, le=LONGEST_S)
    transport: str = key("auto", "tcp: encrypted; auto: that, or Unix sockets where all processes are on one host", choices=("auto", "tcp"))  # fmt: skip
    lost_after_s: float = key(10.0, "silence after which a worker counts as lost", "seconds", gt=0, le=LONGEST_S)
    split_method: str = key("round_robin", "servers of the parameters that stay whole: in turn, or by a hash of the name", choices=("round_robin", "hash_name"))  # fmt: skip
    slice_above: Optional[int] = key(8192, "larger parameters are cut evenly over all servers (null: none is)", "elements", ge=1)  # fmt: skip
    wire: str = key("full", "values on the wire: as they are, bf16, or int8 with error feedback", choices=("full", "bf16", "int8"))  # fmt: skip
    buffers: str = key("rank0", "batch-norm statistics: the first worker's, or their average", choices=("rank0", "average"))  # fmt: skip
    entry: Entry = key(Entry, "when an id becomes a row of a sparse table")
    evict_after: Optional[int] = key(None, "rows untouched for so long are dropped at validations and at the end (null: never)", "steps or event time", ge=1, le=LONG)  # fmt: skip
    evict_by: str = key("steps", "the age of rows: steps of the worker that has done most, or the data's own time (inputs['time'])", choices=("steps", "event_time"))  # fmt: skip
    load_from: Optional[str] = key(None, "folder of persistables that the servers start from")
    persistables: bool = key(True, "servers save tables, optimizer state and watermarks at the end")
    export_limit: int = key(200000000, "larger tables are left out of model.safetensors", "values", ge=0, le=LONG)


@dataclass
class PserverSyncStrategy(PserverStrategy):
    """strategy=pserver_sync: one global step of all workers, equal to one process on the global batch."""

    _target_: str = key("trainer.strategies.builtin.PserverSync", "class, a trainer.strategies.contract.Declaration")
    on_lost_worker: str = key("stop", "when a worker dies: end with an error, or go on with the rest", choices=("stop", "continue"))  # fmt: skip


@dataclass
class StaleStrategy(PserverStrategy):
    """strategy=pserver_async and pserver_ssp: pushes are applied when they come."""

    send_queue_size: int = key(4, "pushes under way per worker; then it waits", "pushes", ge=1, le=1_000_000)
    thread_pool_size: int = key(1, "ZeroMQ's I/O threads per worker", "threads", ge=1, le=1024)
    launch_barrier: bool = key(True, "all workers begin their first step together")
    delay_compensation: float = key(
        0.0, "lambda of DC-ASGD: gradients follow the parameters that moved meanwhile", ge=0
    )
    staleness_power: float = key(0.0, "the learning rate is divided by (1 + staleness) to this power", ge=0, le=100)


@dataclass
class PserverAsyncStrategy(StaleStrategy):
    """strategy=pserver_async: nobody waits."""

    _target_: str = key("trainer.strategies.builtin.PserverAsync", "class, a trainer.strategies.contract.Declaration")
    max_merge_var_num: int = key(1, "gradients that are added up to one push while the queue is full", "batches", ge=1)
    send_wait_times: int = key(0, "batches that a push waits for more gradients although it could go", "batches", ge=0)
    independent_recv_thread: Any = key("auto", "ask for the next batch's parameters before this one is computed (auto: if it has tables)", choices=AUTO)  # fmt: skip
    min_send_grad_num_before_recv: int = key(1, "updates between two pulls of dense parameters", "updates", ge=1)


@dataclass
class PserverSspStrategy(StaleStrategy):
    """strategy=pserver_ssp: asynchronous with a bound."""

    _target_: str = key("trainer.strategies.builtin.PserverSsp", "class, a trainer.strategies.contract.Declaration")
    staleness: int = key(4, "most steps between the fastest and the slowest worker", "steps", ge=0)


@dataclass
class PserverGeoStrategy(PserverStrategy):
    """strategy=pserver_geo: local training, differences exchanged."""

    _target_: str = key("trainer.strategies.builtin.PserverGeo", "class, a trainer.strategies.contract.Declaration")
    k_steps: int = key(100, "updates between two exchanges", "updates", ge=1)
    overlap: bool = key(True, "go on while an exchange is under way; false: wait for it")


# --- launch, execution, tracking ------------------------------------------------------------------------------------


@dataclass
class LaunchConfig:
    """launch: how many processes, and where."""

    nproc: Optional[int] = key(None, "workers on this host (null: one per GPU, else 1)", "processes", ge=1, le=MOST_PROCESSES)  # fmt: skip
    servers: Optional[int] = key(None, "parameter-server processes, for strategies that have them", "processes", ge=1, le=MOST_PROCESSES)  # fmt: skip
    workers: Optional[int] = key(None, "workers in all, the other way to say nproc on one host", "processes", ge=1)
    nnodes: int = key(1, "hosts", "hosts", ge=1, le=MOST_HOSTS)
    node_rank: int = key(0, "which of the hosts this one is", ge=0)
    master_addr: str = key("127.0.0.1", "address of host 0 that the others can reach")
    master_port: int = key(0, "port on host 0 where the processes meet (0: a free one, on one host)", ge=0, le=65535, example=29500)  # fmt: skip
    ips: Optional[str] = key(None, "the hosts' addresses, separated by commas, instead of nnodes and master_addr")
    timeout_s: float = key(300.0, "longest wait for all hosts and processes to arrive", "seconds", gt=0, le=LONGEST_S)


@dataclass
class ExecutionConfig:
    """execution: how the arithmetic is done and how often it is looked at."""

    channels_last: Any = key("auto", "images in memory as (N, H, W, C)", choices=AUTO)
    keep_memory: Any = key("auto", "keep freed memory in the process (glibc mallopt), for CPU training", choices=AUTO)
    deterministic: bool = key(False, "only deterministic kernels")
    threads: Optional[int] = key(None, "CPU threads per worker (null: cores / workers; 1 where a batch is little work)", "threads", ge=1, le=MOST_PROCESSES)  # fmt: skip
    log_every: int = key(5, "batches that a printed and logged line averages, whatever their epochs", "batches", ge=1)
    val_every: int = key(1, "epochs between two validations (0: only after the last)", "epochs", ge=0)
    val_every_steps: Optional[int] = key(None, "updates between two validations, besides val_every", "updates", ge=1)
    profile_after: int = key(10, "with profile=true: updates before the first that is traced", "updates", ge=0)
    profile_steps: int = key(5, "with profile=true: updates that are traced", "updates", ge=1)


@dataclass
class TrackingConfig:
    """tracking: where metrics go besides the run's own folder."""

    kind: str = key("mlflow", "mlflow, or none", choices=("mlflow", "none"))
    uri: Optional[str] = key(None, "MLflow tracking URI (null: $MLFLOW_TRACKING_URI, else sqlite:///mlflow.db)")
    experiment: Optional[str] = key(None, "MLflow experiment (null: the run's name)")
    run_name: Optional[str] = key(None, "MLflow run name (null: what differs from the recipe)")
    tags: Dict[str, str] = key({}, "further tags of the MLflow run")
    flush_timeout_s: float = key(60.0, "longest wait at the end for what is not sent yet, the model included", "seconds", ge=0, le=LONGEST_S)  # fmt: skip
    log_model: bool = key(True, "the best model becomes an MLflow model, for mlflow.pyfunc.load_model")
    log_last_model: bool = key(False, "beside the best model, the one at the end becomes an MLflow model")
    system_every_s: Optional[float] = key(10.0, "between two measurements of each host's load (null: none)", "seconds", gt=0, le=LONGEST_S)  # fmt: skip


@dataclass
class PredictConfig:
    """predict: which images or rows mode=predict looks at, and where it writes what they show."""

    input: Optional[str] = key(None, "folder of images, with all folders in it; of rows a file, folder or pattern")
    output: Optional[str] = key(None, "CSV file of the guesses (null: predictions.csv in the run's folder)")


@dataclass
class EmaConfig:
    """ema: a moving average of the weights, evaluated and saved beside the model."""

    decay: Optional[float] = key(None, "share of the average that each update keeps, e.g. 0.999 (null: no average)", ge=0, lt=1, example=0.999)  # fmt: skip
    warmup: bool = key(False, "the decay grows with the updates n, as 1 - (1 + n / gamma) ** -power")
    gamma: float = key(1.0, "of the warm-up: twice as much needs twice the updates", gt=0)
    power: float = key(2 / 3, "of the warm-up: 2/3 for a million updates and more, 3/4 for fewer", gt=0, le=1000)


@dataclass
class BestConfig:
    """best: which model checkpoints/best.safetensors is."""

    metric: Optional[str] = key(None, "validation metric, e.g. val/loss, val/acc5, val_ema/acc1 (null: acc1, or auc)")


@dataclass
class EarlyStopConfig:
    """early_stop: end before the last epoch when a validation metric has stopped getting better."""

    metric: Optional[str] = key(None, "validation metric that is watched, e.g. val/loss (null: never stop early)")
    patience: int = key(5, "validations in a row without a better value after which the run ends", "validations", ge=1)
    min_delta: float = key(0.0, "a value counts as better only when it is better by more than this", ge=0)


@dataclass
class Config:
    """The whole run."""

    name: str = key("custom", "the recipe's name: MLflow experiment and folder under outputs/")
    mode: str = key("train", "what to do", choices=("train", "eval", "predict"))
    weights: Optional[str] = key(None, "what mode=eval and predict load: .safetensors, .pt, or the folder of a run")
    epochs: int = key(10, "passes over the training data", "epochs", ge=1)
    max_steps: Optional[int] = key(None, "end after so many updates, whatever epochs says", "updates", ge=1)
    limit_train_batches: Optional[int] = key(None, "use only so many batches of each epoch", "batches", ge=1)
    limit_val_batches: Optional[int] = key(None, "use only so many batches of each validation", "batches", ge=1)
    seed: int = key(0, "seed of parameters, order of samples, augmentation", ge=0, le=LONG)
    precision: str = key("auto", "arithmetic of the forward pass", choices=("auto", "fp64", "fp32", "bf16", "fp16"))
    device: str = key("auto", "where to compute", choices=("auto", "cpu", "cuda"))
    compile: bool = key(False, "compile the model (static graph) instead of running it eagerly")
    profile: bool = key(False, "trace a few updates with torch's profiler and print where their time goes")
    plan: bool = key(False, "print the plan and stop")
    debug: bool = key(False, "show tracebacks of errors")
    verbosity: str = key(
        "normal",
        "quiet: warnings and the last lines; debug: tracebacks, and what every process prints",
        choices=("quiet", "normal", "debug"),
    )
    ema: EmaConfig = key(EmaConfig, "a moving average of the weights, evaluated and saved beside the model")
    best: BestConfig = key(BestConfig, "which model checkpoints/best.safetensors is")
    early_stop: EarlyStopConfig = key(EarlyStopConfig, "end when a validation metric has stopped getting better")
    callbacks: List[Any] = key([], "called at the start, after updates, validations and at the end: [{_target_: my_package.MyCallback}]")  # fmt: skip
    metrics: Dict[str, Any] = key({}, "further metrics of validations, by name: {f1w: {_target_: torchmetrics.classification.MulticlassF1Score}}")  # fmt: skip
    model: Any = key("???", "group: what is trained")
    data: Any = key("???", "group: what is learnt from")
    sampler: Any = key("???", "group: which worker sees which sample when")
    loss: Any = key("???", "group: what is minimised")
    optimizer: Any = key("???", "group: how a gradient becomes a step")
    scheduler: Any = key("???", "group: a factor on the learning rate")
    strategy: Any = key("???", "group: how gradients become shared parameters")
    launch: Any = key("???", "group: how many processes, and where")
    execution: Any = key("???", "group: arithmetic and rhythm")
    tracking: Any = key("???", "group: where metrics go")
    predict: Any = key("???", "group: which images or rows mode=predict looks at")


GROUPS: dict[str, tuple[type, ...]] = {
    "model": (
        ModelConfig, LeNetModel, ConvnetModel, ResNet18Model, ResNet50Model, TorchvisionModel, FinetuneModel, TimmModel,
        WideAndDeepModel,
    ),
    "data": (
        DataConfig, DigitsData, RandomImagesData, PicturesData, AugmentedData, ImagesData, FlowersData, Flowers102Data,
        EmbeddedFlowersData, ImageFolderData, ShardsData, ArraysData, Cifar10Data, MnistData, MnistJsonData, CriteoRows,
        CriteoData, SyntheticCriteoData,
    ),
    "sampler": (SamplerConfig,),
    "loss": (LossConfig, CrossEntropyLoss, SquaredErrorLoss, BinaryCrossEntropyLoss),
    "optimizer": (
        OptimizerConfig, MomentumOptimizer, RMSpropOptimizer, AdamOptimizer, AdamWOptimizer, AdagradOptimizer,
        TorchOptimizer,
    ),
    "scheduler": (
        SchedulerConfig, StepSchedule, MultiStepSchedule, CosineSchedule, OneCycleSchedule, PolynomialSchedule,
        PlateauSchedule,
    ),
    "strategy": (
        StrategyConfig, GroupStrategy, CollectiveStrategy, LocalSgdStrategy, PserverStrategy, PserverSyncStrategy,
        StaleStrategy, PserverAsyncStrategy, PserverSspStrategy, PserverGeoStrategy,
    ),
    "launch": (LaunchConfig,),
    "execution": (ExecutionConfig,),
    "tracking": (TrackingConfig,),
    "predict": (PredictConfig,),
}  # fmt: skip


OPEN_GROUPS = ("model", "data", "loss", "optimizer", "scheduler", "strategy")
"""Groups whose option names a class by ``_target_``: a user's own class may take further keys."""

CONSTRUCTED = ("model", "loss", "optimizer")
"""Of these, the ones whose further keys are arguments of a constructor that is not ours."""

NOT_ARGUMENTS = {
    "optimizer": ("sparse", "decay_norms_and_biases", "lr_factors", "layer_decay", "lr_scaling", "lr_base_batch"),
    "model": ("zero_init_residual",),
}
"""Keys of these that the constructor does not get."""

WEIGHT_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""What the name of a file of weights ends with."""
