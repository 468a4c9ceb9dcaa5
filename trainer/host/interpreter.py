"""Saves time in Python: no garbage collection during imports, and no freeing of objects at exit.

Importing torch makes a million objects that live until the end. The collector visits them again and again (0.5 s of an
import of 3 s), and the interpreter frees them one by one at its end (1.2 s).
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

_frozen = False
"""Whether the imported objects are frozen already; later garbage is not to be frozen."""


def begin() -> None:
    """Stop garbage collection at the start of a command, until :func:`at_work`."""
    gc.disable()


@contextmanager
def command() -> Iterator[list[int]]:
    """Context manager around the command line of a module. It ends this process with the exit code that it yields.

    A context manager is no frame on the stack of a run, on which a reader looks for the path to a step.
    """
    begin()
    # A daemon may ignore SIGCHLD; its children inherit that, and could not wait for their own children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    codes = [0]
    try:
        yield codes
    except SystemExit as end:  # argparse, after --help or --version
        codes = [end.code if isinstance(end.code, int) else int(end.code is not None)]
    leave(codes[-1])


@contextmanager
def at_work() -> Iterator[None]:
    """Context manager: collect garbage again if :func:`begin` had stopped it, except imported objects."""
    if gc.isenabled():  # the collector was not stopped, as in a notebook
        yield
        return
    global _frozen
    if not _frozen:  # gc.get_freeze_count() would visit a million objects
        gc.freeze()
        _frozen = True
    gc.enable()
    try:
        yield
    finally:
        gc.disable()


def leave(code: int) -> NoReturn:
    """End this process like ``sys.exit``, but without freeing every object."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons, as the interpreter does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
