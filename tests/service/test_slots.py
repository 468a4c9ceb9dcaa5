"""Which runs start, which wait and why, and which make room."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from trainer.service.queue import HERE, RUNNING, Part, Queue, Run, Slots
from trainer.service.slots import decide, enough, without

HOST = Slots(tuple(range(8)), ("GPU-a", "GPU-b", "GPU-c", "GPU-d"), 64 << 30)


@pytest.fixture
def run(queue: Queue, add: Callable[..., int]) -> Callable[..., Run]:
    def made(**values: object) -> Run:
        found = queue.run(add("work", 1, **values))
        assert found is not None
        return found

    return made


def alive(run: Run, slots: Slots) -> Run:
    return replace(run, state=RUNNING, parts={HERE: Part(enough(slots, run))})


def test_runs_share_a_host_and_no_slot_is_given_twice(run: Callable[..., Run]) -> None:
    runs = [run(cores=2, gpus=1), run(cores=2, gpus=2), run(cores=2, gpus=1), run(cores=1)]
    plan = decide({HERE: HOST}, runs, [])
    gpus = [gpu for slots in plan.start.values() for gpu in slots[HERE].gpus]
    cores = [core for slots in plan.start.values() for core in slots[HERE].cores]
    assert sorted(gpus) == list(HOST.gpus) and sorted(cores) == list(range(7)) and len(plan.start) == 4


def test_a_run_that_waits_is_not_overtaken_and_says_for_what(run: Callable[..., Run]) -> None:
    first = alive(run(cores=1, gpus=3), HOST)
    large, small = run(cores=1, gpus=2), run(cores=1, gpus=1)
    plan = decide({HERE: HOST}, [large, small], [first])
    assert not plan.start and not plan.stop
    assert plan.reasons == {large.number: "free: 1 of 2 GPUs", small.number: "1 before it"}


def test_what_the_host_does_not_have_holds_nobody_up(run: Callable[..., Run]) -> None:
    never, small = run(cores=1, gpus=9, memory=1 << 40), run(cores=1)
    plan = decide({HERE: HOST}, [never, small], [])
    assert plan.reasons == {never.number: "this host has 4 of 9 GPUs, 65536 of 1048576 MiB of memory"}
    assert [*plan.start] == [small.number]


def test_the_fewest_youngest_runs_of_lowest_priority_make_room(run: Callable[..., Run]) -> None:
    old, young, high = run(cores=1, gpus=1), run(cores=1, gpus=1), run(cores=1, gpus=2, priority=5)
    living: list[Run] = []
    for one in (old, young, high):
        living.append(alive(one, without(HOST, (other.slots for other in living))))
    assert decide({HERE: HOST}, [run(cores=1, gpus=1, priority=1)], living).stop == [young.number]
    assert decide({HERE: HOST}, [run(cores=1, gpus=2, priority=1)], living).stop == [young.number, old.number]
    assert (
        decide({HERE: HOST}, [run(cores=1, gpus=3, priority=1)], living).stop == []
    )  # the third is not of lower priority
    assert decide({HERE: HOST}, [run(cores=1, gpus=1)], living).stop == []


def test_so_many_of_a_sweep_at_a_time(run: Callable[..., Run]) -> None:
    points = [replace(run(cores=1), sweep=7, parallel=2) for _ in range(4)]
    plan = decide({HERE: HOST}, points, [])
    assert [*plan.start] == [points[0].number, points[1].number]
    assert plan.reasons[points[2].number] == "2 jobs of its sweep run"


def test_among_equals_the_user_who_holds_least_goes_first(run: Callable[..., Run]) -> None:
    """One user's hundred runs do not keep another's one waiting, and whoever holds GPUs waits for who holds none."""
    small = Slots((0, 1), (), 1 << 30)
    many, one = [run(user="a") for _ in range(4)], run(user="b")
    assert [*decide({HERE: small}, [*many, one], []).start] == [many[0].number, one.number]
    assert decide({HERE: small}, [*many, one], []).reasons == {
        n.number: r for n, r in zip(many[1:], REASONS, strict=True)
    }
    urgent = run(user="a", priority=1)
    assert [*decide({HERE: small}, [urgent, *many, one], []).start] == [urgent.number, one.number]
    with_gpus, with_cores = alive(run(user="a", gpus=3), HOST), alive(run(user="b", cores=4), without(HOST, [HOST]))
    living = [with_gpus, replace(with_cores, parts={HERE: Part(Slots((4, 5, 6, 7)))})]
    next_a, next_b = run(user="a", gpus=1), run(user="b", gpus=1)
    assert [*decide({HERE: HOST}, [next_a, next_b], living).start] == [
        next_b.number
    ]  # 3/4 of the GPUs; 1/2 of the cores


REASONS = ("free: 0 of 1 cores", "1 before it", "2 before it")


def test_a_run_of_several_hosts_gets_all_of_them_or_none(run: Callable[..., Run]) -> None:
    hosts = {"a": Slots((0, 1), (), 1 << 30), "b": Slots((0, 1), (), 1 << 30)}
    both, other = run(hosts=2, cores=2), run(hosts=2, cores=2)
    plan = decide(hosts, [both, other], [])
    assert plan.start == {both.number: {"a": Slots((0, 1)), "b": Slots((0, 1))}}
    assert plan.reasons == {other.number: "free: 0 of 2 hosts with 2 cores"}
    on_b = replace(run(), parts={"b": Part(Slots((0,)))})
    plan = decide(hosts, [both, one := run(cores=1)], [on_b])
    assert not plan.start and plan.reasons[both.number] == "free: 1 of 2 hosts with 2 cores", "a is kept for it"
    assert plan.reasons[one.number] == "1 before it"
    assert decide({"a": hosts["a"]}, [both], []).reasons == {both.number: "1 of 2 hosts with 2 cores"}
    assert [*decide(hosts, [one], [replace(on_b, cores=2, parts={"a": Part(hosts["a"])})]).start[one.number]] == ["b"]
    assert decide(hosts, [run(hosts=2, cores=2, priority=1)], [on_b]).stop == [on_b.number]


def test_who_would_not_help_is_not_asked_to_make_room(run: Callable[..., Run]) -> None:
    without_gpu, with_gpu = run(cores=1, gpus=0), run(cores=1, gpus=4)
    living = [alive(with_gpu, HOST), replace(without_gpu, parts={HERE: Part(Slots((5,)))})]
    assert decide({HERE: HOST}, [run(gpus=1, priority=1)], living).stop == [with_gpu.number]
    ending = [replace(living[0], asked="cancel"), living[1]]
    assert decide({HERE: HOST}, [run(gpus=1, priority=1)], ending).stop == [], "one that ends already is enough"
