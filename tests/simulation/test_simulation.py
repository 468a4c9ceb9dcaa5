"""The simulator breaks no promise of the protocol, finds every defect that is put back, and plays a seed twice
alike."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from tests.simulation import run
from tests.simulation.__main__ import main
from tests.simulation.branches import OTHERS, PSERVER, SIDES
from tests.simulation.mutations import MUTATIONS, mutated
from tests.simulation.run import simulate
from tests.simulation.scenario import FAULTS, MODES, OF_HOSTS, Fault, Scenario
from tests.simulation.seeds import SHOWN, found_by, many, one, part
from trainer.strategies.pserver.worker.held_blocks import HeldBlocks

SEEDS = 300
"""`make simulation` plays 4,000, and `make test-long` a million others."""
MOST = 20_000
"""Seeds within which a defect has to be found."""
FOUND_AT: dict[str, tuple[str | None, int]] = {
    "progress_is_the_greatest_end": (None, 17),
    "pending_work_travels_with_a_block_that_is_taken_over": (None, 3072),
    "covered_work_does_not_advance_the_clock": ("ssp", 95),
    "absence_counts_as_silence": (None, 5),
    "a_refused_push_raises_the_age": (None, 1),
    "a_refused_pull_makes_rows": (None, 711),
    "values_that_are_not_finite_are_applied": (None, 1),
    "a_negative_id_is_called_not_ascending": (None, 13),
    "an_overtaking_push_advances_the_clock": ("ssp", 93),
    "the_staleness_bound_is_off_by_one": ("ssp", 0),
    "who_rests_holds_up_the_others": ("ssp", 23),
    "who_wakes_has_other_clocks_at_other_servers": ("ssp", 23),
    "pushes_that_overtook_are_forgotten": (None, 568),
    "a_push_is_acknowledged_before_it_is_applied": (None, 0),
    "work_that_is_split_beforehand_is_acknowledged_before_it_is_applied": (None, 5),
    "a_push_of_sync_is_taken_twice": (None, 20),
    "a_step_of_sync_keeps_the_push_of_a_lost_worker": ("sync", 81),
    "a_step_of_sync_leaves_out_who_was_lost": (None, 278),
    "a_life_that_is_fenced_goes_on": (None, 27),
    "a_block_is_done_with_the_first_push_after_its_end": (None, 1604),
    "a_take_over_ends_no_push_at_bounds": (None, 3341),
    "a_take_over_begins_where_the_first_server_is": (None, 465),
    "a_late_hello_of_a_life_that_is_over_begins_another_one": (None, 13720),
    "blocks_of_the_lost_are_forgotten": (None, 12),
    "a_copy_of_a_lease_gets_another_block": (None, 10),
    "a_copy_of_a_meeting_counts_twice": (None, 1),
    "heartbeats_are_ignored": (None, 10),
    "what_waits_is_not_looked_at_again": (None, 1),
    "who_waits_is_answered_after_ten_times_the_timeout": (None, 0),
    "blocks_of_the_lost_are_handed_out_after_ten_times_the_timeout": (None, 12),
    "a_lost_goodbye_is_waited_for": (None, 105),
    "a_request_is_sent_once": (None, 0),
    "a_clock_that_jumps_uses_up_the_patience": (None, 266),
    "a_worker_in_geo_is_not_told_its_own_rows": ("geo", 113),
    "intervals_cover_one_too_many": (None, 1),
    "a_step_of_sync_goes_without_the_last_worker": ("sync", 1),
    "a_late_copy_removes_the_part_of_the_next_save": (None, 517),
    "a_part_is_handed_out_from_where_the_last_answer_ended": (None, 20),
    "a_copy_of_a_save_does_not_tell_that_the_part_is_apart": (None, 28),
    "the_next_life_uses_push_numbers_of_the_life_before": (None, 1176),
    "pushes_of_a_life_that_is_over_are_waited_for": ("ssp", 3543),
    "what_a_life_brought_to_a_stop_counts_for_the_next": (None, 9558),
    "who_comes_back_is_waited_for_before_it_is_let_in": (None, 10),
    "the_launcher_takes_the_life_before_for_the_next": (None, 3043),
    "a_checkpoint_forgets_the_blocks_that_are_out": (None, 28),
    "a_block_of_nobody_comes_before_one_s_own": (None, 7319),
    "a_checkpoint_forgets_which_batches_are_applied": (None, 28),
    "a_checkpoint_forgets_what_is_computed_and_not_pushed": (None, 421),
    "blocks_of_workers_that_are_no_more_are_forgotten": (None, 279),
    "blocks_of_workers_that_are_no_more_count_as_finished": (None, 279),
    "a_kept_block_is_handed_out_twice": (None, 2159),
    "of_other_servers_the_progress_of_the_first_counts": (None, 5979),
    "other_servers_forget_the_progress": (None, 59),
    "a_server_reads_the_rows_of_one_part_alone": (None, 3919),
    "a_server_takes_the_rows_of_others_too": (None, 2219),
    "workers_in_geo_of_other_numbers_go_on_from_the_parameters_of_before": (None, 219),
    "a_worker_of_other_numbers_goes_on_with_the_work_of_before": (None, 219),
    "in_sync_all_stop_after_the_next_update": (None, 799),
    "in_sync_a_checkpoint_forgets_the_steps": (None, 179),
    "a_checkpoint_forgets_the_parameters": (None, 19),
    "what_is_done_is_told_after_the_answer": (None, 0),
    "who_waits_for_a_worker_that_saves_has_no_more_patience": (None, 1571),
    "who_stands_still_for_a_checkpoint_is_awaited_at_other_meetings": (None, 1261576),
    "who_waits_at_the_end_of_an_epoch_holds_the_others_up": (None, 1410216),
    "who_gets_no_answer_does_not_ask_whether_the_server_writes": (None, 465),
    "a_row_is_admitted_one_push_too_early": (None, 3),
    "an_id_that_is_admitted_goes_on_waiting": (None, 3),
    "a_row_that_is_pulled_becomes_no_younger": (None, 81),
    "a_row_of_the_last_age_that_stays_is_removed": (None, 30),
    "a_part_is_written_from_the_live_server": (None, 11),
    "a_part_is_begun_while_the_one_before_is_written": (None, 1916),
    "a_save_that_waits_for_the_part_before_is_forgotten": (None, 80),
    "a_board_that_is_away_makes_a_message_nonsense": (None, 47),
    "time_in_a_turn_is_the_silence_of_others": (None, 169),
    "who_has_waited_in_vain_waits_for_the_board_as_well": (None, 47),
    "who_waits_for_a_checkpoint_asks_no_server_for_a_sign_of_life": (None, 14389),
    "who_is_silent_is_lost_before_it_is_ended": (None, 319),
    "a_validation_is_divided_among_those_of_before": (None, 3218),
}
"""The mode that a defect is looked for in, and a seed that finds it: tried first. If scenarios are drawn otherwise one
day, the search begins at 0."""
SCENARIOS = {
    "all_workers_save_into_one_folder": replace(Scenario.drawn(1953272), helpless=True),
    "a_stop_counts_as_hanging": replace(
        Scenario.drawn(7),
        disk_s=250.0,
        stops=1,
        writes_first=False,
        faults=(),
        blocks=4,
        ends=(),
        returns=3,
        pace=(0.5, 0.001),
        places=(),
    ),
    "who_comes_back_waits_for_the_lost": replace(
        Scenario.drawn(1, "async"),
        workers=3,
        servers=1,
        blocks=8,
        block=2,
        merge=1,
        leased=True,
        take_over=True,
        disk_s=0.5,
        returns=3,
        stops=0,
        ends=(),
        pace=(0.05, 0.2, 0.05),
        faults=(
            Fault(0.307491395289921, "kill worker", 2, 0, 0.0),
            Fault(6.5147097321342375, "kill worker", 0, 0, 0.0),
        ),
    ),
    "pending_work_travels_with_a_block_that_only_some_servers_have": replace(
        Scenario.drawn(39, "geo"),
        workers=3,
        servers=2,
        blocks=6,
        block=6,
        merge=1,
        leased=True,
        take_over=True,
        disk_s=0.0,
        table=False,
        bulky=False,
        evaluates=False,
        hosts=(),
        others=(),
        vectors=0,
        epochs=1,
        returns=0,
        stops=1,
        ends=(1.733827932216476, 0.10210648510658539),
        pace=(0.2, 0.05, 0.05),
        options=Scenario.drawn(39, "geo").options | {"k_steps": 5},
        faults=(Fault(2.4068250775435853, "torn push", 2, 0, 0.0),),
    ),
}
"""What finds a defect that no drawn seed is known for."""


@pytest.mark.all
def test_no_promise_is_broken() -> None:
    _, injected, ends, broken = part(range(SEEDS), None, None)
    assert not broken, f"replay: python -m tests.simulation --seed {broken[0][0]}"
    assert {end.split()[0] for end in ends} == set(MODES)
    assert {
        *FAULTS,
        *OF_HOSTS,
        "answer of the board is late",
        "no answer of the board",
        "all go back",
        "part written by a copy",
    } < {*injected}, "some faults were never injected"


@pytest.mark.parametrize("defect", MUTATIONS)
def test_defect_that_is_put_back_is_found(defect: str) -> None:
    if defect in SCENARIOS:
        assert not simulate(SCENARIOS[defect]).violation
        with mutated(defect):
            assert simulate(SCENARIOS[defect]).violation
        return
    mode, seed = FOUND_AT.get(defect, (None, 0))
    if not found_by(defect, range(seed, seed + 1), mode):
        assert found_by(defect, range(MOST), mode), f"{MOST} seeds do not find it"


@pytest.mark.parametrize(
    ("defect", "what"),
    [
        (
            "work_that_is_split_beforehand_is_acknowledged_before_it_is_applied",
            "has acknowledged piece 1 of worker 1 and applied it 0 times",
        ),
        ("blocks_of_the_lost_are_handed_out_after_ten_times_the_timeout", "nothing was computed or written for 205 s"),
        ("a_step_of_sync_keeps_the_push_of_a_lost_worker", "has applied piece 3 2 times"),
        ("a_step_of_sync_leaves_out_who_was_lost", "has acknowledged piece 0, and step 1 goes without it"),
    ],
)
def test_defect_is_seen_where_it_happens(defect: str, what: str) -> None:
    """At an answer to a push that names no work, while nobody does anything, and in sync after a loss, when a step is
    the mean of fewer."""
    mode, seed = FOUND_AT[defect]
    found = found_by(defect, range(seed, seed + 1), mode)
    assert found and what in found[1]


def test_wait_of_a_worker_is_too_long_also_if_it_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LOOP_S", 1e9)  # others may work meanwhile
    found = found_by("who_waits_is_answered_after_ten_times_the_timeout", range(1))
    assert found and found[1] == "worker 0 has waited for 2001.39 s, and may for 205"


def test_ssp_counts_the_steps_of_all_in_an_epoch_that_follows_without_a_validation() -> None:
    """Who had no work at the end of an epoch rests, and has to wake for the next one."""
    for seed in range(12):
        scenario = replace(Scenario.drawn(seed, "ssp"), epochs=2, validates=False, leased=True)
        assert not simulate(scenario).violation


def test_seed_is_played_twice_alike() -> None:
    for seed in range(20):
        one, other = (simulate(Scenario.drawn(seed), tracing=True) for _ in range(2))
        assert one.trace == other.trace and one.trace


def test_seeds_that_break_a_promise_are_printed_with_their_replay_and_trace_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(told: str) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["tests.simulation", *told.split()])
        code = main()
        return code, capsys.readouterr().out.splitlines()

    defect = "--mode ssp --mutation the_staleness_bound_is_off_by_one"
    code, lines = command(f"--seeds 9:11 {defect}")
    first = next(line for line in lines if line.startswith("seed 10: "))
    violation = first.removeprefix("seed 10: ")
    assert code == 1 and "gave worker" in violation
    replay = lines[lines.index(first) + 1]
    assert replay == f"  replay: python -m tests.simulation --seed 10 {defect}"
    trace = lines[lines.index(replay) + 1 : lines.index(f"    VIOLATION: {violation}") + 1]
    assert SHOWN < len(trace) < SHOWN + 5 and any("lines (--whole-trace)" in line for line in trace)

    code, replayed = command(replay.split(" -m tests.simulation ")[1])
    assert code == 1 and [f"    {line}" for line in replayed] == trace
    code, whole = command(f"--seed 10 {defect} --whole-trace")
    assert code == 1 and len(whole) > len(replayed)
    assert [line for line in whole if line in replayed] == [line for line in replayed if "(--whole-trace)" not in line]


def test_seeds_that_break_no_promise_exit_with_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert many(0, 2, "ssp", None, jobs=1) == 0
    assert "2 runs" in (told := capsys.readouterr().out) and "seed" not in told


def test_trace_of_a_seed_whose_run_ends_by_a_bug_has_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(HeldBlocks, "note", fails)
    lines, violation = one(1, "async", None)
    assert violation == "ZeroDivisionError: a bug" and any(line.startswith("Traceback") for line in lines)


def test_table_of_branches_has_all_files_that_decide_something() -> None:
    files = {str(path.relative_to(PSERVER).with_suffix("")) for side in SIDES for path in (PSERVER / side).glob("*.py")}
    told = [f"{side}/{name}" for side, names in SIDES.items() for name in names]
    told += [name for names in OTHERS.values() for name in names] + [f"{side}/__init__" for side in SIDES]
    assert sorted(told) == sorted(files), "a new file belongs into SIDES or OTHERS of tests/simulation/branches.py"


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
def test_no_promise_is_broken_in_a_million_runs() -> None:
    assert many(1_000_000, 2_000_000, None, None, jobs=2) == 0
