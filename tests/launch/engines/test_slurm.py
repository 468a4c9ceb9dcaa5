"""The batch script of launch=slurm: what it asks sbatch for, and what it decides when its tasks end."""

from __future__ import annotations

import os
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.launch.engines.conftest import SHOWN
from trainer.errors import UserError
from trainer.launch.engines.contract import Job, Needs, Point, State
from trainer.launch.engines.engine_folder import begin, setup_lines
from trainer.launch.engines.slurm import Slurm
from trainer.launch.engines.slurm_job import SlurmArray, SlurmJob


def job(tmp_path: Path, **changes: object) -> Job:
    made = Job(
        name="lenet",
        words=("+recipe=digits_lenet", "name=it's $(touch x)"),
        folder=tmp_path / "my run",
        command=("trainer",),
        started_in=str(tmp_path),
        hosts=2,
        needs=Needs(4, "8G", 2),
        grace_s=1,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def play(
    job: Job, fakes: Path, codes: dict[int, int], life: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the batch script of a job once, whose tasks end with these codes."""
    if life == 0:
        begin(job, Slurm(options={}).render(job))
    for old in fakes.glob("code.*"):
        old.unlink()
    for number, code in codes.items():
        (fakes / f"code.{number}").write_text(str(code))
    environment = {**os.environ, "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_RESTART_COUNT": str(life)}
    command, said = ["bash", str(job.engine_folder / "job.sh")], fakes / "said"
    with said.open("w") as out:  # a pipe would be held by what the script has left running
        done = subprocess.run(
            command, env=environment | variables, stdout=out, stderr=out, timeout=30, cwd=job.started_in, check=False
        )
    return subprocess.CompletedProcess(command, done.returncode, said.read_text())


def asked(fakes: Path) -> str:
    return (fakes / "asked").read_text() if (fakes / "asked").exists() else ""


def test_job_asks_sbatch_for_its_hosts_needs_and_time_for_a_checkpoint(tmp_path: Path) -> None:
    text = Slurm().render(job(tmp_path, options={"partition": "gpu", "qos": "a b", "exclusive": True, "time": 1}))
    directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    folder = tmp_path / "my run" / "engine"
    assert directives == [
        "#SBATCH --job-name=lenet",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --cpus-per-task=4",
        "#SBATCH --mem=8G",
        "#SBATCH --gpus-per-node=2",
        f"#SBATCH --output='{folder}/log'",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=USR1@31",
        "#SBATCH --requeue",
        f"#SBATCH --chdir={tmp_path}",
        "#SBATCH --partition=gpu",
        "#SBATCH --qos='a b'",
        "#SBATCH --exclusive",
        "#SBATCH --time=1",
    ]


def test_script_says_which_command_made_it_without_its_secrets(tmp_path: Path, fakes: Path) -> None:
    words = ("+recipe=digits_lenet", "tracking.uri=http://ann:geheim@host", "name=a\nb; touch x")
    one = job(tmp_path, words=words)
    lines = Slurm().render(one).splitlines()
    shown = r"+recipe=digits_lenet tracking.uri=http://(hidden)@host 'name=a\nb; touch x'"
    assert lines[:3] == ["#!/bin/bash", f"# Made by: python -m trainer {shown}", f"# Run folder: {one.folder}"]
    assert play(one, fakes, {0: 0, 1: 0}).returncode == 0 and not (tmp_path / "x").exists()
    sweep = job(tmp_path, words=("seed=1,2",), points=(Point(("seed=1",), tmp_path, "seed=1"),))
    assert Slurm().render(sweep).splitlines()[1] == "# Made by: python -m trainer -m seed=1,2"


@pytest.mark.parametrize(
    ("partition", "kill_wait", "said"),
    [
        ("PreemptMode=REQUEUE GraceTime=20", 30, "gives a pre-empted job 20 s (GraceTime), and checkpoint.grace_s=25"),
        ("PreemptMode=GANG,REQUEUE GraceTime=00:00:20", 30, "20 s (GraceTime)"),
        ("PreemptMode=CANCEL GraceTime=0", 10, "gives a pre-empted job 10 s (KillWait), and checkpoint.grace_s=25"),
        ("PreemptMode=REQUEUE GraceTime=0", 30, ""),  # Slurm waits KillWait between SIGTERM and SIGKILL
        ("PreemptMode=REQUEUE GraceTime=30", 10, ""),
        ("PreemptMode=REQUEUE GraceTime=UNLIMITED", 10, ""),
        ("PreemptMode=OFF GraceTime=0", 10, ""),
        ("PreemptMode=GANG,SUSPEND GraceTime=0", 10, ""),  # nothing is ended
    ],
)
def test_pre_emption_that_leaves_too_little_time_for_a_checkpoint_is_said(
    tmp_path: Path, fakes: Path, partition: str, kill_wait: int, said: str
) -> None:
    (fakes / "partition").write_text(f"PartitionName=low Default=YES {partition}\nPartitionName=high Default=NO\n")
    (fakes / "config").write_text(f"KeepAliveTime = SYSTEM_DEFAULT\nKillWait                = {kill_wait} sec\n")
    found = Slurm().concerns(job(tmp_path, grace_s=25))
    assert len(found) == bool(said) and said in "".join(found)


@pytest.mark.parametrize(
    ("qos", "answer", "said"),
    [
        ({"qos": "low"}, "00:00:20|requeue", "the QOS low gives a pre-empted job 20 s (GraceTime)"),
        ({"q": "low"}, "00:00:00|cluster", "the QOS low gives a pre-empted job 10 s (KillWait)"),
        ({"qos": "low"}, "00:01:00|requeue", ""),
        ({"qos": "low"}, "UNLIMITED|requeue", ""),
        ({"qos": "low"}, "00:00:00|off", ""),
        ({}, "", ""),  # the partition's grace time does not count
    ],
)
def test_grace_time_of_a_qos_counts_where_it_decides(
    tmp_path: Path, fakes: Path, qos: dict[str, str], answer: str, said: str
) -> None:
    (fakes / "partition").write_text("PartitionName=low Default=YES PreemptMode=REQUEUE GraceTime=1\n")
    (fakes / "config").write_text("KillWait = 10 sec\nPreemptMode             = REQUEUE\nPreemptType = preempt/qos\n")
    (fakes / "sacctmgr").write_text(f"#!/bin/sh\n[ $4 = low ] && echo '{answer}'\n")
    (fakes / "sacctmgr").chmod(0o755)
    found = Slurm().concerns(job(tmp_path, grace_s=25, options=qos))
    assert len(found) == bool(said) and said in "".join(found)


@pytest.mark.parametrize(
    ("limit", "is_short"),
    [(1, True), ("2:00", True), ("0:02:25", True), ("0:02:26", False), (3, False), ("1-0", False), ("0-0:2", True)],
)
def test_time_limit_before_which_slurm_may_signal_at_once_is_said(
    tmp_path: Path, fakes: Path, limit: object, is_short: bool
) -> None:
    """55 s of a checkpoint and its slack, 60 s by which Slurm may be early, and 30 s to start."""
    (fakes / "partition").write_text("PartitionName=low Default=YES PreemptMode=OFF\n")
    found = Slurm().concerns(job(tmp_path, grace_s=25, options={"time": limit}))
    assert [f"launch.options.time={limit} is less than" in one for one in found] == [True] * is_short


@pytest.mark.parametrize(
    ("option", "instead"), [("nodes", "launch.nnodes"), ("signal", "without"), ("open-mode", "without")]
)
def test_option_that_the_job_sets_itself_is_refused(tmp_path: Path, option: str, instead: str) -> None:
    with pytest.raises(UserError, match=f"launch.options.{option}.* is set by the job itself.*{instead}"):
        Slurm().render(job(tmp_path, options={option: 1}))


def test_tasks_get_the_words_as_typed_and_the_secret_is_in_a_private_file(tmp_path: Path, fakes: Path) -> None:
    done = play(job(tmp_path, setup=("export SEEN=1",)), fakes, {0: 0, 1: 0})
    assert done.returncode == 0, done.stdout
    assert (fakes / "words.0").read_text().splitlines() == [
        "-m",
        "trainer",
        "+recipe=digits_lenet",
        "name=it's $(touch x)",
    ]
    secret = tmp_path / "my run" / "engine" / "secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600 and len(secret.read_text()) == 64
    assert secret.read_text() not in (secret.parent / "job.sh").read_text() and not (tmp_path / "x").exists()
    assert (secret.parent / "code").read_text() == "0\n" and "requeue" not in asked(fakes)


@pytest.mark.all
@pytest.mark.parametrize(
    ("codes", "changes", "wanted", "code"),
    [
        ({0: 75, 1: 75}, {}, "requeue 12\n", None),
        ({0: 75, 1: 75}, {"max_preemptions": 1}, "requeue 12\n", None),
        ({0: 75, 1: 75}, {"max_preemptions": 0}, "", 75),
        ({0: 1, 1: 1}, {}, "", 1),
        ({0: 2, 1: 2}, {}, "", 2),
        ({1: 2}, {}, "scancel --signal=KILL 12.0\n", 2),
        ({0: 1}, {}, "scancel --signal=KILL 12.0\nrequeue 12\nupdate JobId=12 ExcNodeList=n2\n", None),
        ({0: 1}, {"max_restarts": 0}, "scancel --signal=KILL 12.0\n", 1),
        ({0: 0}, {}, "scancel --signal=KILL 12.0\n", 0),
    ],
)
def test_script_requeues_after_a_preemption_or_a_lost_host_and_ends_otherwise(
    tmp_path: Path, fakes: Path, codes: dict[int, int], changes: dict[str, int], wanted: str, code: int | None
) -> None:
    one = job(tmp_path, **changes)
    done = play(one, fakes, codes)
    assert asked(fakes) == wanted, done.stdout
    left = one.engine_folder / "code"
    assert (int(left.read_text()), done.returncode) == (code, code) if code is not None else not left.exists()


@pytest.mark.all
def test_lost_hosts_stay_excluded_in_later_lives_and_are_counted(tmp_path: Path, fakes: Path) -> None:
    one = job(tmp_path, max_restarts=1)
    play(one, fakes, {0: 1})
    (one.engine_folder / "lives").write_text("0 1 n7\n")  # as if the first one had lost another host
    done = play(one, fakes, {0: 75, 1: 75}, life=1)
    assert "ExcNodeList=n7" in asked(fakes).splitlines()[-1]
    done = play(one, fakes, {0: 1}, life=2)
    assert done.returncode == 1 and (one.engine_folder / "lives").read_text() == "0 1 n7\n1 75 \n2 1 n2\n"


def test_asked_to_leave_the_job_ends_with_75_and_is_not_requeued(tmp_path: Path, fakes: Path) -> None:
    one = job(tmp_path)
    begin(one, Slurm().render(one))
    (one.engine_folder / "leave").touch()
    done = play(one, fakes, {0: 75, 1: 75}, life=1)
    assert (done.returncode, asked(fakes)) == (75, "")


@pytest.mark.parametrize(
    ("words", "comes_again"),
    [
        ("JobState=COMPLETING Reason=None Restarts=1 PreemptTime=None", False),  # scancel in another shell
        ("JobState=COMPLETING Reason=None Restarts=1", False),
        ("JobState=COMPLETING Reason=None Restarts=2 EndTime=Unknown", True),  # Slurm has requeued it itself
        ("JobState=COMPLETING Reason=None Restarts=1 PreemptTime=2026-11-28T14:43:43", True),  # PreemptMode=CANCEL
        ("JobState=COMPLETING Reason=TimeLimit Restarts=1 PreemptTime=None", True),
        ("JobState=RUNNING Reason=None Restarts=1 PreemptTime=2026-11-28T14:43:43", True),
    ],
)
def test_job_that_somebody_has_cancelled_does_not_come_again(
    tmp_path: Path, fakes: Path, words: str, comes_again: bool
) -> None:
    """Lines of a real Slurm 22.05, asked for when the tasks had ended on their SIGTERM."""
    begin(one := job(tmp_path), Slurm().render(one))
    (fakes / "shown").write_text(f"JobId=12 {words} ExitCode=0:0\n")
    done = play(one, fakes, {0: 75, 1: 75}, life=1)
    assert ("requeue 12" in asked(fakes)) == comes_again, done.stdout
    left = one.engine_folder / "code"
    assert comes_again or (left.read_text(), done.returncode) == ("130\n", 130)
    assert left.exists() != comes_again


def test_other_hosts_error_is_shown(tmp_path: Path, fakes: Path) -> None:
    (fakes / "trainer").write_text('#!/bin/bash\nprintf "host $SLURM_NODEID says why"\nexit $SLURM_NODEID\n')
    done = play(job(tmp_path), fakes, {0: 0, 1: 1})
    assert "slurm: host 1 (n2) ended with exit code 1:\nhost 1 says why\n" in done.stdout
    assert done.stdout.count("host 0 says why") == 1


def test_each_job_of_a_sweep_is_an_element_of_an_array(tmp_path: Path, fakes: Path) -> None:
    points = tuple(Point(("x=1", f"seed={i}"), tmp_path / "my run" / str(i), f"seed={i}") for i in range(3))
    one = job(tmp_path, points=points, swept=("seed",), parallel=2)
    assert "#SBATCH --array=0-2%2" in Slurm().render(one)
    done = play(one, fakes, {0: 0, 1: 0}, SLURM_ARRAY_TASK_ID="1")
    assert done.returncode == 0 and (fakes / "words.0").read_text() == "-m\ntrainer\nx=1\nseed=1\n"
    assert (tmp_path / "my run" / "1" / "engine" / "code").read_text() == "0\n"


@pytest.mark.all
def test_what_a_job_of_a_sweep_asks_slurm_for_is_for_itself_alone(tmp_path: Path, fakes: Path) -> None:
    """The number of one element is that of the whole array, by which Slurm would requeue and kill all of them."""
    one = job(
        tmp_path, points=tuple(Point((f"seed={i}",), tmp_path / "my run" / str(i), f"seed={i}") for i in range(3))
    )
    play(one, fakes, {0: 1}, SLURM_ARRAY_TASK_ID="2", SLURM_ARRAY_JOB_ID="12")
    assert asked(fakes) == "scancel --signal=KILL 12_2.0\nrequeue 12_2\nupdate JobId=12_2 ExcNodeList=n2\n"


@pytest.mark.parametrize(
    ("words", "lives", "state"),
    [
        (("PENDING", "Resources", 0, "0:0"), 0, State("pending", "Resources")),
        (("RUNNING", "None", 0, "0:0"), 0, State("running", "n[1-2]")),
        (("COMPLETING", "None", 0, "0:0"), 0, State("running", "n[1-2]")),
        (("COMPLETING", "None", 1, "0:0"), 1, State("requeued")),
        (("PENDING", "BeginTime", 1, "0:0"), 1, State("requeued", "BeginTime")),
        (("COMPLETED", "None", 0, "0:0"), 0, State("ended", "completed")),
        (("CANCELLED", "None", 0, "0:15"), 0, State("ended", "cancelled", 130)),
        (("FAILED", "NonZeroExitCode", 0, "3:0"), 0, State("ended", "failed", 3)),
        (("TIMEOUT", "TimeLimit", 0, "0:15"), 0, State("ended", "timeout", 143)),
        (("OUT_OF_MEMORY", "OutOfMemory", 0, "0:125"), 0, State("ended", "out_of_memory", 137)),
        (("NODE_FAIL", "NodeDown", 0, "0:0"), 0, State("ended", "node_fail", 1)),
    ],
)
def test_state_of_a_job_is_read_from_scontrol(
    tmp_path: Path, words: tuple[object, ...], lives: int, state: State
) -> None:
    (tmp_path / "lives").write_text("0 75 \n" * lives)
    assert SlurmJob("12", tmp_path).state_of(SHOWN.format(*words)) == state


def test_job_that_slurm_has_forgotten_ended_as_its_file_says(tmp_path: Path, fakes: Path) -> None:
    (fakes / "scontrol").write_text("#!/bin/bash\necho 'slurm_load_jobs error: Invalid job id specified' >&2\nexit 1\n")
    (tmp_path / "code").write_text("3\n")
    assert SlurmJob("12", tmp_path).state() == State("ended", "", 3)


def test_array_says_which_of_its_jobs_changed(tmp_path: Path, fakes: Path) -> None:
    points = tuple(Point((), tmp_path / str(i), f"seed={i}") for i in range(3))
    lines = [
        f"{SHOWN.format('RUNNING', 'None', 0, '0:0')} ArrayTaskId=0",
        f"{SHOWN.format('PENDING', 'X', 0, '0:0')} ArrayTaskId=1-2",
    ]
    (fakes / "scontrol").write_text(f"#!/bin/bash\ncat <<'X'\n{chr(10).join(lines)}\nX\n")
    array = SlurmArray("12", tmp_path / "engine", dict(enumerate(points)))
    assert array.state() == State("running", "2 pending, 1 running")
    assert "".join(array.lines()) == "job 0 (seed=0): running (n[1-2])\n"
    for i in range(3):
        (tmp_path / str(i) / "engine").mkdir(parents=True)
        (tmp_path / str(i) / "engine" / "code").write_text(f"{i}\n")
    assert array.state() == State("ended", "", 2)


@pytest.mark.parametrize(
    ("setup", "line", "code"),
    [
        (("module load cuda", "touch later"), "entry 1 ended with exit code 127: module load cuda", 127),
        (("export SEEN=1", "source missing/env"), "entry 2 ended with exit code 1: source missing/env", 1),
        (("set -e", "(exit 4)"), "entry 2 ended with exit code 4: (exit 4)", 4),
        (("exit 3",), "entry 1 ended with exit code 3: exit 3", 3),
        (("exit 0",), "entry 1 ended with exit code 0: exit 0", 1),
        # of the job these codes would say: refused, pre-empted, cancelled
        (("(exit 2)",), "entry 1 ended with exit code 2: (exit 2)", 1),
        (("true", "(exit 75)"), "entry 2 ended with exit code 75: (exit 75)", 1),
        (("exit 130",), "entry 1 ended with exit code 130: exit 130", 1),
        (("true", "true\n(exit 5)\ntouch later"), "entry 2 ended with exit code 5: (exit 5)", 5),
        (("f() { return 6; }\nf\ntouch later",), "entry 1 ended with exit code 6: f", 6),
        (("X=$(exit 7)\ntouch later",), "entry 1 ended with exit code 7: X=$(exit 7)", 7),
        (("true\nexit 8\ntouch later",), "entry 1 ended with exit code 8: true", 8),
    ],
)
def test_a_setup_line_that_fails_ends_the_job_with_the_line_and_its_code(
    tmp_path: Path, fakes: Path, setup: tuple[str, ...], line: str, code: int
) -> None:
    one = job(tmp_path, setup=setup)
    done = play(one, fakes, {0: 0, 1: 0})
    assert done.returncode == code and not (tmp_path / "later").exists() and not (fakes / "words.0").exists()
    assert f"error: launch.setup: {line}" in done.stdout.splitlines(), done.stdout
    assert (one.engine_folder / "code").read_text() == f"{code}\n"
    assert (one.engine_folder / "lives").read_text() == f"0 {code} \n"


def test_a_setup_line_is_judged_as_a_whole_and_its_variables_stay(tmp_path: Path, fakes: Path) -> None:
    (tmp_path / "env").write_text("false\ngrep -q x /dev/null\nexport SEEN=1\n")
    check = 'if [ "$SEEN" != 1 ]; then exit 9; fi'
    done = play(job(tmp_path, setup=(". ./env", "false || true", check)), fakes, {0: 0, 1: 0})
    assert done.returncode == 0, done.stdout


def test_a_setup_entry_of_several_lines_is_one_piece_of_shell(tmp_path: Path, fakes: Path) -> None:
    """Failures inside of a script that it reads, of a function and of a condition are their own matter."""
    (tmp_path / "env").write_text("false\nmodule() { false; export SEEN=$1; }\nfalse\ntrue\n")
    entry = """
        . ./env
        module 1
        if [ "$SEEN" = 1 ]; then
            false || true
        else
            exit 9
        fi
        false && true || true
        cat >here <<X
false
X
    """
    done = play(job(tmp_path, setup=(entry, '[ "$SEEN" = 1 ] && [ "$(cat here)" = false ]')), fakes, {0: 0, 1: 0})
    assert done.returncode == 0 and "error" not in done.stdout, done.stdout


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize(("last", "code"), [("true", 0), ("(exit 5)\ntrue", 5)])
def test_setup_works_in_every_shell(shell: str, last: str, code: int) -> None:
    text = setup_lines(["export A=1", f"B=2\n{last}"]) + 'false\n[ "$A$B" = 12 ] && echo goes on\n'
    done = subprocess.run([shell, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == code and ("goes on" in done.stdout) == (code == 0), done.stderr
    assert ("error: launch.setup: entry 2 ended with exit code 5" in done.stderr) == (code == 5)


def test_a_signal_in_the_setup_is_no_end_of_the_job(tmp_path: Path, fakes: Path) -> None:
    """Slurm may requeue it: then a file "code" would say that it has ended."""
    one = job(tmp_path, setup=("kill -TERM $$", "sleep 5"))
    done = play(one, fakes, {0: 0, 1: 0})
    assert done.returncode == -15 and not (one.engine_folder / "code").exists()


@pytest.mark.parametrize(
    ("reason", "is_stuck"),
    [
        ("PartitionNodeLimit", True),
        ("PartitionConfig", True),
        ("JobHeldUser", True),
        ("AssocMaxCpuPerJobLimit", True),
        ("AssocMaxJobsLimit", False),  # passes when another job of the account ends
        ("Resources", False),
    ],
)
def test_a_reason_that_does_not_pass_by_itself_is_pointed_out(tmp_path: Path, reason: str, is_stuck: bool) -> None:
    held = str(SlurmJob("12_3", tmp_path).state_of(SHOWN.format("PENDING", "JobHeldUser", 0, "0:0")))
    assert held.endswith("you hold it: scontrol release 12_3)")
    said = str(SlurmJob("12", tmp_path).state_of(SHOWN.format("PENDING", reason, 0, "0:0")))
    assert reason in said and ("ATTENTION: this does not pass by itself" in said) == is_stuck


@pytest.mark.parametrize(
    ("said", "options", "instead"),
    [
        (
            "sbatch: error: invalid partition specified: x\n"
            "sbatch: error: Batch job submission failed: Invalid partition name specified",
            {"partition": "x"},
            "launch.options.partition=NAME",
        ),
        (
            "sbatch: error: Batch job submission failed: Invalid partition name specified",
            {"p": "x"},
            "launch.options.p=",
        ),
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
            {},
            "launch.options.account=NAME",
        ),
        (
            "sbatch: error: Batch job submission failed: Invalid qos specification",
            {"qos": 1},
            "launch.options.qos=NAME",
        ),
        ("sbatch: error: Invalid --time specification", {"t": "x"}, "another launch.options.t"),
        (
            "sbatch: error: Batch job submission failed: "
            "Requested time limit is invalid (missing or exceeds some limit)",
            {},
            "launch.options.time=TIME",
        ),
        (
            "sbatch: error: Memory specification can not be satisfied\nsbatch: error: Batch job submission failed: "
            "Requested node configuration is not available",
            {},
            "launch.memory=64G",
        ),
        (
            "sbatch: error: Batch job submission failed: Requested node configuration is not available",
            {},
            "launch.nnodes, launch.cores, launch.memory or launch.gpus",
        ),
        ("sbatch: error: Batch job submission failed: Node count specification invalid", {}, "launch.nnodes"),
        ("sbatch: error: Invalid generic resource (gres) specification", {}, "launch.gpus, or launch.options.gres"),
        (
            "sbatch: unrecognized option '--foo=1'\nTry \"sbatch --help\" for more information",
            {"foo": 1},
            "the command without launch.options.foo",
        ),
        ("sbatch: error: Invalid --mem specification", {}, "another launch.memory"),
        ("sbatch: error: something else", {}, "what it names, in launch.options"),
    ],
)
def test_what_sbatch_refuses_is_said_with_its_words_and_our_key(
    tmp_path: Path, fakes: Path, said: str, options: dict[str, object], instead: str
) -> None:
    (fakes / "sbatch").write_text(f"#!/bin/bash\ncat >&2 <<'X'\n{said}\nX\nexit 1\n")
    (fakes / "sbatch").chmod(0o755)
    with pytest.raises(UserError) as refused:
        Slurm().submit(job(tmp_path, options=options))
    assert refused.value.instead.startswith(instead)
    assert said.split("\n")[0].split(": ", 1)[1].removeprefix("error: ") in refused.value.why


@pytest.mark.parametrize(
    ("changes", "cores"),
    [
        ({"needs": Needs(gpus=8)}, "8"),
        ({"needs": Needs(), "workers": 8}, "4"),
        ({"needs": Needs(4), "workers": 8}, ""),
        ({"needs": Needs(), "workers": 2}, ""),
        ({"needs": Needs(), "workers": 8, "options": {"exclusive": True}}, ""),
    ],
)
def test_workers_without_cores_are_pointed_out(
    tmp_path: Path, fakes: Path, changes: dict[str, object], cores: str
) -> None:
    (fakes / "partition").write_text("PartitionName=low Default=YES PreemptMode=OFF\n")
    found = Slurm().concerns(job(tmp_path, **changes))
    assert [f"launch.cores={cores}" in one for one in found] == [True] * bool(cores)


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [("64G", "64G"), ("64GB", "64G"), ("64GiB", "64G"), ("64Gi", "64G"), ("1T", "1T"), ("1.5T", "1536G")],
)
def test_memory_is_written_as_sbatch_takes_it(tmp_path: Path, typed: str, wanted: str) -> None:
    assert f"#SBATCH --mem={wanted}\n" in Slurm().render(job(tmp_path, needs=Needs(memory=typed)))


@pytest.mark.parametrize("typed", ["64", "64X", "much"])
def test_memory_without_a_unit_is_refused(tmp_path: Path, typed: str) -> None:
    with pytest.raises(UserError, match=f"launch.memory={typed}.* unit.*launch.memory=64G"):
        Slurm().render(job(tmp_path, needs=Needs(memory=typed)))


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("N", "set by the job itself"),
        ("o", "set by the job itself"),
        ("mem", "launch.memory is set as well"),
        ("c", "launch.cores is set as well"),
        ("cpus-per-task", "launch.cores is set as well"),
    ],
)
def test_short_and_contradicting_options_are_refused(tmp_path: Path, option: str, why: str) -> None:
    with pytest.raises(UserError, match=f"launch.options.{option}.*{why}"):
        Slurm().render(job(tmp_path, options={option: 4}))


def test_an_option_of_one_letter_is_written_as_one(tmp_path: Path) -> None:
    assert "#SBATCH -p gpu\n" in Slurm().render(job(tmp_path, options={"p": "gpu"}))


def test_life_that_was_killed_before_it_could_say_so_has_a_line(tmp_path: Path, fakes: Path) -> None:
    begin(one := job(tmp_path), Slurm().render(one))
    play(one, fakes, {0: 0, 1: 0}, life=2)
    assert (one.engine_folder / "lives").read_text() == "0 137 \n1 137 \n2 0 \n"


@pytest.mark.all
@pytest.mark.parametrize(
    ("words", "code"), [("JobState=COMPLETING Restarts=0", 130), ("JobState=COMPLETING Restarts=1", 0)]
)
def test_cancelled_job_leaves_its_code_before_slurm_kills_its_script(
    tmp_path: Path, fakes: Path, words: str, code: int
) -> None:
    """Its tasks outlast KillWait, which is 3 s here, or end in time in a job that Slurm has requeued."""
    begin(one := job(tmp_path, grace_s=60), Slurm().render(one))
    (fakes / "shown").write_text(f"JobId=12 {words} ExitCode=0:0\n")
    (fakes / "config").write_text("KillWait                = 3 sec\n")
    (fakes / "trainer").write_text('#!/bin/bash\nkill -TERM $(cat "$FAKES/script")\nsleep 6\nexit 0\n')
    script = one.engine_folder / "job.sh"
    script.write_text(script.read_text().replace("#!/bin/bash\n", '#!/bin/bash\necho $$ >"$FAKES/script"\n', 1))
    (fakes / "code.0").touch(), (fakes / "code.1").touch()
    environment = {**os.environ, "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_RESTART_COUNT": "0"}
    done = subprocess.run(["bash", str(script)], env=environment, stdout=subprocess.DEVNULL, timeout=60, check=False)
    assert done.returncode == code and (one.engine_folder / "code").read_text() == f"{code}\n"
    assert (one.engine_folder / "lives").read_text() == f"0 {code} \n"
