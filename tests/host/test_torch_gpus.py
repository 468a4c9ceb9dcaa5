"""The real torch is asked, in its own process, on top of a CUDA library that the test compiles (pretended_cuda.c)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nvidia
import pytest

from trainer.host import torch_gpus
from trainer.host.torch_gpus import Question

ROOT = Path(__file__).resolve().parents[2]
HEADERS = next((str(h.parent) for path in nvidia.__path__ for h in Path(path).glob("*/include/cuda_runtime_api.h")), "")
COMPILER = shutil.which("gcc") or shutil.which("clang")
DECORATIONS = (
    "host device device_builtin cudart_builtin device_builtin_texture_type device_builtin_surface_type".split()
)
ALIGNED = "(n) __attribute__((aligned(n)))"


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with libcuda.so.1, which stands for the runtime's library as well when it is preloaded."""
    if COMPILER is None or not HEADERS:
        pytest.skip("no C compiler, or a torch without CUDA's headers")
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "crt").mkdir()  # torch's wheels leave out this part of the headers
    lines = [f"#define __{name}__" for name in DECORATIONS]
    lines += ["#define CUDARTAPI", "#define CUDARTAPI_CDECL", "#define CUDARTAPI_WEAK"]
    lines += [f"#define __align__{ALIGNED}", f"#define __builtin_align__{ALIGNED}"]
    (folder / "crt" / "host_defines.h").write_text("\n".join(lines) + "\n")
    source = Path(__file__).with_name("pretended_cuda.c")
    command = [COMPILER, "-shared", "-fPIC", f"-I{folder}", f"-I{HEADERS}", "-o", f"{folder}/libcuda.so.1", str(source)]
    subprocess.run(command, check=True)
    return folder


def variables(cuda: Path, **more: str) -> dict[str, str]:
    """A container with CUDA's library alone: no NVML, and its runtime says that it has a GPU."""
    own = {"LD_LIBRARY_PATH": str(cuda), "LD_PRELOAD": f"{cuda}/libcuda.so.1", "NVIDIA_VISIBLE_DEVICES": "all"}
    return own | {f"PRETENDED_{name.upper()}": value for name, value in more.items()}


def trained(cuda: Path, folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TRAINER_CACHE": str(folder / "cache"),
        **variables(cuda, **more),
    }
    command = [
        sys.executable,
        "-m",
        "trainer",
        "+recipe=digits_lenet",
        "tracking=none",
        f"hydra.run.dir={folder / 'run'}",
    ]
    return subprocess.run([*command, *words], env=environment, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.all
def test_torch_answers_with_its_gpus_in_cudas_order(cuda: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables(cuda, gpus="2").items():
        monkeypatch.setenv(name, value)
    answer = Question().answer()
    assert [(gpu.name, gpu.capability) for gpu in answer.gpus] == [
        ("NVIDIA H100 80GB HBM3", (9, 0)),
        ("Tesla V100-SXM2-16GB", (7, 0)),
    ]
    assert [gpu.memory >> 30 for gpu in answer.gpus] == [80, 16] and answer.gpus[0].uuid.startswith("GPU-11")
    assert answer.version and answer.kernels and not answer.error


@pytest.mark.all
def test_a_container_with_cuda_and_without_nvml_trains_on_its_gpu(cuda: Path, tmp_path: Path) -> None:
    done = trained(cuda, tmp_path, "plan=true", gpus="1")
    assert done.returncode == 0, done.stderr
    assert "device         cuda  (auto: NVIDIA H100 80GB HBM3)" in done.stdout


@pytest.mark.all
def test_a_run_under_a_driver_too_old_for_torch_is_on_the_cpu_and_says_why(cuda: Path, tmp_path: Path) -> None:
    done = trained(cuda, tmp_path, "max_steps=2", error="35", driver="11040")  # cudaErrorInsufficientDriver
    assert done.returncode == 0, done.stderr
    assert "device         cpu  (auto: no usable GPU: torch " in done.stdout
    assert "and the driver is for CUDA 11.4)" in done.stdout and "done 2 updates" in done.stdout


@pytest.mark.all
def test_device_cuda_under_such_a_driver_is_refused_in_one_sentence(cuda: Path, tmp_path: Path) -> None:
    done = trained(cuda, tmp_path, "device=cuda", error="35", driver="11040")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not (tmp_path / "run").exists()
    assert "Type instead: device=cpu (or update the NVIDIA driver, or install a torch for CUDA 11)" in done.stderr


def test_a_torch_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_gpus, "ANSWER_S", 0.0)
    question = Question()
    assert "did not say within" in question.answer().error and question.process.returncode is not None


def test_a_torch_that_cannot_be_imported_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('broken')")
    monkeypatch.setattr(torch_gpus, "_path", lambda: [str(tmp_path), str(ROOT)])
    assert Question().answer().error == "torch could not be asked which GPUs it can use"
