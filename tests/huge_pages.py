"""Memory in pages of 2 MiB, for a process that forks."""

from __future__ import annotations

import ctypes
from pathlib import Path

MADV_COLLAPSE = 25


def use_huge_pages() -> None:
    """A fork copies the table of its parent's pages, of which 2 MiB have one entry instead of 512 where the kernel
    can."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, _, _, inode, *name = line.split(maxsplit=5)
        if rights == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            madvise(begin, end - begin, MADV_COLLAPSE)
