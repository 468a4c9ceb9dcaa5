"""Keeps torch.compile's cache in folders of this user, not in the common temporary folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.host import cache, private


@contextmanager
def own_code() -> Iterator[None]:
    """Context manager: compiled code is saved to and loaded from folders that no other user can write.

    By default torch uses ``torchinductor_USER`` in the common temporary folder, which any user can create first. torch
    reads the variable when torch._dynamo is imported; precompiled headers ignore it.

    Raises:
        UserError: another user could put code into the cache.
    """
    cache.check_code().mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = cache.check_code()  # somebody may have been faster
    scratch = private.scratch("trainer-")
    changed = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TMPDIR": str(scratch),
    }
    before, before_tempdir = {name: os.environ.get(name) for name in changed}, tempfile.tempdir
    os.environ.update(changed)
    tempfile.tempdir = str(scratch)
    try:
        _place_headers(str(folder / "precompiled_headers"))
        _forget_other_runs()
        yield
    finally:
        tempfile.tempdir = before_tempdir
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        private.discard(scratch)


def _forget_other_runs() -> None:
    """Forget what was compiled in this process: torch compiles a function 8 times, and then runs it as it is."""
    import torch._dynamo

    torch._dynamo.reset()


def _place_headers(folder: str) -> None:
    """Set the folder of precompiled headers, which torch 2.15 fixes when it imports this module."""
    import torch._inductor.codecache as codecache

    codecache._HEADER_DIR = folder
    codecache._HEADER_LOCK_DIR = os.path.join(folder, "locks")
