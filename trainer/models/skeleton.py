"""The skeleton of a model: the module as its class built it, without the values of its state_dict.

Building a user's model again may download pretrained weights again, or need a file that is gone. So a training pickles
the module once, when it is built; the logged model, the export and the test start from this skeleton. It has shape and
type in place of each parameter and buffer of the state_dict. Everything else is as after ``__init__``: attributes,
buffers that are not saved, tensors shared by several layers.

Unpickling runs code of the user's classes. A skeleton is read only where the folder's config would be instantiated,
which runs the same code, and only from a file that no other user can write.
"""

from __future__ import annotations

import io
import pickle  # of the user's own classes, see above  # nosec B403
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.checkpoint.store import SKELETON
from trainer.host import private


def skeleton(module: nn.Module, secrets: Iterable[str] = ()) -> bytes | None:
    """Pickle a module without the values in its state_dict.

    Returns:
        the pickle; None: the module cannot be pickled, is not restored equal, or the pickle would hold a secret.
    """
    content = io.BytesIO()
    try:
        _Pickler(content, module).dump(module)
        # empty tensors: all workers of a host do this at once, and a large model would fill the memory
        same = _described(_Unpickler(io.BytesIO(content.getvalue()), torch.empty).load()) == _described(module)
    except Exception:  # any error of a user's class while it is pickled
        return None
    leaks = any(secret.encode("utf-8", "surrogatepass") in content.getvalue() for secret in secrets)
    return content.getvalue() if same and not leaks else None


def built(content: bytes) -> nn.Module:
    """The module of a skeleton; the tensors of its state_dict are zeros, or on the meta device where they were.

    Raises:
        Exception: any error of importing the module's classes.
    """
    module: nn.Module = _Unpickler(io.BytesIO(content)).load()
    return module


def of_run(run_dir: Path) -> bytes | None:
    """The skeleton in a run's folder; None: there is none, or another user can write it."""
    try:
        return private.read_unshared(run_dir / SKELETON)
    except OSError:
        return None


def as_built(skeleton_file: str, **arguments: Any) -> nn.Module:
    """The module of a skeleton's file: the ``_target_`` of ``eval RUN`` and ``predict RUN`` instead of its class.

    Args:
        arguments: of that class; other keys of the config may refer to them.

    Raises:
        OSError: another user can write the file.
    """
    return built(private.read_unshared(Path(skeleton_file)))


def _described(module: nn.Module) -> dict[str, Any]:
    tensors = {
        name: (tuple(t.shape), t.dtype, t.requires_grad) for name, t in module.state_dict(keep_vars=True).items()
    }
    return {"class": type(module), "tensors": tensors}


class _Pickler(pickle.Pickler):
    """A pickler that writes number, kind, shape and type in place of the tensors of a module's state_dict."""

    def __init__(self, file: io.BytesIO, module: nn.Module) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        tensors = module.state_dict(keep_vars=True).values()
        self.numbers = {id(tensor): number for number, tensor in enumerate(tensors)}

    def persistent_id(self, obj: Any) -> Any:
        """The description of a tensor of the state_dict; None: the object is pickled itself."""
        if type(obj) not in (torch.Tensor, nn.Parameter) or id(obj) not in self.numbers:
            return None
        number, parameter = self.numbers[id(obj)], isinstance(obj, nn.Parameter)
        return number, parameter, tuple(obj.shape), obj.dtype, obj.requires_grad, obj.is_meta


class _Unpickler(pickle.Unpickler):
    """The unpickler for :class:`_Pickler`: it makes one tensor for each number."""

    def __init__(self, file: io.BytesIO, make: Callable[..., torch.Tensor] = torch.zeros) -> None:
        super().__init__(file)
        self.make = make
        self.tensors: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> torch.Tensor:
        """The tensor that stands for ``pid``."""
        number, parameter, shape, dtype, requires_grad, is_meta = pid
        if number not in self.tensors:
            tensor = self.make(shape, dtype=dtype, device="meta" if is_meta else "cpu")
            self.tensors[number] = nn.Parameter(tensor, requires_grad) if parameter else tensor
        return self.tensors[number]
