"""Checks a torch.save file before torch.load makes any object, because a few bytes could ask for any amount of memory.

``torch.load(weights_only=True)`` calls what it knows with any arguments: ``bytearray(5 * 2**30)`` is a file of 32 bytes.
"""

from __future__ import annotations

import pickletools  # reads opcodes; nothing is unpickled  # nosec B403
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.errors import UserError
from trainer.visible import one_line, shortened

CALLED = frozenset(
    ("collections.OrderedDict", "collections.Counter", "builtins.set", "__builtin__.set", "builtins.complex", "__builtin__.complex", "_codecs.encode", "torch.Size", "torch.device")
) | {f"torch._utils._rebuild_{what}" for what in ("tensor", "tensor_v2", "tensor_v3", "parameter", "parameter_with_state")}  # fmt: skip
"""Functions that make no more than they are given; tensors among them are as large as the file's storages."""
LITERALS = frozenset(
    ("NONE", "NEWFALSE", "NEWTRUE", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1")
)  # fmt: skip
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
ZIP = b"PK\x03\x04"
PICKLE = b"\x80"
AGAIN = "torch.save(torch.load(FILE, weights_only=True), FILE), of a file that you trust"


@dataclass(slots=True)
class StackItem:
    """An item on torch.load's stack in :func:`follow`: its cost to copy, and its name or items."""

    size: int = 1
    name: str = ""
    items: tuple[Any, ...] = ()


def check(path: Path, what: str) -> None:
    """Refuse a file that is not in torch.save's current format, or that makes torch.load allocate more than it holds.

    Args:
        what: the key and value that named the file.

    Raises:
        UserError: it is not.
        Exception: it is damaged, or asks for something else; each breaks in its own way.
    """
    with path.open("rb") as file:
        start = file.read(4)
    if start[:1] == PICKLE:
        raise UserError(what, "is of the form that torch.save wrote before torch 1.6, which is not read", AGAIN)
    if start != ZIP:
        raise ValueError("it is no archive as torch.save writes them")
    _refuse_packed(path, what)
    follow(torch._C.PyTorchFileReader(str(path)).get_record("data.pkl"))


def _refuse_packed(path: Path, what: str) -> None:
    """What torch.save writes is a zip archive whose members are not packed; packed ones could become anything."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError):
        return  # torch says what it is instead
    packed = [shortened(one_line(member.filename)) for member in members if member.compress_type != zipfile.ZIP_STORED]
    if packed:
        more = f" and {len(packed) - 4} more" if len(packed) > 4 else ""
        raise UserError(what, f"is a packed archive ({', '.join(packed[:4])}{more}), as torch.save makes none", "torch.save(model.state_dict(), ...)")  # fmt: skip
    if sum(member.file_size for member in members) > path.stat().st_size:
        raise UserError(what, "is an archive whose members are more than the file", "torch.save(model.state_dict(), ...)")  # fmt: skip


def follow(content: bytes) -> None:
    """Simulate a pickle's operations as torch.load runs them, without making any object.

    Raises:
        ValueError: it calls another function than those, or copies more in total than it has bytes.
        Exception: it is damaged.
    """
    stack: list[StackItem] = []
    stacks: list[list[StackItem]] = []
    memo: dict[int, StackItem] = {}
    copied = 0
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
        elif name == "BINPERSID":
            stack[-1] = StackItem()
        elif name in ("REDUCE", "BUILD"):
            given = stack.pop()
            if name == "REDUCE" and stack[-1].name not in CALLED:
                raise ValueError(f"it calls {shortened(one_line(stack[-1].name)) or 'what is no function'}, which plain tensors do not need")  # fmt: skip
            size = given.size + sum(item.size for item in given.items)
            copied += size
            if copied > len(content):
                raise ValueError("it copies more than it has")
            if name == "REDUCE":
                stack[-1] = StackItem(size)
        elif name not in ("PROTO", "STOP"):
            raise ValueError(f"it has the operation {name}, which plain tensors do not need")
