"""Saves time in Python itself: no garbage collection while modules are imported, no dismantling of objects at exit.

Importing torch makes a million objects that live until the end. The collector looks at all of them again and again (0.5
s of an import of 3 s), and the interpreter frees them one by one when it is finalized (1.2 s).
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
"""Whether what this process has imported is left out already; the garbage of a sweep's first job is not."""


def begin() -> None:
    """Stop garbage collection at the start of a command, until :func:`at_work`."""
    gc.disable()


@contextmanager
def command() -> Iterator[list[int]]:
    """Context manager around the command line of a module. It ends this process with the exit code that it yields.

    A context manager is no frame on the stack of a run, on which a reader looks for the path to a step.
    """
    begin()
    # A daemon that ignores it leaves that to its children, who then miss theirs.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    codes = [0]
    try:
        yield codes
    except SystemExit as end:  # argparse, after --help or --version
        codes = [end.code if isinstance(end.code, int) else int(end.code is not None)]
    leave(codes[-1])


@contextmanager
def at_work() -> Iterator[None]:
    """Context manager: garbage is collected again if :func:`begin` had stopped that, imported objects excepted."""
    if gc.isenabled():  # somebody else's process, as in a notebook
        yield
        return
    global _frozen
    if not _frozen:  # gc.get_freeze_count() would tell, and walks over a million objects
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
