"""Settings on GPUs: what ``auto`` chooses and why, and that the user's own variables win."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainer.config.run_config import RunConfig
from trainer.errors import UserError
from trainer.host.numa import Nodes
from trainer.planning.chosen import GpuSettings
from trainer.planning.gpu_settings import GpuCase, cores_of_a_worker, gpu_settings

CONFIG = RunConfig()
TWO = Nodes({0: tuple(range(32)), 1: tuple(range(32, 64))}, (0, 0, 0, 0, 1, 1, 1, 1))
EIGHT = GpuCase("cuda", "bf16", False, 8, (9, 0), several=True, nodes=TWO)
ONE = replace(EIGHT, workers_here=1, several=False)


def settings(case: GpuCase, **execution: Any) -> tuple[GpuSettings, dict[str, str]]:
    return gpu_settings(CONFIG.changed(execution=execution), case)


def test_eight_gpus_of_two_nodes_have_everything() -> None:
    chosen, why = settings(EIGHT)
    assert chosen == GpuSettings(True, True, True, True)
    assert why["numa"].startswith("cuda:0 at node 0, cuda:1 at node 0") and why["numa"].endswith("cuda:7 at node 1")
    assert all(why.values()) and cores_of_a_worker(EIGHT) == 8
    uneven = replace(EIGHT, nodes=replace(TWO, gpus=(0, 0, 0, 0, 0, 0, 1, 1)))
    assert cores_of_a_worker(uneven) == 5


@pytest.mark.parametrize(
    ("name", "case", "reason"),
    [
        ("numa", replace(EIGHT, nodes=replace(TWO, gpus=(0,) * 8)), "the cores of node 1, which has no worker"),
        ("numa", replace(EIGHT, nodes=replace(TWO, cores={0: (0,)})), "the cores of one NUMA node"),
        ("numa", replace(EIGHT, nodes=Nodes({0: (0,), 2: (1,)}, TWO.gpus)), "no core of node 1, where a GPU is"),
        ("numa", replace(EIGHT, nodes=replace(TWO, gpus=(-1,) * 8)), "does not say at which NUMA node"),
        ("numa", replace(EIGHT, nodes=replace(TWO, gpus=(0, 1))), "does not say at which NUMA node"),
        ("numa", replace(EIGHT, nodes=None), "no NUMA nodes"),
        ("numa", replace(EIGHT, elsewhere=True), "not known here"),
        ("numa", ONE, "the cores of node 1, which has no worker"),
        ("nccl_priority", ONE, "one worker exchanges nothing"),
        ("nccl_priority", replace(EIGHT, servers=True), "parameter servers exchange"),
        ("expandable_segments", replace(EIGHT, windows=True), "Windows' subsystem"),
        ("tf32", replace(EIGHT, capability=(7, 5)), "compute capability 8.0 or newer"),
        ("tf32", replace(EIGHT, precision="fp64", typed=True), "fp64 has none of it"),
        ("tf32", replace(EIGHT, precision="fp32", typed=True), "precision=fp32 is typed, which means all 24 bits"),
        *((name, replace(EIGHT, device="cpu"), "for GPUs") for name in ("tf32", "expandable_segments", "numa")),
    ],
)
def test_what_does_not_pay_is_left_with_its_reason(name: str, case: GpuCase, reason: str) -> None:
    chosen, why = settings(case)
    assert getattr(chosen, name) is False and reason in why[name]


def test_tf32_follows_what_is_typed() -> None:
    assert settings(replace(EIGHT, precision="fp32"))[0].tf32, "auto chose fp32, because the model is small"
    typed = replace(EIGHT, precision="fp32", typed=True)
    assert settings(typed, tf32=True)[0].tf32 and "tf32" not in settings(typed, tf32=True)[1]
    assert not settings(EIGHT, deterministic=True)[0].tf32 and settings(EIGHT, deterministic=True, tf32=True)[0].tf32


@pytest.mark.parametrize(
    ("name", "variable", "value"),
    [
        ("tf32", "NVIDIA_TF32_OVERRIDE", "0"),
        ("expandable_segments", "PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128"),
        ("expandable_segments", "PYTORCH_ALLOC_CONF", "expandable_segments:False"),
        ("nccl_priority", "TORCH_NCCL_HIGH_PRIORITY", "0"),
        ("numa", "GOMP_CPU_AFFINITY", "0-3"),
    ],
)
@pytest.mark.parametrize("typed", ["auto", True])
def test_the_users_own_variables_win_and_are_named(name: str, variable: str, value: str, typed: Any) -> None:
    chosen, why = settings(replace(EIGHT, variables={variable: value}), **{name: typed})
    assert getattr(chosen, name) is False and why[name] == f"{variable}={value} of the environment holds"
    others = {one: getattr(chosen, one) for one in ("tf32", "expandable_segments", "nccl_priority", "numa")} | {
        name: True
    }
    assert all(others.values()), "only that one"


@pytest.mark.parametrize(
    ("name", "case", "reason"),
    [
        ("tf32", replace(EIGHT, device="cpu"), "is for GPUs, and this run trains on CPUs"),
        ("tf32", replace(EIGHT, capability=(7, 0)), "TF32 begins with compute capability 8.0, and a GPU has 7.0"),
        ("numa", replace(EIGHT, device="cpu"), "is for GPUs"),
        ("numa", replace(EIGHT, nodes=None), "does not say at which NUMA node each GPU is"),
    ],
)
def test_what_cannot_be_is_refused(name: str, case: GpuCase, reason: str) -> None:
    with pytest.raises(UserError, match=rf"execution.{name}=true: .*{reason}.*execution.{name}=auto"):
        settings(case, **{name: True})
    assert settings(case, **{name: False})[0]
