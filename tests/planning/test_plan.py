"""The plan: processes, devices, batches and steps of any cluster, and what ``auto`` chooses, with its reasons."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from math import ceil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.composed import ready
from tests.pictures import cifar, image_folder, needs
from trainer.config import schema
from trainer.config.run_config import RunConfig
from trainer.errors import UserError
from trainer.host import hardware
from trainer.host.visible_gpus import Gpu
from trainer.job import plan_table
from trainer.planning.auto import Machine, ModelFacts, choose
from trainer.planning.batches import batch_sizes
from trainer.planning.checked_config import Checked
from trainer.planning.chosen import Chosen, GpuSettings
from trainer.planning.plan import Plan, Predicted
from trainer.tracking.describe import note
from trainer.wording import counted

DIGITS = "+recipe=digits_lenet"
TRAIN = 1438  # of 1,797 digits a fifth is held out


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores, no GPU, no 16-bit arithmetic."""
    monkeypatch.setattr(hardware, "cores", lambda: 2)
    monkeypatch.setattr(hardware, "gpus", lambda: ())
    monkeypatch.setattr(hardware, "cpu_flags", lambda: frozenset())


def planned(*overrides: str) -> Plan:
    return ready(*overrides).plan


# --- topologies -----------------------------------------------------------------------------------------------------


def test_one_worker() -> None:
    plan = planned(DIGITS)
    assert (plan.strategy.name, plan.topology.roles, plan.topology.device) == ("single", {"worker": 1}, "cpu")
    assert plan.remarks.why["strategy"] == "one worker"
    assert (plan.batches.size, plan.batches.global_size) == (32, 32)
    assert (plan.length.steps_per_epoch, plan.length.epochs, plan.length.total_steps) == (
        TRAIN // 32,
        12,
        12 * (TRAIN // 32),
    )
    assert plan.data.facts.train_samples == TRAIN and plan.data.facts.classes == 10
    assert plan.topology.endpoint == "a folder that no other user can enter"


def test_outputs_without_a_class_are_in_the_plan_and_in_the_runs_note() -> None:
    plan = planned(DIGITS, "model.num_classes=12")
    assert "12 outputs for the 10 classes" in plan.remarks.concern and f"**ATTENTION: {plan.remarks.concern}**" in note(
        plan, []
    )
    assert planned(DIGITS).remarks.concern == "" and "ATTENTION" not in note(planned(DIGITS), [])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["max_steps=6"], "the warm-up (44 updates) is longer than the run (6)"),
        (["epochs=2", "scheduler=multistep", "scheduler.milestones=[1.5,3]"], "3 never come"),
        (["epochs=2", "scheduler=step"], "the first drop of the learning rate, after 1320 updates"),
        (["epochs=2", "scheduler=plateau"], "scheduler.patience=10 is as long as the run (2 validations)"),
        (["epochs=2"], ""),
        (["epochs=20", "scheduler=plateau"], ""),
    ],
)
def test_schedule_that_the_run_is_too_short_for_is_a_concern(changed: list[str], said: str) -> None:
    assert said in (concern := planned(DIGITS, *changed).remarks.concern) and bool(said) == bool(concern)


def test_momentum_of_workers_that_push_apart_is_a_concern() -> None:
    alone = (DIGITS, "strategy=pserver_async", "launch.servers=1")
    said = planned(*alone, "launch.nproc=3", "optimizer.momentum=0.9").remarks.concern
    assert said.startswith("optimizer.momentum=0.9 with 3 workers that push apart") and "optimizer.momentum=0.5" in said
    for fine in (
        ["launch.nproc=3", "optimizer.momentum=0.5"],
        ["launch.nproc=1", "optimizer.momentum=0.9"],
        ["launch.nproc=3", "optimizer.momentum=0.9", "strategy=pserver_sync"],
        ["launch.nproc=3", "optimizer.momentum=0.9", "strategy=pserver_geo"],
        ["launch.nproc=3", "optimizer=adagrad"],
    ):
        assert planned(*alone, *fine).remarks.concern == "", fine


def test_several_workers_are_collective() -> None:
    plan = planned(DIGITS, "launch.nproc=3")
    assert (plan.strategy.name, plan.remarks.why["strategy"], plan.strategy.traits.exact) == (
        "collective",
        "3 workers",
        True,
    )
    assert [(p.rank, p.node, p.local_rank, p.device) for p in plan.topology.processes] == [
        (i, 0, i, "cpu") for i in range(3)
    ]
    assert plan.batches.global_size == 96 and plan.length.steps_per_epoch == ceil(TRAIN / 3) // 32


def test_sixteen_hosts_of_eight_gpus_without_any_of_them() -> None:
    typed = ("plan=true", "launch.nnodes=16", "launch.nproc=8", "launch.master_addr=10.0.0.1", "device=cuda")
    plan = planned("+recipe=resnet50_random", *typed)
    assert plan.topology.roles == {"worker": 128} and plan.strategy.name == "collective"
    expected = [("worker", rank, rank // 8, rank % 8, f"cuda:{rank % 8}") for rank in range(128)]
    assert [(p.role, p.rank, p.node, p.local_rank, p.device) for p in plan.topology.processes] == expected
    assert plan.batches.global_size == 128 * 32 and (plan.length.steps_per_epoch, plan.length.total_steps) == (100, 100)
    assert plan.topology.endpoint == "10.0.0.1:29500"
    assert plan.topology.environment == {
        "worker": {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "128",
            "LOCAL_WORLD_SIZE": "8",
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "29500",
        }
    }
    assert plan.chosen.precision == "fp16" and "assuming" in plan.remarks.why["precision"]
    assert plan.chosen.pin_memory is True and plan.chosen.keep_memory is False


def test_ips_instead_of_nnodes_and_address() -> None:
    plan = planned(DIGITS, "plan=true", "launch.ips=10.0.0.1, 10.0.0.2", "launch.nproc=2")
    assert (plan.topology.nnodes, plan.topology.roles, plan.topology.endpoint) == (2, {"worker": 4}, "10.0.0.1:29500")
    assert [p.node for p in plan.topology.processes] == [0, 0, 1, 1]


SERVED = (DIGITS, "plan=true", "strategy=pserver_async")


@pytest.mark.parametrize(
    ("nnodes", "typed", "hosts"),
    [
        (1, ("launch.servers=3",), [0, 0, 0]),
        (1, ("launch.servers=2", "launch.server_hosts=all"), [0, 0]),
        (2, ("launch.servers=2",), [0, 1]),
        (3, ("launch.servers=2",), [0, 0]),  # fewer than hosts
        (2, (), [0]),
        (2, ("launch.servers=5",), [0, 0, 0, 1, 1]),
        (2, ("launch.servers=4", "launch.server_hosts=first"), [0, 0, 0, 0]),
        (4, ("launch.servers=4", "launch.server_hosts=1,3"), [1, 1, 3, 3]),
        (4, ("launch.servers=1", "launch.server_hosts=2"), [2]),
        (3, ("launch.servers=3", "launch.server_hosts=2, 0"), [2, 2, 0]),
    ],
)
def test_servers_are_spread_evenly_over_the_chosen_hosts(nnodes: int, typed: tuple[str, ...], hosts: list[int]) -> None:
    plan = planned(*SERVED, f"launch.nnodes={nnodes}", "launch.nproc=1", *typed)
    servers = [p for p in plan.topology.processes if p.role == "server"]
    assert [p.rank for p in servers] == list(range(len(hosts))) and plan.topology.nodes_of("server") == hosts
    for host in set(hosts):
        assert [p.local_rank for p in servers if p.node == host] == list(range(hosts.count(host)))
    assert plan.topology.nodes_of("worker") == list(range(nnodes))


def test_plan_tells_which_server_is_on_which_host() -> None:
    shown = dict(plan_table.rows(planned(*SERVED, "launch.nnodes=2", "launch.servers=3", "launch.nproc=1")))
    assert shown["servers on"] == "host 0: 2, host 1: 1"
    assert (shown["  server 1"], shown["  server 2"]) == ("host 0, cpu", "host 1, cpu")
    assert "servers on" not in dict(plan_table.rows(planned(*SERVED, "launch.servers=3")))


def test_each_role_has_its_own_environment_in_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(*SERVED, "launch.nnodes=2", "launch.servers=3", "launch.nproc=4", "launch.master_addr=10.0.0.1")
    sizes = {role: (told["WORLD_SIZE"], told["LOCAL_WORLD_SIZE"]) for role, told in plan.topology.environment.items()}
    assert sizes == {"worker": ("8", "4"), "server": ("3", "2")}
    assert {told["MASTER_PORT"] for told in plan.topology.environment.values()} == {"29500"}
    plan_table.show_plan(plan, "debug")
    out = capsys.readouterr().out
    assert "Environment of worker 0" in out and "Environment of server 0" in out
    assert "WORLD_SIZE        3" in out
    assert [*planned(DIGITS, "launch.nproc=2").topology.environment] == ["worker"]


def test_ips_say_which_host_this_is() -> None:
    assert planned(DIGITS, "launch.ips=10.255.255.1,127.0.0.1").topology.node_rank == 1


def test_workers_over_all_hosts_instead_of_nproc() -> None:
    plan = planned(DIGITS, "plan=true", "launch.nnodes=2", "launch.workers=6")
    assert plan.topology.roles == {"worker": 6} and plan.topology.environment["worker"]["LOCAL_WORLD_SIZE"] == "3"


def test_one_worker_per_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "gpus", lambda: (Gpu("H100", (9, 0)),) * 4)
    plan = planned(DIGITS)
    assert [p.device for p in plan.topology.processes] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert planned(DIGITS, "device=cpu").topology.roles == {"worker": 1}


# --- batches and steps ----------------------------------------------------------------------------------------------


def test_global_batch_size_is_the_other_way_to_say_it() -> None:
    plan = planned(DIGITS, "launch.nproc=3", "data.global_batch_size=48", "data.batch_size=null")
    assert (plan.batches.size, plan.batches.global_size) == (16, 48)
    assert planned(DIGITS, "launch.nproc=3", "data.global_batch_size=48").batches.size == 16, (
        "typed goes before the recipe"
    )
    assert planned(DIGITS, "data.global_batch_size=32", "data.batch_size=32").batches.global_size == 32


@pytest.mark.parametrize(("k", "steps"), [(1, 44), (4, 11), (5, 9)])
def test_gradient_merge(k: int, steps: int) -> None:
    plan = planned(DIGITS, f"strategy.gradient_merge.k_steps={k}")
    assert TRAIN // 32 == 44
    assert (plan.batches.merge, plan.batches.global_size, plan.length.steps_per_epoch) == (k, 32 * k, steps)


def test_gradient_merge_in_the_global_batch() -> None:
    plan = planned(DIGITS, "strategy.gradient_merge.k_steps=2", "launch.nproc=2", "data.global_batch_size=64")
    assert (plan.batches.size, plan.batches.global_size) == (16, 64)


@pytest.mark.parametrize("drop", [True, False])
def test_updates_of_an_epoch_follow_from_the_global_batch_alone(drop: bool) -> None:
    updates = TRAIN // 32 if drop else ceil(TRAIN / 32)
    for workers, merge in ((1, 1), (2, 1), (4, 1), (3, 1), (1, 2), (2, 3), (7, 4)):
        plan = planned(
            DIGITS,
            f"launch.nproc={workers}",
            "data.global_batch_size=32",
            f"strategy.gradient_merge.k_steps={merge}",
            f"sampler.drop_last={str(drop).lower()}",
        )
        assert (plan.batches.global_size, plan.length.steps_per_epoch, plan.length.total_steps) == (
            32,
            updates,
            12 * updates,
        )
        assert plan.batches.size == ceil(32 / workers / merge)
        shown = dict(plan_table.rows(plan))["batch size"]
        assert shown.endswith("= 32 global") == (32 % (workers * merge) == 0)
        assert shown.startswith("32 global, shared out: at most ") == (32 % (workers * merge) > 0)


def test_batch_size_on_the_command_line_goes_before_a_recipes_global_batch(tmp_path: Path) -> None:
    data = schema.DataConfig(batch_size=8, global_batch_size=64)
    assert batch_sizes(data, 4, 1, {"data.batch_size"}) == {"batch_size": 8, "global_batch_size": None}
    assert data == schema.DataConfig(batch_size=8, global_batch_size=64), "nothing is changed while it is checked"


def test_leased_work_takes_only_global_batches_that_divide() -> None:
    leased = ("+recipe=wide_and_deep", "launch.workers=2", "data.batch_size=null")
    assert planned(*leased, "data.global_batch_size=512").batches.size == 256
    with pytest.raises(UserError, match=r"multiple of 2 workers, and work that is leased in blocks.*data\.work=static"):
        planned(*leased, "data.global_batch_size=511")
    assert planned(*leased, "data.global_batch_size=511", "data.work=static").batches.global_size == 511


def test_the_table_tells_how_work_is_handed_out() -> None:
    def row(*overrides: str) -> str | None:
        return dict(plan_table.rows(planned(DIGITS, "launch.workers=2", *overrides))).get("work")

    servers = ("strategy=pserver_async", "launch.servers=1")
    assert row(*servers) == "leased in blocks of 2 batches; a lost worker's go to others"
    odd = ("data.lease_batches=7", "strategy.gradient_merge.k_steps=2")
    assert row(*servers, *odd) == "leased in blocks of 8 batches; a lost worker's go to others"
    assert row(*servers, "data.on_lost_worker=drop") == "leased in blocks of 2 batches; a lost worker's are dropped"
    assert row(*servers, "data.work=static") == "split beforehand"
    assert row("strategy=pserver_sync", "launch.servers=1") == "split beforehand"
    assert row() is None, "who meets at every update never leases"


def test_max_steps_goes_beyond_epochs_or_ends_before() -> None:
    longer = planned(DIGITS, "epochs=1", "max_steps=100")
    assert (longer.length.total_steps, longer.length.epochs) == (100, 3)
    shorter = planned(DIGITS, "epochs=12", "max_steps=45")
    assert (shorter.length.total_steps, shorter.length.epochs) == (45, 2)


@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_last_batches(workers: int, drop: bool) -> None:
    plan = planned(DIGITS, f"launch.nproc={workers}", f"sampler.drop_last={str(drop).lower()}", "data.batch_size=100")
    mine = ceil(TRAIN / workers)
    assert plan.length.steps_per_epoch == (mine // 100 if drop else ceil(mine / 100))


def test_limited_epochs() -> None:
    plan = planned(DIGITS, "limit_train_batches=10", "epochs=2")
    assert (plan.length.steps_per_epoch, plan.length.total_steps) == (10, 20)


def test_evaluation_batches_follow_training_batches() -> None:
    assert planned(DIGITS).batches.val_size == 32
    assert planned(DIGITS, "data.val_batch_size=64").batches.val_size == 64


def test_a_batch_that_fits_one_worker_may_not_fit_many() -> None:
    assert planned(DIGITS, "data.batch_size=700").length.steps_per_epoch == 2
    with pytest.raises(UserError, match="with 4 workers a batch of 2800 does not fit the 1438 training samples"):
        planned(DIGITS, "data.batch_size=700", "launch.nproc=4")


# --- auto -----------------------------------------------------------------------------------------------------------

CONFIG = RunConfig()
BIG, SMALL = ModelFacts(25_000_000, convolutional=True), ModelFacts(20_000, convolutional=True)
RESNET = replace(BIG, norms=("BatchNorm2d",))
SPEEDS = {"fp32": 2950.0, "bf16": 4703.0, "fp16": 5985.0}
AMX = frozenset({"avx512f", "amx_bf16"})


def gpu_of(major: int, minor: int) -> Machine:
    return Machine(16, frozenset(), (Gpu("a GPU", (major, minor)),))


@pytest.mark.parametrize(
    ("device", "model", "host", "precision", "channels_last", "reason"),
    [
        ("cpu", BIG, Machine(2, AMX, ()), "bf16", True, "this CPU has amx_bf16"),
        ("cpu", BIG, Machine(2, frozenset({"avx512_bf16"}), ()), "bf16", True, "this CPU has avx512_bf16"),
        ("cpu", BIG, Machine(2, frozenset({"avx2"}), ()), "fp32", False, "no bf16 instructions"),
        ("cpu", SMALL, Machine(2, AMX, ()), "fp32", False, "below 1,000,000"),
        ("cpu", ModelFacts(25_000_000, convolutional=False), Machine(2, AMX, ()), "fp32", False, "this model has none"),
        ("cuda", BIG, gpu_of(9, 0), "bf16", True, "compute capability 9.0"),
        ("cuda", BIG, gpu_of(8, 0), "bf16", True, "compute capability 8.0"),
        ("cuda", BIG, gpu_of(7, 0), "fp16", True, "compute capability 7.0"),
        ("cuda", BIG, gpu_of(6, 0), "fp32", False, "no 16-bit matrix units"),
        ("cuda", BIG, Machine(2, AMX, ()), "bf16", True, "assuming GPUs of compute capability 8.0"),
        ("cuda", SMALL, gpu_of(9, 0), "fp32", False, "with 20,000 parameters, below 1,000,000, kernels are so short"),
        ("cuda", RESNET, gpu_of(9, 0), "fp16", True, "batch norm by cuDNN in fp16"),
        ("cuda", RESNET, Machine(2, AMX, ()), "fp16", True, "assuming GPUs of compute capability 8.0 or newer, and"),
        ("cuda", replace(RESNET, norms=("LayerNorm",)), gpu_of(9, 0), "bf16", True, "compute capability 9.0"),
        ("cuda", replace(RESNET, unfused="odd"), gpu_of(9, 0), "bf16", True, "each update would wait for the GPU"),
        ("cuda", replace(RESNET, in_tables=24_500_000), gpu_of(9, 0), "fp32", False, "with 500,000 parameters"),
        ("cuda", replace(RESNET, speeds=SPEEDS), gpu_of(9, 0), "fp16", True, "fp16 5,985, bf16 4,703, fp32 2,950"),
        ("cuda", replace(SMALL, speeds=SPEEDS), gpu_of(9, 0), "bf16", True, "measured here: bf16 4,703, fp32 2,950"),
        ("cuda", replace(BIG, speeds={"fp32": 100, "bf16": 104}), gpu_of(9, 0), "fp32", False, "measured here"),
        ("cuda", replace(BIG, precision_before=("bf16", "step-7")), gpu_of(9, 0), "bf16", True, "as in step-7"),
        ("cuda", replace(RESNET, precision_before=("fp16", "step-7")), gpu_of(6, 0), "fp32", False, "no 16-bit"),
    ],
)
def test_auto_precision_and_memory_format(
    device: str, model: ModelFacts, host: Machine, precision: str, channels_last: bool, reason: str
) -> None:
    chosen, why = choose(CONFIG, device, model, host, 1, False)
    assert (chosen.precision, chosen.channels_last) == (precision, channels_last)
    assert reason in why["precision"] and why["channels_last"]


def test_the_weakest_gpu_decides() -> None:
    host = Machine(16, frozenset(), (Gpu("H100", (9, 0)), Gpu("V100", (7, 0))))
    assert choose(CONFIG, "cuda", BIG, host, 2, False)[0].precision == "fp16"


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        (["strategy=pserver_sync", "launch.nproc=2"], "servers know no loss scale"),
        (["strategy=collective", "launch.nproc=2", "strategy.comm_hook=powersgd"], "each has a scale of its own"),
        (["optimizer=rmsprop"], "each update would wait"),
    ],
)
def test_auto_is_no_fp16_where_that_is_refused(typed: list[str], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, precision in (((9, 0), "bf16"), ((7, 0), "fp16" if "optimizer=rmsprop" in typed else "fp32")):
        gpus = (Gpu("a GPU", capability),) * 2
        monkeypatch.setattr(hardware, "gpus", lambda gpus=gpus: gpus)
        plan = planned("+recipe=resnet50_random", *typed)
        assert plan.chosen.precision == precision
        assert why in plan.remarks.why["precision"] or precision == "fp16"


def test_batch_norm_over_all_workers_is_as_fast_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "gpus", lambda: (Gpu("a GPU", (9, 0)),) * 2)
    own = ("+recipe=resnet50_random", "strategy=collective")
    assert planned(*own).chosen.precision == "fp16"
    assert planned(*own, "strategy.sync_batch_norm=true").chosen.precision == "bf16"


def test_random_images_are_so_many_updates_however_many_batches_these_merge() -> None:
    for merge in (1, 3):
        plan = planned("+recipe=resnet50_random", f"strategy.gradient_merge.k_steps={merge}", "data.batches=7")
        assert (plan.length.steps_per_epoch, plan.data.facts.train_samples) == (7, 7 * plan.batches.global_size)
        assert plan.batches.global_size == plan.batches.size * merge


def test_auto_takes_one_thread_where_a_batch_is_too_little_work_for_two() -> None:
    host = Machine(8, AMX, ())
    lenet = ModelFacts(
        11_350, convolutional=True, work=11_350 * 64
    )  # on digits: 0.2 million multiply-adds, 0.7 at most
    assert choose(CONFIG, "cpu", lenet, host, 1, False, 32)[0].threads == 1
    assert choose(CONFIG, "cpu", lenet, host, 1, False, 512)[0].threads == 8
    assert choose(CONFIG, "cpu", SMALL, host, 1, False, 32)[0].threads == 8, "not known how much work"
    given = CONFIG.changed(execution={"threads": 5})
    assert choose(given, "cpu", lenet, host, 1, False, 32)[0].threads == 5
    plan = planned(DIGITS)
    assert plan.chosen.threads == 1 and "little work" in plan.remarks.why["threads"]


def test_auto_threads_share_the_cores() -> None:
    for workers, threads, shared in ((1, 8, "1 worker"), (3, 2, "3 workers"), (16, 1, "16 workers")):
        chosen, why = choose(CONFIG, "cpu", BIG, Machine(8, AMX, ()), workers, False)
        assert chosen.threads == threads and why["threads"] == f"8 cores / {shared}"


@pytest.mark.parametrize(
    ("device", "slow", "cores", "workers", "readers"),
    [
        ("cpu", False, 8, 1, 0),
        ("cpu", True, 2, 1, 1),
        ("cpu", True, 8, 1, 1),
        ("cpu", True, 32, 1, 4),
        ("cpu", True, 64, 4, 2),
        ("cpu", True, 4, 8, 1),
        ("cuda", True, 16, 1, 15),
        ("cuda", True, 16, 4, 3),
        ("cuda", True, 224, 8, 27),
        ("cuda", True, 2, 4, 1),
    ],
)
def test_auto_reading_processes(device: str, slow: bool, cores: int, workers: int, readers: int) -> None:
    chosen, why = choose(CONFIG, device, BIG, Machine(cores, frozenset(), ()), workers, slow)
    assert chosen.num_workers == readers
    share = f"{counted(cores // workers, 'core')} per worker" if cores >= workers else "fewer cores than workers"
    share = f"({cores} cores - 1) / {counted(workers, 'GPU')}" if device == "cuda" else share
    assert (share if readers else "cut from memory") in why["num_workers"]
    null = CONFIG.changed(data={"num_workers": None})
    assert choose(null, device, BIG, Machine(cores, frozenset(), ()), workers, slow) == (chosen, why)


@pytest.mark.parametrize(("readers", "batches"), [(0, 0), (1, 4), (2, 2), (8, 2)])
def test_auto_prefetch(readers: int, batches: int) -> None:
    config = CONFIG.changed(data={"num_workers": readers})
    chosen, why = choose(config, "cpu", BIG, Machine(8, AMX, ()), 1, True)
    assert chosen.prefetch == batches
    assert (f"{readers * batches} batches are ready" if readers else "data.num_workers") in why["prefetch"]
    given, why = choose(config.changed(data={"prefetch": 7}), "cpu", BIG, Machine(8, AMX, ()), 1, True)
    assert given.prefetch == (7 if readers else 0) and ("prefetch" in why) == (not readers)


def test_auto_memory() -> None:
    on_cpu, on_gpu = (
        choose(CONFIG, "cpu", BIG, Machine(2, AMX, ()), 1, False),
        choose(CONFIG, "cuda", BIG, gpu_of(9, 0), 1, False),
    )
    assert (on_cpu[0].keep_memory, on_cpu[0].pin_memory) == (True, False)
    assert (on_gpu[0].keep_memory, on_gpu[0].pin_memory) == (False, True)
    assert {"keep_memory", "pin_memory"} <= set(on_cpu[1]) & set(on_gpu[1])


def test_what_is_given_is_taken_without_a_reason() -> None:
    given = CONFIG.changed(
        device="cpu",
        precision="fp64",
        execution={
            "channels_last": True,
            "keep_memory": False,
            "threads": 5,
            "fused_optimizer": False,
            **dict.fromkeys(asdict(GpuSettings()), False),
        },
        data={"num_workers": 3, "prefetch": 5, "pin_memory": True},
    )
    chosen, why = choose(given, "cpu", BIG, Machine(2, AMX, ()), 1, True)
    assert why == {} and chosen == Chosen("fp64", True, False, 5, 3, 5, True, False)


def fused(device: str, *, model: ModelFacts = BIG, servers: bool = False, **changed: object) -> tuple[bool, str]:
    config = CONFIG.changed(**changed)
    chosen, why = choose(config, device, model, gpu_of(9, 0), 1, False, servers=servers)
    return chosen.fused_optimizer, why.get("fused_optimizer", "")


def test_optimizers_are_fused_on_gpus_and_by_request() -> None:
    true, false = {"execution": {"fused_optimizer": True}}, {"execution": {"fused_optimizer": False}}
    assert fused("cuda")[0] and "without a wait" in fused("cuda")[1]
    assert fused("cpu") == (False, "pays on GPUs") and fused("cpu", **true) == (True, "")
    assert fused("cuda", **false) == (False, "")
    assert fused("cuda", servers=True) == (False, "parameter servers make the updates, on CPUs")
    assert fused("cuda", mode="eval", model=ModelFacts(1, False, unfused="no kernels")) == (False, "nothing is trained")
    assert fused("cuda", model=ModelFacts(1, False, unfused="no kernels")) == (False, "no kernels")
    assert fused("cuda", model=ModelFacts(1, False, unfused_by_auto="not by auto")) == (False, "not by auto")
    assert fused("cuda", model=ModelFacts(1, False, unfused_by_auto="not by auto"), **true) == (True, "")
    assert fused("cpu", optimizer={"fused": True}) == (True, "optimizer.fused=true")
    assert fused("cuda", optimizer={"fused": False}) == (False, "optimizer.fused=false")


def test_optimizers_that_cannot_be_fused_are_refused() -> None:
    lacks, asked = ModelFacts(1, False, unfused="no kernels"), {"execution": {"fused_optimizer": True}}
    with pytest.raises(UserError, match=r"^execution.fused_optimizer=true: no kernels. Type instead: execution.f"):
        fused("cpu", model=lacks, **asked)
    with pytest.raises(UserError, match=r"^optimizer.fused=true: no kernels. Type instead: optimizer.fused=false"):
        fused("cuda", model=lacks, optimizer={"fused": True})
    with pytest.raises(UserError, match=r"parameter servers make the updates.*\+optimizer.fused=true"):
        fused("cuda", servers=True, **asked)
    with pytest.raises(UserError, match=r"^execution.fused_optimizer=true: optimizer.fused=false says otherwise"):
        fused("cuda", optimizer={"fused": False}, **asked)


def test_the_plan_says_whether_the_optimizer_is_fused_and_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "gpus", lambda: (Gpu("a GPU", (9, 0)),))

    def row(*typed: str) -> str:
        return dict(plan_table.rows(planned(DIGITS, "strategy=single", "device=cuda", *typed)))["fused_optimizer"]

    for optimizer in ("sgd", "momentum", "nesterov", "adam", "adamw"):
        assert row(f"optimizer={optimizer}").startswith("true  (auto: one kernel"), optimizer
    assert row("optimizer=torch", "optimizer.name=adamw").startswith("true  (auto: one kernel")
    assert row("optimizer=rmsprop") == "false  (auto: torch has no fused kernels for RMSprop)"
    assert row("optimizer=adagrad") == "false  (auto: it fuses SGD, Adam and AdamW of torch)"
    assert row("optimizer=adam", "+optimizer.foreach=true") == (
        "false  (auto: optimizer.foreach=true excludes fused kernels)"
    )
    assert "a dampening wrongly" in row("optimizer=momentum", "+optimizer.dampening=0.1")
    assert row("optimizer=adagrad", "execution.fused_optimizer=true") == "true"
    assert row("optimizer=adagrad", "+optimizer.fused=true") == "true  (auto: optimizer.fused=true)"
    with pytest.raises(UserError, match="torch has no fused kernels for RMSprop"):
        row("optimizer=rmsprop", "execution.fused_optimizer=true")
    with pytest.raises(UserError, match=r"^optimizer.fused=true: .*dampening"):
        row("optimizer=momentum", "+optimizer.dampening=0.1", "+optimizer.fused=true")


def test_reasons_are_in_the_plan() -> None:
    plan = planned(DIGITS, "execution.threads=1")
    assert plan.chosen.threads == 1 and "threads" not in plan.remarks.why
    assert plan.chosen.precision == "fp32" and "no bf16 instructions" in plan.remarks.why["precision"]


def test_reading_is_in_the_plan_that_is_shown_with_its_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "cores", lambda: 16)
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path))
    typed = ["+recipe=resnet50_imagefolder", f"data.root={image_folder(tmp_path / 'd', per_class=24)}"]
    shown = dict(plan_table.rows(planned(*typed)))
    assert shown["num_workers"] == "2  (auto: 16 cores per worker, and one process decodes for 8 that train)"
    assert shown["prefetch"] == "2  (auto: 4 batches are ready where one takes longer)"
    assert "in memory shared by this host's workers" in shown["cache"]
    assert shown["pin_memory"] == "false  (auto: no GPU)"
    typed += ["data.num_workers=3", "data.prefetch=5", "data.cache=none"]
    shown = dict(plan_table.rows(planned(*typed)))
    assert (shown["num_workers"], shown["prefetch"]) == ("3", "5")
    assert shown["cache"] == "none: images are decoded each time"
    root = cifar(tmp_path / "c")
    shown = dict(plan_table.rows(planned("+recipe=cifar10_convnet", f"data.root={root}", "data.batch_size=4")))
    assert "mapped by all workers of a host" in shown["cache"]
    assert "cache" not in dict(plan_table.rows(planned(DIGITS)))


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ((), "none: the only worker is this process (launch=forkserver makes"),
        (("launch=in_process",), "none: the only worker is this process (launch=forkserver makes"),
        (("launch=forkserver",), "at most 3 within an hour, when a process dies or hangs"),
        (("launch.nproc=2", "launch.max_restarts=5"), "at most 5 within an hour, when a process dies or hangs"),
        (("launch=forkserver", "launch.max_restarts=0"), ""),
    ],
)
def test_the_plan_tells_whether_one_worker_alone_is_started_again(typed: tuple[str, ...], said: str) -> None:
    shown = dict(plan_table.rows(planned(DIGITS, *typed))).get("restarts", "")
    assert shown.startswith(said) and bool(shown) == bool(said)


@pytest.mark.parametrize("each", ["image", "row"])
def test_the_plan_of_predicting_shows_what_is_read_and_written(each: str) -> None:
    plan = planned(DIGITS).changed(mode="predict", data={"predict": Predicted("/in", 1200, each, None)})
    shown = dict(plan_table.rows(plan))
    assert shown["input"] == ("/in: 1,200 images" if each == "image" else "/in: about 1,200 rows")
    assert shown["output"] == f"{plan.paths.run_dir}/predictions.csv" and "data" not in shown
    assert "training" not in " ".join(shown.values())
    there = dict(plan_table.rows(plan.changed(data={"predict": Predicted("/in", 1200, each, "/x.csv")})))
    assert there["output"] == "/x.csv"


MODES = ("sync", "async", "ssp", "geo")
RECIPES = sorted(path.stem for path in (Path(__file__).parents[2] / "recipes" / "recipe").glob("*.yaml"))
ON_SERVERS = [
    pytest.param(recipe, mode, marks=[pytest.mark.long] * ((number + offset) % len(MODES) > 0))
    for number, recipe in enumerate(RECIPES)
    for offset, mode in enumerate(MODES)
]
"""Each recipe with each mode; in ``make test`` each recipe with one, and each mode with several recipes."""


@pytest.mark.all
@pytest.mark.parametrize(("recipe", "mode"), ON_SERVERS)
def test_every_recipe_can_run_on_servers(recipe: str, mode: str, tmp_path: Path) -> None:
    plan = planned(f"+recipe={recipe}", f"strategy=pserver_{mode}", *needs(recipe, tmp_path))
    assert plan.topology.roles == {"worker": 2, "server": 1}
    assert plan.length.total_steps > 0


def test_launcher_other_than_the_usual_one_is_named() -> None:
    plan = planned(DIGITS, "launch=forkserver")
    assert ("launcher", "trainer.launch.builtin.Forkserver") in list(plan_table.rows(plan))
    assert planned(DIGITS).topology.launcher == ""


def test_plan_tells_the_buckets_of_gradients() -> None:
    two = (DIGITS, "launch.nproc=2", "strategy=collective")
    plan = planned(*two)
    [size] = plan.strategy.buckets.sizes
    assert size == 4 * plan.model.parameters and dict(plan_table.rows(plan))["  gradients"] == "1 bucket: 0.043 MiB"
    assert Plan.of(json.loads(json.dumps(plan.as_dict()))) == plan
    assert sum(planned(*two, "precision=fp64", "strategy.bucket_cap_mb=0.02").strategy.buckets.sizes) == 2 * size
    frozen = planned(*two, "optimizer.lr_factors={features.0: 0}")
    assert sum(frozen.strategy.buckets.sizes) == size - 4 * (20 * 25 + 20), (
        "the first convolution, 5 x 5, from 1 channel to 20"
    )
    for others in (("compile=true",), ("strategy=local_sgd",), ("strategy=pserver_sync",)):
        assert planned(*two, *others).strategy.buckets is None
    assert planned(DIGITS).strategy.buckets is None and "  gradients" not in dict(plan_table.rows(planned(DIGITS)))


@pytest.mark.parametrize(
    ("mode", "nnodes", "least", "torchrun", "again"),
    [
        ("train", 1, None, False, True),
        ("train", 4, 1, False, True),
        ("train", 2, None, False, False),
        ("eval", 1, None, False, False),
        ("train", 1, None, True, False),
    ],
)
def test_processes_are_started_again_on_one_host_or_where_hosts_come_and_go_and_by_torchrun_itself(
    mode: str, nnodes: int, least: int | None, torchrun: bool, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SimpleNamespace(mode=mode, launch=SimpleNamespace(nnodes=nnodes, least_nnodes=least))
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        monkeypatch.setenv("RANK", "0")
    assert Checked.restartable.fget(SimpleNamespace(config=config)) == again  # type: ignore[attr-defined]
