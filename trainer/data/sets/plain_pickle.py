"""Reads pickles of plain data, such as CIFAR's, with a parser of its own that never calls or imports anything in them.

A pickle is a program for a small stack machine. This one knows the operations that dicts, lists, tuples, texts, bytes,
whole numbers and arrays of whole numbers are written with (protocols 0 to 5, of Python 2 and 3); any other is refused.
Memory and time stay within a multiple of the file's size: whatever can be named again (a memoised text, tuple or list)
is passed on as it is; what would copy it is limited to a few characters, or to as many bytes in total as the file has.
An array stays its shape, type and bytes until ``numpy.frombuffer`` makes it, once these fit one another.
"""

from __future__ import annotations

import codecs
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.visible import one_line

MOST_STEPS = 2_000_000
"""Operations in a file. A batch of CIFAR-10 has 70,000; each can take a hundred bytes of memory."""
MOST_DIGITS = 20
LONGEST_KEY = 1000
"""Characters of a key of a dict. Keys are copied and compared, and a file can name one and the same again and again."""
LONGEST_CODE = 4
"""Characters of an array's type."""
MOST_ARGUMENTS = 8
TYPES = ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "b1")
"""Accepted types of arrays."""


class NotPlain(Exception):
    """The error for bytes that are no pickle of plain data; its text is the rest of a sentence."""


@dataclass(frozen=True, slots=True)
class Name:
    """The name of a class or function in a pickle; it is compared with the allowed names and never looked up."""

    module: str
    name: str


@dataclass(slots=True)
class Type:
    """The state of a ``numpy.dtype`` while a pickle of it is read."""

    code: str
    order: str = "<"

    def fill(self, state: Any) -> None:
        """Take in the pickled state of a dtype: (version, byte order, ...)."""
        if not isinstance(state, tuple) or len(state) < 2 or state[1] not in ("<", ">", "|", "="):
            raise NotPlain("the type of an array is not told as it should be")
        self.order = ">" if state[1] == ">" else "<"


@dataclass(slots=True)
class Array:
    """The state of a ``numpy.ndarray`` while a pickle of it is read."""

    shape: Any = None
    type: Any = None
    content: Any = None
    fortran: bool = False

    def fill(self, state: Any) -> None:
        """Take in the pickled state of an array: (version, shape, dtype, Fortran order, bytes)."""
        if not isinstance(state, tuple) or len(state) != 5:
            raise NotPlain("an array is not told as it should be")
        self.shape, self.type, fortran, self.content = state[1:]
        self.fortran = bool(fortran)

    def made(self) -> np.ndarray:
        """Make the numpy array from the pickled bytes."""
        shape, content = self.shape, self.content
        if not isinstance(self.type, Type) or not isinstance(content, (bytes, str)):
            raise NotPlain("an array has no type or no bytes")
        if not isinstance(shape, tuple) or not 1 <= len(shape) <= 8 or not all(_is_size(size) for size in shape):
            raise NotPlain("an array has no shape")
        kind = np.dtype(self.type.order + self.type.code)
        if len(content) != math.prod(shape) * kind.itemsize:
            raise NotPlain(f"an array of {shape} has {len(content)} bytes")
        if isinstance(content, str):  # as Python 2 wrote bytes
            content = content.encode("latin-1")
        return np.frombuffer(content, kind).reshape(shape, order="F" if self.fortran else "C")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**40


def loads(content: bytes) -> Any:
    """Read the plain data in a pickle; numpy arrays come out as :class:`Array`.

    Raises:
        NotPlain: it is cut off, damaged, or holds something else.
    """
    try:
        return _Machine(content).run()
    except (IndexError, KeyError, struct.error, ValueError, TypeError, OverflowError, AttributeError) as error:
        raise NotPlain("it is cut off or damaged") from error


_MARK = object()


class _Machine:
    """The stack, the memo, and the place in the file."""

    def __init__(self, content: bytes) -> None:
        self.content, self.place = content, 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.encoded = 0

    def run(self) -> Any:
        """Run all operations, and return the result of the last one."""
        for _ in range(MOST_STEPS):
            operation = self.read_bytes(1)
            if operation == b".":
                return self.stack.pop()
            known = OPERATIONS.get(operation)
            if known is None:
                raise NotPlain(f"byte {self.place - 1} is no operation that plain data need")
            known(self)
        raise NotPlain(f"it has more than {MOST_STEPS:,} operations")

    def read_bytes(self, length: int) -> bytes:
        """Read the next ``length`` bytes."""
        if not 0 <= length <= len(self.content) - self.place:
            raise NotPlain("it is cut off")
        self.place += length
        return self.content[self.place - length : self.place]

    def line(self) -> bytes:
        """Read up to the end of the line."""
        end = self.content.index(b"\n", self.place)
        line = self.content[self.place : end]
        self.place = end + 1
        return line

    def number(self, form: str) -> int:
        """Read the next bytes as a number."""
        return int(struct.unpack(form, self.read_bytes(struct.calcsize(form)))[0])

    def push(self, value: Any) -> None:
        """Push a value onto the stack."""
        self.stack.append(value)

    def since_mark(self) -> list[Any]:
        """Pop all values above the last mark, and the mark."""
        place = len(self.stack) - 1
        while self.stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise NotPlain("it is damaged: a mark is missing")
        above = self.stack[place + 1 :]
        del self.stack[place:]
        return above

    def named(self, module: Any, name: Any) -> None:
        """Push the name of a class or function, without importing it."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise NotPlain("it is damaged: a name is no text")
        if (module, name) not in MAKERS:
            raise NotPlain(
                f"it asks for {one_line(f'{module[:60]}.{name[:60]}')[:100]}, which no file of CIFAR-10 does"
            )
        self.push(Name(module, name))

    def reduce(self) -> None:
        """Replace function and arguments by the result, for the few functions in ``MAKERS``."""
        arguments, callee = self.stack.pop(), self.stack.pop()
        if not isinstance(callee, Name) or not isinstance(arguments, tuple):
            raise NotPlain("it calls what is no function")
        if len(arguments) > MOST_ARGUMENTS:
            raise NotPlain("it calls a function with very many arguments")
        if callee == ENCODE and isinstance(arguments[0], str):
            self.encoded += len(
                arguments[0]
            )  # of one text, which the memo has, a few bytes can ask for any number of copies
            if self.encoded > len(self.content):
                raise NotPlain("it makes more bytes than it has")
        self.push(MAKERS[callee.module, callee.name](*arguments))

    def build(self) -> None:
        """Set the state of the array or type on top of the stack."""
        state = self.stack.pop()
        if not isinstance(self.stack[-1], (Array, Type)):
            raise NotPlain("it gives a state to what has none")
        self.stack[-1].fill(state)

    def items(self, flat: list[Any]) -> None:
        """Add keys and values to the dict on top of the stack."""
        target = self.stack[-1]
        if type(target) is not dict or len(flat) % 2 or not all(isinstance(key, (str, bytes)) for key in flat[::2]):
            raise NotPlain("it is damaged: a dict of other keys than texts")
        if any(len(key) > LONGEST_KEY for key in flat[::2]):
            raise NotPlain("it has a very long key")
        target.update(zip((_text(key) for key in flat[::2]), flat[1::2], strict=True))

    def append(self, values: list[Any]) -> None:
        """Append values to the list on top of the stack."""
        if type(self.stack[-1]) is not list:
            raise NotPlain("it is damaged: it adds to what is no list")
        self.stack[-1].extend(values)

    def dict_of(self, flat: list[Any]) -> None:
        """Push a dict of these keys and values."""
        self.push({})
        self.items(flat)

    def remember(self, place: int) -> None:
        """Put the top of the stack into the memo."""
        self.memo[place] = self.stack[-1]

    def tuple_of(self, length: int) -> None:
        """Replace the uppermost ``length`` values by a tuple of them."""
        if len(self.stack) < length or any(value is _MARK for value in self.stack[-length:]):
            raise NotPlain("it is damaged: a tuple is cut off")
        values = tuple(self.stack[-length:])
        del self.stack[-length:]
        self.push(values)

    def decimal(self, line: bytes) -> None:
        """Push a number in text, or a truth value of protocol 0."""
        if line in (b"00", b"01"):
            self.push(line == b"01")
        elif len(line) > MOST_DIGITS:
            raise NotPlain("it holds a number of very many digits")
        else:
            self.push(int(line.rstrip(b"L")))

    def quoted(self, line: bytes) -> None:
        """Push a text of Python 2, from its ``repr``."""
        if len(line) < 2 or line[:1] not in (b"'", b'"') or line[:1] != line[-1:]:
            raise NotPlain("it is damaged: a text without quotes")
        self.push(codecs.escape_decode(line[1:-1])[0].decode("latin-1"))  # type: ignore[attr-defined]

    def long_of(self, length: int) -> None:
        """Push a number of ``length`` bytes."""
        if length > MOST_DIGITS:
            raise NotPlain("it holds a number of very many digits")
        self.push(int.from_bytes(self.read_bytes(length), "little", signed=True))


def _text(key: str | bytes) -> str:
    return key if isinstance(key, str) else key.decode("latin-1")


def _type(code: Any, *flags: Any) -> Type:
    plain = code.lstrip("<>|=") if isinstance(code, str) and len(code) <= LONGEST_CODE else ""
    if plain not in TYPES:
        raise NotPlain(f"an array is of a type that is not one of {', '.join(TYPES)}")
    return Type(plain, ">" if code.startswith(">") else "<")


def _from_buffer(content: Any, kind: Any, shape: Any, order: Any) -> Array:
    return Array(shape, kind, content, order == "F")


def _empty(kind: Any, shape: Any, code: Any) -> Array:
    return Array()


def _scalar(kind: Any, content: Any) -> int:
    return int(Array((1,), kind, content).made()[0])


def _encoded(text: Any, encoding: Any) -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise NotPlain("it is damaged: bytes that are no text")
    return text.encode("latin-1")


ENCODE = Name("_codecs", "encode")
MAKERS: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "dtype"): _type,
    ("numpy", "ndarray"): _type,  # named, and never called
    ("_codecs", "encode"): _encoded,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _empty for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _scalar for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _from_buffer for core in ("core", "_core")},
}

_Run = Callable[[_Machine], object]

OPERATIONS: dict[bytes, _Run] = {
    b"\x80": lambda m: m.read_bytes(1),  # protocol
    b"\x95": lambda m: m.read_bytes(8),  # frame
    b"(": lambda m: m.push(_MARK),
    b"0": lambda m: m.stack.pop(),
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"I": lambda m: m.decimal(m.line()),
    b"L": lambda m: m.decimal(m.line()),
    b"J": lambda m: m.push(m.number("<i")),
    b"K": lambda m: m.push(m.number("<B")),
    b"M": lambda m: m.push(m.number("<H")),
    b"\x8a": lambda m: m.long_of(m.number("<B")),
    b"\x8b": lambda m: m.long_of(m.number("<i")),
    b"S": lambda m: m.quoted(m.line()),
    b"T": lambda m: m.push(m.read_bytes(m.number("<i")).decode("latin-1")),
    b"U": lambda m: m.push(m.read_bytes(m.number("<B")).decode("latin-1")),
    b"V": lambda m: m.push(m.line().decode("raw-unicode-escape")),
    b"X": lambda m: m.push(m.read_bytes(m.number("<I")).decode()),
    b"\x8c": lambda m: m.push(m.read_bytes(m.number("<B")).decode()),
    b"\x8d": lambda m: m.push(m.read_bytes(m.number("<Q")).decode()),
    b"B": lambda m: m.push(m.read_bytes(m.number("<I"))),
    b"C": lambda m: m.push(m.read_bytes(m.number("<B"))),
    b"\x8e": lambda m: m.push(m.read_bytes(m.number("<Q"))),
    b"\x96": lambda m: m.push(m.read_bytes(m.number("<Q"))),  # a bytearray
    b")": lambda m: m.push(()),
    b"t": lambda m: m.push(tuple(m.since_mark())),
    b"\x85": lambda m: m.tuple_of(1),
    b"\x86": lambda m: m.tuple_of(2),
    b"\x87": lambda m: m.tuple_of(3),
    b"]": lambda m: m.push([]),
    b"l": lambda m: m.push(m.since_mark()),
    b"a": lambda m: m.append([m.stack.pop()]),
    b"e": lambda m: m.append(m.since_mark()),
    b"}": lambda m: m.push({}),
    b"d": lambda m: m.dict_of(m.since_mark()),
    b"s": lambda m: m.items([m.stack.pop(-2), m.stack.pop()]),
    b"u": lambda m: m.items(m.since_mark()),
    b"p": lambda m: m.remember(int(m.line()[:MOST_DIGITS])),
    b"q": lambda m: m.remember(m.number("<B")),
    b"r": lambda m: m.remember(m.number("<I")),
    b"\x94": lambda m: m.remember(len(m.memo)),
    b"g": lambda m: m.push(m.memo[int(m.line()[:MOST_DIGITS])]),
    b"h": lambda m: m.push(m.memo[m.number("<B")]),
    b"j": lambda m: m.push(m.memo[m.number("<I")]),
    b"c": lambda m: m.named(m.line().decode("latin-1"), m.line().decode("latin-1")),
    b"\x93": lambda m: m.named(m.stack.pop(-2), m.stack.pop()),
    b"R": lambda m: m.reduce(),
    b"b": lambda m: m.build(),
}
