"""``plan=true`` and refusals on pretended machines: the driver's library and torch's answer are the test's, all else is
the product's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.host import pretended_driver
from tests.host.pretended_driver import OLD_KERNELS, Asked, Card, Library, install, torch_fails, torch_shows
from trainer import __main__
from trainer.host import usable_gpus
from trainer.host.torch_gpus import Answer
from trainer.job import job
from trainer.job.ready import Ready
from trainer.planning import precision

H100 = Card("NVIDIA H100 80GB HBM3", "GPU-11aa")
V100 = Card("Tesla V100-SXM2-16GB", "GPU-22bb", (7, 0), 16384, cores=5120)
SLICE = Card("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "MIG-33cc", memory=9984, busy=None)
SEVEN = replace(H100, slices=tuple(replace(SLICE, uuid=f"MIG-{i}") for i in range(7)))
EIGHT = [replace(H100, uuid=f"GPU-{i}{i}") for i in range(8)]
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)
BROKEN = (
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions? Error 803: system has unsupported"
)
NO_DRIVER = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"
NOT_FOUND = "no GPU: the driver's libnvidia-ml.so.1 was not found"
NOT_LOADED = "no GPU: the driver's library cannot be loaded (libnvidia-ml.so.1: cannot open shared object file"


@dataclass(frozen=True)
class Machine:
    """A pretended machine.

    Attributes:
        library: the driver's; None: there is none. torch: what torch answers; None: it is not asked.
        variables: of the environment. devices: whether CUDA's library and /dev/nvidia0 are there without NVML.
        gpus: how many workers of device=auto have one each; 0: the CPU.
        why: the rest of the plan's row ``device``. precision: of the plan; empty: as the CPU's.
        refused: a part of what device=cuda says; empty: it runs. attention: a part of the plan's warnings.
    """

    library: Library | None
    torch: Answer | None
    gpus: int
    why: str
    precision: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    devices: bool = False
    refused: str = ""
    attention: str = ""


def visible(value: str, **more: str) -> tuple[tuple[str, str], ...]:
    return (("CUDA_VISIBLE_DEVICES", value), *more.items())


OLD_TORCH = {"kernels": OLD_KERNELS, "version": "2.14.0+cu126"}
MACHINES = {
    "8 x H100": Machine(Library(EIGHT), torch_shows(*EIGHT), 8, "8 x NVIDIA H100 80GB HBM3", "bf16"),
    "V100 and H100: CUDA counts the fastest first, so that 1 is the V100": Machine(
        Library([V100, H100]), torch_shows(V100, **OLD_TORCH), 1, V100.name, "fp16", visible("1")
    ),
    "V100 and H100 by bus: 1 is the H100": Machine(
        Library([V100, H100]),
        torch_shows(H100, **OLD_TORCH),
        1,
        H100.name,
        "bf16",
        visible("1", CUDA_DEVICE_ORDER="PCI_BUS_ID"),
    ),
    "V100 and H100: torch knows better which is which": Machine(
        Library([V100, replace(H100, cores=100)]), torch_shows(H100, **OLD_TORCH), 1, H100.name, "bf16", visible("0")
    ),
    "the start of a UUID": Machine(Library(EIGHT[:2]), torch_shows(EIGHT[1]), 1, H100.name, "bf16", visible("GPU-11")),
    "a MIG device of seven": Machine(
        Library([SEVEN]), torch_shows(SEVEN.slices[2]), 1, SLICE.name, "bf16", visible("MIG-2")
    ),
    "8 cards with MIG, nothing set: CUDA shows one MIG device": Machine(
        Library([replace(SEVEN, uuid=f"GPU-{i}") for i in range(8)]), torch_shows(SLICE), 1, SLICE.name, "bf16"
    ),
    "a card in MIG mode without a MIG device": Machine(
        Library([replace(H100, slices=())]),
        None,
        0,
        "no GPU: the card is in MIG mode and has no MIG device",
        refused="has no MIG device",
    ),
    "0,0": Machine(
        Library(EIGHT[:2]),
        None,
        0,
        "no GPU: CUDA_VISIBLE_DEVICES=0,0 names a GPU twice",
        variables=visible("0,0"),
        refused="CUDA_VISIBLE_DEVICES=0,0 names a GPU twice, and CUDA then shows none",
    ),
    "0,-1,1": Machine(Library(EIGHT[:2]), torch_shows(EIGHT[0]), 1, H100.name, "bf16", visible("0,-1,1")),
    "NoDevFiles": Machine(
        Library([H100]),
        None,
        0,
        "no GPU: CUDA_VISIBLE_DEVICES=NoDevFiles shows none of 1 GPU",
        variables=visible("NoDevFiles"),
        refused="CUDA_VISIBLE_DEVICES=NoDevFiles shows none",
    ),
    "5 of 2": Machine(
        Library(EIGHT[:2]),
        None,
        0,
        "no GPU: CUDA_VISIBLE_DEVICES=5 shows none of 2 GPUs",
        variables=visible("5"),
        refused="shows none of 2 GPUs",
    ),
    "nothing visible": Machine(
        Library([H100]),
        None,
        0,
        "no GPU: CUDA_VISIBLE_DEVICES is set and empty",
        variables=visible(""),
        refused="CUDA_VISIBLE_DEVICES is set and empty",
    ),
    "a driver that does not say the compute capability: torch does": Machine(
        Library([H100], "418.67", 10010, lacks=["nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetNumGpuCores"]),
        torch_shows(H100),
        1,
        H100.name,
        "bf16",
    ),
    "a driver too old for torch": Machine(
        Library(EIGHT, "535.104.05", 12020),
        torch_fails(TOO_OLD),
        0,
        "no usable GPU: torch 2.15.0+cu132 needs a driver for CUDA 13, and driver 535.104.05 is for CUDA 12.2",
        refused="Type instead: device=cpu (or update the NVIDIA driver, or install a torch for CUDA 12)",
    ),
    "no kernels for the card": Machine(
        Library([V100]),
        torch_shows(V100),
        0,
        "no usable GPU: Tesla V100-SXM2-16GB has compute capability 7.0, and torch 2.15.0+cu132 (CUDA 13.2) has "
        "kernels for 7.5, 8.0, 8.6, 9.0, 10.0, 12.0",
        refused="device=cpu (or a torch that has kernels for 7.0)",
    ),
    "no kernels for the second card": Machine(
        Library([H100, V100]),
        torch_shows(H100, V100),
        1,
        H100.name,
        "bf16",
        attention="cuda:1 is not used: Tesla V100-SXM2-16GB has compute capability 7.0",
    ),
    "torch shows fewer": Machine(
        Library(EIGHT[:2]),
        torch_shows(EIGHT[0]),
        1,
        H100.name,
        "bf16",
        attention="torch shows 1 GPU, and the driver 2 (torch 2.15.0+cu132 (CUDA 13.2), driver 580.95.05 (CUDA 13.0))",
    ),
    "torch without CUDA": Machine(
        Library([H100]),
        Answer("2.15.0+cpu", "", error="Torch not compiled with CUDA enabled"),
        0,
        "no usable GPU: torch 2.15.0+cpu is built without CUDA",
        refused="device=cpu (or a torch with CUDA)",
    ),
    "CUDA fails": Machine(
        Library([H100]),
        torch_fails(BROKEN),
        0,
        "no usable GPU: the driver shows 1 GPU, and torch none: CUDA error 803, system has unsupported",
        refused="(torch 2.15.0+cu132 (CUDA 13.2), driver 580.95.05 (CUDA 13.0))",
    ),
    "the driver and its library differ": Machine(
        Library(error=pretended_driver.MISMATCH),
        torch_fails(BROKEN),
        0,
        "no GPU: the loaded NVIDIA driver is of another version than its library",
        devices=True,
        refused="a restart of the machine loads the new one",
    ),
    "no permission": Machine(
        Library(error=pretended_driver.NO_PERMISSION),
        torch_fails("No CUDA GPUs are available"),
        0,
        "no GPU: this user may not open the driver's devices (/dev/nvidiactl)",
        devices=True,
        refused="/dev/nvidiactl",
    ),
    "the driver is not loaded": Machine(
        Library(error=pretended_driver.DRIVER_NOT_LOADED),
        None,
        0,
        "no GPU: the NVIDIA driver is not loaded",
        refused="the NVIDIA driver is not loaded",
    ),
    "no driver at all": Machine(None, None, 0, NOT_FOUND, refused=f"this machine shows {NOT_FOUND}"),
    "a container with CUDA and without NVML": Machine(
        None,
        torch_shows(*EIGHT[:2]),
        2,
        "2 x NVIDIA H100 80GB HBM3",
        "bf16",
        (("NVIDIA_VISIBLE_DEVICES", "all"), ("NVIDIA_DRIVER_CAPABILITIES", "compute")),
        devices=True,
    ),
    "the same with an old driver": Machine(
        None,
        torch_fails(TOO_OLD),
        0,
        "no usable GPU: torch 2.15.0+cu132 needs a driver for CUDA 13, and the driver is for CUDA 12.2",
        variables=(("NVIDIA_VISIBLE_DEVICES", "all"),),
        devices=True,
        refused="update the NVIDIA driver",
    ),
    "a container whose devices torch cannot open": Machine(
        None, torch_fails(NO_DRIVER), 0, NOT_LOADED, devices=True, refused=NOT_LOADED
    ),
    "Windows' subsystem: fewer functions": Machine(
        Library([H100], lacks=["nvmlDeviceGetMigMode", "nvmlDeviceGetNumGpuCores", "nvmlDeviceGetMaxClockInfo"]),
        torch_shows(H100),
        1,
        H100.name,
        "bf16",
    ),
}


@pytest.fixture
def machine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """This process is on a pretended machine."""
    described: Machine = request.param
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    install(monkeypatch, described.library, described.devices, **dict(described.variables))
    if described.torch is None:
        monkeypatch.setattr(usable_gpus, "Question", lambda: pytest.fail("torch was asked"))
    else:
        Asked(monkeypatch, described.torch)
    return described


on_each_machine = pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys(), indirect=True)


def row(shown: str, name: str) -> str:
    lines = [line for line in shown.splitlines() if line.startswith(f"{name} ")]
    assert len(lines) == 1, shown
    return lines[0].removeprefix(name).strip()


@on_each_machine
def test_a_plan_says_which_gpus_a_run_would_use_or_why_none(
    machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if machine.gpus:
        monkeypatch.setattr(precision, "BIG_MODEL", 1)  # LeNet would be fp32 on every GPU
    assert __main__.main(["+recipe=digits_lenet", "plan=true", "tracking=none"]) == 0
    shown = capsys.readouterr().out
    device = "cuda" if machine.gpus else "cpu"
    assert row(shown, "device").startswith(f"{device}  (auto: {machine.why}")
    assert row(shown, "roles") == ("1 worker" if machine.gpus < 2 else f"{machine.gpus} workers")
    assert row(shown, "precision").startswith(machine.precision or "fp32")
    assert (machine.attention in shown) and ("ATTENTION" in shown) == bool(machine.attention)


class Started(BaseException):
    """The run would start now."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Ready]:
    """Collects the jobs that would start; they end there."""
    jobs: list[Ready] = []

    def execute(ready: Ready, *more: object) -> None:
        jobs.append(ready)
        raise Started

    monkeypatch.setattr(job, "execute", execute)
    return jobs


@on_each_machine
def test_device_cuda_runs_on_these_gpus_or_is_refused_with_the_reason(
    machine: Machine, started: list[Ready], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["+recipe=digits_lenet", "device=cuda", "tracking=none"]
    if machine.gpus:
        with pytest.raises(Started):
            __main__.main(command)
        assert [p.device for p in started[0].plan.topology.processes] == [f"cuda:{i}" for i in range(machine.gpus)]
        assert "device" not in started[0].plan.remarks.why
    else:
        assert __main__.main(command) == 2 and not started
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "device=cuda: this machine shows no" in said and machine.refused in said


@on_each_machine
def test_device_auto_runs_where_the_plan_says(machine: Machine, started: list[Ready]) -> None:
    with pytest.raises(Started):
        __main__.main(["+recipe=digits_lenet", "tracking=none"])
    assert started[0].plan.topology.device == ("cuda" if machine.gpus else "cpu")
    assert started[0].plan.remarks.why["device"].startswith(machine.why)


@pytest.mark.parametrize("machine", [MACHINES["no kernels for the second card"]], indirect=True)
def test_more_workers_than_usable_gpus_are_refused_with_the_reason(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert __main__.main(["+recipe=digits_lenet", "device=cuda", "launch.nproc=2"]) == 2
    said = capsys.readouterr().err
    assert "this host has 1 GPU, and every worker needs its own (cuda:1 is not used: Tesla V100" in said


@on_each_machine
def test_a_plan_for_more_gpus_than_there_are_says_that_the_run_would_be_refused_here(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    for workers in (machine.gpus, machine.gpus + 1):
        command = ["+recipe=digits_lenet", "plan=true", "device=cuda", f"launch.nproc={workers}"]
        assert not workers or __main__.main(command) == 0
        said = "the plan is for another machine, and the run would be refused on this one"
        assert (said in " ".join(capsys.readouterr().out.split())) == (workers > machine.gpus)


@pytest.mark.parametrize("machine", [MACHINES["a container with CUDA and without NVML"]], indirect=True)
def test_a_refusal_for_want_of_gpus_waits_for_torchs_answer(machine: Machine, started: list[Ready]) -> None:
    with pytest.raises(Started):
        __main__.main(["+recipe=digits_lenet", "device=cuda", "launch.nproc=2", "tracking=none"])
    assert started[0].plan.topology.roles == {"worker": 2}


@pytest.mark.parametrize("words", [["device=cpu"], ["optimizer.lr=-1"]])
@pytest.mark.parametrize("machine", [MACHINES["8 x H100"]], indirect=True)
def test_torch_is_not_asked_for_the_cpu_and_for_a_refusal(
    machine: Machine, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usable_gpus, "Question", lambda: pytest.fail("torch was asked"))
    assert __main__.main(["+recipe=digits_lenet", "plan=true", *words]) == (0 if "device=cpu" in words else 2)


@pytest.mark.parametrize("machine", [MACHINES["8 x H100"]], indirect=True)
def test_a_plan_for_other_hosts_says_that_the_gpus_are_this_ones(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert __main__.main(["+recipe=digits_lenet", "plan=true", "launch.nnodes=2", "tracking=none"]) == 0
    why = "8 x NVIDIA H100 80GB HBM3; other hosts may differ"
    assert row(capsys.readouterr().out, "device") == f"cuda  (auto: {why})"
