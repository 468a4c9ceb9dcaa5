"""Runs a program of Python on a machine with GPUs that are not there: see cuda.c."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

SOURCE = Path(__file__).with_name("cuda.c")
PATIENCE_S = 240


def missing() -> str:
    """What this machine lacks for a null GPU; empty: nothing."""
    if shutil.which("gcc") is None:
        return "gcc"
    if headers() is None:
        return "CUDA's headers"
    try:
        import torch
    except ImportError:
        return "torch"
    return "" if torch.version.cuda else "a torch that is built for CUDA"


def headers() -> Path | None:
    """The folder of CUDA's headers, which triton's wheel carries."""
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        return None
    folder = Path(triton.origin).parent / "backends" / "nvidia" / "include"
    return folder if (folder / "cuda_runtime_api.h").is_file() else None


def build(folder: Path) -> Path:
    """Compile the runtime into a folder; returns the library."""
    library = folder / "null_gpu.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-w", f"-I{headers()}", "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    (folder / "libcuda.so.1").symlink_to(library.name)  # the driver, which torch opens and asks nothing
    return library


def run(library: Path, module: str, question: Any, gpus: int = 1) -> Any:
    """Run ``python -m module`` with GPUs that are not there; returns what it answers to a question, both JSON."""
    variables = {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(library.parent),
        "NULL_GPUS": str(gpus),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", module, json.dumps(question)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])


def leave(answer: Any) -> NoReturn:
    """In a program that :func:`run` has started: answer, and end at once. Threads of a GPU that is not there may still
    run, and C++ ends a process in which they do at its exit."""
    print(json.dumps(answer), flush=True)
    os._exit(0)
