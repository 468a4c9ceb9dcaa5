"""A run that counts in a file: ``fake_run.py -m trainer work STEPS``. It saves on SIGTERM, goes on from there if it is
to resume, and notes in ``lives`` where it begins. It refuses to run beside itself."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from pathlib import Path

STEP_S = 0.02


def main() -> int:
    """Count to STEPS; returns the exit code."""
    folder, steps = Path(os.environ["TRAINER_RUN_DIR"]), int(sys.argv[4])
    asked = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    host = os.environ.get("TRAINER_HOST", "")
    if host:
        with (folder / "hosts").open("a") as hosts:
            print(host, os.environ["TRAINER_HOSTS"], os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], file=hosts)
    lock = (folder / f"alone{host}").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        (folder / "twice").touch()
        return 1
    saved, done = folder / f"saved{host}", folder / "done"
    if saved.exists() and not done.exists() and os.environ.get("TRAINER_RESUME") not in ("auto", "fresh"):
        return 2  # as trainer: the folder holds a run that did not come to its end
    step = int(saved.read_text()) if os.environ.get("TRAINER_RESUME") == "auto" and saved.exists() else 0
    with (folder / "lives").open("a") as lives:
        print(step, os.environ.get("CUDA_VISIBLE_DEVICES"), sorted(os.sched_getaffinity(0)), file=lives)
    if sys.argv[3] == "fail-second" and host == "1":
        return 3
    if sys.argv[3] == "fail":
        return steps
    if sys.argv[3] == "deaf":
        asked = []
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    held = b"x" * (64 << 20) if sys.argv[3] in ("large", "deaf") else b""
    while step < steps:
        time.sleep(STEP_S)
        step += 1
        saved.with_suffix(".new").write_text(str(step))
        saved.with_suffix(".new").replace(saved)
        if asked:
            print(f"saved {step}", flush=True)
            return 75
    del held
    with done.open("a") as file:
        print(step, file=file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
