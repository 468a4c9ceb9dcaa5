"""What only a GPU shows: the device is found, bf16 and NCCL train, a resumed run is bit-identical, memory that is not
enough is a sentence.

Skipped where the driver shows no GPU; `make test-gpu` runs this folder alone.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.checkpoint.test_identity import ALONE, EVERYTHING, back_at, check_equal
from tests.faults.held_up import held_up
from tests.faults.test_restarts import GATE, writes
from tests.pictures import image_folder
from tests.runs import kill, losses, points, read, trainer
from trainer.checkpoint import tensor_tree
from trainer.checkpoint.pinned import PinnedMemory
from trainer.checkpoint.tensor_tree import Packed
from trainer.data.augment.views import Augmentation, CentreView, TrainView, WindowView
from trainer.data.placement import Placement
from trainer.data.shared_batches import Parcel, SharedBatches
from trainer.data.source import Splits
from trainer.host import hardware, nvml, visible_gpus
from trainer.host.torch_gpus import Question

pytestmark = pytest.mark.skipif(not hardware.gpus(), reason="the driver shows no GPU")

DIGITS = ("+recipe=digits_lenet", "tracking=none", "hydra.run.dir=run", "execution.threads=1")
RESNET = (
    "+recipe=resnet50_random",
    "data.image_size=64",
    "data.batches=4",
    "data.val_batches=1",
    "tracking=none",
    "hydra.run.dir=run",
    "execution.threads=1",
)
EXACT = ("device=cuda", "execution.deterministic=true", "precision=fp32")


def ended(*command: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = trainer(*command, cwd=cwd, timeout=240)
    assert done.returncode == code, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model.safetensors")


def apart(one: Path, other: Path) -> float:
    """The greatest difference between two runs' weights, as a share of the greatest weight of that tensor."""
    ours, theirs = weights(one), weights(other)
    assert {*ours} == {*theirs}
    return max(
        float((ours[n].double() - theirs[n].double()).abs().max() / theirs[n].double().abs().max().clamp_min(1e-12))
        for n in ours
    )


def test_gpu_is_taken_unasked_and_learns(tmp_path: Path) -> None:
    done = ended(*DIGITS, "epochs=4", cwd=tmp_path)
    plan = read(tmp_path / "run" / "plan.json")
    assert (
        plan["topology"]["device"] == "cuda" and plan["chosen"]["precision"] == "fp32" and plan["chosen"]["pin_memory"]
    )
    assert [p["device"] for p in plan["topology"]["processes"]] == ["cuda:0"]
    assert "kernels are so short" in done.stdout
    assert read(tmp_path / "run" / "result.json")["metrics"]["val/acc1"] > 0.93


def test_a_long_run_measures_its_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    ended(*RESNET, "data.batches=500", "data.batch_size=8", "limit_train_batches=500", "model=resnet18", cwd=tmp_path)
    plan = read(tmp_path / "run" / "plan.json")
    assert "measured here: " in plan["remarks"]["why"]["precision"]
    kept = read(tmp_path / "cache" / "precisions.json")
    assert [set(speeds) for speeds in kept.values()] == [{"fp32", "bf16", "fp16"}]


def test_bytes_of_a_gpu_are_rounded_as_those_of_a_cpu() -> None:
    images, labels = torch.arange(256, dtype=torch.uint8).repeat(6).view(2, 3, 16, 16), torch.zeros(2)
    splits = Splits(None, None, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])  # type: ignore[arg-type]
    for dtype in (torch.bfloat16, torch.float16):
        on_cpu, on_gpu = (
            Placement(splits, torch.device(device), torch.float32, True, dtype)(images.pin_memory(), labels)[0]
            for device in ("cpu", "cuda:0")
        )
        assert isinstance(on_cpu, torch.Tensor) and isinstance(on_gpu, torch.Tensor) and on_gpu.dtype == dtype
        # fused multiply-add rounds once where a CPU rounds twice: at most one unit in the last place
        assert torch.allclose(on_gpu.cpu().double(), on_cpu.double(), rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "fp16", "bf16"])
def test_every_precision_gives_about_the_cpus_losses(precision: str, tmp_path: Path) -> None:
    told = (*DIGITS, "epochs=1", "execution.log_every=1", "strategy.clip_norm=5", "ema.decay=0.9")
    ended(*told, "device=cuda", f"precision={precision}", cwd=tmp_path)
    (tmp_path / "run").rename(tmp_path / "gpu")
    ended(*told, "device=cpu", "precision=fp64", cwd=tmp_path)
    ours, truth = losses(tmp_path / "gpu"), losses(tmp_path / "run")
    assert [step for step, _ in ours] == [step for step, _ in truth]
    near = {"fp64": 1e-9, "fp32": 2e-3, "fp16": 3e-2, "bf16": 0.1}[precision]
    assert max(abs(a - b) for (_, a), (_, b) in zip(ours, truth, strict=True)) < near


def test_collective_over_nccl_and_a_server_equal_one_process(tmp_path: Path) -> None:
    told = (*DIGITS, *EXACT, "epochs=1", "optimizer.momentum=0.9")
    for name, strategy in (
        ("single", ["strategy=single"]),
        ("nccl", ["strategy=collective", "launch.nproc=1"]),
        ("local", ["strategy=local_sgd", "launch.nproc=1"]),
        ("server", ["strategy=pserver_sync", "launch.servers=1", "launch.workers=1"]),
    ):
        ended(*told, *strategy, cwd=tmp_path)
        (tmp_path / "run").rename(tmp_path / name)
    assert apart(tmp_path / "nccl", tmp_path / "single") == 0.0
    assert apart(tmp_path / "local", tmp_path / "single") == 0.0
    assert apart(tmp_path / "server", tmp_path / "single") < 1e-5  # the server's arithmetic is the CPU's


@pytest.mark.parametrize("strategy", ["pserver_async", "pserver_ssp", "pserver_geo"])
def test_worker_of_servers_trains_on_the_gpu(strategy: str, tmp_path: Path) -> None:
    ended(*DIGITS, f"strategy={strategy}", "launch.servers=2", "launch.workers=1", "epochs=3", cwd=tmp_path)
    devices = {p["role"]: p["device"] for p in read(tmp_path / "run" / "plan.json")["topology"]["processes"]}
    assert devices == {"worker": "cuda:0", "server": "cpu"}
    assert read(tmp_path / "run" / "result.json")["metrics"]["val/acc1"] > 0.85


@pytest.mark.parametrize("strategy", ["pserver_sync", "pserver_async", "pserver_geo"])
def test_click_model_with_tables_at_servers_trains_on_the_gpu(strategy: str, tmp_path: Path) -> None:
    told = (
        "+recipe=wide_and_deep",
        "data.train_rows=4000",
        "data.val_rows=1000",
        "epochs=1",
        "tracking=none",
        "hydra.run.dir=run",
    )
    ended(*told, f"strategy={strategy}", "launch.servers=1", "launch.workers=1", cwd=tmp_path)
    assert read(tmp_path / "run" / "result.json")["metrics"]["val/auc"] > 0.5


def test_sparse_tables_in_workers_are_refused_with_nccl_and_train_alone(tmp_path: Path) -> None:
    told = (
        "+recipe=wide_and_deep",
        "data.train_rows=2000",
        "data.val_rows=500",
        "epochs=1",
        "tracking=none",
        "hydra.run.dir=run",
        "launch.servers=null",
    )
    ended(*told, "strategy=single", "launch.workers=null", "launch.nproc=1", cwd=tmp_path)


@pytest.mark.parametrize("case", ALONE)
def test_resumed_run_is_bit_identical_on_the_gpu(case: str, tmp_path: Path) -> None:
    command = (*ALONE[case], *EVERYTHING, "device=cuda", "execution.deterministic=true")
    ended(*command, "hydra.run.dir=whole", cwd=tmp_path)
    steps = sorted(int(p.name.partition("-")[2]) for p in (tmp_path / "whole" / "checkpoints").glob("step-*"))
    for step in (steps[len(steps) // 2], steps[-2]):
        back_at(tmp_path / "whole", step, tmp_path / f"from{step}")
        ended(*command, f"hydra.run.dir=from{step}", "resume=auto", cwd=tmp_path)
        check_equal(tmp_path / "whole", tmp_path / f"from{step}")


def test_convolutions_are_bit_identical_after_a_kill_too(tmp_path: Path) -> None:
    """ResNet-18 in channels_last and fp16, with cuDNN's deterministic kernels."""
    told = (
        *RESNET,
        "model=resnet18",
        "device=cuda",
        "execution.deterministic=true",
        "epochs=3",
        "execution.log_every=1",
        "checkpoint.every_steps=3",
    )
    ended(*told, cwd=tmp_path)
    (tmp_path / "run").rename(tmp_path / "whole")
    waits = lambda run: len(points(run, "train/loss")) >= 7 if (run / "metrics.jsonl").exists() else False  # noqa: E731
    with held_up(tmp_path, waits, *told, GATE, "launch.max_restarts=0", ends_s=90) as (process, _, everybody):
        kill(everybody)
        process.wait(30)
    ended(*told, GATE, "launch.max_restarts=0", "resume=auto", cwd=_with_go(tmp_path))
    check_equal(tmp_path / "whole", tmp_path / "run")


def _with_go(folder: Path) -> Path:
    (folder / "run" / "go").touch()
    return folder


def test_killed_worker_is_started_again_and_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    told = (
        *DIGITS,
        "device=cuda",
        "execution.deterministic=true",
        "limit_train_batches=10",
        "epochs=2",
        "execution.log_every=1",
        "checkpoint.every_steps=4",
        "checkpoint.background=false",
    )
    ended(*told, cwd=tmp_path)
    (tmp_path / "run").rename(tmp_path / "whole")
    waits = lambda run: len(points(run, "train/loss")) >= 7 if (run / "metrics.jsonl").exists() else False  # noqa: E731
    with held_up(tmp_path, waits, *told, GATE, ends_s=90) as (process, run, everybody):
        kill(p for p in everybody if writes(p, run / "workerlog.0"))
        (run / "go").touch()
    assert process.returncode == 0, (tmp_path / "screen.txt").read_text()
    check_equal(tmp_path / "whole", tmp_path / "run")


def test_preempted_run_ends_with_75_and_goes_on(tmp_path: Path) -> None:
    told = (
        *DIGITS,
        "device=cuda",
        "execution.deterministic=true",
        "limit_train_batches=10",
        "epochs=2",
        "execution.log_every=1",
    )
    ended(*told, cwd=tmp_path)
    (tmp_path / "run").rename(tmp_path / "whole")
    waits = lambda run: len(points(run, "train/loss")) >= 7 if (run / "metrics.jsonl").exists() else False  # noqa: E731
    with held_up(tmp_path, waits, *told, GATE, ends_s=90) as (process, run, _):
        process.send_signal(signal.SIGTERM)
        (run / "go").touch()
    assert process.returncode == 75, (tmp_path / "screen.txt").read_text()
    ended(*told, GATE, "resume=auto", cwd=tmp_path)
    check_equal(tmp_path / "whole", tmp_path / "run")


def test_memory_that_is_not_enough_is_a_sentence(tmp_path: Path) -> None:
    too_many = int(torch.cuda.mem_get_info()[1] / 2**30) * 40
    done = ended(
        "+recipe=resnet50_random",
        "tracking=none",
        "hydra.run.dir=run",
        f"data.batch_size={too_many}",
        "data.batches=1",
        cwd=tmp_path,
        code=1,
    )
    assert "Traceback" not in done.stdout + done.stderr
    assert re.search(
        rf"cuda:0 is out of memory .*batches of {too_many} samples.*the peak of its tensors was [\d.]+ of [\d.]+ GiB",
        done.stderr,
    ), done.stderr


def test_largest_batch_within_a_limit_is_found(tmp_path: Path) -> None:
    done = ended(*RESNET, "model=resnet18", "data.batch_size=auto", "data.memory_limit_gib=3", cwd=tmp_path)
    found = int(re.search(r"data.batch_size=auto: (\d+), the most that fits into 3 GiB", done.stdout)[1])  # type: ignore[index]
    assert 64 <= found <= 4096
    assert read(tmp_path / "run" / "plan.json")["batches"]["size"] == found


def test_loss_that_is_not_finite_stops_the_run_with_a_report(tmp_path: Path) -> None:
    done = ended(*DIGITS, "device=cuda", "optimizer.lr=1e12", "epochs=1", "execution.log_every=5", cwd=tmp_path, code=1)
    assert "Traceback" not in done.stderr and "The loss is" in done.stderr
    assert list((tmp_path / "run").glob("nonfinite*")), list((tmp_path / "run").iterdir())


def test_skipped_updates_are_counted(tmp_path: Path) -> None:
    told = (
        "model._target_=tests.faults.poisoned.Poisoned",
        "~model.in_channels",
        "~model.image_size",
        "+model.at=[3,7]",
    )
    done = ended(*DIGITS, *told, "device=cuda", "on_nonfinite=skip", "limit_train_batches=10", "epochs=1", cwd=tmp_path)
    assert "2 updates skipped" in done.stdout


@pytest.mark.parametrize("visible", [None, "0", "0,0", "0,-1", "7,0", "UUID", ""])
def test_the_drivers_gpus_are_torchs(visible: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cards = nvml.read().cards
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", cards[0].gpu.uuid[:12] if visible == "UUID" else visible)
    shown, answer = visible_gpus.visible(cards, os.environ), Question().answer()
    assert [(gpu.name, gpu.capability) for gpu in shown.gpus] == [(gpu.name, gpu.capability) for gpu in answer.gpus]
    if shown.gpus and not shown.gpus[0].uuid.startswith("MIG-"):
        assert [gpu.uuid for gpu in shown.gpus] == [gpu.uuid for gpu in answer.gpus]
    assert all(0.9 < ours.memory / torchs.memory < 1.1 for ours, torchs in zip(shown.gpus, answer.gpus, strict=True))


def test_one_gpu_is_not_shared_by_two_workers(tmp_path: Path) -> None:
    nproc = len(hardware.gpus()) + 1
    done = ended(*DIGITS, f"launch.nproc={nproc}", cwd=tmp_path, code=2)
    assert "every worker needs its own" in done.stderr and not (tmp_path / "run").exists()


def test_compiled_model_trains(tmp_path: Path) -> None:
    ended(*RESNET, "model=resnet18", "compile=true", cwd=tmp_path)
    assert read(tmp_path / "run" / "plan.json")["topology"]["device"] == "cuda"


def test_trace_has_the_kernels(tmp_path: Path) -> None:
    ended(*RESNET, "model=resnet18", "profile=true", "data.batches=20", cwd=tmp_path)
    import gzip

    trace = json.loads(gzip.decompress(next((tmp_path / "run").glob("trace.0.json.gz")).read_bytes()))
    assert any(event.get("cat") == "kernel" for event in trace["traceEvents"])


def test_evaluation_and_prediction_take_a_checkpoint_to_either_device(tmp_path: Path) -> None:
    ended(*DIGITS, "epochs=1", "precision=fp32", cwd=tmp_path)
    found = {}
    for device in ("cuda", "cpu"):
        told = (
            "mode=eval",
            "weights=run",
            "precision=fp32",
            f"device={device}",
            f"hydra.run.dir={device}",
            *DIGITS[:2],
            DIGITS[3],
        )
        ended(*told, cwd=tmp_path)
        found[device] = read(tmp_path / device / "result.json")["metrics"]
    assert found["cuda"]["val/acc1"] == pytest.approx(found["cpu"]["val/acc1"], abs=0.01)
    assert found["cuda"]["val/loss"] == pytest.approx(found["cpu"]["val/loss"], abs=2e-3)
    (tmp_path / "pictures").mkdir()
    Image.new("L", (8, 8), 128).save(tmp_path / "pictures" / "grey.png")
    ended("mode=predict", "weights=run", "predict.input=pictures", "hydra.run.dir=told", *DIGITS[:2], cwd=tmp_path)
    assert "grey.png" in (tmp_path / "told" / "predictions.csv").read_text()


def test_run_moves_between_gpu_and_cpu(tmp_path: Path) -> None:
    told = (
        *DIGITS,
        "execution.deterministic=true",
        "precision=fp32",
        "limit_train_batches=10",
        "execution.log_every=1",
    )
    ended(*told, "epochs=1", "device=cuda", cwd=tmp_path)
    ended(*told, "epochs=2", "device=cpu", "resume=auto", "resume.allow_changes=true", cwd=tmp_path)
    ended(*told, "epochs=3", "device=cuda", "resume=auto", "resume.allow_changes=true", cwd=tmp_path)
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(1, 31))


def test_load_of_the_gpu_is_in_the_log(tmp_path: Path) -> None:
    ended(*DIGITS, "epochs=20", "tracking.system_every_s=0.5", cwd=tmp_path)
    names = {
        n for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines() for n in json.loads(line)["metrics"]
    }
    assert any("gpu0_memory_used_mib" in name for name in names), names


def test_a_state_in_pinned_memory_is_that_of_the_moment(tmp_path: Path) -> None:
    """The tensors change right after the copy was asked for, and the next copy does not change the file of this one."""
    draw = torch.Generator("cuda").manual_seed(0)

    def state() -> dict[str, torch.Tensor]:
        return {
            "weight": torch.randn(64, 32, 3, 3, device="cuda", generator=draw).to(memory_format=torch.channels_last),
            "half": torch.randn(1_000_003, device="cuda", generator=draw).bfloat16(),
            "scale": torch.tensor(65536.0, device="cuda"),
            "rows": torch.randn(100, 8, device="cuda", generator=draw)[::3],
        }

    memory, first, second = PinnedMemory(), state(), state()
    wanted = {name: tensor.to("cpu", copy=True) for name, tensor in first.items()}
    packed = Packed(first, memory)
    assert packed.events, "it was not waited for"
    for tensor in first.values():
        tensor.fill_(float("nan"))
    other = Packed(second, memory)
    packed.write(tmp_path / "first")
    other.write(tmp_path / "second")
    again = Packed(second, memory)
    again.write(tmp_path / "again")
    for name, states in {"first": wanted, "second": second, "again": second}.items():
        found = tensor_tree.read(tmp_path / name)
        assert all(torch.equal(found[key], tensor.cpu()) for key, tensor in states.items())


def test_images_decoded_or_kept_on_the_gpu_train_as_on_the_ordinary_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVJPEG rounds a pixel otherwise than the CPU's decoder, so that losses are near and not equal."""
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    root = image_folder(tmp_path / "d", per_class=40)
    typed = ("+recipe=resnet50_imagefolder", f"data.root={root}", "model=resnet18", "data.image_size=64", "epochs=1")
    typed += ("data.batch_size=16", "data.erasing=0.5", "data.mixup=0.2", "tracking=none", "execution.log_every=1")
    found = {}
    for name, how in {
        "ordinary": ("data.cache=none", "data.decode=cpu", "data.num_workers=2"),
        "decoded": ("data.cache=none", "data.decode=gpu", "data.num_workers=2"),
        "kept": ("data.cache=device",),
    }.items():
        ended(*typed, *how, *EXACT, f"hydra.run.dir={tmp_path / name}", cwd=tmp_path)
        found[name] = [loss for _, loss in losses(tmp_path / name)]
    assert found["ordinary"] == pytest.approx(found["decoded"], rel=0.02)
    assert found["ordinary"] == pytest.approx(found["kept"], rel=0.02)


def test_views_of_images_on_the_gpu_are_at_most_one_of_255_apart() -> None:
    draw, sizes = torch.Generator().manual_seed(0), np.array([[375, 500], [640, 480], [64, 64], [70, 300]])
    images = [torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=draw) for size in sizes.tolist()]
    augmentation = Augmentation(0.5, None, 0.5, torch.zeros(3, dtype=torch.uint8))
    gpu, numbers = torch.device("cuda"), np.arange(len(images))
    for view in (
        TrainView(64, (0.35, 1.0), (0.75, 1 / 0.75), augmentation),
        WindowView(72, 64, augmentation),
        CentreView(72, 64),
    ):
        here = view(iter(images), sizes, (3, 1), numbers)
        there = view.on(gpu)(iter([image.to(gpu) for image in images]), sizes, (3, 1), numbers)
        assert int((there.cpu().int() - here.int()).abs().max()) <= 1


def test_slots_that_are_registered_count_as_pinned() -> None:
    shared = SharedBatches(1, pinned=True)
    sent = shared.put((torch.arange(1000.0), torch.arange(10)))
    assert isinstance(sent, Parcel)
    inputs, labels = shared.take(sent)
    assert isinstance(inputs, torch.Tensor) and inputs.is_pinned() and labels.is_pinned()
    assert torch.equal(inputs.to("cuda", non_blocking=True).cpu(), torch.arange(1000.0))


@pytest.mark.parametrize("strategy", ["single", "collective"])
def test_captured_updates_have_the_losses_of_eager_ones(strategy: str, tmp_path: Path) -> None:
    typed = (*DIGITS, f"strategy={strategy}", "epochs=1", "execution.log_every=1", "sampler.drop_last=false", *EXACT)
    ended(*typed, "hydra.run.dir=eager", cwd=tmp_path)
    ended(*typed, "hydra.run.dir=graph", "execution.cuda_graph=true", cwd=tmp_path)
    eager, graph = losses(tmp_path / "eager"), losses(tmp_path / "graph")
    assert len(graph) == len(eager) > 20 and graph == pytest.approx(eager, rel=1e-3)
    assert apart(tmp_path / "eager", tmp_path / "graph") < 1e-3


def test_compiled_blocks_have_the_losses_of_eager_ones(tmp_path: Path) -> None:
    typed = (*RESNET, "model=resnet18", "execution.log_every=1", "epochs=1", *EXACT)
    ended(*typed, "hydra.run.dir=eager", cwd=tmp_path)
    for regions in ("true", "false"):
        how = ("compile=true", f"execution.compile_regions={regions}", f"hydra.run.dir={regions}")
        ended(*typed, *how, cwd=tmp_path)
        assert losses(tmp_path / regions) == pytest.approx(losses(tmp_path / "eager"), rel=2e-3)
