"""Runs a program of Python on a machine with GPUs that are not there: see cuda.c."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import IO, Any, NoReturn

from tests.zygote import Zygote

SOURCE = Path(__file__).with_name("cuda.c")
PATIENCE_S = 240
MODULES = ("torch._subclasses.fake_tensor", "torch.testing._internal.distributed.fake_pg", "tests.null_gpu.count")
"""What the programs import beside what a run needs."""


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


@functools.cache
def zygote(library: Path) -> Zygote:
    """A process with the runtime and all imports, which has asked no GPU for anything: it forks for each question."""
    return Zygote(variables(library), MODULES)


def variables(library: Path) -> dict[str, str]:
    """Of the environment: what a process has to find when it starts."""
    return {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(library.parent), "OMP_NUM_THREADS": "1"}


def run(library: Path, module: str, question: Any, gpus: int = 1) -> Any:
    """Run ``python -m module`` with GPUs that are not there; returns what it answers to a question, both JSON."""
    env = {**os.environ, **variables(library), "NULL_GPUS": str(gpus)}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        started = zygote(library).start(
            [json.dumps(question)], Path.cwd(), env, out.fileno(), err.fileno(), module, pictures=True, spares=0
        )
        try:
            code = started.wait(PATIENCE_S)
        finally:
            started.kill()
        written, errors = (_text(file) for file in (out, err))
    assert code == 0, f"exit code {code}\n{written}{errors}"
    return json.loads(written.splitlines()[-1])


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def leave(answer: Any) -> NoReturn:
    """In a program that :func:`run` has started: answer, and end at once. Threads of a GPU that is not there may still
    run, and C++ ends a process in which they do at its exit."""
    print(json.dumps(answer), flush=True)
    os._exit(0)
