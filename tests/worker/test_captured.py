"""execution.cuda_graph=true: a captured update gives the losses of an eager one, and is refused where it cannot be.

On a CPU a graph is the work itself, called again at each replay: it reads the same memory as a graph of a GPU does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import trainer
from tests.composed import ready
from tests.runs import points
from trainer.errors import RunFailed, UserError
from trainer.host import hardware
from trainer.host.visible_gpus import Gpu
from trainer.metrics.criterion import Criterion
from trainer.planning import cuda_graph
from trainer.worker import captured, gpu_settings
from trainer.worker.captured import WARM_UP, CudaGraph

RUN = """
    +recipe=digits_lenet device=cpu precision=fp64 execution.threads=1 epochs=2 limit_train_batches=null seed=3
    execution.log_every=1 data.num_workers=0 data.batch_size=100 sampler.drop_last=false tracking=none optimizer.lr=0.05
    strategy.clip_norm=1.0 ema.decay=0.9 verbosity=quiet scheduler=one_cycle
""".split()
CALLS: list[str] = []


class Replayed:
    """A graph on the CPU: nothing is computed when it is captured."""

    def __init__(self, device: torch.device) -> None:
        self.work: Callable[[], None] | None = None

    @contextlib.contextmanager
    def warm_up(self) -> Iterator[None]:
        CALLS.append("warm-up")
        yield

    def capture(self, work: Callable[[], None]) -> None:
        CALLS.append("capture")
        self.work = work

    def replay(self) -> None:
        CALLS.append("replay")
        assert self.work is not None
        self.work()


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates are captured on the CPU, too."""
    monkeypatch.setattr(cuda_graph, "_of_machine", lambda checked, chosen: [])
    monkeypatch.setattr(captured, "CudaGraph", Replayed)
    CALLS.clear()


def run(folder: Path, *more: str) -> Any:
    return trainer.run([*RUN, f"hydra.run.dir={folder}", *more])


@pytest.mark.parametrize(
    "more",
    [("optimizer=momentum",), ("optimizer=adamw", "optimizer.lr=0.01", "strategy=collective")],
    ids=["momentum", "adamw under DDP"],
)
@pytest.mark.usefixtures("on_cpu")
def test_padded_updates_have_the_losses_of_eager_ones(more: tuple[str, ...], tmp_path: Path) -> None:
    eager, graph = tmp_path / "eager", tmp_path / "graph"
    run(eager, *more)
    assert not CALLS
    run(graph, *more, "execution.cuda_graph=true")
    updates = 2 * 15  # 1,438 samples: 14 batches of 100, and one of 38
    assert ["warm-up"] * (1 + WARM_UP) + ["capture"] + ["replay"] * (updates - WARM_UP) == CALLS, "first DDP is made"
    for name in ("train/loss", "train/acc1", "val/loss", "val_ema/loss", "lr"):
        found, truth = points(graph, name), points(eager, name)
        assert truth and found == pytest.approx(truth, rel=1e-12, abs=1e-12), name
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (graph, eager))
    assert all(torch.allclose(ours[name], theirs[name], rtol=1e-11, atol=1e-12) for name in theirs)


@pytest.mark.all
@pytest.mark.usefixtures("on_cpu")
def test_a_captured_run_resumes_captured_or_not(tmp_path: Path) -> None:
    more = ("optimizer=momentum", "checkpoint.every_steps=13")
    run(tmp_path / "whole", *more)
    truth = load_file(tmp_path / "whole" / "model.safetensors")
    for then in ("true", "false"):
        folder = tmp_path / then
        run(folder, *more, "execution.cuda_graph=true", "max_steps=20")
        run(folder, *more, f"execution.cuda_graph={then}", "resume=auto", "resume.allow_changes=true")
        found = load_file(folder / "model.safetensors")
        assert set(found) == set(truth)
        again = tmp_path / f"again-{then}"
        run(again, *more, "max_steps=20")
        run(again, *more, "resume=auto", "resume.allow_changes=true")
        same = load_file(again / "model.safetensors")
        assert all(torch.allclose(found[name], same[name], rtol=1e-10, atol=1e-12) for name in same)


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(label_smoothing=0.1), nn.MultiLabelSoftMarginLoss(), nn.MSELoss()]
)
def test_a_padded_loss_is_the_mean_of_what_counts(loss: nn.Module) -> None:
    torch.manual_seed(0)
    outputs = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 3, 1]) if isinstance(loss, nn.CrossEntropyLoss) else torch.rand(3, 4).round().double()
    criterion = Criterion(loss)
    truth = criterion(outputs[:3], labels)
    (wanted,) = torch.autograd.grad(truth, outputs)
    criterion.counted = torch.tensor([1 / 3, 1 / 3, 1 / 3, 0, 0], dtype=torch.float64)
    padded = torch.cat([labels, labels[:1], labels[:1]])
    found = criterion(outputs, padded)
    (gradient,) = torch.autograd.grad(found, outputs)
    assert torch.allclose(found, truth, rtol=1e-12) and torch.allclose(gradient, wanted, rtol=1e-12, atol=1e-15)
    assert torch.equal(criterion(outputs[:3], labels, train=False), criterion.measured(outputs[:3], labels))


H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0))
LENET = ("+recipe=digits_lenet", "execution.cuda_graph=true", "sampler.drop_last=false")
RESNET = ("+recipe=resnet50_random", "execution.cuda_graph=true")
NORMS = (
    "model._target_=tests.job.test_batch_size_search.Bounded",
    "+model.most=[100]",
    "~model.in_channels",
    "~model.image_size",
)
UNEVEN = ("data.batch_size=null", "data.global_batch_size=63")


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        ((*LENET, "device=cpu"), "this run trains on CPUs.*execution.cuda_graph=false"),
        ((*RESNET, "precision=fp16"), "in fp16 the host would have to ask.*precision=bf16"),
        ((*LENET, "optimizer=rmsprop"), "needs an optimizer that is one kernel"),
        ((*LENET, "compile=true", "execution.compile_mode=reduce-overhead"), "records graphs of its own"),
        ((*LENET, "strategy=pserver_sync"), "needs an optimizer that is one kernel|strategy=pserver_sync has steps"),
        ((*LENET, "strategy=local_sgd", "launch.nproc=2"), "strategy=local_sgd has steps on the host"),
        ((*LENET, "strategy.gradient_merge.k_steps=2"), "an update has 2 batches"),
        ((*LENET, "strategy=collective", "strategy.find_unused_parameters=true"), "asks in each update"),
        (
            (*LENET, "strategy=collective", "strategy.comm_hook=fp16", "launch.nproc=2"),
            "runs on the host in each update",
        ),
        ((*LENET, "on_nonfinite=skip"), "on_nonfinite=skip reads the gradients"),
        ((*LENET, *UNEVEN, "launch.nproc=2"), "unequally many samples.*data.global_batch_size=62"),
        ((*LENET, "loss.weight=balanced"), "the loss is divided by class weights"),
        ((*LENET, *NORMS), "BatchNorm1d would count its padding.*sampler.drop_last=true"),
    ],
)
def test_updates_that_cannot_be_captured_are_refused(
    typed: tuple[str, ...], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "gpus", lambda: (H100, H100))
    typed = tuple(dict.fromkeys(typed))
    nproc = () if any(one.startswith("launch.") for one in typed) else ("launch.nproc=1",)
    with pytest.raises(UserError, match=f"^execution.cuda_graph=true: .*({why})"):
        ready(*typed, *nproc, "tracking=none")


def test_a_captured_run_is_planned_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "gpus", lambda: (H100, H100))
    plan = ready(*RESNET, "tracking=none", "strategy=collective").plan
    assert plan.chosen.cuda_graph and plan.chosen.precision == "bf16"
    assert "cannot ask whether its gradients are finite" in plan.remarks.why["precision"]


@pytest.mark.usefixtures("on_cpu")
def test_what_torch_cannot_capture_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Replayed, work: Callable[[], None]) -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nat length")

    monkeypatch.setattr(Replayed, "capture", fails)
    why = "cannot be captured as a CUDA graph: CUDA error: operation not permitted .*Use execution.cuda_graph=false"
    with pytest.raises(RunFailed, match=why):
        run(tmp_path / "run", "execution.cuda_graph=true", "optimizer=momentum")


def test_torch_is_called_in_the_order_that_it_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up on a side stream that waits for the others and is waited for; then capture there; then replay."""
    calls = mock.MagicMock()
    side, main = mock.Mock(name="side"), mock.Mock(name="main")
    calls.attach_mock(side, "side")
    calls.attach_mock(main, "main")
    for name in ("stream", "graph", "CUDAGraph", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(calls, name))
    calls.Stream.return_value, calls.current_stream.return_value = side, main
    one = CudaGraph(torch.device("cuda", 0))
    with one.warm_up():
        calls.work()
    one.capture(calls.recorded)
    one.replay()
    done = [name for name, *_ in calls.mock_calls if "__" not in name]
    assert done == [
        *("Stream", "CUDAGraph"),
        *("current_stream", "side.wait_stream", "stream", "work", "main.wait_stream"),
        *("graph", "recorded", "CUDAGraph().replay"),
    ]
    assert calls.graph.call_args.kwargs == {"stream": side, "capture_error_mode": "thread_local"}


def test_nccl_leaves_errors_to_the_host_where_updates_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.planning.chosen import GpuSettings

    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(name, raising=False)
    for captures, truth in ((True, "0"), (False, None)):
        with gpu_settings.on_gpu(GpuSettings(), torch.device("cuda", 0), captures):
            assert gpu_settings.os.environ.get(name) == truth
        assert name not in gpu_settings.os.environ
    monkeypatch.setenv(name, "3")
    with gpu_settings.on_gpu(GpuSettings(), torch.device("cuda", 0), True):
        assert gpu_settings.os.environ.get(name) == "3"
