"""What declarations promise is what their workers can do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from trainer.config.instantiate import locate
from trainer.errors import RunFailed
from trainer.host.notes_board import SealedBoard
from trainer.planning.launcher import Assignment
from trainer.strategies import builtin
from trainer.strategies.contract import Declaration, LeasesWork, ObservesValidations, Scatters, Strategy
from trainer.strategies.process_group import ProcessGroup
from trainer.strategies.seat import Seat
from trainer.strategies.single import Single
from trainer.worker.user_strategy import check_abilities

from .launching import Case, launched, payload

BASE = ("model=lenet", "model.image_size=8", "data=tiny", "data.global_batch_size=16", "tracking=none", "device=cpu")

DECLARATIONS = [
    builtin.SingleDeclaration,
    builtin.CollectiveDeclaration,
    builtin.LocalSgdDeclaration,
    builtin.PserverSyncDeclaration,
    builtin.PserverAsyncDeclaration,
    builtin.PserverSspDeclaration,
    builtin.PserverGeoDeclaration,
]


@pytest.mark.parametrize("declaration", DECLARATIONS, ids=lambda d: d.__name__)
def test_workers_can_do_what_their_declaration_promises_and_no_less(declaration: type[Declaration]) -> None:
    worker, traits = locate(declaration.worker), declaration().traits
    assert issubclass(worker, Scatters) == traits.scatters
    assert issubclass(worker, LeasesWork) >= traits.leases  # pserver_sync has the method and works in step
    assert issubclass(worker, ObservesValidations)


@pytest.mark.parametrize("strategy", ["collective", "local_sgd"])
def test_nobody_can_leave_a_process_group_that_others_still_connect_to(
    warm: None, tmp_path: Path, strategy: str
) -> None:
    workers = launched(strategy, 3, {"joining": Case("joining")}, tmp_path)["worker"]
    answers = [workers[rank]["answers"][0] for rank in range(3)]
    assert min(a["goes_on"] for a in answers) >= max(a["connected"] for a in answers)


class WithoutOptions(Single):
    """Has a process group, and forgets ``Options = GroupStrategy``."""

    def __init__(self, config: Any, seat: Seat) -> None:
        super().__init__(config, seat)
        self.group = ProcessGroup(seat, self.options)  # type: ignore[arg-type]


def test_worker_whose_options_are_none_of_a_group_is_told_the_line_that_lacks() -> None:
    board = SealedBoard(dist.HashStore(), bytes(32))
    seat = Seat("worker", 0, 1, 0, 1, "cpu", board, group_store=dist.HashStore())
    config = {"_target_": "tests.Nothing", "timeout_s": 5.0, "init": "broadcast", "buffers": "rank0"}
    with pytest.raises(RunFailed, match=r"given a StrategyConfig as options.* Write Options = GroupStrategy \(from"):
        WithoutOptions(config, seat)
    assert not dist.is_initialized()


class Empty(Strategy):
    """Can do nothing."""

    lr = 0.0

    def _nothing(self, *arguments: Any) -> Any:
        raise NotImplementedError

    setup = backward = step = all_reduce_sum = synchronize = _nothing


@pytest.mark.parametrize("override", ["data.read=scatter", "scheduler=plateau"])
def test_broken_promise_of_a_declaration_ends_the_run_with_what_is_missing(override: str) -> None:
    given = Assignment.of(payload("collective", 2, (override,), BASE))
    check_abilities(given.config, given.plan, object.__new__(Single))
    with pytest.raises(
        RunFailed, match=rf"^{override} needs a strategy of kind .*test_contract.Empty lacks its methods"
    ):
        check_abilities(given.config, given.plan, object.__new__(Empty))
