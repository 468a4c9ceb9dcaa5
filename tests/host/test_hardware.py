"""The GPUs of pretended machines: what the driver's library and torch say of them, and what the product makes of it."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.host import pretended_driver
from tests.host.pretended_driver import Asked, Card, Library, install, torch_fails, torch_shows
from trainer.host import hardware, nvml, usable_gpus
from trainer.host.nvml import Load
from trainer.host.torch_gpus import Answer, of_text, runs_on
from trainer.host.visible_gpus import Gpu

MIB = 1 << 20
H100 = Card("NVIDIA H100 80GB HBM3", "GPU-11aa")
V100 = Card("Tesla V100-SXM2-16GB", "GPU-22bb", (7, 0), 16384, 7, 99, 5120)
SLICE = Card("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "MIG-33cc", memory=9984, used=12, busy=None)


def test_the_driver_says_names_capabilities_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library([H100, V100])
    install(monkeypatch, library, CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert hardware.gpus() == (
        Gpu("NVIDIA H100 80GB HBM3", (9, 0), 81559 * MIB, "GPU-11aa"),
        Gpu("Tesla V100-SXM2-16GB", (7, 0), 16384 * MIB, "GPU-22bb"),
    )
    assert library.opened == 0


def test_loads_are_of_visible_gpus_in_cudas_order(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Library([H100, V100, replace(H100, uuid="GPU-44")]), CUDA_VISIBLE_DEVICES="1,0")
    assert hardware.gpu_loads() == [Load(99, 7), Load(37, 1024)]


def test_what_a_card_does_not_say_is_missing_and_the_rest_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = replace(H100, uuid="GPU-55", busy=None, memory=None)
    install(monkeypatch, Library([silent, H100]))
    assert hardware.gpu_loads() == [Load(None, None), Load(37, 1024)]
    assert [gpu.memory for gpu in hardware.gpus()] == [0, 81559 * MIB]


def test_an_old_driver_counts_memory_in_the_old_way(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Library([H100], lacks=["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMigMode"]))
    assert hardware.gpu_loads() == [Load(37, 1624)]


def test_a_mig_device_has_its_own_memory_and_load(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Library([replace(H100, slices=(SLICE,))]))
    assert hardware.gpus() == (Gpu(SLICE.name, (9, 0), 9984 * MIB, "MIG-33cc"),)
    assert hardware.gpu_loads() == [Load(None, 12)]


def test_mig_devices_are_named_as_the_driver_names_them_since_and_before_470(monkeypatch: pytest.MonkeyPatch) -> None:
    slices = (SLICE, replace(SLICE, uuid="MIG-66dd"))
    for name in ("MIG-66dd", "MIG-GPU-11aa/8/0"):
        install(monkeypatch, Library([replace(H100, slices=slices)]), CUDA_VISIBLE_DEVICES=name)
        assert [gpu.uuid for gpu in hardware.gpus()] == ["MIG-66dd"]


def test_cards_of_other_jobs_are_not_counted_and_a_lost_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    others = replace(H100, error=pretended_driver.NO_PERMISSION)
    install(monkeypatch, Library([others, H100]), CUDA_VISIBLE_DEVICES="0")
    assert [gpu.uuid for gpu in hardware.gpus()] == ["GPU-11aa"] and usable_gpus.found().concern == ""
    install(monkeypatch, Library([replace(H100, error=pretended_driver.GPU_IS_LOST), H100]))
    assert "card 0 does not answer (NVML: GPU is lost)" in usable_gpus.found().concern


def test_a_driver_that_hangs_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(Library):
        def nvmlInitWithFlags(self, flags: int) -> int:
            released.wait()
            return 1

    released = threading.Event()
    install(monkeypatch, Hanging([H100]))
    monkeypatch.setattr(nvml, "ANSWER_S", 0.01)
    try:
        assert usable_gpus.found().why == "no GPU: the NVIDIA driver does not answer within 0.01 s"
    finally:
        released.set()


@pytest.mark.parametrize(
    ("kernels", "capability", "run"),
    [
        ("sm_80", (8, 6), True),
        ("sm_86", (8, 0), False),
        ("sm_75", (7, 0), False),
        ("sm_75", (8, 0), False),
        ("sm_90", (10, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_100f", (10, 3), True),
        ("sm_100a", (10, 3), False),
        ("compute_70", (12, 0), True),
        ("compute_90a", (10, 0), False),
    ],
)
def test_kernels_run_on_their_generation_and_ptx_on_every_newer_one(
    kernels: str, capability: tuple[int, int], run: bool
) -> None:
    assert runs_on(kernels, capability) == run


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gpus.json"


def asked(plan: bool) -> bool:
    check = usable_gpus.TorchCheck()
    check.start(plan, hardware.has_cuda())
    return check.changes_gpus()


def test_a_plan_does_not_ask_torch_again_and_a_run_does(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Library([H100, H100]))
    process = Asked(monkeypatch, torch_shows(H100, H100))
    for plan, times in ((True, 1), (True, 1), (False, 2), (True, 2)):
        pretended_driver.forget(monkeypatch)
        assert not asked(plan) and process.times == times and len(hardware.gpus()) == 2
    assert cached.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "other",
    [
        (Library([H100]), {}),
        (Library([H100, H100], version="590.1"), {}),
        (Library([H100, H100]), {"CUDA_VISIBLE_DEVICES": "0"}),
        (Library([H100, H100]), {"LD_LIBRARY_PATH": "/opt/cuda/compat"}),
    ],
)
def test_what_torch_said_of_another_machine_or_environment_is_not_used(
    cached: Path, monkeypatch: pytest.MonkeyPatch, other: tuple[Library, dict[str, str]]
) -> None:
    install(monkeypatch, Library([H100, H100]))
    process = Asked(monkeypatch, torch_shows(H100, H100))
    asked(plan=False)
    install(monkeypatch, other[0], **other[1])
    asked(plan=True)
    assert process.times == 2


def test_what_torch_could_not_use_is_asked_again_for_it_may_be_repaired(
    cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, Library([H100]))
    Asked(monkeypatch, torch_fails("CUDA unknown error"))
    assert asked(plan=True) and hardware.gpus() == () and not cached.exists()
    pretended_driver.forget(monkeypatch)
    Asked(monkeypatch, torch_shows(H100))
    assert not asked(plan=True) and len(hardware.gpus()) == 1


@pytest.mark.parametrize("damage", ["", "{}", "[1]", '{"of": 1, "answer": 2}'])
def test_a_damaged_cache_is_no_answer(cached: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    install(monkeypatch, Library([H100]))
    process = Asked(monkeypatch, torch_shows(H100))
    asked(plan=False)
    cached.write_text(damage)
    pretended_driver.forget(monkeypatch)
    asked(plan=True)
    assert process.times == 2


def test_a_cache_that_others_can_write_is_not_read(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Library([H100]))
    process = Asked(monkeypatch, torch_shows(H100))
    asked(plan=False)
    cached.parent.chmod(0o777)
    pretended_driver.forget(monkeypatch)
    asked(plan=True)
    assert process.times == 2 and len(hardware.gpus()) == 1


@pytest.mark.parametrize(
    ("library", "devices", "variables", "driver", "asks"),
    [
        (None, False, {}, False, False),
        (None, False, {"NVIDIA_VISIBLE_DEVICES": "all"}, False, False),  # set by an image, without CUDA's library
        (None, True, {}, True, True),
        (None, True, {"NVIDIA_VISIBLE_DEVICES": "all"}, True, True),
        (None, True, {"CUDA_VISIBLE_DEVICES": ""}, True, False),
        (Library([H100]), True, {}, True, True),
        (Library([H100]), True, {"CUDA_VISIBLE_DEVICES": "-1"}, True, False),
        (Library([]), False, {}, True, False),
        (Library(error=pretended_driver.MISMATCH), True, {}, True, True),
        (Library(error=pretended_driver.DRIVER_NOT_LOADED), False, {}, True, False),  # a login node
    ],
)
def test_torch_is_asked_where_there_may_be_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    library: Library | None,
    devices: bool,
    variables: dict[str, str],
    driver: bool,
    asks: bool,
) -> None:
    install(monkeypatch, library, devices, **variables)
    process = Asked(monkeypatch, torch_fails("No CUDA GPUs are available"))
    assert hardware.has_driver() == driver
    if driver:
        asked(plan=False)
    assert process.times == asks and hardware.gpus() == ()


def test_a_library_that_cannot_be_loaded_is_no_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError(f"{name}: wrong ELF class: ELFCLASS32")

    install(monkeypatch, None)
    for module in (hardware, nvml):
        monkeypatch.setattr(module, "CDLL", broken)
    why = "no GPU: the driver's library cannot be loaded (libnvidia-ml.so.1: wrong ELF class: ELFCLASS32)"
    assert hardware.about_gpus().why == why


def test_without_an_answer_the_drivers_gpus_are_used_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Library([H100]))
    Asked(monkeypatch, Answer("", "", error="torch did not say within 120 s which GPUs it can use"))
    asked(plan=False)
    assert [gpu.uuid for gpu in hardware.gpus()] == ["GPU-11aa"]
    assert usable_gpus.found().concern == "torch did not say within 120 s which GPUs it can use"


@pytest.mark.parametrize("text", ["", "null", "7", "{}", '{"version": "2", "cuda": "", "gpus": [{}], "kernels": []}'])
def test_lines_that_are_no_answer_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        of_text(text)
