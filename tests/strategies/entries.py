"""What the conformance suite's processes do: the run's own pieces (trainer.worker.build.build, trainer.worker.loop),
looked at inside.

Every function takes (seat, payload, ...) like a role's entry, and returns plain data for the parent to judge.
"""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tests.strategies import norm_kernels
from trainer.config.instantiate import locate
from trainer.errors import RunFailed
from trainer.host.sharded import local, whole
from trainer.launch.process import resolve
from trainer.models.sync_batch_norm import SyncBatchNorm, synchronised
from trainer.planning.launcher import Assignment
from trainer.run_folder.report import Report
from trainer.strategies import process_group
from trainer.strategies.pserver.protocol import snapshot
from trainer.strategies.pserver.protocol.messages import WANTS_DENSE, Kind, Message, Verb
from trainer.strategies.seat import Seat
from trainer.worker.build import build
from trainer.worker.loop import fit, train_epoch
from trainer.worker.settings import settings
from trainer.worker.train import membership, seated
from trainer.worker.training import Training


def each_case(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """Entry of every role: all cases one after the other, each with a store, members and servers of its own."""
    answers = []
    for number, case in enumerate(payload["cases"]):
        own = replace(
            seat,
            store=seat.store.under(f"case{number}"),
            group_store=dist.PrefixStore(f"case{number}", seat.group_store),
        )
        if seat.role == "worker":
            answers.append(resolve(case["entry"])(own, copy.deepcopy(case["payload"]), **case["arguments"]))
            continue
        given = Assignment.of(case["payload"])
        resolve(given.plan.strategy.entries[seat.role])(own, given)
    return {"pid": os.getpid(), "answers": answers}


@contextmanager
def taking_part(seat: Seat, payload: dict[str, Any]) -> Iterator[Training]:
    """A worker of the run up to the loop, as ``trainer.worker.train.train`` makes it."""
    given = Assignment.of(payload)
    config, plan = given.config, given.plan
    seat = seated(seat, config, plan)
    with settings(config, plan, seat):
        strategy = locate(plan.strategy.worker)(config.node("strategy"), seat)
        try:
            run = build(config, plan, seat, strategy, Report(None, plan.length.total_steps))
            run.watchers.save_best = lambda first: None
            yield run
        finally:
            strategy.close()


def joining(seat: Seat, payload: dict[str, Any]) -> dict[str, float]:
    """Each worker is slower than the one before; when it was connected to all others, and when it could go on."""
    connected = []
    connect = dist.init_process_group

    def slowly(*arguments: Any, **options: Any) -> None:
        connect(*arguments, **options)
        time.sleep(0.5 * seat.rank)
        connected.append(time.monotonic())

    dist.init_process_group = slowly
    try:
        strategy = locate(payload["plan"]["strategy"]["worker"])(payload["config"]["strategy"], seat)
        goes_on = time.monotonic()
        strategy.close()
    finally:
        dist.init_process_group = connect
    return {"connected": connected[0], "goes_on": goes_on}


def raises_beside_a_hang(seat: Seat, payload: dict[str, Any], stopped: bool) -> None:
    """Worker 1 never comes to an exchange in which worker 0 has an error of its own."""
    with membership(seat, Assignment.of(payload), Report(None, 1)) as strategy:
        strategy.all_reduce_sum(torch.ones(1, dtype=torch.float64))
        if seat.rank == 1:
            if stopped:
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(600)
        exchange = dist.all_reduce(torch.ones(1000), async_op=True)
        if seat.rank == 0:
            raise ValueError("the true error")
        exchange.wait()


@contextmanager
def exchanging_as_gpus_do() -> Iterator[None]:
    """A sum returns when it is queued, as NCCL's do. Gloo's threads do it, and are this process's GPU."""
    works: list[Any] = []
    begin, all_reduce = dist.init_process_group, dist.all_reduce

    def start(backend: str, **options: Any) -> None:
        assert backend == "nccl"
        begin("gloo", **{**options, "device_id": None})

    def queue(values: torch.Tensor) -> None:
        works.append(all_reduce(values, async_op=True))

    def recorded(device: torch.device) -> SimpleNamespace:
        before = [*works]
        return SimpleNamespace(query=lambda: all(work.is_completed() for work in before))

    with (
        patch.object(dist, "init_process_group", start),
        patch.object(dist, "all_reduce", queue),
        patch("trainer.worker.train.settings", lambda *args: nullcontext()),  # there is no GPU to set
        patch.object(process_group, "recorded", recorded),
        patch.object(process_group, "on_its_way", lambda values, device: values),
    ):
        yield


def hangs_on_gpus(seat: Seat, payload: dict[str, Any], stopped: bool, polls: bool) -> None:
    """Worker 1 does not come to the third sum. The others go on, and then wait for their GPUs."""
    seat, ones = replace(seat, device=f"cuda:{seat.rank}"), torch.ones(1, dtype=torch.float64)
    with exchanging_as_gpus_do(), membership(seat, Assignment.of(payload), Report(None, 1)) as strategy:
        for number in range(5):
            if number == 3 and seat.rank == 1:
                if stopped:
                    os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(600)
            strategy.all_reduce_sum(ones)
        if polls:
            strategy.wait_for(process_group.recorded(torch.device("cpu")))  # type: ignore[arg-type]
        time.sleep(600)  # in the launch of a kernel


def parameters(run: Training) -> dict[str, np.ndarray]:
    return {name: whole(p.detach()).numpy().copy() for name, p in run.model.named_parameters()}


def buffers(run: Training) -> dict[str, np.ndarray]:
    return {name: b.numpy().copy() for name, b in run.model.named_buffers()}


def trained(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """The whole loop; what it came to."""
    with taking_part(seat, payload) as run:
        validation = fit(run)
        by_place = torch.channels_last
        last = {
            n
            for n, p in run.model.named_parameters()
            if p.dim() == 4 and not p.is_contiguous() and p.is_contiguous(memory_format=by_place)
        }
        return {
            "parameters": parameters(run),
            "validation": validation,
            "steps": run.progress.step,
            "channels_last": last,
        }


def failing(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """The whole loop of a run that cannot be; with which words it ends."""
    with taking_part(seat, payload) as run:
        try:
            fit(run)
        except RunFailed as error:
            return {"error": str(error)}
        return {"error": ""}


def compressed(seat: Seat, payload: dict[str, Any], epochs: int) -> dict[str, Any]:
    """As ``step_by_step``, with PowerSGD: also what this worker's compression has left out so far, and its rate."""
    with taking_part(seat, payload) as run:
        after = [parameters(run)]
        for epoch in range(epochs):
            train_epoch(run, epoch)
            after.append(parameters(run))
        strategy, names = run.strategy, [name for name, _ in run.model.named_parameters()]
        memory, errors = strategy.memory, {}
        for bucket, members in memory.layout.items():
            pieces = memory.torch.error_dict[bucket].split([size for _, size in members])
            errors |= {names[number]: piece.numpy() for (number, _), piece in zip(members, pieces, strict=True)}
        return {"after": after, "errors": errors, "gauges": strategy.gauges()}


def gathered(seat: Seat, payload: dict[str, Any], epochs: int) -> dict[str, Any]:
    """As ``step_by_step``, with DGC: also what this worker has kept, and how it has compressed."""
    with taking_part(seat, payload) as run:
        after = [parameters(run)]
        for epoch in range(epochs):
            train_epoch(run, epoch)
            after.append(parameters(run))
        kept = {name: value.numpy().copy() for name, value in run.strategy.memory.kept.items()}
        return {"after": after, "kept": kept, "gauges": run.strategy.gauges()}


def step_by_step(seat: Seat, payload: dict[str, Any], epochs: int) -> dict[str, Any]:
    """Epochs of ``limit_train_batches`` updates; the parameters after each, and after settling at the end."""
    with taking_part(seat, payload) as run:
        after = []
        for epoch in range(epochs):
            train_epoch(run, epoch)
            after.append(parameters(run))
        run.strategy.synchronize()
        return {"after": after, "parameters": parameters(run)}


def settled_each(seat: Seat, payload: dict[str, Any], epochs: int) -> dict[str, Any]:
    """As ``step_by_step``, settling after each epoch; the parameters after each."""
    with taking_part(seat, payload) as run:
        after = []
        for epoch in range(epochs):
            train_epoch(run, epoch)
            run.strategy.synchronize()
            after.append(parameters(run))
        return {"after": after}


def tables_each(seat: Seat, payload: dict[str, Any], epochs: int) -> dict[str, Any]:
    """As ``settled_each``, rows merged into the model; nobody pushes before all have computed, from rows as they
    were."""
    with taking_part(seat, payload) as run:
        after, update = [], run.strategy.step

        def together(samples: int) -> None:
            run.strategy.meet()
            update(samples)

        run.strategy.step = together
        for epoch in range(epochs):
            train_epoch(run, epoch)
            run.strategy.synchronize()
            with run.strategy.whole():
                after.append(parameters(run))
            run.strategy.meet()
        return {"after": after}


def merged_tables(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """The whole loop; all parameters, rows merged into the model as for saving."""
    with taking_part(seat, payload) as run:
        fit(run)
        with run.strategy.whole():
            return {"parameters": parameters(run)}


def aged(seat: Seat, payload: dict[str, Any]) -> dict[str, list[int]]:
    """An epoch and a meeting; for each table the ids that the servers have then, as the first worker learns them."""
    with taking_part(seat, payload) as run:
        train_epoch(run, 0)
        run.strategy.synchronize()
        found: dict[str, list[int]] = {}
        run.strategy.persist(Path(payload["plan"]["paths"]["run_dir"]))
        for part in (
            snapshot.read(Path(payload["plan"]["paths"]["run_dir"]) / "persistables").parts if seat.rank == 0 else ()
        ):
            for name in part:
                if name.endswith("|ids"):
                    found.setdefault(name.split("|")[1], []).extend(part[name].tolist())
        return {name: sorted(ids) for name, ids in found.items()}


def summed(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """Sums over the workers, of values that differ, with everybody's own left as it was."""
    with taking_part(seat, payload) as run:
        mine = torch.tensor([seat.rank + 1.0, 10.0**seat.rank, 1e-12 * seat.rank], dtype=torch.float64)
        before = mine.clone()
        sums = run.strategy.all_reduce_sum(mine)
        return {"sums": sums.numpy(), "dtype": str(sums.dtype), "untouched": torch.equal(mine, before)}


def settled(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """An epoch on own batches, then settling: everything before and after."""
    with taking_part(seat, payload) as run:
        train_epoch(run, 0)
        before = buffers(run)
        run.strategy.synchronize()
        first = parameters(run), buffers(run)
        run.strategy.synchronize()
        return {"before": before, "parameters": first[0], "buffers": first[1], "again": (parameters(run), buffers(run))}


def started(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """The start, drawn by every worker from a seed of its own; how that was taken."""
    payload["config"]["seed"] += seat.rank
    try:
        with taking_part(seat, payload) as run:
            return {"parameters": parameters(run), "buffers": buffers(run), "error": ""}
    except RunFailed as error:
        return {"error": str(error)}


def listening(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """The addresses that this process listens on while it trains; what is left of them, and of threads, when it
    left."""
    before, threads = _addresses(), set(threading.enumerate())
    with taking_part(seat, payload) as run:
        train_epoch(run, 0)
        during = _addresses() - before
    del run
    gc.collect()
    seat.store.set(f"left {seat.rank}", "")
    seat.store.wait([f"left {rank}" for rank in range(seat.size)])
    left = {"addresses": _addresses() - before, "threads": [t.name for t in threading.enumerate() if t not in threads]}
    return {"addresses": during, "left": left}


def _addresses() -> set[tuple[str, int]]:
    return {tuple(c.laddr) for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}


def late(seat: Seat, payload: dict[str, Any], meeting: str, arrivals: dict[int, float]) -> dict[str, Any]:
    """A meeting to which workers come after so many seconds, or, without a number, after all others have given up."""
    with taking_part(seat, payload) as run:
        run.strategy.all_reduce_sum(torch.zeros(1, dtype=torch.float64))
        start = time.monotonic()
        if seat.rank in arrivals:
            time.sleep(arrivals[seat.rank])
        else:
            seat.store.wait([f"gave up {rank}" for rank in arrivals])
        came = time.monotonic()
        try:
            if meeting == "all_reduce_sum":
                run.strategy.all_reduce_sum(torch.zeros(1, dtype=torch.float64))
            elif meeting == "step":
                train_epoch(run, 0)
            else:
                run.strategy.synchronize()
        except RunFailed as error:
            return {"error": str(error), "since_start": time.monotonic() - start, "waited": time.monotonic() - came}
        finally:
            seat.store.set(f"gave up {seat.rank}", "")
            seat.store.wait([f"gave up {rank}" for rank in range(seat.size)])  # the next case starts together
        return {"error": ""}


def stalled(seat: Seat, payload: dict[str, Any]) -> None:
    """A run whose worker 1 stands still before its first update, for longer than anybody waits."""
    with taking_part(seat, payload) as run:
        time.sleep(600 if seat.rank == 1 else 0)
        fit(run)


def kept(seat: Seat, payload: dict[str, Any]) -> list[float]:
    """The whole loop and the persistables, in the run's folder; the rate of each update."""
    with taking_part(seat, payload) as run:
        rates: list[float] = []
        update = run.strategy.step

        def note(samples: int) -> None:
            rates.append(run.strategy.lr)
            update(samples)

        run.strategy.step = note
        fit(run)
        run.strategy.persist(Path(payload["plan"]["paths"]["run_dir"]))
        return rates


def stalled_in_a_block(seat: Seat, payload: dict[str, Any]) -> None:
    """A run whose worker 1 stands still in its first update, for longer than anybody waits, while its heart beats
    on."""
    with taking_part(seat, payload) as run:
        update = run.strategy.step

        def stand(samples: int) -> None:
            seat.store.set("stands", "")
            time.sleep(600)

        def late(samples: int) -> None:  # worker 1 has work before the others have done it all
            seat.store.wait(["stands"])
            update(samples)

        run.strategy.step = stand if seat.rank == 1 else late
        fit(run)


class Blown(nn.Module):
    """A model on inputs so large that its scaled gradients are out of fp16's range, while its loss is not."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.module(inputs * 1e3)


def overflowing(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """One epoch whose gradients overflow on worker 1, and a good one; whether each changed the parameters."""
    with taking_part(seat, payload) as run:
        seen, good = [parameters(run)], run.forward
        for epoch, bad in enumerate((True, False)):
            run.forward = Blown(good) if bad and seat.rank == 1 else good
            train_epoch(run, epoch)
            seen.append(parameters(run))
        changed = [any(not np.array_equal(a[n], b[n]) for n in a) for a, b in pairwise(seen)]
        return {"changed": changed, "scale": run.strategy.updater.scaler.get_scale(), "parameters": seen[-1]}


def normalised(
    seat: Seat, payload: dict[str, Any], sizes: list[int], momentum: float | None, path: str
) -> dict[str, Any]:
    """Three batches through a synchronised batch norm, each worker with its part of them; everything that comes out.

    A worker without a part has a placeholder that does not count, and no outputs.
    """
    group = dist.PrefixStore("norms", seat.group_store)
    dist.init_process_group("gloo", store=group, rank=seat.rank, world_size=seat.size)
    try:
        norm = synchronised(nn.Sequential(own_norm(momentum)))
        inputs, weights = norm_batches(sum(sizes))
        mine = slice(sum(sizes[: seat.rank]), sum(sizes[: seat.rank + 1]))
        norm[0].share = float(sizes[seat.rank] > 0)
        part, wanted = inputs[:, mine], weights[:, mine]
        if not sizes[seat.rank]:
            part, wanted = inputs[:, :1] + 100, torch.zeros_like(weights[:, :1])
        with patch.object(SyncBatchNorm, "forward", getattr(SyncBatchNorm, path)), norm_kernels.on_cpu():
            outputs, gradients = through(norm, part, wanted)
        if not sizes[seat.rank]:
            assert not any(gradient.any() for gradient in gradients)
            outputs, gradients = ([one[:0] for one in many] for many in (outputs, gradients))
        for parameter in norm.parameters():
            dist.all_reduce(parameter.grad)
        return {
            "kind": type(norm[0]).__name__,
            "outputs": outputs,
            "gradients": gradients,
            "parameters": [p.grad.numpy() for p in norm.parameters()],
            "state": {name: value.numpy() for name, value in norm.state_dict().items()},
            "evaluated": norm.eval()(inputs[0, mine]).detach().numpy(),
        }
    finally:
        dist.destroy_process_group()


def own_norm(momentum: float | None) -> nn.BatchNorm2d:
    """A batch norm with weights and biases that are not 1 and 0."""
    norm = nn.BatchNorm2d(3, eps=1e-3, momentum=momentum).double()
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([0.5, 2.0, -1.0]))
        norm.bias.copy_(torch.tensor([0.1, -3.0, 0.0]))
    return norm


def norm_batches(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Three batches (3, N, 3, 4, 5) far from zero, and weights of their outputs in a loss."""
    generator = torch.Generator().manual_seed(5)
    shape = (3, samples, 3, 4, 5)
    inputs = 10 + 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(shape, generator=generator, dtype=torch.float64)


def through(norm: nn.Module, inputs: torch.Tensor, weights: torch.Tensor) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Outputs, and gradients of a weighted sum of their squares with respect to the inputs."""
    outputs, gradients = [], []
    for batch, weight in zip(inputs, weights, strict=True):
        batch = batch.clone().requires_grad_()
        out = norm(batch)
        (weight * out.square()).sum().backward()
        outputs.append(out.detach().numpy())
        gradients.append(batch.grad.numpy())
    return outputs, gradients


def counted(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """An epoch; the samples of each push, how many pushes were under way at once, and pulls of dense parameters."""
    with taking_part(seat, payload) as run:
        client, samples, pulls, most = run.strategy.client, [], 0, 0
        ask = client.ask

        def look(server: int, message: Message, then: Any = None) -> Any:
            nonlocal pulls, most
            pulls += message.verb == Verb.PULL and bool(message.flags & WANTS_DENSE)
            if message.verb == Verb.PUSH:
                samples.append(float(message.need(Kind.NUMBERS)[1]))
            request = ask(server, message, then)
            most = max(most, sum(r.message.verb == Verb.PUSH for r in client.under_way.values()))
            return request

        client.ask = look
        train_epoch(run, 0)
        run.strategy.finish_pushes()
        found = {"samples": samples, "pushes": len(samples), "pulls": pulls, "most_under_way": most}
        client.ask = ask
        return found


def begun_late(seat: Seat, payload: dict[str, Any], waits: bool) -> bool:
    """An epoch that worker 1 begins late; there, whether worker 0 had taken a step before.

    Args:
        waits: worker 1 begins when worker 0 has taken a step, or after two minutes; else after a second.
    """
    with taking_part(seat, payload) as run:
        note, early = f"stepped/{waits}", False
        if seat.rank == 1:
            until = time.monotonic() + (120 if waits else 1)
            while not early and time.monotonic() < until:
                time.sleep(0.02)
                early = seat.store.check([note])
        update = run.strategy.step

        def tell(samples: int) -> None:
            if seat.rank == 0:
                seat.store.set(note, "")
            update(samples)

        run.strategy.step = tell
        train_epoch(run, 0)
        run.strategy.synchronize()
        return early


def optimized(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """The whole loop; parameters, the averaged ones, the rate of each update, the last validation, how it ended."""
    with taking_part(seat, payload) as run:
        rates: list[float] = []
        update = run.strategy.step

        def note(samples: int) -> None:
            rates.append(run.strategy.lr)
            update(samples)

        run.strategy.step = note
        fit(run)
        found = {
            "parameters": parameters(run),
            "rates": rates,
            "steps": run.progress.step,
            "metrics": dict(run.reporting.report.metrics),
        }
        if run.watchers.ema is not None:
            with run.watchers.ema.in_place():
                found["averaged"] = {**parameters(run), **buffers(run)}
        return {**found, "ended": run.reporting.report.ended}


def held(seat: Seat, payload: dict[str, Any]) -> dict[str, int]:
    """After an epoch: the numbers of this worker's parameters and optimizer state, of the whole model, how many modules
    have their parameters gathered, and how often gradients went by parts, and by Gloo's own reduce-scatter."""
    with ExitStack() as stack:
        run = stack.enter_context(taking_part(seat, payload))
        parts, own = (
            stack.enter_context(patch.object(dist, name, wraps=getattr(dist, name)))
            for name in ("all_to_all_single", "reduce_scatter_single")
        )
        train_epoch(run, 0)
        live = [*run.model.parameters()]
        state = [value for one in run.strategy.updater.optimizer.state.values() for value in one.values()]
        return {
            "parameters": sum(local(p).numel() for p in live),
            "whole": sum(p.numel() for p in live),
            "optimizer": sum(local(value).numel() for value in state if value.dim()),
            "gathered": sum(not hasattr(type(p), "full_tensor") for p in live),
            "parts": parts.call_count,
            "reduce-scatters": own.call_count,
        }


def built(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """The most bytes that torch's allocator gave out while the worker was built, and the parameters then."""
    with ExitStack() as stack:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            run = stack.enter_context(taking_part(seat, payload))
        events = [one for one in profiled.profiler.kineto_results.events() if one.name() == "[memory]"]
        held = accumulate(one.nbytes() for one in sorted(events, key=lambda one: one.start_ns()))
        return {"most": max(held), "parameters": parameters(run), "buffers": buffers(run)}
