"""model=finetune: a torchvision model with pretrained weights and a new head for the data's classes."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError  # an error to catch; nothing is unpickled  # nosec B403
from typing import Any

import torch
from torch import nn

from trainer.config.schema import WEIGHT_FILES
from trainer.errors import UserError
from trainer.host.https import unreachable
from trainer.models.classifiers import HEADS, without_weights
from trainer.weights import fit, paddle_files, tensor_files
from trainer.weights.state_dicts import renamed
from trainer.wording import quoted


def finetuned(
    name: str, weights: str, num_classes: int, freeze: str = "none", head: str = "auto", **arguments: Any
) -> nn.Module:
    """Make ``torchvision.models.<name>`` with pretrained weights, except in layers whose number of classes differs.

    Args:
        weights: torchvision's name of weights, ``DEFAULT`` for its best, or a file of tensors by name.
        head: ``new``: draw the last layer again although the weights would fit, because they are for other classes.
        freeze: ``backbone``: only the head learns; batch norms before it keep their statistics.

    Raises:
        UserError: the weights are missing, or of another model.
    """
    model = architecture(name, weights, num_classes, **arguments)
    if not any(p.is_meta for p in model.parameters()):
        _load(model, _without_head(model, num_classes, _tensors(name, weights), head), f"model.weights={weights}")
    if freeze == "backbone":
        _freeze(model, num_classes)
    return model


def architecture(
    name: str, weights: str, num_classes: int, freeze: str = "none", head: str = "auto", **arguments: Any
) -> nn.Module:
    """Make the same model as :func:`finetuned` with random weights, because saved ones will be loaded."""
    return without_weights(name, None if _is_file(weights) else weights, num_classes=num_classes, **arguments)


def check(name: str, weights: str, num_classes: int = 1000, freeze: str = "none", **arguments: Any) -> str:
    """Check the weights before anything starts.

    Returns:
        which part of the file is loaded, in words; empty: all of it.

    Raises:
        UserError: the weights are of another model, or pretrained ones are neither in the cache nor at their site.
    """
    if _is_file(weights):
        return _check_file(name, weights, num_classes, arguments)
    entry = _entry(name, weights)
    if not _cached(entry.url).is_file() and (reason := unreachable(entry.url)):
        raise UserError(
            f"model.weights={weights}",
            f"the weights of {name} are not in {_cached(entry.url).parent} and cannot be fetched ({reason})",
            f"model.weights=FILE, or put {Path(entry.url).name} there",
        )
    return ""


def _check_file(name: str, weights: str, num_classes: int, arguments: dict[str, Any]) -> str:
    what = f"model.weights={weights}"
    if not Path(weights).is_file():
        raise UserError(what, "there is no such file")
    paddle_files.refuse(Path(weights), "model.weights")
    outlines, said = tensor_files.outlines(Path(weights), what)
    with torch.device("meta"):
        model = architecture(name, weights, num_classes, **arguments)
    found = renamed(outlines, model.state_dict(), what)
    anew = _not_in_file(model, {n: outline.shape for n, outline in found.tensors.items()}, what)
    layers = sorted({n.rpartition(".")[0] for n in anew})
    return "; ".join(filter(None, [said, found.said, f"begins anew: {', '.join(layers)}" if layers else ""]))


def prepare(name: str, weights: str, **others: Any) -> None:
    """Download the pretrained weights, once per host, before the workers start."""
    if not _is_file(weights):
        _tensors(name, weights)


def _is_file(weights: str) -> bool:
    return "/" in weights or weights.endswith((*WEIGHT_FILES, *paddle_files.SUFFIXES))


def _entry(name: str, weights: str) -> Any:
    from torchvision.models import get_model_weights

    try:
        known = get_model_weights(name)
        return known[weights]
    except KeyError:
        raise UserError(
            f"model.weights={weights}",
            f"{name} has {', '.join(w.name for w in known) or 'no weights'}",
            "model.weights=DEFAULT",
        ) from None
    except ValueError as error:
        raise UserError(f"model.name={name}", str(error)) from error


def _cached(url: str) -> Path:
    return Path(torch.hub.get_dir()) / "checkpoints" / Path(url).name


def _tensors(name: str, weights: str) -> dict[str, torch.Tensor]:
    """The weights by name."""
    if not _is_file(weights):
        entry = _entry(name, weights)
        try:
            return entry.get_state_dict(progress=False, check_hash=True, weights_only=True)  # type: ignore[no-any-return]
        except UnpicklingError as error:
            raise UserError(
                f"model.weights={weights}",
                f"{_cached(entry.url)} holds more than tensors by name",
                f"rm {quoted(str(_cached(entry.url)))}, which is then fetched anew",
            ) from error
        except (OSError, RuntimeError) as error:
            raise UserError(f"model.weights={weights}", f"cannot be fetched: {error}", "model.weights=FILE") from error
    paddle_files.refuse(Path(weights), "model.weights")
    return tensor_files.read(Path(weights), f"model.weights={weights}")


def _load(model: nn.Module, tensors: dict[str, torch.Tensor], what: str) -> None:
    """Load all tensors except layers for another number of classes, and auxiliary classifiers that the model lacks."""
    found = renamed(tensors, model.state_dict(), what).tensors
    anew = _not_in_file(model, {name: tuple(tensor.shape) for name, tensor in found.items()}, what)
    fit.load_tensors(model, {n: t for n, t in found.items() if n not in anew and not _of_a_head(n, model)}, what)


def _not_in_file(model: nn.Module, there: dict[str, fit.Shape], what: str) -> list[str]:
    """The tensors of the model that the file does not fill: of a missing head, or of a head for other classes.

    Args:
        there: shapes in the file, under the model's names.

    Raises:
        UserError: other tensors differ as well: the file is of another model.
    """
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    here = {name: shape for name, shape in there.items() if name in own or not _of_a_head(name, model)}
    missing = [name for name in own if name not in here and not name.endswith("num_batches_tracked")]
    head = {name for name in own if name.partition(".")[0] == list(own)[-1].partition(".")[0]}
    without_head = head if not head.intersection(here) else set()
    other = [name for name, shape in here.items() if name in own and shape != own[name]]
    wrong = [name for name in other if here[name][1:] != own[name][1:]]
    fit.refuse_misfit(
        what,
        "belongs to another model",
        len(own),
        [name for name in missing if name not in without_head],
        [name for name in here if name not in own],
        fit.other_shapes({name: here[name] for name in wrong}, own),
    )
    return [*without_head, *other]


def _of_a_head(name: str, model: nn.Module) -> bool:
    """Whether a tensor belongs to an auxiliary classifier that this model lacks."""
    return name.partition(".")[0] in HEADS and name not in model.state_dict()


def _without_head(
    model: nn.Module, num_classes: int, tensors: dict[str, torch.Tensor], head: str
) -> dict[str, torch.Tensor]:
    """The tensors of a file, with the model's own tensors for a new head."""
    if head != "new":
        return tensors
    own, (name, module) = model.state_dict(), _head_of(model, num_classes)
    new = {f"{name}.{part}": own[f"{name}.{part}"] for part in module.state_dict()}
    return {**renamed(tensors, own, "model.weights").tensors, **new}


def _head_of(model: nn.Module, num_classes: int) -> tuple[str, nn.Module]:
    """The name of the last layer with as many outputs as there are classes, and that layer.

    Raises:
        UserError: there is no such layer.
    """
    modules: list[tuple[str, nn.Module]] = list(model.named_modules())
    heads = [one for one in modules if isinstance(one[1], nn.Linear) and one[1].out_features == num_classes]
    heads = heads or [one for one in modules if isinstance(one[1], nn.Conv2d) and one[1].out_channels == num_classes]
    if not heads:
        raise UserError(
            "model", f"no layer has {num_classes} outputs, so there is no head", "model.head=keep model.freeze=none"
        )
    return heads[-1]


def _freeze(model: nn.Module, num_classes: int) -> None:
    model.requires_grad_(False)
    _head_of(model, num_classes)[1].requires_grad_(True)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            module.register_forward_pre_hook(_stay_in_evaluation)


def _stay_in_evaluation(module: nn.Module, inputs: Any) -> None:
    module.training = False


# Attributes that any target of ``model._target_`` may have: a target without pretrained weights, a check of the
# arguments before anything starts, and a preparation once per host before the workers start.
finetuned.without_pretrained = f"{__name__}.architecture"  # type: ignore[attr-defined]
finetuned.check = check  # type: ignore[attr-defined]
finetuned.prepare = prepare  # type: ignore[attr-defined]
