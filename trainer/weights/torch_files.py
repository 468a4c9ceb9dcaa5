"""Reads files of torch.save: tensors, and a placeholder for each object of another class.

The pickle is simulated before torch.load makes any object, because a few bytes could ask for any amount of memory:
``torch.load(weights_only=True)`` calls known functions with any arguments, and ``bytearray(5 * 2**30)`` fits into a
file of 32 bytes.
"""

from __future__ import annotations

import pickle  # an Unpickler that finds no other class  # nosec B403
import pickletools  # reads opcodes; nothing is unpickled  # nosec B403
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.errors import UserError
from trainer.visible import one_line, shortened
from trainer.wording import quoted

CALLED = frozenset(
    """
    collections.OrderedDict collections.Counter builtins.set __builtin__.set builtins.complex __builtin__.complex
    _codecs.encode torch.Size torch.device torch._utils._rebuild_tensor torch._utils._rebuild_tensor_v2
    torch._utils._rebuild_tensor_v3 torch._utils._rebuild_parameter torch._utils._rebuild_parameter_with_state
    """.split()
)
"""Functions whose result is no larger than their arguments, or than the file's storages."""
LITERALS = frozenset(
    "NONE NEWFALSE NEWTRUE EMPTY_TUPLE EMPTY_LIST EMPTY_DICT EMPTY_SET BININT BININT1 BININT2 BINFLOAT LONG1".split()
)
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
ZIP = b"PK\x03\x04"
PICKLE = b"\x80"
HARMLESS = frozenset("getattr slice range frozenset object dict list tuple int float str bool type".split())
OF_PYTHON = ("builtins", "__builtin__")
REFUSED = frozenset(
    (
        *OF_PYTHON,
        *"os posix nt sys subprocess shutil socket ctypes importlib runpy pty code pickle _pickle torch".split(),
    )
)
"""Packages that no checkpoint needs: a file that names one is refused, although nothing would be called."""
CLASSES_OF_TORCH = tuple(
    """
    torch.nn. torch.optim. torch.torch_version. torch.utils.data. torch.amp. torch.cuda.amp. torch.distributed.
    torch.fx.
    """.split()
)


class Skipped:
    """A placeholder for an object of another class: it accepts all arguments, and does nothing."""

    kind = ""

    def __init__(self, *args: Any, **named: Any) -> None:
        pass

    def __call__(self, *args: Any, **named: Any) -> Skipped:
        return self

    append = extend = add = __setitem__ = __setstate__ = __call__


@dataclass(frozen=True)
class WholeModel:
    """A file with a pickled model: what it is, and the code that writes its state_dict."""

    kind: str
    code: str

    def refusal(self, what: str) -> UserError:
        """The refusal, with the command that writes the model's tensors; it needs the model's classes."""
        path = repr(what.partition("=")[2])
        why = f"{self.kind}; if you trust the file, write its tensors alone into another one"
        code = f"import torch; torch.save({self.code.format(path)}, 'weights.pth')"
        return UserError(what, why, f"python -c {quoted(code)}")


TORCHSCRIPT = WholeModel("is a TorchScript program, whose code is not run", "torch.jit.load({}).state_dict()")
EXPORTED = WholeModel("is a program of torch.export, whose code is not run", "dict(torch.export.load({}).state_dict)")
LEGACY = WholeModel(
    "is of the form that torch.save wrote before torch 1.6, which is not read", "torch.load({}, weights_only=True)"
)
OF_A_MODEL = ("model", "ema", "net", "network", "module", "state_dict")
"""Keys at which a checkpoint may hold a whole model."""


def whole_model(content: Any) -> WholeModel | None:
    """The :class:`WholeModel` in a file; None: it holds none."""
    places = {"": content}
    if isinstance(content, dict):
        places = {f"[{key!r}]": content[key] for key in OF_A_MODEL if key in content}
    for place, value in places.items():
        if isinstance(value, Skipped):
            kind = f"holds a whole model ({shortened(one_line(value.kind))}), whose code is not run"
            return WholeModel(kind, f"torch.load({{}}, weights_only=False){place}.state_dict()")
    return None


def _of_torch() -> dict[str, Any]:
    """The classes that ``weights_only=True`` allows: parts of tensors, dtypes, storages, a few plain containers."""
    found: dict[str, Any] = torch._weights_only_unpickler._get_allowed_globals()
    return found


class _Unpickler(pickle.Unpickler):
    """An unpickler that finds parts of tensors, and :class:`Skipped` for everything else."""

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        return _of_torch()[full] if full in _of_torch() else type("Skipped", (Skipped,), {"kind": full})


class _Pickle:
    """The module ``pickle`` as torch.load uses it, with that Unpickler alone."""

    __name__ = __name__
    Unpickler = _Unpickler


def read(path: Path, what: str, mapped: bool = False) -> Any:
    """Read a file of torch.save's on the CPU. Nothing in it is executed.

    Args:
        mapped: tensors stay in the file; only their shapes are needed.

    Raises:
        UserError: it holds code, or has another format.
        Exception: it is damaged.
    """
    others = check(path, what)
    named = path.suffix == ".safetensors"  # torch.load would trust the suffix
    with path.open("rb") as file:
        source: Any = file if named else path
        if others:
            return torch.load(
                source, "cpu", _Pickle, weights_only=False, mmap=mapped and not named
            )  # finds nothing of others  # nosec B614
        return torch.load(source, "cpu", weights_only=True, mmap=mapped and not named)


@dataclass(slots=True)
class StackItem:
    """An item on torch.load's stack in :func:`simulate`: its cost to copy, and its name or items."""

    size: int = 1
    name: str = ""
    items: tuple[Any, ...] = ()


def check(path: Path, what: str) -> bool:
    """Refuse a file that is not in torch.save's current format, or that makes torch.load allocate more than it holds.

    Args:
        what: the key and value that named the file.

    Returns:
        whether it holds objects of other classes.

    Raises:
        UserError: it is such a file.
        Exception: it is damaged.
    """
    with path.open("rb") as file:
        start = file.read(4)
    if start[:1] == PICKLE:
        raise LEGACY.refusal(what)
    if start != ZIP:
        raise ValueError("it is no archive as torch.save writes them")
    _refuse_packed(path, what)
    return simulate(torch._C.PyTorchFileReader(str(path)).get_record("data.pkl"))


def _refuse_packed(path: Path, what: str) -> None:
    """Refuse a zip archive with compressed members, of any size when unpacked; torch.save does not compress."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError):
        return  # torch reports it
    inside = [member.filename.partition("/")[2] for member in members]
    if "constants.pkl" in inside and any(name.startswith("code/") for name in inside):
        raise TORCHSCRIPT.refusal(what)
    if any(name.endswith("archive_format") for name in inside):
        raise EXPORTED.refusal(what)
    packed = [shortened(one_line(member.filename)) for member in members if member.compress_type != zipfile.ZIP_STORED]
    if packed:
        more = f" and {len(packed) - 4} more" if len(packed) > 4 else ""
        raise UserError(
            what,
            f"is a packed archive ({', '.join(packed[:4])}{more}), as torch.save makes none",
            "torch.save(model.state_dict(), ...)",
        )
    if sum(member.file_size for member in members) > path.stat().st_size:
        raise UserError(
            what, "is an archive whose members are more than the file", "torch.save(model.state_dict(), ...)"
        )


def _skipped(name: str) -> bool:
    """Whether a class or function in a file is skipped.

    Raises:
        ValueError: its package is one that no checkpoint needs.
    """
    package, _, own = name.partition(".")
    if name in CALLED:
        return False
    if not name or (
        package in REFUSED and not name.startswith(CLASSES_OF_TORCH) and not (package in OF_PYTHON and own in HARMLESS)
    ):
        raise ValueError(
            f"it calls {shortened(one_line(name)) or 'what is no function'}, which plain tensors do not need"
        )
    return True


def simulate(content: bytes) -> bool:
    """Simulate a pickle's operations as torch.load runs them, without making any object.

    Returns:
        whether it makes objects of other classes.

    Raises:
        ValueError: it calls another function, or copies more in total than its size.
        Exception: it is damaged.
    """
    stack: list[StackItem] = []
    stacks: list[list[StackItem]] = []
    memo: dict[int, StackItem] = {}
    copied, others = 0, False
    argument: Any
    for operation, argument, _ in pickletools.genops(content):
        name = operation.name
        if name in LITERALS:
            stack.append(StackItem())
        elif name in ("BINUNICODE", "SHORT_BINSTRING"):
            stack.append(StackItem(len(argument)))
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "MARK":
            stacks.append(stack)
            stack = []
        elif name in ("TUPLE", "APPENDS", "SETITEMS"):
            items, stack = stack, stacks.pop()
            if name == "TUPLE":
                stack.append(StackItem(len(items), items=tuple(items)))
            else:
                stack[-1].size += len(items)
        elif name in TUPLES:
            count = TUPLES[name]
            stack[-count:] = [StackItem(count, items=tuple(stack[-count:]))]
        elif name in ("APPEND", "SETITEM"):
            del stack[-1 if name == "APPEND" else -2 :]
            stack[-1].size += 1
        elif name == "GLOBAL":
            stack.append(StackItem(name=argument.replace(" ", ".")))
            others |= stack[-1].name not in _of_torch()
        elif name == "BINPERSID":
            stack[-1] = StackItem()
        elif name in ("REDUCE", "NEWOBJ") and (name == "NEWOBJ" or _skipped(stack[-2].name)):
            if not _skipped(stack[-2].name):
                raise ValueError(f"it has the operation {name}, which plain tensors do not need")
            stack[-2:] = [StackItem()]
        elif name in ("REDUCE", "BUILD"):
            state = stack.pop()
            size = state.size + sum(item.size for item in state.items)
            copied += size
            if copied > len(content):
                raise ValueError("it copies more than it has")
            if name == "REDUCE":
                stack[-1] = StackItem(size)
        elif name not in ("PROTO", "STOP"):
            raise ValueError(f"it has the operation {name}, which plain tensors do not need")
    return others
