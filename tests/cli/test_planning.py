"""``plan=true`` prints the plan of any cluster, with the model's true size, and writes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

import trainer
from tests.cli.conftest import Run
from trainer.host import hardware

DIGITS = "+recipe=digits_lenet"


def resnet50_parameters(classes: int) -> int:
    """From the architecture (He et al., 2016): convolutions without bias, two parameters per channel of batch norm."""
    total, channels = 3 * 64 * 7 * 7 + 2 * 64, 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            total += channels * width + width * width * 9 + width * 4 * width + 2 * (width + width + 4 * width)
            if block == 0:
                total += channels * 4 * width + 2 * 4 * width
            channels = 4 * width
    return total + channels * classes + classes


@pytest.mark.all
def test_plan_of_the_main_job_prints_its_parameters_and_writes_nothing(run: Run, folder: Path) -> None:
    assert resnet50_parameters(102) == 23_717_030
    typed = ("plan=true", "data.download=false", "launch.nnodes=31", "device=cuda")
    code, out, error = run("+recipe=resnet50_flowers", *typed)
    assert (code, error) == (0, "") and "would be refused" not in out
    for part in ("23,717,030 parameters", "32 per worker x 31 workers = 992 global", "and 15 more processes"):
        assert part in out
    assert list(folder.iterdir()) == []


def test_a_sweep_plans_every_point(run: Run, folder: Path) -> None:
    code, out, _ = run("-m", DIGITS, "plan=true", "data.batch_size=16,64")
    assert code == 0 and "= 16 global" in out and "= 64 global" in out
    assert list(folder.iterdir()) == []


@pytest.mark.all
def test_sixteen_hosts_of_eight(run: Run, folder: Path) -> None:
    typed = ("plan=true", "verbosity=debug", "launch.nnodes=16", "launch.nproc=8", "device=cuda")
    code, out, error = run("+recipe=resnet50_random", *typed)
    assert (code, error) == (0, "")
    for part in (
        "128 workers on 16 hosts",
        "host 1, cuda:7",
        "and 112 more processes",
        "= 4096 global",
        "100 per epoch",
        "(host 0's address, launch.master_addr):29500",
        "cores of each host / 8 workers",
    ):
        assert part in out
    assert "127.0.0.1" not in out and " cores / " not in out and "would be refused" not in out
    assert list(folder.iterdir()) == []


@pytest.mark.all
def test_the_example_of_the_docs_is_a_plan_that_could_run(run: Run) -> None:
    page = Path(__file__).parents[2] / "docs" / "getting-started.md"
    [example] = [line for line in page.read_text().splitlines() if "plan=true launch.nnodes" in line]
    assert run(*example.split()[3:])[0] == 0


def reasons(out: str) -> list[str]:
    """What is listed under a plan that would be refused."""
    *_, listed = out.partition("this run would be refused:\n")
    return [line.removeprefix("  - ") for line in listed.splitlines() if line.startswith("  - ")]


@pytest.mark.all
def test_a_cluster_larger_than_the_data_is_planned_and_what_is_lacking_leads_on(run: Run, folder: Path) -> None:
    typed = ("+recipe=resnet50_flowers", "data=embedded_flowers", "plan=true", "launch.nnodes=1000")
    code, out, error = run(*typed, "launch.nproc=8")
    assert (code, error) == (2, "")
    assert "8000 workers on 1000 hosts" in out and "and 7984 more processes" in out
    [reason] = reasons(out)
    assert "8000 workers" in reason and "1020 training samples" in reason
    instead = reason.partition("Type instead: ")[2].split()
    assert instead == ["launch.nnodes=3", "launch.nproc=8"], "31 whole batches of 32 for 24 workers"
    code, out, _ = run(*typed[:-1], *instead)
    assert code == 0 and reasons(out) == []
    assert list(folder.iterdir()) == []


def test_every_reason_is_listed_not_only_the_first(run: Run, folder: Path) -> None:
    code, out, error = run(
        DIGITS,
        *"""
            plan=true launch.nproc=8 data.batch_size=4000 tracking.uri=foo://x hydra.run.dir=/proc/x
            strategy=local_sgd launch.servers=1 early_stop.metric=val/auc data.work=leased
        """.split(),
    )
    assert (code, error) == (2, "") and "Plan of digits_lenet" in out
    found = reasons(out)
    begun = """
        data.batch_size=4000 tracking.uri=foo://x hydra.run.dir= launch.servers=1 early_stop.metric=
        data.work=leased
    """.split()
    assert sorted(reason.partition(":")[0].partition("=")[0] + "=" for reason in found) == sorted(
        b.partition("=")[0] + "=" for b in begun
    )
    assert "8000" not in out and list(folder.iterdir()) == []


def test_a_plan_of_one_host_speaks_of_this_machine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "cores", lambda: 2)
    code, out, _ = run(
        "+recipe=resnet50_flowers", "data=embedded_flowers", "plan=true", "verbosity=debug", "launch.nproc=8"
    )
    assert code == 0 and "2 cores / 8 workers" in out and "127.0.0.1" in out
    assert "0 core" not in out and "fewer cores than workers" in out


def test_a_model_without_convolutions_is_not_called_small(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "cpu_flags", lambda: frozenset({"avx512_bf16"}))
    _, out, _ = run("+recipe=wide_and_deep", "plan=true", "verbosity=debug")
    assert "on a CPU bf16 pays for convolutions, and this model has none" in " ".join(out.split())
    _, out, _ = run(DIGITS, "plan=true", "verbosity=debug")
    assert "with 11,350 parameters, below 1,000,000, bf16 does not pay" in " ".join(out.split())


def test_a_plan_from_python_tells_why_it_would_be_refused(folder: Path) -> None:
    result = trainer.run([DIGITS, "plan=true", "data.batch_size=4000"])
    assert result.status == "planned" and result.error.startswith("data.batch_size=4000: ")
    assert trainer.run([DIGITS, "plan=true"]).error == ""


def test_outputs_that_have_no_class_are_said_loudly(run: Run, folder: Path) -> None:
    code, out, _ = run(DIGITS, "plan=true", "model.num_classes=1000", "hydra.run.dir=run")
    said = " ".join(out.split())
    assert code == 0 and "ATTENTION: model (trainer.models.lenet.LeNet) makes 1000 outputs for the 10 classes" in said
    assert "990 of them have no samples (model.num_classes=10 makes one for each)" in said
    assert "ATTENTION" not in run(DIGITS, "plan=true")[1]
