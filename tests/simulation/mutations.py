"""Defects put back one at a time: what the simulator has to find.

The first seven were real, found by an adversary from outside. (Of the nine that it found, one is about the launcher's
store and one about file descriptors: neither is in the protocol, and both have tests of their own.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np

from tests.simulation import part_writer, run
from trainer.host.notes_board import NoNote
from trainer.strategies.pserver.protocol import snapshot
from trainer.strategies.pserver.protocol.index_intervals import Intervals
from trainer.strategies.pserver.protocol.messages import RESTS, SAVES, WAKES, Kind, Malformed, Message, Verb
from trainer.strategies.pserver.server import (
    admission,
    checks,
    epoch_blocks,
    lease_requests,
    liveness,
    machine,
    members,
    pulls,
    pushes,
    rules,
    saving,
    shard,
    sparse_table,
)
from trainer.strategies.pserver.server import meetings as meetings_module
from trainer.strategies.pserver.server.request_queue import RequestQueue
from trainer.strategies.pserver.worker import (
    async_and_ssp,
    client,
    connections,
    geo,
    held_blocks,
    silent_servers,
    sync,
    worker,
)
from trainer.worker import coming_back

Defect = Callable[[], Any]
MUTATIONS: dict[str, Defect] = {}


@contextlib.contextmanager
def mutated(name: str | None) -> Iterator[None]:
    """With that defect; None: with none."""
    with MUTATIONS[name]() if name else contextlib.nullcontext():
        yield


def replaces(owner: Any, attribute: str, of: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The function below stands for ``owner.attribute`` while a mutation is on: that of its name, or ``of`` another,
    which it belongs to. It gets the original first."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        original, name = getattr(owner, attribute), of or function.__name__
        known = MUTATIONS.get(name, contextlib.nullcontext)

        def instead(*arguments: Any, **named: Any) -> Any:
            return function(original, *arguments, **named)

        MUTATIONS[name] = lambda: _both(known, lambda: patch.object(owner, attribute, instead))
        return function

    return register


@contextlib.contextmanager
def _both(one: Defect, other: Defect) -> Iterator[None]:
    with one(), other():
        yield


# --- the defects that were found from outside ----------------------------------------------------------------------


@replaces(epoch_blocks.Progress, "is_applied")
def progress_is_the_greatest_end(_: Any, self: epoch_blocks.Progress, rows: np.ndarray) -> bool:
    def end(block: int) -> int:
        return max((stop for _, stop in self.applied.get(block, ())), default=0)

    return len(rows) > 0 and all(
        e < self.epoch or (e == self.epoch and stop <= end(b)) for e, b, _, stop in rows.tolist()
    )


@replaces(epoch_blocks.Progress, "is_applied")
def pending_work_travels_with_a_block_that_is_taken_over(
    original: Any, self: epoch_blocks.Progress, rows: np.ndarray
) -> bool:
    try:
        return bool(original(self, rows))
    except Malformed:
        return False


@replaces(worker.PserverWorker, "push_pending", of="pending_work_travels_with_a_block_that_is_taken_over")
@replaces(async_and_ssp.Stale, "push_pending", of="pending_work_travels_with_a_block_that_is_taken_over")
def _nothing_is_pushed(_: Any, self: worker.PserverWorker) -> None:
    pass


@replaces(rules.Ssp, "duplicate")
def covered_work_does_not_advance_the_clock(_: Any, self: rules.Ssp, push: rules.Push) -> None:
    pass


@replaces(machine.Server, "_was_away")
def absence_counts_as_silence(_: Any, self: machine.Server, seconds: float) -> None:
    pass


@replaces(pushes.Pushes, "push")
def a_refused_push_raises_the_age(original: Any, self: pushes.Pushes, message: Message) -> Message:
    self.parameters.grow_older(int(message.need(Kind.NUMBERS)[2]))
    return original(self, message)  # type: ignore[no-any-return]


@replaces(pulls.Pulls, "pull")
def a_refused_pull_makes_rows(original: Any, self: pulls.Pulls, message: Message) -> Message:
    shard, rule = self.parameters.opened()
    if message.flags & ~rule.pull_flags:
        for record in message.records:
            shard.tables[record.table].pull(record.array, create=True, clock=0)
    return original(self, message)  # type: ignore[no-any-return]


@replaces(checks, "nonfinite")
def values_that_are_not_finite_are_applied(_: Any, *arguments: Any) -> str:
    return ""


@replaces(checks, "ids")
def a_negative_id_is_called_not_ascending(original: Any, shard: Any, number: int, found: np.ndarray) -> np.ndarray:
    if len(found) and found[0] < 0:
        raise Malformed("ids are not ascending")
    return original(shard, number, found)  # type: ignore[no-any-return]


# --- others --------------------------------------------------------------------------------------------------------


@replaces(rules.Ssp, "_came")
def an_overtaking_push_advances_the_clock(_: Any, self: rules.Ssp, push: rules.Push) -> None:
    self.clocks[push.rank] = max(push.clock, self.clocks[push.rank])


@replaces(rules.Ssp, "may_pull")
def the_staleness_bound_is_off_by_one(_: Any, self: rules.Ssp, clock: int) -> bool:
    return self.slowest() >= clock - self.bound - 1


@replaces(rules.Ssp, "signal")
def who_rests_holds_up_the_others(original: Any, self: rules.Ssp, message: Message) -> None:
    if not message.flags & RESTS:
        original(self, message)


@replaces(async_and_ssp.PserverSsp, "wake")
def who_wakes_has_other_clocks_at_other_servers(_: Any, self: async_and_ssp.PserverSsp, anew: bool) -> None:
    self.done = max(answer.clock for answer in self._say(WAKES, 0 if anew else self.done))


@replaces(members.Watermark, "seen")
def pushes_that_overtook_are_forgotten(_: Any, self: members.Watermark, sequence: int) -> bool:
    return sequence <= self.done


def _put_off(server: pushes.Pushes) -> list[Callable[[], None]]:
    """Does what was put off, and returns the list for what is put off until the next push."""
    later: list[Callable[[], None]] = server.__dict__.setdefault("later", [])
    while later:
        later.pop()()
    return later


@replaces(pushes.Pushes, "_take")
def a_push_is_acknowledged_before_it_is_applied(
    original: Any, self: pushes.Pushes, message: Message, rule: Any, push: Any, rows: Any
) -> bool:
    later = _put_off(self)
    duplicate = self.work.progress.is_applied(rows)
    self.members.all[message.rank].watermark.mark(message.sequence)
    self.work.applied(rows)
    if message.flags:
        rule.signal(message)
    elif duplicate:
        rule.duplicate(push)
    else:
        later.append(lambda: rule.push(push))
    return not duplicate


@replaces(pushes.Pushes, "_take")
def work_that_is_split_beforehand_is_acknowledged_before_it_is_applied(
    original: Any, self: pushes.Pushes, message: Message, rule: Any, push: Any, rows: Any
) -> bool:
    later = _put_off(self)
    if rule.lockstep or message.flags or len(rows):
        return bool(original(self, message, rule, push, rows))
    self.members.all[message.rank].watermark.mark(message.sequence)
    later.append(lambda: rule.push(push))
    return True


@replaces(pushes.Pushes, "_take")
def a_push_of_sync_is_taken_twice(original: Any, self: pushes.Pushes, message: Message, rule: Any, *more: Any) -> bool:
    taken = original(self, message, rule, *more)
    if taken and rule.lockstep:
        rule.push(more[0])
    return bool(taken)


@replaces(rules.Sync, "changed")
def a_step_of_sync_keeps_the_push_of_a_lost_worker(original: Any, self: rules.Sync) -> None:
    kept = {rank: push for rank, push in self.waiting.items() if self.members.all[rank].lost}
    original(self)
    if not self.waiting and len(kept) < len(self.members.all):
        self.waiting |= kept


@replaces(rules.Sync, "changed")
def a_step_of_sync_leaves_out_who_was_lost(original: Any, self: rules.Sync) -> None:
    self.waiting = {rank: push for rank, push in self.waiting.items() if not self.members.all[rank].lost}
    original(self)


@replaces(members.Members, "why_refused")
def a_life_that_is_fenced_goes_on(_: Any, self: members.Members, rank: int, incarnation: int) -> str:
    return ""


@replaces(held_blocks.HeldBlocks, "acknowledged")
def a_block_is_done_with_the_first_push_after_its_end(
    _: Any, self: held_blocks.HeldBlocks, pushed: held_blocks.PushedBatches
) -> None:
    self._under_way.subtract(pushed.blocks)
    for block in pushed.blocks & self._at_their_end:
        self.finished(block)


@replaces(held_blocks.HeldBlocks, "_begin")
def a_take_over_ends_no_push_at_bounds(original: Any, self: held_blocks.HeldBlocks, *arguments: Any) -> int:
    start = original(self, *arguments)
    self._cuts.clear()
    return int(start)


@replaces(liveness.Liveness, "_is_over")
def a_late_hello_of_a_life_that_is_over_begins_another_one(
    _: Any, self: liveness.Liveness, rank: int, life: int
) -> bool:
    return self.members.over(rank, life)


@replaces(epoch_blocks.Leases, "lose")
def blocks_of_the_lost_are_forgotten(_: Any, self: epoch_blocks.Leases, rank: int) -> None:
    pass


@replaces(epoch_blocks.Leases, "lose", of="blocks_of_the_lost_are_handed_out_after_ten_times_the_timeout")
def _lost_later(original: Any, self: epoch_blocks.Leases, rank: int) -> None:
    self.__dict__.setdefault("later", []).append(lambda: original(self, rank))


@replaces(lease_requests.LeaseRequests, "lease")
def blocks_of_the_lost_are_handed_out_after_ten_times_the_timeout(
    original: Any, self: lease_requests.LeaseRequests, message: Message
) -> Message:
    later = self.leases.__dict__.setdefault("later", [])
    while later and self.now() - self.moved > 10.0 * self.__dict__.setdefault("timeout", self.patience_s):
        later.pop()()
    self.patience_s = 1e9
    return original(self, message)  # type: ignore[no-any-return]


@replaces(lease_requests.LeaseRequests, "lease")
def a_copy_of_a_lease_gets_another_block(
    original: Any, self: lease_requests.LeaseRequests, message: Message
) -> Message:
    self.answered.clear()
    return original(self, message)  # type: ignore[no-any-return]


@replaces(meetings_module.Totals, "_arrive")
def a_copy_of_a_meeting_counts_twice(original: Any, self: Any, number: int, rank: int, values: np.ndarray) -> Any:
    total = self.open.get(number)
    if total is not None and total.value is None and rank in total.brought:
        values = values + total.brought[rank]
    return original(self, number, rank, values)


@replaces(machine.Server, "take")
def heartbeats_are_ignored(original: Any, self: machine.Server, address: bytes, message: Message) -> None:
    if message.verb != Verb.BEAT:
        original(self, address, message)


@replaces(RequestQueue, "try_again")
def what_waits_is_not_looked_at_again(_: Any, self: RequestQueue) -> None:
    pass


@replaces(RequestQueue, "_patience_with")
def who_waits_is_answered_after_ten_times_the_timeout(original: Any, self: RequestQueue, request: Message) -> float:
    return 10.0 * float(original(self, request))


@replaces(RequestQueue, "try_again", of="who_waits_is_answered_after_ten_times_the_timeout")
def _nothing_is_tried_again(_: Any, self: RequestQueue) -> None:
    pass


@replaces(client.Client, "until", of="who_waits_is_answered_after_ten_times_the_timeout")
def _with_ten_times_the_patience(
    original: Any, self: client.Client, done: Any, patience_s: float | None = None, meanwhile: Any = None
) -> None:
    original(self, done, 10.0 * (self.timeout_s + client.MARGIN_S if patience_s is None else patience_s), meanwhile)


@replaces(liveness.Liveness, "check_workers")
def a_lost_goodbye_is_waited_for(original: Any, self: liveness.Liveness) -> None:
    check = self.board.check

    def blind(keys: list[str]) -> bool:
        return not any(key.startswith("done/") for key in keys) and bool(check(keys))

    with patch.object(self.board, "check", blind):
        original(self)


@replaces(client.Client, "_send_again")
def a_request_is_sent_once(_: Any, self: client.Client) -> None:
    pass


@replaces(rules.Geo, "answer")
def a_worker_in_geo_is_not_told_its_own_rows(original: Any, self: rules.Geo, message: Message, applied: bool) -> Any:
    return original(self, message, True)


@replaces(Intervals, "covers")
def intervals_cover_one_too_many(original: Any, self: Intervals, start: int, stop: int) -> bool:
    return bool(original(self, start, stop - 1))


@replaces(rules.Sync, "awaited")
def a_step_of_sync_goes_without_the_last_worker(original: Any, self: rules.Sync, clock: int) -> list[int]:
    return (
        list(original(self, clock))[:-1] if self.waiting and len(self.members.all) > 2 else list(original(self, clock))
    )


@replaces(saving.Saving, "_is_of_this_save")
def a_late_copy_removes_the_part_of_the_next_save(_: Any, self: saving.Saving, message: Message) -> bool:
    return True


@replaces(saving.Saving, "fetch")
def a_part_is_handed_out_from_where_the_last_answer_ended(
    original: Any, self: saving.Saving, message: Message
) -> Message:
    at = self.__dict__.setdefault("at", 0)
    if message.clock > 0:
        message = Message(message.verb, message.rank, message.incarnation, message.number, clock=at)
    answer: Message = original(self, message)
    some = answer.first(Kind.DENSE)
    self.__dict__["at"] = message.clock + (len(some) if some is not None else 0)
    return answer


@replaces(machine.Server, "answer")
def a_copy_of_a_save_does_not_tell_that_the_part_is_apart(
    original: Any, self: machine.Server, request: Message
) -> Message:
    copy = (request.incarnation, request.number) <= self.done_once.get(request.rank, (0, 0))
    answer: Message = original(self, request)
    if request.verb == Verb.SAVE and copy:
        answer.flags = 0
    return answer


# --- a worker that comes back -------------------------------------------------------------------------------------


@replaces(client.Client, "hello")
def the_next_life_uses_push_numbers_of_the_life_before(original: Any, self: client.Client) -> None:
    original(self)
    self.sequence = min(self.watermarks)


@replaces(members.Watermark, "begin")
def pushes_of_a_life_that_is_over_are_waited_for(_: Any, self: members.Watermark, sequence: int) -> None:
    pass


@replaces(meetings_module.Totals, "forget")
def what_a_life_brought_to_a_stop_counts_for_the_next(_: Any, self: meetings_module.Totals, rank: int) -> None:
    pass


@replaces(members.Members, "hello")
def who_comes_back_is_waited_for_before_it_is_let_in(
    original: Any, self: members.Members, rank: int, life: int, coming: bool = False
) -> Any:
    return original(self, rank, life)


@replaces(coming_back, "is_lost")
def who_comes_back_waits_for_the_lost(_: Any, *arguments: Any) -> bool:
    return False


@replaces(run.Play, "_starts_again")
def the_launcher_takes_the_life_before_for_the_next(original: Any, self: run.Play, rank: int) -> None:
    note = f"fenced/worker/{rank}"
    before = dict.get(self.board, note)
    original(self, rank)
    if before is not None:
        self.board[note] = before


# --- all go on from a checkpoint -----------------------------------------------------------------------------------


@replaces(epoch_blocks.Progress, "load")
def a_checkpoint_forgets_which_batches_are_applied(_: Any, self: epoch_blocks.Progress, **saved: Any) -> None:
    pass


@replaces(epoch_blocks.Leases, "load")
def a_checkpoint_forgets_the_blocks_that_are_out(original: Any, self: epoch_blocks.Leases, **saved: Any) -> None:
    original(self, **saved | {"kept": ()})


@replaces(held_blocks.HeldBlocks, "load")
def a_checkpoint_forgets_what_is_computed_and_not_pushed(_: Any, self: held_blocks.HeldBlocks, **saved: Any) -> None:
    pass


@replaces(epoch_blocks.Leases, "ask")
def a_block_of_nobody_comes_before_one_s_own(original: Any, self: epoch_blocks.Leases, holder: Any, *told: Any) -> Any:
    nobody = [b for b, rank in self.epoch.kept.items() if rank == epoch_blocks.NOBODY]
    own = [b for b, rank in self.epoch.kept.items() if rank == holder.rank]
    if own and nobody and min(nobody) < min(own):
        self.epoch.kept[min(nobody)] = holder.rank
    return original(self, holder, *told)


@replaces(held_blocks.HeldBlocks, "lease")
def pending_work_travels_with_a_block_that_only_some_servers_have(original: Any, self: Any, *told: Any) -> Any:
    lease, self.torn = original(self, *told), False
    return lease


# --- other numbers of processes go on, or as many in sync ----------------------------------------------------------


@replaces(epoch_blocks.Leases, "load")
def blocks_of_workers_that_are_no_more_are_forgotten(
    original: Any, self: epoch_blocks.Leases, workers: int, kept: Any, **saved: Any
) -> None:
    original(self, workers, kept=[(block, rank) for block, rank in kept if rank < workers], **saved)


@replaces(epoch_blocks.Leases, "load")
def blocks_of_workers_that_are_no_more_count_as_finished(
    original: Any, self: epoch_blocks.Leases, workers: int, kept: Any, finished: Any, **saved: Any
) -> None:
    gone = [(block, block + 1) for block, rank in kept if rank >= workers]
    original(self, workers, kept=kept, finished=[*finished, *gone], **saved)
    self.epoch.kept = {block: rank for block, rank in self.epoch.kept.items() if (block, block + 1) not in gone}


@replaces(epoch_blocks.Leases, "ask")
def a_kept_block_is_handed_out_twice(original: Any, self: epoch_blocks.Leases, *asked: Any) -> Any:
    nobodys = {b for b, rank in self.epoch.kept.items() if rank == epoch_blocks.NOBODY}
    answer = original(self, *asked)
    twice = self.__dict__.setdefault("twice", set())
    if answer is not None and answer.block in nobodys - twice:
        twice.add(answer.block)
        self.epoch.kept[answer.block] = epoch_blocks.NOBODY
    return answer


@replaces(lease_requests.LeaseRequests, "go_on")
def of_other_servers_the_progress_of_the_first_counts(original: Any, self: Any, progress: Any, leases: Any) -> None:
    original(self, [*progress][:1], leases)


@replaces(lease_requests.LeaseRequests, "go_on")
def other_servers_forget_the_progress(original: Any, self: Any, progress: Any, leases: Any) -> None:
    original(self, progress if len([*progress]) == 1 else [], leases)


@replaces(shard.Shard, "_load_tables")
def a_server_reads_the_rows_of_one_part_alone(original: Any, self: shard.Shard, parts: Any) -> None:
    original(self, parts[-1:])


@replaces(shard.Shard, "_load_tables")
def a_server_takes_the_rows_of_others_too(original: Any, self: shard.Shard, parts: Any) -> None:
    with patch.object(self, "owns", lambda number, ids: np.ones(len(ids), dtype=bool)):
        original(self, parts)


@replaces(geo.PserverGeo, "begin_anew")
def workers_in_geo_of_other_numbers_go_on_from_the_parameters_of_before(_: Any, self: Any, workers: int) -> None:
    self.begun = True


@replaces(worker.PserverWorker, "load")
def a_worker_of_other_numbers_goes_on_with_the_work_of_before(
    original: Any, self: worker.PserverWorker, folder: Any, share: Any
) -> None:
    original(self, folder, share)
    self.work.load(**share.own["work"])


@replaces(sync.PserverSync, "next_meeting")
def in_sync_all_stop_after_the_next_update(_: Any, self: sync.PserverSync, step: int) -> int:
    return step + 1


@replaces(sync.PserverSync, "load")
def in_sync_a_checkpoint_forgets_the_steps(original: Any, self: sync.PserverSync, folder: Any, share: Any) -> None:
    original(self, folder, share)
    self.steps = 0


@replaces(shard.Shard, "_load_vectors")
def a_checkpoint_forgets_the_parameters(_: Any, self: shard.Shard, parts: Any) -> None:
    pass


# --- lives that are over, stops, and waits -------------------------------------------------------------------------


@replaces(lease_requests.LeaseRequests, "stood_still")
def a_stop_counts_as_hanging(_: Any, self: lease_requests.LeaseRequests) -> None:
    pass


@replaces(RequestQueue, "_patience_with")
def who_waits_for_a_worker_that_saves_has_no_more_patience(_: Any, self: RequestQueue, request: Message) -> float:
    return self.patience_s


@replaces(RequestQueue, "_spare_who_stands")
def who_stands_still_for_a_checkpoint_is_awaited_at_other_meetings(_: Any, self: RequestQueue, now: float) -> None:
    pass


@replaces(async_and_ssp.PserverSsp, "meet")
def who_waits_at_the_end_of_an_epoch_holds_the_others_up(_: Any, self: async_and_ssp.PserverSsp) -> None:
    self._sum(np.zeros(1))


@replaces(client.Client, "_some_server_saves")
def who_gets_no_answer_does_not_ask_whether_the_server_writes(_: Any, self: client.Client) -> bool:
    return False


@replaces(machine.Server, "answer")
def what_is_done_is_told_after_the_answer(_: Any, self: machine.Server, request: Message) -> Message:
    before, answer = self.parameters.version, self._do(request)
    if before != self.reported_done:
        self.report_done(before)
        self.reported_done = before
    return answer


# --- parts that are written behind pushes --------------------------------------------------------------------------


@replaces(part_writer.SlowWriter, "_copied")
def a_part_is_written_from_the_live_server(_: Any, self: part_writer.SlowWriter, write: Callable[[], None]) -> Any:
    return write


@replaces(part_writer.SlowWriter, "busy")
def a_part_is_begun_while_the_one_before_is_written(_: Any, self: part_writer.SlowWriter) -> bool:
    return False


@replaces(saving.Saving, "has_written")
def a_save_that_waits_for_the_part_before_is_forgotten(_: Any, self: saving.Saving) -> bool:
    return False


# --- rows that are admitted and removed ----------------------------------------------------------------------------


@replaces(admission.Count, "admits")
def a_row_is_admitted_one_push_too_early(_: Any, self: admission.Count, key: Any, ids: Any, seen: np.ndarray) -> Any:
    return seen >= self.k - 1


@replaces(admission.Waiting, "remove")
def an_id_that_is_admitted_goes_on_waiting(_: Any, self: admission.Waiting, ids: np.ndarray) -> None:
    pass


@replaces(sparse_table.SparseTable, "pull")
def a_row_that_is_pulled_becomes_no_younger(
    original: Any, self: sparse_table.SparseTable, ids: Any, create: bool = True, clock: int = 0
) -> Any:
    return original(self, ids, create, 0)


@replaces(sparse_table.SparseTable, "shrink")
def a_row_of_the_last_age_that_stays_is_removed(original: Any, self: sparse_table.SparseTable, older_than: int) -> Any:
    return original(self, older_than + 1)


@replaces(machine.Server, "answer")
def a_board_that_is_away_makes_a_message_nonsense(original: Any, self: machine.Server, request: Message) -> Message:
    try:
        return original(self, request)  # type: ignore[no-any-return]
    except NoNote as error:
        raise RuntimeError(str(error)) from error


@replaces(machine.Server, "_spent")
def time_in_a_turn_is_the_silence_of_others(_: Any, self: machine.Server, since: float) -> float:
    self.ended_turn = self.now()
    return self.ended_turn


@replaces(silent_servers.SilentServers, "check")
def who_waits_for_a_checkpoint_asks_no_server_for_a_sign_of_life(_: Any, *arguments: Any) -> list[int]:
    return []


# A patch inside of a function that waits would last while others run.
@replaces(worker.PserverWorker, "agree")
def a_validation_is_divided_among_those_of_before(
    _: Any, self: worker.PserverWorker, action: Callable[[int, int], Any], settle: Callable[[], None] = lambda: None
) -> Any:
    while True:
        index, count = self.members()
        settle()
        done = action(index, count)
        self._sum(np.zeros(1), SAVES)
        if len(self.present) == count:
            return done


MUTATIONS |= {
    "a_take_over_begins_where_the_first_server_is": lambda: patch.object(
        held_blocks, "min", lambda starts: next(iter(starts)), create=True
    ),
    "who_has_waited_in_vain_waits_for_the_board_as_well": lambda: patch.object(connections, "ASK_S", 1e9),
    "all_workers_save_into_one_folder": lambda: patch.object(snapshot, "of_worker", lambda folder, rank: folder),
    "who_is_silent_is_lost_before_it_is_ended": lambda: patch.object(liveness, "ENDING_S", 0.0),
    "a_clock_that_jumps_uses_up_the_patience": lambda: patch.object(client, "AWAY_S", 1e9),
}
