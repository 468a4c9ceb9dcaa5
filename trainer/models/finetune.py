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
from trainer.models.classifiers import HEADS, unfilled
from trainer.weights import fit, paddle_files, tensor_files


def finetuned(
    name: str, weights: str, num_classes: int, freeze: str = "none", head: str = "auto", **arguments: Any
) -> nn.Module:
    """Make ``torchvision.models.<name>`` with pretrained weights, except in layers whose number of classes differs.

    Args:
        weights: a name of torchvision's, ``DEFAULT`` for its best, or a file of tensors by name.
        head: ``new``: the last layer is new although its weights would fit, because they are of other classes.
        freeze: ``backbone``: only the head learns; batch norms before it keep their statistics.

    Raises:
        UserError: the weights are not there or belong to another model.
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
    return unfilled(name, None if _is_file(weights) else weights, num_classes=num_classes, **arguments)


def check(name: str, weights: str, **others: Any) -> None:
    """Before anything starts: refuse pretrained weights that are not in the cache if their site does not answer.

    Raises:
        UserError: they are not.
    """
    if _is_file(weights):
        if not Path(weights).is_file():
            raise UserError(f"model.weights={weights}", "there is no such file")
        return
    entry = _entry(name, weights)
    if not _cached(entry.url).is_file() and (reason := unreachable(entry.url)):
        raise UserError(
            f"model.weights={weights}",
            f"the weights of {name} are not in {_cached(entry.url).parent} and cannot be fetched ({reason})",
            f"model.weights=FILE, or put {Path(entry.url).name} there",
        )


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
        raise UserError(f"model.weights={weights}", f"{name} has {', '.join(w.name for w in known) or 'no weights'}", "model.weights=DEFAULT") from None  # fmt: skip
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
            raise UserError(f"model.weights={weights}", f"{_cached(entry.url)} holds more than tensors by name", f"rm {_cached(entry.url)}, which is then fetched anew") from error  # fmt: skip
        except (OSError, RuntimeError) as error:
            raise UserError(f"model.weights={weights}", f"cannot be fetched: {error}", "model.weights=FILE") from error
    paddle_files.refuse(Path(weights), "model.weights")
    return tensor_files.read(Path(weights), f"model.weights={weights}")


def _load(model: nn.Module, given: dict[str, torch.Tensor], what: str) -> None:
    """All but layers that tell another number of classes apart, and auxiliary classifiers that the model goes without."""
    own = model.state_dict()
    named = fit.unwrapped(given, own)
    found = {name: tensor for name, tensor in named.items() if name in own or name.partition(".")[0] not in HEADS}
    strange = [name for name in found if name not in own]
    missing = [name for name in own if name not in found and not name.endswith("num_batches_tracked")]
    if strange or missing:
        raise UserError(
            what,
            f"belongs to another model: {len(missing)} tensors are missing ({tensor_files.some_names(missing)}), "
            f"{len(strange)} are unknown ({tensor_files.some_names(strange)})",
        )
    other = [name for name, tensor in found.items() if tensor.shape != own[name].shape]
    wrong = [name for name in other if found[name].shape[1:] != own[name].shape[1:]]
    if wrong:
        raise UserError(what, f"belongs to another model: {wrong[0]} is {tuple(found[wrong[0]].shape)} there and {tuple(own[wrong[0]].shape)} here")  # fmt: skip
    fit.into(model, {n: t for n, t in found.items() if n not in other}, what)


def _without_head(
    model: nn.Module, num_classes: int, given: dict[str, torch.Tensor], head: str
) -> dict[str, torch.Tensor]:
    """The tensors of a file, with the model's own in place of those of the head where that is to be new."""
    if head != "new":
        return given
    own, (name, module) = model.state_dict(), _head_of(model, num_classes)
    new = {f"{name}.{part}": own[f"{name}.{part}"] for part in module.state_dict()}
    return {**fit.unwrapped(given, own), **new}


def _head_of(model: nn.Module, num_classes: int) -> tuple[str, nn.Module]:
    """The name of the last layer with as many outputs as there are classes, and that layer.

    Raises:
        UserError: there is none.
    """
    modules: list[tuple[str, nn.Module]] = list(model.named_modules())
    heads = [one for one in modules if isinstance(one[1], nn.Linear) and one[1].out_features == num_classes]
    heads = heads or [one for one in modules if isinstance(one[1], nn.Conv2d) and one[1].out_channels == num_classes]
    if not heads:
        raise UserError("model", f"no layer has {num_classes} outputs, so there is no head", "model.head=keep model.freeze=none")  # fmt: skip
    return heads[-1]


def _freeze(model: nn.Module, num_classes: int) -> None:
    model.requires_grad_(False)
    _head_of(model, num_classes)[1].requires_grad_(True)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            module.register_forward_pre_hook(_stay_in_evaluation)


def _stay_in_evaluation(module: nn.Module, inputs: Any) -> None:
    module.training = False


finetuned.without_pretrained = f"{__name__}.architecture"  # type: ignore[attr-defined]  # and how it is built without them
finetuned.check = check  # type: ignore[attr-defined]  # a target may say what is to be looked at before anything starts,
finetuned.prepare = prepare  # type: ignore[attr-defined]  # and what is to be done once, before the workers do
