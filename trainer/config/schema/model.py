"""model, loss: what is trained and what is minimised. Open groups: further keys go to the constructor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, Optional  # OmegaConf reads them

from trainer.config.schema.declare import WIDEST, key


def _model(target: str) -> Any:
    return key(target, "class or function that returns a torch.nn.Module")


def _loss(target: str) -> Any:
    return key(target, "torch.nn.Module called with (outputs, labels), mean over samples")


def _outputs() -> Any:
    return key("${data.num_classes}", "outputs (null: the data's classes)", "classes", ge=1, le=10_000_000)


def _first_parameters() -> Any:
    help = "first parameters: as the model draws them, or as the reference's examples do"
    return key("default", help, choices=("default", "reference"))


@dataclass
class ModelConfig:
    """model: what is trained. Further keys are arguments of the constructor."""

    _target_: str = _model("???")


@dataclass
class LeNetModel(ModelConfig):
    """model=lenet: two convolutions 5x5 and one linear layer."""

    _target_: str = _model("trainer.models.lenet.LeNet")
    num_classes: Optional[int] = _outputs()
    in_channels: int = key(1, "channels of an image", "channels", ge=1, le=1_000_000)
    image_size: int = key(28, "height and width of an image, a multiple of 4", "pixels", ge=4, le=WIDEST)
    init: str = _first_parameters()


@dataclass
class ConvnetModel(ModelConfig):
    """model=convnet: three convolutions 3x3 and two linear layers, for images of 32 pixels."""

    _target_: str = _model("trainer.models.convnet.Convnet")
    num_classes: Optional[int] = _outputs()
    init: str = _first_parameters()


@dataclass
class ResNet18Model(ModelConfig):
    """model=resnet18: ResNet-18 of torchvision."""

    _target_: str = _model("torchvision.models.resnet18")
    num_classes: Optional[int] = _outputs()
    zero_init_residual: bool = key(False, "residual blocks start as identities: their last norms begin at zero")
    init: str = _first_parameters()


@dataclass
class ResNet50Model(ResNet18Model):
    """model=resnet50: ResNet-50 of torchvision, with the keys of model=resnet18."""

    _target_: str = _model("torchvision.models.resnet50")


@dataclass
class TorchvisionModel(ModelConfig):
    """model=torchvision: any of torchvision's classification models."""

    _target_: str = _model("trainer.models.classifiers.classifier")
    name: str = key("???", "its name in torchvision.models, e.g. mobilenet_v3_small")
    num_classes: Optional[int] = _outputs()
    zero_init_residual: bool = key(False, "residual blocks start as identities: their last norms begin at zero")


@dataclass
class FinetuneModel(ModelConfig):
    """model=finetune: a model of torchvision with pretrained weights and a new head."""

    _target_: str = _model("trainer.models.finetune.finetuned")
    name: str = key("resnet50", "its name in torchvision.models")
    weights: str = key("DEFAULT", "name of torchvision's weights, e.g. IMAGENET1K_V2, or a file of weights")
    freeze: str = key("none", "parts that stay as they are: none, or all but the head", choices=("none", "backbone"))
    head: str = key(
        "auto",
        "the last layer's weights (auto: kept, unless the file is of a run with other classes)",
        choices=("auto", "keep", "new"),
    )
    num_classes: Optional[int] = _outputs()


@dataclass
class TimmModel(ModelConfig):
    """model=timm: any model of timm, which is installed as trainer[timm]."""

    _target_: str = _model("timm.create_model")
    model_name: str = key("???", "its name in timm, e.g. convnext_tiny")
    pretrained: bool = key(False, "with timm's weights")
    num_classes: Optional[int] = _outputs()


@dataclass
class WideAndDeepModel(ModelConfig):
    """model=wide_and_deep: a linear model beside a network on embedded ids, for click-through data."""

    _target_: str = _model("trainer.models.wide_and_deep.WideAndDeep")
    table_size: Optional[int] = key(
        1000001, "rows of the table that all slots share (null: any id, on servers)", "rows"
    )
    embedding_dim: int = key(10, "columns of the table", "columns", ge=1, le=1_000_000)
    dense_features: int = key(13, "numbers of a sample", "features", ge=1, le=1_000_000)
    sparse_slots: int = key(26, "ids of a sample", "slots", ge=1, le=1_000_000)
    hidden: List[int] = key([400, 400, 400], "widths of the network's layers", "units", ge=1, le=1_000_000)
    init_scale: float = key(0.01, "fresh rows are uniform between this and its negative", ge=0)
    init: str = _first_parameters()


@dataclass
class LossConfig:
    """loss: what is minimised. Further keys are arguments of the constructor."""

    _target_: str = _loss("torch.nn.CrossEntropyLoss")


@dataclass
class CrossEntropyLoss(LossConfig):
    """loss=cross_entropy: for class numbers, or with mixup and cutmix, shares of classes."""

    weight: Optional[Any] = key(
        None, "weights of classes: a list, or balanced: samples / (classes * samples of the class)", or_word="balanced"
    )
    label_smoothing: float = key(0.0, "share of the label that is spread over all classes; not in val/loss", ge=0, le=1)


@dataclass
class SquaredErrorLoss(LossConfig):
    """loss=squared_error: mean over samples and classes of a squared difference."""

    _target_: str = _loss("trainer.models.squared_error.SquaredError")
    target: str = key(
        "one_hot",
        "one_hot: (output - 1 or 0)^2; class_number: (softmax(outputs) - label's number)^2, as the reference",
        choices=("one_hot", "class_number"),
    )


@dataclass
class BinaryCrossEntropyLoss(LossConfig):
    """loss=binary_cross_entropy: for labels 0 and 1 and one logit."""

    _target_: str = _loss("torch.nn.BCEWithLogitsLoss")
    pos_weight: Optional[Any] = key(
        None, "factor on samples with label 1, or balanced: those with label 0 / those with 1", or_word="balanced"
    )


@dataclass
class LogLoss(LossConfig):
    """loss=log_loss: the reference's log loss, for labels 0 and 1 and one logit."""

    _target_: str = _loss("trainer.models.log_loss.LogLoss")
    epsilon: float = key(1e-4, "added to probabilities before the logarithm", gt=0, lt=1)


@dataclass
class MseLoss(LossConfig):
    """loss=mse: mean squared error, for labels that are numbers."""

    _target_: str = _loss("torch.nn.MSELoss")


@dataclass
class HuberLoss(LossConfig):
    """loss=huber: squared error of small errors, absolute error of large ones, for labels that are numbers."""

    _target_: str = _loss("torch.nn.HuberLoss")
    delta: float = key(1.0, "error from which it grows in proportion", gt=0)
