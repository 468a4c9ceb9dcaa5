"""``plan=true`` prints the plan of any cluster, with the model's true size, and writes nothing."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Run

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


def test_plan_of_the_main_job_prints_its_parameters_and_writes_nothing(run: Run, folder: Path) -> None:
    assert resnet50_parameters(102) == 23_717_030
    typed = ("plan=true", "data.download=false", "launch.nnodes=31", "device=cuda")
    code, out, error = run("+recipe=resnet50_flowers", *typed)
    assert (code, error) == (0, "")
    for part in ("23,717,030 parameters", "32 per worker x 31 workers = 992 global", "and 15 more processes"):
        assert part in out
    assert list(folder.iterdir()) == []


def test_a_sweep_plans_every_point(run: Run, folder: Path) -> None:
    code, out, _ = run("-m", DIGITS, "plan=true", "data.batch_size=16,64")
    assert code == 0 and "= 16 global" in out and "= 64 global" in out
    assert list(folder.iterdir()) == []


def test_sixteen_hosts_of_eight(run: Run, folder: Path) -> None:
    typed = ("plan=true", "launch.nnodes=16", "launch.nproc=8", "device=cuda")
    code, out, error = run("+recipe=resnet50_random", *typed)
    assert (code, error) == (0, "")
    for part in (
        "128 workers on 16 hosts",
        "host 1, cuda:7",
        "and 112 more processes",
        "= 4096 global",
        "100 per epoch",
    ):
        assert part in out
    assert list(folder.iterdir()) == []


def test_outputs_that_have_no_class_are_said_loudly(run: Run, folder: Path) -> None:
    code, out, _ = run(DIGITS, "plan=true", "model.num_classes=1000", "hydra.run.dir=run")
    said = " ".join(out.split())
    assert code == 0 and "ATTENTION: model (trainer.models.lenet.LeNet) makes 1000 outputs for the 10 classes" in said
    assert "990 of them have no samples (model.num_classes=10 makes one for each)" in said
    assert "ATTENTION" not in run(DIGITS, "plan=true")[1]
