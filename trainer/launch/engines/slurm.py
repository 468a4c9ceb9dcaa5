"""launch=slurm: the command as a batch job of Slurm, which is requeued until it has ended.

The batch script runs one task on each host, the launcher of that host, and decides what the end of the tasks means:

- Host 0's task has ended, and another host is silent for ``checkpoint.grace_s`` more: that host is lost. The job is
  requeued without it, at most ``launch.max_restarts`` times.
- Exit code 75 of host 0: pre-empted, or out of time (SIGUSR1 comes before). The job is requeued, at most
  ``launch.max_preemptions`` times, and ``resume=auto`` continues the run.
- Exit code 75 after this command was asked to leave (``engine/leave``): the job ends with 75.
- Exit code 75 after somebody has cancelled the job (scancel in another shell): the job ends with 130.
- Another exit code: the job ends with it.

The number of one element of an array is that of the whole array as well. So an element calls itself ARRAY_ELEMENT.

Slurm takes a job that ends inside of its grace period for failed. So the script asks for the requeue itself, and then
waits until Slurm ends it. Files of a job in ``RUN/engine``: ``job.sh``, ``secret`` (0600), ``log``, ``host.N.log``,
``ended.LIFE.HOST`` (exit code of a task), ``lives`` (a line per life: number, exit code, lost hosts) and ``code`` (exit
code of the job). After some minutes Slurm forgets a job; then ``code`` says how it ended.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.host.engine_tasks import SLURM
from trainer.launch.engines.contract import (
    ENDED,
    ENGINE,
    PENDING,
    REQUEUED,
    RUNNING,
    Handle,
    Job,
    State,
    Submitter,
    Unreachable,
)
from trainer.launch.engines.engine_folder import (
    LEAVE,
    LIVES,
    LOG,
    SECRET,
    LogReader,
    ask,
    begin,
    clear,
    query,
    read_code,
    shell_words,
)
from trainer.launch.engines.slurm_concerns import SIGNAL_BEFORE_S, concerns, field

SCRIPT = """\
#!/bin/bash
{directives}

# The task of each host is that host's launcher. How this script decides about its end: trainer/launch/engines/slurm.py.
{words}
engine=$folder/engine
job={number}
life=${{SLURM_RESTART_COUNT:-0}}
{setup}
export TRAINER_SUBMITTED=slurm TRAINER_RUN_DIR=$folder{sweep}
TRAINER_RUN_SECRET=$(cat {secret}) && export TRAINER_RUN_SECRET || exit 1
[ "$life" = 0 ] || export TRAINER_RESUME=auto
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_ADDR=$(scontrol show node "$head" -o | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)
MASTER_PORT=$((20000 + (SLURM_JOB_ID + 1009 * life) % 10000)) # another one in each life: the last store may linger
export MASTER_ADDR MASTER_PORT
mkdir -p "$engine" && rm -f "$engine"/ended."$life".*
trap : TERM USR1 # Slurm sends them to the tasks, too; this script waits for these
echo "slurm: job $SLURM_JOB_ID, life $life, on $SLURM_JOB_NODELIST"
TRAINER_WORDS=$(printf '%q ' {command} -m trainer "$@") # on no command line that other users of the hosts can see
export TRAINER_WORDS
srun --kill-on-bad-exit=0 --ntasks-per-node=1 bash -c '
    trap : TERM USR1
    [ "$SLURM_NODEID" = 0 ] || exec >>"$0/host.$SLURM_NODEID.log" 2>&1 # the screen shows host 0
    life=$1
    eval "set -- $TRAINER_WORDS"
    unset TRAINER_WORDS
    "$@"
    code=$?
    echo $code >"$0/ended.$life.$SLURM_NODEID"
    exit $code' "$engine" "$life" &
step=$!
ended=
while kill -0 "$step" 2>/dev/null; do
    sleep 1
    if [ -s "$engine/ended.$life.0" ] || grep -qx 2 "$engine"/ended."$life".* 2>/dev/null; then # 2: refused
        ended=${{ended:-$SECONDS}}
        if [ $((SECONDS - ended)) -ge {grace} ]; then # the hosts that are silent now are lost
            for one in $(squeue -h -s -j "$job" -o %i | grep '\\.[0-9]'); do scancel --signal=KILL "$one"; done
            sleep 2
            kill -KILL "$step" 2>/dev/null
            break
        fi
    fi
done
wait "$step"

lost= number=0
for host in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    if [ ! -s "$engine/ended.$life.$number" ]; then
        lost=$lost${{lost:+,}}$host
    elif [ "$number" != 0 ] && ! grep -qx '0\\|75' "$engine/ended.$life.$number"; then
        echo "slurm: host $number ($host) ended with exit code $(cat "$engine/ended.$life.$number"):"
        tail -n 12 "$engine/host.$number.log" | awk 1 # the last line gets its end
    fi
    number=$((number + 1))
done
code=$(cat "$engine/ended.$life.0" 2>/dev/null || cat "$engine"/ended."$life".* 2>/dev/null | sort -n | tail -n 1)
code=${{code:-1}}
echo "$life $code $lost" >>"$engine/lives"
again=
if [ -e "$engine/leave" ]; then
    :
elif [ -n "$lost" ] && [ "$code" != 0 ] && [ "$code" != 2 ]; then
    echo "slurm: $lost was lost"
    [ "$(grep -c '^[0-9]* [0-9]* .' "$engine/lives")" -le {max_restarts} ] && again=1
elif [ "$code" = 75 ]; then
    {preemptions}again=1
fi
if [ -n "$again" ]; then
    case "$(scontrol show job "$job" -o) " in # a job that Slurm ends for none of these reasons is cancelled
    *" Restarts=$((life + 1)) "* | *" PreemptTime=2"* | *" Reason=TimeLimit "*) ;;
    *" JobState=COMPLETING "*) again= code=130 ;;
    esac
fi
if [ -n "$again" ]; then
    scontrol requeue "$job" && echo "slurm: requeued"
    # The job is pending from now on, and can be kept off the lost hosts until Slurm ends this script.
    lost=$(cut -s -d ' ' -f 3 "$engine/lives" | grep . | paste -sd , -)
    [ -z "$lost" ] || scontrol update JobId="$job" ExcNodeList="$lost"
    while :; do sleep 5; done # SIGTERM ends the sleep alone: nothing may follow it
fi
echo "$code" >"$engine/code"
exit "$code"
"""
OWN = (
    "nodes",
    "ntasks",
    "ntasks_per_node",
    "array",
    "output",
    "error",
    "open_mode",
    "signal",
    "requeue",
    "no_requeue",
    "chdir",
)
"""Options of sbatch that the job itself sets."""
CODES = {"COMPLETED": 0, "CANCELLED": 130, "PREEMPTED": 75, "OUT_OF_MEMORY": 137}
"""Exit codes for how a job ends that does not say it itself."""
FORGOTTEN = "Invalid job id"
"""What scontrol says of a job that has ended some time ago."""
OVER = (
    "COMPLETED",
    "CANCELLED",
    "FAILED",
    "TIMEOUT",
    "NODE_FAIL",
    "PREEMPTED",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
)


class Slurm(Submitter):
    """launch=slurm: sbatch's own options are ``launch.options``."""

    engine = SLURM

    def render(self, job: Job) -> str:
        limit = f'[ "$(grep -c \'^[0-9]* 75 $\' "$engine/lives")" -le {job.max_preemptions} ] && '
        return SCRIPT.format(
            directives="\n".join(f"#SBATCH {directive}" for directive in _directives(job)),
            setup="\n".join(job.setup),
            secret=shlex.quote(str(job.engine_folder / SECRET)),
            words=_words(job),
            number="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if job.points else "$SLURM_JOB_ID",
            sweep=_sweep(job),
            command=shell_words(job.command),
            grace=round(job.grace_s),
            max_restarts=job.max_restarts,
            preemptions="" if job.max_preemptions is None else limit,
        )

    def concerns(self, job: Job) -> list[str]:
        return concerns(job)

    def submit(self, job: Job) -> Handle:
        script = begin(job, self.render(job))
        for point in job.points:
            clear(point.folder / ENGINE)
        number = ask(["sbatch", "--parsable", str(script)], "launch=slurm").strip().partition(";")[0]
        return SlurmArray(number, job) if job.points else SlurmJob(number, job.engine_folder)


def _directives(job: Job) -> list[str]:
    """The options of sbatch: those of the job, and the user's own, which may not contradict them."""
    for name in job.options:
        if name.replace("-", "_") in OWN:
            instead = {"nodes": "launch.nnodes", "array": "sweep.parallel"}.get(
                name, f"the command without launch.options.{name}"
            )
            raise UserError(f"launch.options.{name}", "is set by the job itself", instead)
    needs = job.needs
    job.refuse_range("a job of Slurm keeps its hosts until it is requeued")
    engine = job.engine_folder
    own = {
        "job-name": job.name,
        "nodes": str(job.hosts),
        "ntasks-per-node": "1",
        "cpus-per-task": needs.cores,
        "mem": needs.memory,
        "gpus-per-node": needs.gpus,
        "array": _array(job),
        "output": f"{engine}/%a.log" if job.points else f"{engine}/{LOG}",
        "open-mode": "append",
        "signal": f"USR1@{round(job.grace_s + SIGNAL_BEFORE_S)}",
        "requeue": "",
        "chdir": job.started_in,
    }
    typed = {name.replace("_", "-"): value for name, value in job.options.items()}
    return [
        _option(name, value) for name, value in {**own, **typed}.items() if value is not None and value is not False
    ]


def _option(name: str, value: Any) -> str:
    return f"--{name}" if value is True or value == "" else f"--{name}={shlex.quote(str(value))}"


def _array(job: Job) -> str | None:
    if not job.points:
        return None
    return f"0-{len(job.points) - 1}{f'%{job.parallel}' if job.parallel else ''}"


def _words(job: Job) -> str:
    """Lines that set the folder and the words of the command; of a sweep those of the element's job."""
    if not job.points:
        return _setting(job.folder, job.words)
    cases = "\n".join(f"{i}) {_setting(one.folder, one.words)} ;;" for i, one in enumerate(job.points))
    return f'case "$SLURM_ARRAY_TASK_ID" in\n{cases}\nesac'


def _setting(folder: Path, words: Sequence[str]) -> str:
    return f"folder={shlex.quote(str(folder))}; set -- {shell_words(words)}"


def _sweep(job: Job) -> str:
    """The variables by which a job of a sweep knows it."""
    if not job.points:
        return ""
    return f" TRAINER_SWEEP_DIR={shlex.quote(str(job.folder))} TRAINER_SWEPT={shlex.quote(','.join(job.swept))}"


class SlurmJob(Handle):
    """A submitted job of Slurm. Its state is asked of ``scontrol``; of a job that Slurm has forgotten, or whose end it
    calls otherwise, the file ``code`` counts."""

    def __init__(self, number: str, folder: Path) -> None:
        self.number, self.folder = number, folder
        self.name, self.cancels, self.log = f"Slurm job {number}", f"scancel {number}", str(self.folder / LOG)
        self._reader = LogReader(self.folder / LOG)

    def state(self) -> State:
        try:
            return self.state_of(query(["scontrol", "show", "job", self.number, "-o"]))
        except Unreachable as error:
            if FORGOTTEN not in str(error) or (code := read_code(self.folder)) is None:
                raise
            return State(ENDED, "", code)

    def state_of(self, said: str) -> State:
        """The state of the job of which ``scontrol show job -o`` says this."""
        code = read_code(self.folder)
        word = field(said, "JobState")
        reason = "" if (found := field(said, "Reason")) in ("None", "") else found
        if word in OVER:
            return State(ENDED, "" if code is not None else word.lower(), _code(word, said) if code is None else code)
        if code is not None:
            return State(ENDED, "", code)
        restarts = int(field(said, "Restarts") or 0)
        if word in ("PENDING", "REQUEUED") or (word == "COMPLETING" and 0 < restarts == self._lives()):
            return State(REQUEUED if restarts else PENDING, reason)
        return State(RUNNING, field(said, "NodeList"))

    def _lives(self) -> int:
        """How many lives of the job have ended."""
        with suppress(OSError):
            return len((self.folder / LIVES).read_text().splitlines())
        return 0

    def lines(self) -> Iterator[str]:
        return self._reader.lines()

    def signal(self, number: int) -> None:
        (self.folder / LEAVE).touch()
        _send(number, self.number)

    def cancel(self) -> None:
        with suppress(OSError):
            (self.folder / LEAVE).touch()
        query(["scancel", self.number])


class SlurmArray(Handle):
    """A sweep as one array of Slurm: its lines are the changes of state of its elements."""

    def __init__(self, number: str, job: Job) -> None:
        self.number, self.points = number, job.points
        self.name, self.cancels = f"Slurm array {number}", f"scancel {number}"
        self.log = f"{job.engine_folder}/N.log"
        self._elements = [SlurmJob(f"{number}_{i}", point.folder / ENGINE) for i, point in enumerate(job.points)]
        self._states = [State(PENDING)] * len(job.points)
        self._said: list[str] = []

    def state(self) -> State:
        try:
            said = query(["scontrol", "show", "job", self.number, "-o"]).splitlines()
        except Unreachable as error:
            if FORGOTTEN not in str(error):
                raise
            said = []
        by_element = {field(line, "ArrayTaskId"): line for line in said}
        for i, element in enumerate(self._elements):
            if line := by_element.get(str(i)):  # those that wait have one line in common
                self._change(i, element.state_of(line))
            elif (code := read_code(element.folder)) is not None:
                self._change(i, State(ENDED, "", code))
        phases = [state.phase for state in self._states]
        counts = {phase: phases.count(phase) for phase in (PENDING, REQUEUED, RUNNING, ENDED)}
        words = ", ".join(f"{count} {phase}" for phase, count in counts.items() if count)
        if counts[ENDED] == len(phases):
            return State(ENDED, "", max(state.code for state in self._states))
        return State(RUNNING if counts[RUNNING] or counts[ENDED] else PENDING, words)

    def _change(self, number: int, state: State) -> None:
        if state != self._states[number]:
            self._states[number] = state
            self._said.append(f"job {number} ({self.points[number].name}): {state}\n")

    def lines(self) -> Iterator[str]:
        said, self._said = self._said, []
        yield from said

    def signal(self, number: int) -> None:
        for element in self._elements:
            element.folder.mkdir(parents=True, exist_ok=True)
            (element.folder / LEAVE).touch()
        query(["scancel", "--state=PENDING", self.number])
        _send(number, self.number)

    def cancel(self) -> None:
        query(["scancel", self.number])


def _send(number: int, job: str) -> None:
    """Send a signal to the tasks of a job or an array."""
    query(["scancel", f"--signal={signal.Signals(number).name.removeprefix('SIG')}", job])


def _code(word: str, said: str) -> int:
    """The exit code for a job that left none: Slurm's, or that of the way it ended."""
    code, _, number = field(said, "ExitCode").partition(":")
    if word in CODES:
        return CODES[word]
    return int(code or 0) or (128 + int(number) if number.isdecimal() and int(number) else 1)
