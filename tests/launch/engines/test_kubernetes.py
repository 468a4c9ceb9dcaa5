"""launch=kubernetes: the manifest, the pods that find themselves by it, and a job that is followed by a kubectl made of
files."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.pace import wait_for
from trainer import __main__
from trainer.config.run_config import RunConfig
from trainer.config.schema import LaunchConfig
from trainer.errors import UserError
from trainer.launch.engines.carried import _unpacked
from trainer.launch.engines.contract import ENDED, PENDING, REQUEUED, RUNNING, Job, Needs, State
from trainer.launch.engines.copies import Carried
from trainer.launch.engines.kubernetes import PACKS, Kubernetes, name_of
from trainer.launch.engines.kubernetes_job import KubernetesJob
from trainer.planning.engine_hosts import of_engine
from trainer.planning.launch_role import peers

GOLDENS = Path(__file__).with_name("goldens")
IMAGE = {"image": "registry.example/trainer:1", "volume": "runs"}
HOSTS = Job(
    name="digits_lenet",
    words=("+recipe=digits_lenet", "launch=kubernetes", "launch.nnodes=2", "launch.nproc=4", "run_name='a $(b) c'"),
    folder=Path("/home/ann/outputs/digits_lenet/2026-11-28_10-00-00"),
    command=("/home/ann/.venv/bin/python",),
    started_in="/home/ann",
    hosts=2,
    workers=8,
    needs=Needs(16, "64Gi", 4),
    grace_s=45.0,
)
SERVERS = replace(HOSTS, name="wide_and_deep", hosts=1, workers=3, servers=2, needs=Needs(4, "8Gi"))
WITH_QUEUE = {**IMAGE, "queue": "team", "namespace": "ml", "server_cores": 2, "server_memory": "32Gi"}


def objects(job: Job, **config: Any) -> dict[str, Any]:
    """The objects of the manifest by their kind."""
    return {one["kind"]: one for one in yaml.safe_load_all(Kubernetes(**IMAGE, **config).render(job))}


def job_set(found: dict[str, Any]) -> dict[str, Any]:
    """The spec of the JobSet, which a TrainJob's runtime holds."""
    whole = found.get("JobSet") or found["TrainingRuntime"]["spec"]["template"]
    spec: dict[str, Any] = whole["spec"]
    return spec


def pods(found: dict[str, Any]) -> dict[str, Any]:
    """The spec of the pods by their role."""
    return {one["name"]: one["template"]["spec"]["template"]["spec"] for one in job_set(found)["replicatedJobs"]}


def container(found: dict[str, Any], role: str = "node") -> dict[str, Any]:
    only: dict[str, Any]
    (only,) = pods(found)[role]["containers"]
    return only


def as_kubernetes_hands_it_on(text: str) -> str:
    """A word of a command: ``$$`` is a dollar, and ``$(NAME)`` a variable; there is none here."""
    return re.sub(r"\$(\$|\(\w+\))", lambda found: "$" if found[1] == "$" else "", text)


PATCHES = {"runtime": "torch-distributed"}


@pytest.mark.parametrize(
    ("name", "job", "config"), [("trainjob", HOSTS, {}), ("jobset", SERVERS, {}), ("patches", HOSTS, PATCHES)]
)
def test_the_manifest_is_the_one_that_was_read_and_validated(name: str, job: Job, config: dict[str, Any]) -> None:
    text = Kubernetes(**WITH_QUEUE, **config).render(job)
    assert text == (GOLDENS / f"{name}.yaml").read_text()
    read = list(yaml.safe_load_all(text))
    assert list(yaml.safe_load_all(yaml.safe_dump_all(read))) == read


@pytest.mark.parametrize("job", [HOSTS, SERVERS])
def test_pods_get_the_words_of_the_command_as_typed(job: Job) -> None:
    found = objects(replace(job, words=(*job.words, "hydra.run.dir=/home/ann/here")))
    for spec in pods(found).values():
        assert tuple(map(as_kubernetes_hands_it_on, spec["containers"][0]["args"])) == job.words


@pytest.mark.parametrize("job", [HOSTS, SERVERS])
def test_all_that_belongs_to_a_job_has_its_label_and_its_namespace(job: Job) -> None:
    found = list(yaml.safe_load_all(Kubernetes(**WITH_QUEUE).render(job)))
    labels = {one["metadata"]["labels"]["app.kubernetes.io/instance"] for one in found}
    assert labels == {one["metadata"]["name"] for one in found} and len(labels) == 1
    assert {one["metadata"]["namespace"] for one in found} == {"ml"}
    queued = [one["kind"] for one in found if "kueue.x-k8s.io/queue-name" in one["metadata"]["labels"]]
    assert queued == ["TrainJob" if job is HOSTS else "JobSet"]


def what_follows(found: dict[str, Any], code: int = 0, evicted: bool = False) -> str:
    """What the controllers do about a pod that ended so, by the rules of their manuals."""
    (first, *_) = job_set(found)["replicatedJobs"]
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for number, rule in enumerate(first["template"]["spec"]["podFailurePolicy"]["rules"]):
        assert rule["action"] == "FailJob"
        codes = rule.get("onExitCodes", {"values": []})["values"]
        states = [one["type"] for one in rule.get("onPodConditions", [])]
        if code in codes or (evicted and "DisruptionTarget" in states):
            why = f"failed with exit code {code}" if code in codes else "has condition DisruptionTarget"
            reason, message = "PodFailurePolicy", f"Container node for pod ml/p {why} matching FailJob rule at {number}"
            break
    for rule in job_set(found)["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
            return str(rule["action"])
    return "RestartJobSet"


@pytest.mark.parametrize("job", [HOSTS, SERVERS])
def test_a_preempted_pod_is_no_failure_and_a_refused_one_ends_the_job(job: Job) -> None:
    found = objects(job)
    assert what_follows(found, 75) == "RestartJobSetAndIgnoreMaxRestarts"
    assert what_follows(found, 137, evicted=True) == "RestartJobSetAndIgnoreMaxRestarts"
    assert what_follows(found, 2) == what_follows(found, 130) == "FailJobSet"
    assert what_follows(found, 1) == what_follows(found, 137) == "RestartJobSet"


@pytest.mark.parametrize("job", [HOSTS, SERVERS])
def test_pods_restart_together_and_at_most_so_often(job: Job) -> None:
    found = objects(replace(job, max_restarts=5))
    policy = job_set(found)["failurePolicy"]
    assert (policy["maxRestarts"], policy["restartStrategy"]) == (5, "BlockingRecreate")
    for one in job_set(found)["replicatedJobs"]:
        assert one["template"]["spec"]["backoffLimit"] == 0
        assert one["template"]["spec"]["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize("grace_s", [30.0, 900.0])
def test_a_pod_has_time_for_its_last_checkpoint(grace_s: float) -> None:
    (node,) = pods(objects(replace(HOSTS, grace_s=grace_s))).values()
    assert node["terminationGracePeriodSeconds"] >= grace_s + 30


def test_needs_are_the_resources_of_the_pods_and_servers_have_their_own() -> None:
    assert container(objects(HOSTS))["resources"] == {
        "requests": {"cpu": "16", "memory": "64Gi"},
        "limits": {"memory": "64Gi", "nvidia.com/gpu": "4"},
    }
    found = objects(SERVERS, server_cores=2, server_memory="32Gi")
    assert container(found, "server")["resources"]["requests"] == {"cpu": "2", "memory": "32Gi"}
    assert container(found, "worker")["resources"]["requests"] == {"cpu": "4", "memory": "8Gi"}


def run_dir(found: dict[str, Any]) -> str:
    variables = {one["name"]: one.get("value") for one in container(found)["env"]}
    return str(variables["TRAINER_RUN_DIR"])


def test_the_run_folder_is_on_the_volume() -> None:
    found = objects(HOSTS, volumes={"images": "/data"})
    mounts = {one["name"]: one["mountPath"] for one in container(found)["volumeMounts"]}
    claims = {
        one["persistentVolumeClaim"]["claimName"]: mounts[one["name"]]
        for one in pods(found)["node"]["volumes"]
        if "persistentVolumeClaim" in one
    }
    assert claims == {"runs": "/runs", "images": "/data"}
    assert run_dir(found) == "/runs/digits_lenet/2026-11-28_10-00-00"
    assert run_dir(objects(HOSTS, volume_path="/home/ann/outputs")) == str(HOSTS.folder)


def test_fields_of_the_pod_are_options() -> None:
    options = {"nodeSelector": {"zone": "a"}, "serviceAccountName": "train", "priorityClassName": "low"}
    node = pods(objects(replace(HOSTS, options=options)))["node"]
    assert {key: node[key] for key in options} == options


def test_a_runtime_of_the_cluster_gets_the_same_pod_as_patches() -> None:
    own, found = objects(HOSTS), objects(HOSTS, runtime="torch-distributed")
    assert list(found) == ["TrainJob"]
    spec = found["TrainJob"]["spec"]
    assert spec["runtimeRef"] == {"name": "torch-distributed"}
    (patch,) = spec["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    patched = node["template"]["spec"]["template"]["spec"]
    (mounts,) = patched["containers"]
    wanted = container(own)
    assert mounts == {"name": "node", "volumeMounts": wanted["volumeMounts"]}
    for key in ("volumes", "terminationGracePeriodSeconds"):
        assert patched[key] == pods(own)["node"][key]
    for key in ("image", "command", "args", "env"):
        assert spec["trainer"][key] == wanted[key]
    assert spec["trainer"]["resourcesPerNode"] == wanted["resources"]


def launch_of(environment: dict[str, str], **typed: Any) -> LaunchConfig:
    config = RunConfig.of({"launch": {"_target_": "trainer.launch.builtin.Local", **typed}})
    return of_engine(config, environment).launch


def test_each_pod_of_a_train_job_is_a_host() -> None:
    found = objects(HOSTS)
    wanted = found["TrainJob"]["spec"]["trainer"]
    name = found["TrainJob"]["metadata"]["name"]
    for host in range(wanted["numNodes"]):
        launch = launch_of(  # the variables that Kubeflow adds
            {
                "PET_NNODES": str(wanted["numNodes"]),
                "PET_NPROC_PER_NODE": str(wanted["numProcPerNode"]),
                "PET_NODE_RANK": str(host),
                "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
                "PET_MASTER_PORT": "29500",
                "JOB_COMPLETION_INDEX": str(host),
            }
        )
        assert (launch.nnodes, launch.node_rank, launch.nproc) == (2, host, 4)
        assert (launch.master_addr, launch.master_port) == (f"{name}-node-0-0.{name}", 29500)


def test_each_pod_of_a_job_set_is_one_process_and_knows_where_all_are() -> None:
    found = objects(SERVERS)
    name, seen = found["JobSet"]["metadata"]["name"], []
    for one in found["JobSet"]["spec"]["replicatedJobs"]:
        for index in range(one["template"]["spec"]["completions"]):
            variables = {each["name"]: each.get("value", "") for each in container(found, one["name"])["env"]}
            launch = launch_of({**variables, "JOB_COMPLETION_INDEX": str(index)}, servers=2, workers=3)
            # JobSet names a pod NAME-ROLE-JOB-INDEX, in a service with the JobSet's name
            host = f"{name}-{one['name']}-0-{index}.{name}"
            me = next(peer for peer in peers(launch) if peer.endpoint.host == host)
            assert (me.role, me.rank) == (launch.role, launch.rank) == (one["name"], index)
            seen.append(str(me))
    assert seen == ["server 0", "server 1", "worker 0", "worker 1", "worker 2"]


@pytest.mark.parametrize(
    ("change", "config", "instead"),
    [
        ({}, {"image": None}, "launch.image=REGISTRY/trainer:TAG"),
        ({}, {"volume": None}, "launch.volume=CLAIM"),
        ({}, {"memory": "64"}, "launch.memory=64G"),
        ({"least_hosts": 1}, {}, "launch.nnodes=2"),
        ({"max_preemptions": 3}, {}, "launch.max_preemptions=null"),
        ({"points": (("seed=1",), ("seed=2",))}, {}, "one command for each"),
        ({"options": {"volumes": []}}, {}, "the command without volumes"),
        ({"servers": 2, "hosts": 1}, {"nproc": 4}, "launch.workers=4"),
        ({}, {"runtime": "torch-distributed", "env_from": "mlflow"}, "without launch.env_from"),
    ],
)
def test_what_kubernetes_cannot_do_is_refused(change: dict[str, Any], config: dict[str, Any], instead: str) -> None:
    with pytest.raises(UserError) as refused:
        Kubernetes(**{**IMAGE, **config}).render(replace(HOSTS, **change))
    assert instead in refused.value.instead


PYTHON = """#!/bin/sh
echo "$TRAINER_RESUME|$EXTRA|$*"
"""


@pytest.mark.parametrize("checkpoint", [False, True])
def test_the_shell_of_a_pod_sets_up_and_resumes_where_there_is_a_checkpoint(tmp_path: Path, checkpoint: bool) -> None:
    for name, text in (("python", PYTHON), ("getent", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    if checkpoint:
        (tmp_path / "run" / "checkpoints" / "step-000000044").mkdir(parents=True)
    found = container(objects(replace(HOSTS, setup=("export EXTRA=1",))))
    done = subprocess.run(
        [as_kubernetes_hands_it_on(word) for word in (*found["command"], *found["args"])],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "TRAINER_RUN_DIR": str(tmp_path / "run"), "HOSTNAME": "p"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{'auto' if checkpoint else ''}|1|-m trainer {' '.join(HOSTS.words)}\n"


KUBECTL = """#!/bin/sh
here=${0%/*}
echo "$*" >>"$here/calls"
case " $* " in
*" get "*) cat "$here/objects" ;;
*" logs "*) cat "$here/log"; [ ! -e "$here/broken" ] || exit 1 ;;
*" apply "*) cat >"$here/applied"; cp "$here/next" "$here/objects" ;;
esac
"""
NOTHING: dict[str, Any] = {"items": []}


class Cluster:
    """A kubectl whose answers are files: ``objects`` for get, ``next`` for get after apply, ``log`` for logs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "kubectl").write_text(KUBECTL)
        (folder / "kubectl").chmod(0o755)
        self.shows()
        self.prints("")
        self.write("calls", "")

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()

    def shows(self, *items: dict[str, Any], file: str = "objects") -> None:
        self.write(file, json.dumps({"items": items}))

    def prints(self, *lines: str, cut: int = 0) -> None:
        """The log has these lines, without the last characters of the last one."""
        text = "".join(f"2026-11-28T10:00:0{n}.{n}5Z {line}\n" for n, line in enumerate(lines) if line)
        self.write("log", text[:-cut] if cut else text)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    (folder := tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return Cluster(folder)


def train_job(*conditions: str, kind: str = "TrainJob", message: str = "", **metadata: str) -> dict[str, Any]:
    listed = [{"type": one, "status": "True", "reason": one, "message": message} for one in conditions]
    return {"kind": kind, "metadata": metadata, "status": {"conditions": listed}}


def pod(index: int, phase: str, life: int = 0, role: str = "node", **status: Any) -> dict[str, Any]:
    labels = {
        "batch.kubernetes.io/job-completion-index": str(index),
        "jobset.sigs.k8s.io/replicatedjob-name": role,
        "jobset.sigs.k8s.io/restart-attempt": str(life),
    }
    return {
        "kind": "Pod",
        "metadata": {"name": f"{role}-{index}-life-{life}", "labels": labels},
        "spec": {"nodeName": f"n{index}"},
        "status": {"phase": phase, **status},
    }


def ended(code: int) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "node", "state": {"terminated": {"exitCode": code}}}]}


def waiting(reason: str) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "node", "state": {"waiting": {"reason": reason}}}]}


UNSCHEDULABLE: dict[str, Any] = {
    "conditions": [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available"}
    ]
}
STATES: dict[str, tuple[list[dict[str, Any]], State]] = {
    "no pods yet": ([train_job()], State(PENDING)),
    "in Kueue's queue": ([train_job("Suspended")], State(PENDING, "Suspended")),
    "no room": ([train_job(), pod(0, "Pending", **UNSCHEDULABLE)], State(PENDING, "0/3 nodes are available")),
    "no image": (
        [train_job(), pod(0, "Running"), pod(1, "Pending", **waiting("ImagePullBackOff"))],
        State(PENDING, "ImagePullBackOff"),
    ),
    "all run": ([train_job(), pod(1, "Running"), pod(0, "Running")], State(RUNNING, "n0,n1")),
    "done": ([train_job("Complete"), pod(0, "Succeeded", **ended(0))], State(ENDED)),
    "refused": (
        [train_job("Failed", message="FailJobSet"), pod(0, "Failed", **ended(2)), pod(1, "Failed", **ended(75))],
        State(ENDED, "FailJobSet", 2),
    ),
    "another host failed": (
        [train_job("Failed"), pod(0, "Failed", **ended(75)), pod(1, "Failed", **ended(3))],
        State(ENDED, "", 3),
    ),
    "no pod is left": ([train_job("Failed")], State(ENDED, "", 1)),
    "ending": ([train_job(deletionTimestamp="2026"), pod(0, "Running")], State(RUNNING, "it is deleted, and ends")),
    "deleted by somebody": ([], State(ENDED, "deleted", 130)),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_is_what_the_job_and_its_pods_say(cluster: Cluster, name: str) -> None:
    items, state = STATES[name]
    cluster.shows(*items)
    assert (
        KubernetesJob(
            "TrainJob", "digits-1", "trainjob,trainingruntime,secret", "ml", "/runs/d", Path("/nowhere")
        ).state()
        == state
    )
    assert cluster.read("calls").startswith("--namespace ml get trainjob,pods -l app.kubernetes.io/instance=digits-1")


def test_pods_that_come_again_are_requeued_and_the_newest_count(cluster: Cluster) -> None:
    handle = KubernetesJob("JobSet", "wide-1", "jobset,secret", None, "/runs/w", Path("/nowhere"))
    before = [pod(0, "Running", role="server"), pod(0, "Running", role="worker")]
    cluster.shows(train_job(kind="JobSet"), *before)
    assert handle.state().phase == RUNNING
    again = [pod(0, "Pending", 1, "server"), pod(0, "Running", 1, "worker")]
    cluster.shows(train_job(kind="JobSet"), *before, *again)
    assert handle.state().phase == REQUEUED


def test_lines_are_those_of_worker_0_and_each_comes_once(cluster: Cluster) -> None:
    handle = KubernetesJob("JobSet", "wide-1", "jobset,secret", None, "/runs/w", Path("/nowhere"))
    cluster.shows(
        train_job(kind="JobSet"),
        *(pod(0, "Running", role="server"), pod(1, "Running", role="worker")),
        pod(0, "Running", role="worker"),
    )
    cluster.prints("one", "two")
    found: list[str] = []

    def read() -> str:
        found.extend(handle.lines())
        return "".join(found)

    handle.state()
    wait_for(lambda: read().count("\n") >= 2, 10, "two lines have not come")
    cluster.prints("one", "two", "three")  # kubectl has ended although the pod runs: it is started again
    wait_for(lambda: handle.state() and read().count("\n") >= 3, 10, "the third line has not come")
    assert read() == "one\ntwo\nthree\n"
    assert "logs worker-0-life-0 --container node --follow --timestamps\n" in cluster.read("calls")
    assert "--timestamps --since-time=2026-11-28T10:00:01Z\n" in cluster.read("calls")


def test_all_lines_of_a_pod_are_there_when_the_job_has_ended(cluster: Cluster) -> None:
    handle = KubernetesJob("TrainJob", "digits-1", "trainjob,trainingruntime,secret", None, "/runs/d", Path("/nowhere"))
    cluster.shows(train_job("Complete"), pod(0, "Succeeded", **ended(0)))
    cluster.prints("one", "two")
    assert handle.state() == State(ENDED)
    assert "".join(handle.lines()) == "one\ntwo\n"


@pytest.mark.parametrize(("cut", "last"), [(1, "numb\n"), (3, "nu\n"), (40, "")])
def test_last_line_that_a_killed_pod_leaves_without_its_end_is_shown(cluster: Cluster, cut: int, last: str) -> None:
    handle = KubernetesJob("TrainJob", "digits-1", "trainjob,trainingruntime,secret", None, "/runs/d", Path("/nowhere"))
    cluster.shows(train_job("Failed"), pod(0, "Failed", **ended(137)))
    cluster.prints("one", "ValueError: the numb", cut=cut)
    assert handle.state().phase == ENDED
    assert "".join(handle.lines()) == ("one\nValueError: the " if last else "one\n") + last
    assert "".join(handle.lines()) == ""


@pytest.mark.parametrize("next_life", [0, 1])
def test_a_line_in_which_kubectl_loses_the_pod_comes_whole_or_as_the_last_one_of_its_pod(
    cluster: Cluster, next_life: int
) -> None:
    handle = KubernetesJob("TrainJob", "digits-1", "trainjob,trainingruntime,secret", None, "/runs/d", Path("/nowhere"))
    cluster.shows(train_job(), pod(0, "Running"))
    cluster.prints("one", "ValueError: the numb", cut=3)
    found: list[str] = []

    def reads(text: str) -> bool:
        found.extend(handle.lines())
        return "".join(found) == text

    handle.state()
    wait_for(lambda: reads("one\n"), 10, "the first line has not come")
    cluster.shows(train_job(), pod(0, "Running", next_life))
    cluster.prints("one" if not next_life else "", "ValueError: the numb" if not next_life else "", "two")
    whole = "numb" if not next_life else "nu"
    wait_for(lambda: handle.state() and reads(f"one\nValueError: the {whole}\ntwo\n"), 10, "".join(found))


@pytest.mark.parametrize(("asked", "code"), [("signal", 75), ("cancel", 130)])
def test_a_signal_deletes_the_job_whose_pods_then_have_their_grace(cluster: Cluster, asked: str, code: int) -> None:
    handle = KubernetesJob("TrainJob", "digits-1", "trainjob,trainingruntime,secret", None, "/runs/d", Path("/nowhere"))
    if asked == "signal":
        handle.signal(signal.SIGUSR1)
    else:
        handle.cancel()
    wanted = "delete trainjob,trainingruntime,secret digits-1 --cascade=foreground --wait=false --ignore-not-found\n"
    assert cluster.read("calls") == wanted
    assert handle.state() == State(ENDED, "deleted", code)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Run a command line in an empty folder; returns exit code, output and error."""
    monkeypatch.chdir(tmp_path)

    def started(*words: str) -> tuple[int, str, str]:
        typed = ["+recipe=digits_lenet", "launch=kubernetes", "launch.image=i", "launch.volume=runs", *words]
        code = __main__.main(typed)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    yield started


def test_the_manifest_is_printed_without_a_secret_and_nothing_is_written(run: Any, tmp_path: Path) -> None:
    code, out, _ = run("launch.nnodes=2", "launch.nproc=1")
    assert code == 0 and "kubectl apply -f -" in out and "(hidden)" not in out
    assert [one["kind"] for one in yaml.safe_load_all(out)] == ["TrainingRuntime", "TrainJob"]
    assert list(tmp_path.iterdir()) == []


def test_an_applied_job_is_followed_to_its_end(run: Any, cluster: Cluster) -> None:
    cluster.shows(train_job("Failed", message="done for"), pod(0, "Failed", **ended(3)), file="next")
    cluster.prints("the line of host 0")
    code, out, err = run("launch.apply=true", "hydra.run.dir=/runs/r")
    assert code == 3 and "the line of host 0\n" in out and "done for" in err
    secret, *others = yaml.safe_load_all(cluster.read("applied"))
    assert secret["kind"] == "Secret" and len(secret["stringData"]["value"]) >= 32
    assert secret["stringData"]["value"] not in json.dumps(others) + out + err
    (named,) = (one for one in container({one["kind"]: one for one in others})["env"] if "valueFrom" in one)
    where = {"name": secret["metadata"]["name"], "key": "value"}
    assert named == {"name": "TRAINER_RUN_SECRET", "valueFrom": {"secretKeyRef": where}}


def test_the_same_command_follows_the_job_that_lives_and_shows_an_end_that_nobody_has_seen(
    run: Any, cluster: Cluster, tmp_path: Path
) -> None:
    words = ("launch.apply=true", f"hydra.run.dir={tmp_path}/r")
    cluster.shows(train_job(), pod(0, "Running"), file="next")
    code, out, err = run(*words, "launch.wait=false")
    assert code == 0 and "follow    python -m trainer" in out, err
    code, _, err = run(*words, "epochs=3")
    assert (
        code == 2 and "of another command runs in this folder" in err and "which follows it; or kubectl delete" in err
    )
    assert "logs" not in cluster.read("calls"), "nobody reads the lines of a job that is not followed"
    cluster.shows(train_job(deletionTimestamp="2026"), pod(0, "Running"))
    found = Kubernetes(**IMAGE).living([tmp_path / "r" / "engine"])
    assert found is not None and found.leaves
    cluster.shows(train_job("Failed"), pod(0, "Failed", **ended(3)))
    cluster.prints("the line of host 0")
    cluster.write("calls", "")
    code, out, _ = run(*words)
    assert code == 3 and "the line of host 0\n" in out and "apply" not in cluster.read("calls")
    cluster.shows(train_job("Complete"), pod(0, "Succeeded", **ended(0)), file="next")
    code, out, err = run(*words)
    assert code == 0 and "apply" in cluster.read("calls"), err


def test_files_of_config_dir_are_in_the_secret_alone(tmp_path: Path) -> None:
    away = replace(HOSTS, copies="s3://bucket/runs/one", config="UEFDS0VE")
    text = Kubernetes(image="trainer:1").render(away)
    assert "UEFDS0VE" not in text and "--from-file value=run.secret --from-file config=run.config\n" in text
    env = {one["name"]: one for one in container({one["kind"]: one for one in yaml.safe_load_all(text)})["env"]}
    of_secret = env["TRAINER_CARRIED_CONFIG"]["valueFrom"]["secretKeyRef"]
    assert of_secret == {"name": name_of(away), "key": "config"}


def test_config_that_was_packed_by_hand_is_unpacked_in_the_pod(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe.yaml").write_text("epochs: 3\n")
    packs = next(line for line in PACKS.split(";") if "tar" in line).strip().partition(" > ")[0]
    packed = subprocess.run(packs.replace("FOLDER", "mine"), shell=True, cwd=tmp_path, capture_output=True, check=True)
    assert _unpacked(packed.stdout.decode(), tmp_path / "there")[0] == "--config-dir"
    assert (tmp_path / "there" / "recipe.yaml").read_text() == "epochs: 3\n"


def test_a_folder_has_one_job_at_a_time(run: Any, cluster: Cluster) -> None:
    cluster.shows(train_job(), pod(0, "Running"))
    code, _, err = run("launch.apply=true", "hydra.run.dir=/runs/r")
    assert code == 2 and "is in this folder: running" in err and "kubectl delete trainjob" in err
    assert "apply" not in cluster.read("calls")


def test_a_folder_of_the_pods_need_not_be_one_that_this_machine_can_make(run: Any, cluster: Cluster) -> None:
    cluster.shows(train_job(), pod(0, "Running"))
    code, _, err = run("launch.apply=true", "launch.volume_path=/proc/pods", "hydra.run.dir=/proc/pods/r")
    assert code == 2 and "is in this folder: running" in err


def test_folder_is_checked_where_this_machine_has_the_volume(run: Any, cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    words = ("launch.apply=true", f"launch.volume_path={tmp_path}/volume", f"hydra.run.dir={tmp_path}/volume/r")
    (tmp_path / "volume" / "r").mkdir()
    (tmp_path / "volume" / "r" / "checkpoints").symlink_to(tmp_path)
    code, _, err = run(*words, "launch.volume=runs")
    assert code == 2 and "does not write through links" in err and cluster.read("calls") == ""
    assert Kubernetes(**IMAGE, volume_path=str(tmp_path)).sees(tmp_path / "r")
    assert not Kubernetes(**IMAGE, volume_path="/nowhere").sees(Path("/nowhere/r"))
    assert not Kubernetes(**IMAGE, volume_path=str(tmp_path), shared_storage=False).sees(tmp_path / "r")


def test_without_kubectl_the_manifest_is_proposed(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    code, _, err = run("launch.apply=true")
    assert code == 2 and "kubectl" in err and "launch.apply=false" in err


@pytest.mark.all
@pytest.mark.parametrize("name", ["trainjob", "jobset", "patches"])
def test_the_models_of_the_api_know_every_field(name: str) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    found = {
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
        "JobSet": models.JobsetV1alpha2JobSet,
    }
    for one in yaml.safe_load_all((GOLDENS / f"{name}.yaml").read_text()):
        model = found[one["kind"]]
        assert model.from_dict(one).to_dict() == one  # a field that the API does not know is dropped
        wrong = {**one, "spec": {**one["spec"], "nodes": 2}}
        assert model.from_dict(wrong).to_dict() != wrong


@pytest.mark.all
@pytest.mark.parametrize("job", [HOSTS, SERVERS])
def test_the_pods_fit_the_schema_of_kubernetes(job: Job) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for one in job_set(objects(job))["replicatedJobs"]:
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}, "spec": one["template"]["spec"]}
        validator.validate(whole, "1.34", strict=True)
        with pytest.raises(validator.ValidationError):
            validator.validate({**whole, "spec": {**whole["spec"], "completionsMode": "Indexed"}}, "1.34", strict=True)


@pytest.mark.parametrize("job", [HOSTS, SERVERS])
def test_pods_without_a_volume_copy_their_files_and_always_resume(job: Job) -> None:
    away = replace(job, copies="s3://bucket/runs/one")
    found = {one["kind"]: one for one in yaml.safe_load_all(Kubernetes(image="trainer:1").render(away))}
    for spec in pods(found).values():
        (only,) = spec["containers"]
        assert [volume for volume in spec["volumes"] if "persistentVolumeClaim" in volume] == []
        assert {"name": "runs", "emptyDir": {}} in spec["volumes"]
        values = {one["name"]: one.get("value") for one in only["env"]}
        assert values["TMPDIR"] == "/runs" and values["TRAINER_RESUME"] == "auto" and "TRAINER_RUN_DIR" not in values
        asked = Carried.of(as_kubernetes_hands_it_on(values["TRAINER_CARRIED"]))
        assert (tuple(asked.words), asked.copies, asked.started_in) == (job.words, "s3://bucket/runs/one", "")
        script = as_kubernetes_hands_it_on(only["command"][2])
        assert script.endswith("exec python -m trainer.launch.engines.carried\n") and only["args"] == []
        assert spec["terminationGracePeriodSeconds"] == 45 + 30 + 60
    with pytest.raises(UserError, match=r"launch\.volumes="):
        Kubernetes(**IMAGE).render(away)
