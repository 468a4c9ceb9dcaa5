"""launch=ray: what is asked of Ray, and how a job goes on, by a Ray made of one process: its actors run here."""

from __future__ import annotations

import signal
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch.engines.apart import end_with, left_on_disks, python_apart
from tests.launch.engines.jobs import job_with
from tests.pace import wait_for
from trainer.config.run_config import RunConfig
from trainer.config.schema import LaunchConfig
from trainer.errors import UserError
from trainer.launch.engines.contract import ENDED, PENDING, REQUEUED, RUNNING, Handle, Job, Needs, State, Unreachable
from trainer.launch.engines.copies import Away, Copies
from trainer.launch.engines.ray import Ray
from trainer.launch.engines.ray_hosts import Host
from trainer.planning.engine_hosts import check_alone, of_engine

TASK = """
import os, signal, sys, time
assert sys.argv[1:3] == ["-m", "trainer"]
host, what, life = int(os.environ["TRAINER_HOST"]), sys.argv[3], "TRAINER_RESUME" in os.environ
if what == "environment":
    names = "SUBMITTED RUN_DIR HOSTS HOST RESUME".split()
    print(*(os.environ.get(f"TRAINER_{name}") for name in names), os.environ["MASTER_ADDR"], *sys.argv[4:])
    print(len(os.environ["TRAINER_RUN_SECRET"]) >= 32, os.environ.get("SLURM_PROCID"), os.environ.get("MLFLOW_X"))
elif what == "sleep" and not life:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
    print("begun", flush=True)
    while True:
        time.sleep(0.05)
elif what == "sleep":
    print("resumed by", os.environ["TRAINER_RESUME"])
elif what == "bar":
    print("10% \\u20ac", end="", flush=True)
    while not os.path.exists(os.environ["TRAINER_RUN_DIR"] + "/go on"):
        time.sleep(0.05)
    print("\\r20%", end="")
    sys.exit(0 if life else 75)
elif what == "deaf" and not life:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("begun", flush=True)
    time.sleep(60 if host else 0)
    sys.exit(1)
elif what != "deaf":
    print("line of host", host)
    sys.exit(int(what.split(",")[host]))
"""


class ActorError(Exception):
    pass


class Unavailable(ActorError):
    pass


class TaskError(Exception):
    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class FakeRay(types.ModuleType):
    """The calls of Ray that the product makes. An actor is an object of this process; a call has been made when its
    answer is asked for.

    Attributes:
        done: calls that change something, in order. signals: what actors were asked to send. resources: of each node.
        busy: groups wait. is_away: the cluster does not answer. actors: by the order of their start. draining: nodes.
        lost: the answer of host 1 that is lost: 0: that for its place; 1: that to start its command.
    """

    def __init__(self) -> None:
        super().__init__("ray")
        self.done: list[Any] = []
        self.signals: list[tuple[Any, ...]] = []
        self.resources, self.busy, self.is_away = [{"CPU": 8.0}] * 2, False, False
        self.actors: list[FakeActor] = []
        self.draining: list[str] = []
        self.lost: int | None = None
        self.exceptions = types.SimpleNamespace(
            RayActorError=ActorError, ActorUnavailableError=Unavailable, RayTaskError=TaskError, RayError=OSError
        )
        self.cloudpickle = types.SimpleNamespace(
            register_pickle_by_value=lambda module: self.done.append(f"by value: {module.__name__}")
        )
        self.groups: Any = types.ModuleType("ray.util.placement_group")
        self.groups.placement_group, self.groups.placement_group_table = self.group, self.table
        self.groups.remove_placement_group = self.remove
        self.strategies: Any = types.ModuleType("ray.util.scheduling_strategies")
        self.strategies.PlacementGroupSchedulingStrategy = lambda group, placement_group_bundle_index: (
            group,
            placement_group_bundle_index,
        )

    def init(self, address: str, **_: Any) -> None:
        if address == "nowhere":
            raise ConnectionError("Failed to connect")
        self.done.append(f"init {address}")

    def get_runtime_context(self) -> Any:
        return types.SimpleNamespace(get_job_id=lambda: "02000000")

    def group(self, bundles: list[dict[str, float]], strategy: str) -> str:
        self.done.append((strategy, bundles))
        return f"group {sum(isinstance(one, tuple) for one in self.done)}"

    def table(self, group: str) -> dict[str, Any]:
        if self.is_away:
            raise ConnectionError("GCS is away")
        if self.busy:
            return {"state": "PENDING", "stats": {"scheduling_state": "NO_RESOURCES"}}
        return {"state": "CREATED"}

    def remove(self, group: str) -> None:
        self.done.append(f"remove {group}")
        for actor in self.actors:
            actor.end()

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": has} for has in self.resources]

    def remote(self, kind: type) -> Any:
        assert kind is Host

        def options(**options: Any) -> Any:
            def made() -> FakeActor:
                self.done.append(options)
                self.actors.append(FakeActor(self, len(self.actors)))
                return self.actors[-1]

            return types.SimpleNamespace(remote=made)

        return types.SimpleNamespace(options=options)

    def wait(self, asked: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return asked, []

    def get(self, call: Callable[[], Any]) -> Any:
        return call()


class FakeActor:
    """An actor with the address 10.0.0.N; dead: its next answer is that it has died."""

    def __init__(self, ray: FakeRay, number: int) -> None:
        self.ray, self.number, self.host = ray, number, Host()
        self.errors: list[Exception] = []

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Callable[[], Any]:
            answer: Any = None
            if name == ("place", "start")[self.ray.lost or 0] and self.ray.lost is not None and self.number == 1:
                self.ray.lost = None
                return lambda: (_ for _ in ()).throw(OSError("the object is lost"))
            if name == "place":
                answer = f"node {self.number}", f"10.0.0.{self.number}", 4000
            elif name in ("signal", "kill"):
                self.ray.signals.append((name, self.number, *arguments))
            if self.errors:
                error = self.errors.pop()
                return lambda: (_ for _ in ()).throw(error)
            try:
                answer = answer or getattr(self.host, name)(*arguments)
            except OSError as error:
                cause = error
                return lambda: (_ for _ in ()).throw(TaskError(cause))
            if name == "news":
                answer = (*answer[:2], self.ray.draining)
            return lambda: answer

        return types.SimpleNamespace(remote=remote)

    def end(self) -> None:
        self.host.kill()
        if self.host.process is not None:
            self.host.process.wait()

    def die(self) -> None:
        """Die with the command, as an actor of a node that is gone."""
        self.end()
        self.errors.append(ActorError())


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "ray.util.placement_group", fake.groups)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", fake.strategies)
    return fake


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return job_with(TASK, tmp_path, needs=Needs(4, "1.5G", 2), grace_s=0.2, options={"TPU": 1})


def submitted(job: Job, *words: str, **config: Any) -> Handle:
    return Ray(**config).submit(replace(job, words=words or job.words))


def ended(handle: Handle) -> tuple[State, str]:
    """The last state of a job, and its lines."""
    wait_for(lambda: handle.state().phase == ENDED, 30, "the job has not ended")
    return handle.state(), "".join(handle.lines())


def begun(handle: Handle, job: Job) -> None:
    """Wait until the commands of both hosts have printed."""
    logs = [job.engine_folder / f"host.{host}.log" for host in range(job.hosts)]

    def all_have() -> bool:
        handle.state()
        return all(log.exists() and "begun" in log.read_text() for log in logs)

    wait_for(all_have, 30, "the commands have not begun")


def test_a_group_is_placed_before_the_actors_and_each_starts_the_command(
    job: Job, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("MLFLOW_X", "tracked")
    state, lines = ended(submitted(job, cluster="10.0.0.9:6379"))
    assert state == State(ENDED)
    run = f"ray {job.folder} 2 0 None 10.0.0.0 name='a $b c'"
    assert lines == f"ray: life 0, on 10.0.0.0, 10.0.0.1\n{run}\nTrue None tracked\n"
    assert (job.engine_folder / "host.1.log").read_text().startswith(f"ray {job.folder} 2 1 None 10.0.0.0")
    bundle = {"CPU": 4, "GPU": 2, "memory": 3 << 29, "TPU": 1}
    first = {"num_cpus": 4, "num_gpus": 2, "memory": 3 << 29, "resources": {"TPU": 1}, "max_restarts": 0}
    assert ray.done == [
        "init 10.0.0.9:6379",
        "by value: trainer.launch.engines.ray_hosts",
        ("STRICT_SPREAD", [bundle, bundle]),
        {**first, "scheduling_strategy": ("group 1", 0)},
        {**first, "scheduling_strategy": ("group 1", 1)},
        "remove group 1",
    ]


@pytest.mark.parametrize(
    ("codes", "code", "reason"),
    [("0,0", 0, ""), ("1,0", 1, ""), ("1,3", 1, "host 1 ended with exit code 3: "), ("0,1", 0, ""), ("1,2", 2, "host")],
)
def test_the_exit_code_is_that_of_host_0_or_a_refusal(
    job: Job, ray: FakeRay, codes: str, code: int, reason: str
) -> None:
    state, lines = ended(submitted(job, codes))
    assert (state.phase, state.code) == (ENDED, code)
    assert state.reason.startswith(reason) and bool(state.reason) == bool(reason)
    assert "line of host 0\n" in lines and "line of host 1" not in lines


def test_it_says_what_the_group_waits_for(job: Job, ray: FakeRay) -> None:
    ray.busy = True
    handle = submitted(replace(job, needs=Needs(4), options={}))
    assert handle.state() == State(PENDING, "no resources")
    ray.resources = [{"CPU": 2.0}, {"CPU": 4.0}]
    assert handle.state() == State(PENDING, "1 of 2 nodes with 4 CPU are there")
    ray.busy = False
    handle.state()
    assert handle.state().phase in (PENDING, RUNNING)
    assert ended(handle)[0] == State(ENDED)


def test_after_a_dead_actor_the_others_end_and_the_run_goes_on_in_another_group(job: Job, ray: FakeRay) -> None:
    handle = submitted(job, "sleep")
    begun(handle, job)
    assert handle.state() == State(RUNNING, "10.0.0.0, 10.0.0.1")
    ray.actors[1].die()
    wait_for(lambda: handle.state().phase == REQUEUED, 10, "not requeued")
    state, lines = ended(handle)
    assert state == State(ENDED)
    assert lines.splitlines() == [
        "ray: life 0, on 10.0.0.0, 10.0.0.1",
        "begun",
        "ray: host 1 (10.0.0.1) is lost",
        "ray: life 0 ended with exit code 75; the hosts are placed again",
        "ray: life 1, on 10.0.0.2, 10.0.0.3",
        "resumed by auto",
    ]
    assert ray.signals == [("signal", 0, signal.SIGTERM)]
    assert ray.done.index("remove group 1") < len(ray.done) - 1 and ray.done[-1] == "remove group 2"


def test_lines_without_an_end_are_shown_and_apart_from_what_this_command_says(job: Job, ray: FakeRay) -> None:
    handle = submitted(job, "bar")
    found: list[str] = []

    def shows(text: str) -> bool:
        handle.state()
        found.extend(handle.lines())
        return "".join(found) == text

    life = "ray: life 0, on 10.0.0.0, 10.0.0.1\n10% \N{EURO SIGN}"
    wait_for(lambda: shows(life), 10, "no progress bar")
    (job.folder / "go on").touch()
    _, lines = ended(handle)
    assert "".join(found) + lines == (
        f"{life}\r20%\nray: life 0 ended with exit code 75; the hosts are placed again\n"
        "ray: life 1, on 10.0.0.2, 10.0.0.3\n10% \N{EURO SIGN}\r20%\n"
    )


def test_a_lost_host_is_named_on_a_line_of_its_own(job: Job, ray: FakeRay) -> None:
    handle = submitted(replace(job, max_restarts=0), "bar")
    found: list[str] = []

    def shows_the_bar() -> bool:
        handle.state()
        found.extend(handle.lines())
        return "10%" in "".join(found)

    wait_for(shows_the_bar, 10, "no progress bar")
    ray.actors[0].die()
    (job.folder / "go on").touch()
    _, lines = ended(handle)
    assert lines == "\nray: host 0 (10.0.0.0) is lost\n"


def test_hosts_are_lost_at_most_so_often(job: Job, ray: FakeRay) -> None:
    handle = submitted(replace(job, max_restarts=0), "sleep")
    begun(handle, job)
    ray.actors[0].die()
    assert ended(handle)[0] == State(ENDED, "host 0 (10.0.0.0) is lost", 75)


def test_a_draining_node_counts_as_preemption(job: Job, ray: FakeRay) -> None:
    handle = submitted(replace(job, max_restarts=0), "sleep")
    begun(handle, job)
    ray.draining = ["node 9", "node 1"]
    wait_for(lambda: handle.state().phase == REQUEUED, 10, "not requeued")
    ray.draining = []
    state, lines = ended(handle)
    assert state == State(ENDED)
    assert "ray: the node of host 1 (10.0.0.1) is draining: the run saves and ends\n" in lines
    handle = submitted(replace(job, max_preemptions=0, folder=job.folder.with_name("other")), "75,75")
    assert ended(handle)[0] == State(ENDED, "", 75)


@pytest.mark.all
def test_a_host_that_is_silent_after_the_end_of_host_0_is_killed_and_the_run_goes_on(job: Job, ray: FakeRay) -> None:
    state, lines = ended(submitted(job, "deaf"))
    assert state == State(ENDED)
    assert "ray: host 1 (10.0.0.1) has not ended within 0.2 s, and is killed\n" in lines
    assert ray.signals[-1] == ("kill", 1)


def test_an_actor_that_does_not_answer_is_asked_again(job: Job, ray: FakeRay) -> None:
    handle = submitted(job, "sleep")
    begun(handle, job)
    ray.actors[1].errors.append(Unavailable())
    for _ in range(3):
        assert handle.state().phase == RUNNING
    handle.cancel()


def test_an_actor_that_cannot_be_reached_at_its_start_is_asked_again(job: Job, ray: FakeRay) -> None:
    """Whether it had started the command by then is not known."""
    handle = submitted(job, "0,0")
    handle.state()
    for actor in ray.actors:
        actor.errors += [Unavailable(), Unavailable()]
    state, lines = ended(handle)
    assert state == State(ENDED)
    assert lines == "ray: life 0, on 10.0.0.0, 10.0.0.1\nline of host 0\n"


@pytest.mark.parametrize("answered", [0, 1])
def test_a_call_before_the_start_with_a_lost_answer_comes_again(job: Job, ray: FakeRay, answered: int) -> None:
    """Of the questions for its place, and to start its command: Ray has further errors than that of a dead actor."""
    handle = submitted(job, "0,0")
    ray.lost = answered
    with pytest.raises(Unreachable, match="the object is lost"):
        for _ in range(3):
            handle.state()
    assert ended(handle)[0] == State(ENDED)


def test_a_host_starts_its_command_once(tmp_path: Path) -> None:
    host = Host()
    for _ in range(2):
        host.start(["sh", "-c", "echo begun"], str(tmp_path / "log"), str(tmp_path), {}, (), 1, True)
    assert host.process is not None and host.process.wait(60) == 0
    assert (tmp_path / "log").read_text() == "begun\n"


def test_an_actor_that_dies_at_its_start_is_a_lost_host(job: Job, ray: FakeRay) -> None:
    handle = submitted(job, "sleep")
    handle.state()
    ray.actors[1].errors.append(ActorError())
    state, lines = ended(handle)
    assert state == State(ENDED)
    assert "ray: host 1 (10.0.0.1) is lost\n" in lines and "ray: life 1, on 10.0.0.2, 10.0.0.3\n" in lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_all_hosts_and_the_run_does_not_come_again(job: Job, ray: FakeRay, number: int) -> None:
    handle = submitted(job, "sleep")
    begun(handle, job)
    handle.signal(number)
    assert ended(handle)[0] == State(ENDED, "", 75)
    assert ray.signals == [("signal", host, number) for host in range(2)]


def test_a_signal_before_the_start_ends_the_job(job: Job, ray: FakeRay) -> None:
    handle = submitted(job, "sleep")
    handle.signal(signal.SIGTERM)
    assert handle.state() == State(ENDED, "", 75) and ray.done[-1] == "remove group 1"


def test_cancelling_ends_the_hosts_and_removes_the_group(job: Job, ray: FakeRay) -> None:
    handle = submitted(job, "sleep")
    begun(handle, job)
    handle.cancel()
    assert ray.signals == [("signal", host, signal.SIGTERM) for host in range(2)]
    assert ray.done[-1] == "remove group 1"


def test_a_second_ctrl_c_does_not_wait_for_the_hosts(job: Job, ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = submitted(replace(job, grace_s=600), "deaf")
    begun(handle, job)
    monkeypatch.setattr(handle, "sleep", lambda seconds: handle.hurry())
    handle.cancel()
    assert handle.state() == State(ENDED, "", 130) and ray.done[-1] == "remove group 1"


def test_a_command_that_a_host_does_not_have_ends_the_job_with_the_reason(job: Job, ray: FakeRay) -> None:
    state, _ = ended(submitted(replace(job, command=("/nowhere/python",))))
    assert state.code == 2 and "cannot start the command" in state.reason and "/nowhere/python" in state.reason


def test_a_cluster_that_is_away_is_unreachable(job: Job, ray: FakeRay) -> None:
    handle = submitted(job)
    ray.is_away = True
    with pytest.raises(Unreachable, match="GCS is away"):
        handle.state()


@pytest.mark.parametrize(
    ("change", "config", "instead"),
    [
        ({"points": (("seed=1",),)}, {}, "one command for each of its runs"),
        ({"least_hosts": 1}, {}, "launch.nnodes=2"),
        ({"needs": Needs(memory="lots")}, {}, "launch.memory=64G"),
        ({"options": {"GPU": 2}}, {}, "launch.gpus=2"),
        ({"options": {"TPU": "many"}}, {}, "launch.options.TPU=1"),
        ({}, {"wait": False}, "ray job submit --no-wait -- python -m trainer ... launch=ray"),
        ({}, {"cluster": "nowhere"}, "launch.cluster=ADDRESS:6379"),
    ],
)
def test_what_ray_cannot_do_is_refused(
    job: Job, ray: FakeRay, change: dict[str, Any], config: dict[str, Any], instead: str
) -> None:
    with pytest.raises(UserError) as refused:
        Ray(**config).submit(replace(job, **change))
    assert refused.value.instead.startswith(instead) and not ray.done


def test_without_ray_the_sentence_says_how_to_install_it(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"Ray is not installed here. Type instead: uv pip install 'trainer\[ray\]'"):
        Ray().submit(job)
    assert not job.folder.exists()


def test_the_printed_text_has_the_group_the_command_and_no_secret(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hush-hush")
    text = Ray(variables=["HF_HOME"]).render(replace(job, setup=("module load cuda",)))
    plain = yaml.safe_load(text)
    assert plain["placement_group"]["bundles"] == 2 and plain["placement_group"]["each"]["GPU"] == 2
    shell, flag, lines, zero = plain["command"][:4]
    assert (shell, flag, zero) == ("bash", "-c", "trainer")
    assert "setup='module load cuda'\n" in lines and lines.endswith('\nexec "$@"')
    assert plain["command"][-1] == "name='a $b c'"
    assert {"HF_HOME", "TRAINER_RUN_SECRET", "TRAINER_HOST"} <= plain["environment"].keys() and "hush" not in text


def test_a_host_finds_itself_by_the_variables_of_its_actor() -> None:
    here = {"TRAINER_HOSTS": "3", "TRAINER_HOST": "2", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4000"}
    config = RunConfig.of({}).changed(launch={"nnodes": 3})
    found = of_engine(config, here)
    launch = found.launch
    assert (launch.nnodes, launch.node_rank, launch.master_addr, launch.master_port) == (3, 2, "10.0.0.7", 4000)
    check_alone(found, here)
    assert LaunchConfig.env == "auto"


def test_hosts_without_a_common_disk_bring_their_files_by_the_address(job: Job, ray: FakeRay, tmp_path: Path) -> None:
    end_with(tmp_path, 0, 0)
    python = python_apart(tmp_path, "TRAINER_HOST")
    away = replace(job, command=(python,), copies=f"file://{tmp_path}/store", started_in="/not/there")
    handle = Away(Ray().submit(away), [Copies(away.copies, away.folder)], print)
    state, lines = ended(handle)
    assert state == State(ENDED) and "words of host 0 ['environment', \"name='a $b c'\"]" in lines
    assert (away.folder / "workerlog.1").read_text() == "life of host 1\n" and (away.folder / "result.json").exists()
    assert (away.engine_folder / "host.1.log").read_text().startswith("words of host 1")
    assert not (away.engine_folder / "host.0.log").exists() and left_on_disks(tmp_path) == []
