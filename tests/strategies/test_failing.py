"""A worker that fails sends its error first, and then leaves the group without a wait for workers that hang."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from tests.pace import patient
from tests.strategies.launching import Case, hand_over, start
from trainer.errors import Interrupted, Missing, RunFailed
from trainer.launch.process import FailureReport
from trainer.strategies.collective import Collective
from trainer.strategies.process_group import ProcessGroup
from trainer.worker import train
from trainer.worker.train import membership

TIMEOUT_S = 300.0
"""Longest wait for missing workers, far longer than a test."""


@pytest.mark.parametrize("stopped", [False, pytest.param(True, marks=pytest.mark.all)])
def test_the_true_error_ends_the_run_while_another_worker_hangs(warm: None, tmp_path: Path, stopped: bool) -> None:
    case = Case("raises_beside_a_hang", (f"strategy.timeout_s={TIMEOUT_S:g}",), {"stopped": stopped})
    began = time.monotonic()
    with pytest.raises(RunFailed, match=r"worker 0:\n(.*\n)*ValueError: the true error"):
        start(hand_over("collective", 3, {"hang": case}), tmp_path)
    assert time.monotonic() - began < min(patient(20), TIMEOUT_S / 2)


class Group:
    """A process group of torch's that notes what is asked of it."""

    def __init__(self, name: str, asked: list[str]) -> None:
        self.name, self.asked = name, asked

    def abort(self) -> None:
        self.asked.append(f"abort {self.name}")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a worker of three does at its end, in order."""
    asked: list[str] = []
    world = Group("NCCL", asked)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: asked.append("destroy"))
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
    return asked


def leave(asked: list[str], error: BaseException | None, size: int = 3, send: Any = None) -> None:
    """A worker with a group on GPUs and one of Gloo takes part, and ends, with an error or without one."""

    def strategy(config: Any, seat: Any) -> Collective:
        made: Any = object.__new__(Collective)
        made.group = group = object.__new__(ProcessGroup)
        group.seat, group.batches = seat, Group("Gloo", asked)
        group.on_host, group.subgroups = None, []
        group.roll_call = SimpleNamespace(end=lambda: asked.append("leave the roll call"))  # type: ignore[assignment]
        group.watch = SimpleNamespace(close=lambda: asked.append("end the watch"))  # type: ignore[assignment]
        return made  # type: ignore[no-any-return]

    seat: Any = SimpleNamespace(size=size, send_failure=send or (lambda error: asked.append(f"send {error}")))
    assignment: Any = SimpleNamespace(
        plan=SimpleNamespace(strategy=SimpleNamespace(worker=strategy)), config=SimpleNamespace(node=lambda name: {})
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "locate", lambda worker: worker)
        patch.setattr(train, "settings", lambda *facts: nullcontext())
        seat.device, report = "cpu", cast(Any, None)
        with pytest.raises(type(error)) if error else nullcontext(), membership(seat, assignment, report):
            asked.append("train")
            if error:
                raise error


@pytest.mark.parametrize("error", [ValueError("why"), Missing("why", ["worker 1"]), Interrupted("why")])
def test_an_error_is_sent_first_and_then_the_groups_are_aborted(asked: list[str], error: BaseException) -> None:
    leave(asked, error)
    assert asked == ["train", "send why", "end the watch", "leave the roll call", "abort Gloo", "abort NCCL"]


def test_ctrl_c_is_left_to_the_launcher_which_gets_it_too(asked: list[str]) -> None:
    leave(asked, KeyboardInterrupt())
    assert asked == ["train", "end the watch", "leave the roll call", "abort Gloo", "abort NCCL"]


def test_a_worker_that_is_done_closes_its_group(asked: list[str]) -> None:
    leave(asked, None)
    assert asked == ["train", "end the watch", "leave the roll call", "destroy"]


def test_a_lone_worker_closes_its_group_after_an_error_for_the_next_run_of_the_process(asked: list[str]) -> None:
    leave(asked, ValueError("why"), size=1)
    assert asked == ["train", "send why", "end the watch", "leave the roll call", "destroy"]


def test_a_launcher_that_is_gone_keeps_no_worker_from_leaving(asked: list[str]) -> None:
    def send(error: BaseException) -> None:
        raise BrokenPipeError

    leave(asked, ValueError("why"), send=send)
    assert asked == ["train", "end the watch", "leave the roll call", "abort Gloo", "abort NCCL"]


def test_of_two_failures_of_a_process_the_first_one_counts() -> None:
    sent: list[Any] = []
    report = FailureReport(lambda text: sent.append(json.loads(text)["words"]))
    with ThreadPoolExecutor() as pool:
        pool.submit(report, RunFailed("first")).result()
        pool.submit(report, RunFailed("second")).result()
    assert sent == ["first"]
