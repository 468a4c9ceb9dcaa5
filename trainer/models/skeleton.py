"""The skeleton of a model: the module as its class built it, without the tensors that saved weights fill.

Building a model of one's own a second time may fetch pretrained weights again, or read a file that is gone. So a
training pickles the module once, when it is built: the run's logged model, its export and its test begin with this
skeleton. In place of each parameter and buffer of the state_dict stand shape and type. Everything else is as
``__init__`` left it: attributes, buffers that are not saved, tensors shared by several layers.

A pickle names the classes of its objects and runs code of theirs. It is read where the config of the same folder would
be instantiated, which runs the same code, and only if it is a file of this user's that nobody else can write to.
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
        the pickle; None: pickle does not take the module, or gives another one back, or one of the secrets would be in
        it.
    """
    content = io.BytesIO()
    try:
        _Pickler(content, module).dump(module)
        # unfilled: all workers of a host do this at once, and nobody writes to the memory of a large model
        same = _described(_Unpickler(io.BytesIO(content.getvalue()), torch.empty).load()) == _described(module)
    except Exception:  # whatever the attributes of a user's class raise when they are pickled
        return None
    leaks = any(secret.encode("utf-8", "surrogatepass") in content.getvalue() for secret in secrets)
    return content.getvalue() if same and not leaks else None


def built(content: bytes) -> nn.Module:
    """The module of a skeleton; the tensors of its state_dict are zeros, or on the meta device where they were.

    Raises:
        Exception: whatever importing the module's classes raises.
    """
    module: nn.Module = _Unpickler(io.BytesIO(content)).load()
    return module


def of_run(run_dir: Path) -> bytes | None:
    """The skeleton in a run's folder; None: the run left none, or another user may have written it."""
    try:
        return private.read_unshared(run_dir / SKELETON)
    except OSError:
        return None


def as_built(skeleton_file: str, **arguments: Any) -> nn.Module:
    """The module of a skeleton's file, as a ``_target_``: ``eval RUN`` and ``predict RUN`` name it in place of the
    run's own class.

    Args:
        arguments: of that class, for whatever else in the config takes its values from them.

    Raises:
        OSError: another user may have written the file since the command began.
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
        """What stands for the object; None: it is pickled itself, as tensors of other classes are."""
        if type(obj) not in (torch.Tensor, nn.Parameter) or id(obj) not in self.numbers:
            return None
        number, parameter = self.numbers[id(obj)], isinstance(obj, nn.Parameter)
        return number, parameter, tuple(obj.shape), obj.dtype, obj.requires_grad, obj.is_meta


class _Unpickler(pickle.Unpickler):
    """The unpickler for it: one tensor for each number."""

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
