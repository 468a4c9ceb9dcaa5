"""Opens data files from outside: regular files only, without waiting, and never more bytes than a limit."""

from __future__ import annotations

import errno
import gzip
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from trainer.data.limits import DEFAULTS, Limits

GZIP = b"\x1f\x8b"
"""First bytes of a file that gzip has packed."""
KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a folder",
}


def kind_of(mode: int) -> str:
    """The kind of a special file by its ``st_mode``, e.g. ``a FIFO``; '' for a regular file."""
    return "" if stat.S_ISREG(mode) else KINDS.get(stat.S_IFMT(mode), "a special file")


def open_regular(path: str | Path) -> IO[bytes]:
    """Open a data file for reading; a FIFO or device in its place is refused at once.

    Raises:
        OSError: the file is not there, may not be read, or is not a regular file; ``strerror`` tells which.
    """
    _refuse_special(path, os.stat(path).st_mode)  # before it is opened: opening a device may do something
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse_special(path, os.fstat(number).st_mode)
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


def read_regular(path: str | Path, limits: Limits = DEFAULTS, start: int = 0, length: int = -1) -> bytes:
    """Read a data file's bytes, or ``length`` of them from ``start`` on.

    Raises:
        OSError: as ``open_regular``; or it is larger than the limit, or ends too soon.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size if length < 0 else length
        if size > limits.file_bytes:
            raise _too_large(path, f"has {size:,} bytes", limits)
        file.seek(start)
        content = file.read(limits.file_bytes + 1 if length < 0 else length)
    if len(content) > limits.file_bytes:
        raise _too_large(path, "grows while it is read", limits)
    if length >= 0 and len(content) < length:
        raise OSError(errno.EIO, f"ends {length - len(content):,} bytes too soon", str(path))
    return content


def is_packed(path: str | Path) -> bool:
    """Whether gzip has packed a data file, by its first bytes, whatever its name.

    Raises:
        OSError: as ``open_regular``.
    """
    with open_regular(path) as file:
        return file.read(len(GZIP)) == GZIP


@contextmanager
def open_unpacked(path: str | Path) -> Iterator[IO[bytes]]:
    """Context manager: a data file for reading; one that gzip has packed is unpacked while it is read.

    Raises:
        OSError, EOFError, zlib.error: as ``open_regular``; or what is packed is damaged.
    """
    with open_regular(path) as file:
        packed = file.read(len(GZIP)) == GZIP
        file.seek(0)
        yield gzip.GzipFile(fileobj=file) if packed else file  # type: ignore[misc]


def _too_large(path: str | Path, what: str, limits: Limits) -> OSError:
    """The error for a data file that is larger than ``data.max_file_mib``."""
    return OSError(errno.EFBIG, f"{what}, more than data.max_file_mib={limits.file_mib}", str(path))


def _refuse_special(path: str | Path, mode: int) -> None:
    if kind := kind_of(mode):
        raise OSError(errno.EINVAL, f"is {kind} and not a regular file", str(path))
