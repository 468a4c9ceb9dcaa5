"""A TCPStore that another process serves, which can be stopped and go on, or be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

SERVES = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


@contextmanager
def store_elsewhere() -> Iterator[tuple[dist.TCPStore, subprocess.Popen[str]]]:
    """The store, and the process that serves it."""
    with subprocess.Popen([sys.executable, "-c", SERVES], stdout=subprocess.PIPE, text=True) as serves:
        assert serves.stdout is not None
        try:
            port = int(serves.stdout.readline())
            yield dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False), serves
        finally:
            serves.kill()


def stop(process: subprocess.Popen[str]) -> None:
    """Stop it; returns when all its threads stand still."""
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
