"""How fast this machine is now: what a test waits for is a multiple of a measured start, never a number of seconds
alone.

A deadline in a test has one of two meanings. It says that something hangs: then it is generous, and asked for more time
when it has passed (``wait_for``). Or it is a promise to users ("ends within 10 s"), or a patience that the product
itself has (``strategy.timeout_s``): then it holds on a machine that is free, and ``patient`` makes more of it on a busy
one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

FREE_S = 0.15
"""What the fixed piece of work takes at most on a free machine of the kind that the promises were made for."""
WORK = [sys.executable, "-S", "-c", "for _ in range(2_000_000): pass"]
TIMES = 3


def slowness() -> float:
    """How many times longer things take now than on a free machine; at least 1."""
    taken = []
    for _ in range(TIMES):
        began = time.monotonic()
        subprocess.run(WORK, check=True)
        taken.append(time.monotonic() - began)
    waiting = os.getloadavg()[0] / (os.cpu_count() or 1)
    return max(1.0, max(taken) / FREE_S, waiting)


def patient(seconds: float) -> float:
    """So many seconds of a free machine, on this one and now."""
    return round(seconds * slowness(), 1)


def wait_for(what: Callable[[], Any], seconds: float, why: str) -> Any:
    """The first true answer of ``what``; fails with ``why`` when there is none in time, measured again when it is
    up."""
    began, allowed, extended = time.monotonic(), seconds, False
    while True:
        if answer := what():
            return answer
        if time.monotonic() - began > allowed:
            if extended:
                raise AssertionError(f"not within {allowed:.1f} s: {why}")
            allowed, extended = 2 * patient(max(seconds, 1.0)), True
        time.sleep(0.05)
