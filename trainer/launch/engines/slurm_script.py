"""The batch script of launch=slurm, for hosts that share the run's folder and for hosts that do not.

What it decides is described in :mod:`trainer.launch.engines.slurm`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from trainer.errors import UserError
from trainer.launch.engines.contract import Job
from trainer.launch.engines.copies import carried
from trainer.launch.engines.engine_folder import LOG, SECRET, made_by, memory_of, setup_lines, shell_words
from trainer.launch.engines.slurm_concerns import SIGNAL_BEFORE_S

SCRIPT = """\
#!/bin/bash
{made_by}{directives}

# The task of each host is that host's launcher. How this script decides about its end: trainer/launch/engines/slurm.py.
{place}
job={number}
life=${{SLURM_RESTART_COUNT:-0}}
{setup}export TRAINER_SUBMITTED=slurm{variables}
TRAINER_RUN_SECRET={secret} && export TRAINER_RUN_SECRET || exit 1
[ "$life" = 0 ] || export TRAINER_RESUME=auto
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_ADDR=$(scontrol show node "$head" -o | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)
MASTER_PORT=$((20000 + (SLURM_JOB_ID + 1009 * life) % 10000)) # another one in each life: the last store may linger
export MASTER_ADDR MASTER_PORT
{begin}
for earlier in $(seq 0 $((life - 1))); do # killed before it could say so
    grep -q "^$earlier " "$engine/lives" 2>/dev/null || echo "$earlier 137 " >>"$engine/lives"
done
is_cancelled() {{ # a job that Slurm ends for none of these reasons is cancelled
    case "$(scontrol show job "$job" -o) " in
    *" Restarts=$((life + 1)) "* | *" PreemptTime=2"* | *" Reason=TimeLimit "*) return 1 ;;
    *" JobState=COMPLETING "*) ;;
    *) return 1 ;;
    esac
}}
asked= left=
trap 'asked=${{asked:-$SECONDS}}' TERM # Slurm sends it to the tasks, too; this script waits for these
trap : USR1
echo "slurm: job $SLURM_JOB_ID, life $life, on $SLURM_JOB_NODELIST"
{start}
step=$!
ended=
while kill -0 "$step" 2>/dev/null; do
    sleep 1
    if [ -n "$asked" ] && [ -z "$left" ]; then # Slurm may kill this script KillWait after its SIGTERM
        left=$(scontrol show config 2>/dev/null | sed -n 's/^KillWait *= *//p' | tr -dc 0-9)
        left=$((${{left:-30}} - 2))
    fi
    if [ -n "$left" ] && [ $((SECONDS - asked)) -ge "$left" ]; then
        asked= left=
        if is_cancelled; then
            echo "$life 130 " >>"$engine/lives"
            echo 130 >"$engine/code"
            {keep_code}exit 130
        fi
    fi
    if [ -s "$engine/ended.$life.0" ] || grep -qx 2 "$engine"/ended."$life".* 2>/dev/null; then # 2: refused
        ended=${{ended:-$SECONDS}}
        if [ $((SECONDS - ended)) -ge {grace} ]; then # the hosts that are silent now are lost
            for one in $(squeue -h -s -j "$job" -o %i | grep '\\.[0-9]'); do
                scancel --signal=KILL "$one" 2>/dev/null # it may be over
            done
            sleep 2
            kill -KILL "$step" 2>/dev/null
            break
        fi
    fi
done
wait "$step"
{settle}
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
[ -z "$again" ] || ! is_cancelled || again= code=130
if [ -n "$again" ]; then
    lost=$(cut -s -d ' ' -f 3 "$engine/lives" | grep . | paste -sd , -)
    {keep_lives}scontrol requeue "$job" && echo "slurm: requeued"
    # The job is pending from now on, and can be kept off the lost hosts until Slurm ends this script.
    [ -z "$lost" ] || scontrol update JobId="$job" ExcNodeList="$lost"
    while :; do sleep 5; done # SIGTERM ends the sleep alone: nothing may follow it
fi
echo "$code" >"$engine/code"
{keep_code}exit "$code"
"""
TASK = """\
TRAINER_WORDS=$(printf '%q ' {command} -m trainer "$@") # on no command line that other users of the hosts can see
export TRAINER_WORDS
tasks() {{ # where srun is killed, bash says this name in place of all that follows
exec srun --kill-on-bad-exit=0 --ntasks-per-node=1 bash -c '
    trap : TERM USR1
    [ "$SLURM_NODEID" = 0 ] || exec >>"$0/host.$SLURM_NODEID.log" 2>&1 # the screen shows host 0
    life=$1
    eval "set -- $TRAINER_WORDS"
    unset TRAINER_WORDS
    "$@"
    code=$?
    echo $code >"$0/ended.$life.$SLURM_NODEID"
    exit $code' "$engine" "$life"
}}
tasks &"""
AWAY_PLACE = """\
# No disk is shared: the files of this script are in a folder of this host, and are copied to {copies}.
{words}
export TRAINER_CARRIED
cd {started_in} 2>/dev/null || cd /
kept=$(mktemp -d "${{TMPDIR:-/tmp}}/trainer.job-XXXXXX") && engine=$kept/engine || exit 1
carry() {{ {command} -m trainer.launch.engines.carried "$@"; }}"""
AWAY_BEGIN = """\
carry begin "$kept" || exit 1
mkdir -p "$engine" && exec >>"$engine/log" 2>&1 || exit 1
carry job "$kept" &
carrier=$!"""
AWAY_TASK = """\
tasks() {{ # where srun is killed, bash says this name in place of all that follows
exec srun --kill-on-bad-exit=0 --ntasks-per-node=1 bash -c '
    trap : TERM USR1
    cd "$0" 2>/dev/null || cd /
    "$@"' {started_in} {command} -m trainer.launch.engines.carried
}}
tasks &"""
AWAY_SETTLE = """\
touch "$kept/over.tmp" # it copies once more
while kill -0 "$carrier" 2>/dev/null; do wait "$carrier"; done # a signal ends a wait
"""
AWAY_CODE = """\
carry once "$kept"
rm -rf "$kept" {log}
"""
FAILED = 'mkdir -p "$engine"; echo "$sentence"; echo "$life $code " >>"$engine/lives"; echo "$code" >"$engine/code"'
"""After a failed line of ``launch.setup``."""
AWAY_FAILED = (
    'carry begin "$kept" && mkdir -p "$engine" && exec >>"$engine/log" 2>&1; '
    f'{FAILED}; carry once "$kept" && rm -rf "$kept"'
)
DRAWN = "<drawn at the submission>"
EARLY = "/tmp/trainer-%j.log"  # nosec B108: Slurm makes it, with the user's rights
"""What a script says on its host before it has its folder."""
COPIES_S = 10.0
"""So much longer other hosts may be silent where their exit codes come by an address."""
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
SHORT = {"N": "nodes", "n": "ntasks", "a": "array", "o": "output", "e": "error", "D": "chdir"}
"""Their short forms."""
KEYS = {
    "nodes": "launch.nnodes",
    "ntasks": "launch.nnodes",
    "array": "sweep.parallel",
    "mem": "launch.memory",
    "cpus_per_task": "launch.cores",
    "c": "launch.cores",
}
"""Keys of ours for options of sbatch."""


def rendered(job: Job) -> str:
    """The script of a job, without its secret where that belongs into it (:data:`DRAWN`).

    Raises:
        UserError: an option of the user's contradicts the job's own.
    """
    limit = f'[ "$(grep -c \'^[0-9]* 75 $\' "$engine/lives")" -le {job.max_preemptions} ] && '
    return SCRIPT.format(
        made_by=made_by(job),
        directives="\n".join(f"#SBATCH {directive}" for directive in _directives(job)),
        setup=setup_lines(job.setup, AWAY_FAILED if job.copies else FAILED),
        number="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if job.points else "$SLURM_JOB_ID",
        max_restarts=job.max_restarts,
        preemptions="" if job.max_preemptions is None else limit,
        **(_away(job) if job.copies else _shared(job)),
    )


def _directives(job: Job) -> list[str]:
    """The options of sbatch: those of the job, and the user's own, which may not contradict them."""
    for name in job.options:
        long = SHORT.get(name, name.replace("-", "_"))
        has_key = KEYS.get(long, "").removeprefix("launch.")
        if has_key and getattr(job.needs, has_key, None) is not None:
            why = f"{KEYS[long]} is set as well"
            raise UserError(f"launch.options.{name}", why, f"{KEYS[long]} alone")
        if long in OWN:
            instead = KEYS.get(long, f"the command without launch.options.{name}")
            raise UserError(f"launch.options.{name}", "is set by the job itself", instead)
    needs = job.needs
    job.refuse_range("a job of Slurm keeps its hosts until it is requeued")
    engine = job.engine_folder
    own = {
        "job-name": job.name,
        "nodes": str(job.hosts),
        "ntasks-per-node": "1",
        "cpus-per-task": needs.cores,
        "mem": None if needs.memory is None else _memory(needs.memory),
        "gpus-per-node": needs.gpus,
        "array": _array(job),
        "output": EARLY if job.copies else f"{engine}/%a.log" if job.points else f"{engine}/{LOG}",
        "open-mode": "append",
        "signal": f"USR1@{round(job.grace_s + SIGNAL_BEFORE_S)}",
        "requeue": "",
        "chdir": "/" if job.copies else job.started_in,
    }
    typed = {name.replace("_", "-"): value for name, value in job.options.items()}
    return [
        _option(name, value) for name, value in {**own, **typed}.items() if value is not None and value is not False
    ]


def _memory(text: str) -> str:
    """An amount as sbatch takes it: whole numbers alone."""
    number, unit = memory_of(text)
    while not float(number).is_integer() and unit != "K":
        number, unit = str(float(number) * 1024), "KMGT"["KMGT".index(unit) - 1]
    return f"{round(float(number))}{unit}"


def _option(name: str, value: Any) -> str:
    if len(name) == 1:
        return f"-{name}" if value is True or value == "" else f"-{name} {shlex.quote(str(value))}"
    return f"--{name}" if value is True or value == "" else f"--{name}={shlex.quote(str(value))}"


def _array(job: Job) -> str | None:
    if not job.points:
        return None
    numbers = ",".join(map(str, job.numbers)) or f"0-{len(job.points) - 1}"
    return f"{numbers}{f'%{job.parallel}' if job.parallel else ''}"


def _shared(job: Job) -> dict[str, Any]:
    """The parts of the script where hosts share the run's folder."""
    sweep = f" TRAINER_SWEEP_DIR={shlex.quote(str(job.folder))} TRAINER_SWEPT={_swept(job)}" if job.points else ""
    settings = [
        f"folder={shlex.quote(str(one.folder))}; set -- {shell_words(one.words)}" for one in job.points or [job]
    ]
    return {
        "place": f"{_by_element(job, settings)}\nengine=$folder/engine",
        "variables": f" TRAINER_RUN_DIR=$folder{sweep}",
        "secret": f"$(cat {shlex.quote(str(job.engine_folder / SECRET))})",
        "begin": 'mkdir -p "$engine" && rm -f "$engine"/ended."$life".*',
        "start": TASK.format(command=shell_words(job.command)),
        "grace": round(job.grace_s),
        **dict.fromkeys(("settle", "keep_lives", "keep_code"), ""),
    }


def _away(job: Job) -> dict[str, Any]:
    """The parts of the script where they share none.

    The secret is in the script itself. Slurm's controller keeps it where users do not read, and shows it to the job's
    user and to administrators alone (``scontrol write batch_script``); each host has it as a variable of its tasks. At
    the address everybody who reads there would have it.
    """
    started_in, command = shlex.quote(job.started_in), shell_words(job.command)
    settings = [f"TRAINER_CARRIED={shlex.quote(one.text())}" for one in carried(job)]
    return {
        "place": AWAY_PLACE.format(
            copies=job.copies, words=_by_element(job, settings), started_in=started_in, command=command
        ),
        "variables": f" TRAINER_LIFE=$life{f' TRAINER_SWEPT={_swept(job)}' if job.points else ''}",
        "secret": shlex.quote(DRAWN),
        "begin": AWAY_BEGIN,
        "start": AWAY_TASK.format(started_in=started_in, command=command),
        "settle": AWAY_SETTLE,
        "grace": round(job.grace_s + COPIES_S),
        "keep_lives": 'carry once "$kept"; rm -rf "$kept"\n    ',
        "keep_code": AWAY_CODE.format(log=EARLY.replace("%j", '"$SLURM_JOB_ID"')),
    }


def _swept(job: Job) -> str:
    return shlex.quote(",".join(job.swept))


def _by_element(job: Job, settings: Sequence[str]) -> str:
    """Lines of the shell for a job; of a sweep those of the array's element."""
    if not job.points:
        return settings[0]
    cases = "\n".join(f"{i}) {one} ;;" for i, one in zip(job.numbered, settings, strict=True))
    return f'case "$SLURM_ARRAY_TASK_ID" in\n{cases}\nesac'
