#!/bin/bash
# Made by: python -m trainer +recipe=digits_lenet 'name='"'"'a $b c'"'"''
# Run folder: /home/ann/outputs/one
#SBATCH --job-name=lenet
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --output=/tmp/trainer-%j.log
#SBATCH --open-mode=append
#SBATCH --signal=USR1@60
#SBATCH --requeue
#SBATCH --chdir=/

# The task of each host is that host's launcher. How this script decides about its end: trainer/launch/engines/slurm.py.
# No disk is shared: the files of this script are in a folder of this host, and are copied to s3://bucket/runs/outputs/one.
TRAINER_CARRIED='{"words": ["+recipe=digits_lenet", "name='"'"'a $b c'"'"'"], "copies": "s3://bucket/runs/outputs/one", "config": "", "started_in": "/home/ann", "folder": "/home/ann/outputs/one", "sweep": ""}'
export TRAINER_CARRIED
cd /home/ann 2>/dev/null || cd /
kept=$(mktemp -d "${TMPDIR:-/tmp}/trainer.job-XXXXXX") && engine=$kept/engine || exit 1
carry() { /opt/venv/bin/python -m trainer.launch.engines.carried "$@"; }
job=$SLURM_JOB_ID
life=${SLURM_RESTART_COUNT:-0}
setup_failed() {
    code=$?
    set +e
    trap - EXIT
    sentence="error: launch.setup: entry $entry ended with exit code $code: $setup"
    case "$code" in 0 | 2 | 75 | 130) code=1 ;; esac # of a run: done, refused, pre-empted, cancelled
    carry begin "$kept" && mkdir -p "$engine" && exec >>"$engine/log" 2>&1; mkdir -p "$engine"; echo "$sentence"; echo "$life $code " >>"$engine/lives"; echo "$code" >"$engine/code"; carry once "$kept" && rm -rf "$kept"
    exit $code
}
trap setup_failed EXIT
trap 'trap - EXIT TERM; kill -TERM $$' TERM USR1 # by a signal this shell ends as any other
entry=1 setup='module load cuda'
eval "$setup" || exit
trap - EXIT TERM USR1
set +e
export TRAINER_SUBMITTED=slurm TRAINER_LIFE=$life
TRAINER_RUN_SECRET='<drawn at the submission>' && export TRAINER_RUN_SECRET || exit 1
[ "$life" = 0 ] || export TRAINER_RESUME=auto
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_ADDR=$(scontrol show node "$head" -o | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)
MASTER_PORT=$((20000 + (SLURM_JOB_ID + 1009 * life) % 10000)) # another one in each life: the last store may linger
export MASTER_ADDR MASTER_PORT
carry begin "$kept" || exit 1
mkdir -p "$engine" && exec >>"$engine/log" 2>&1 || exit 1
carry job "$kept" &
carrier=$!
for earlier in $(seq 0 $((life - 1))); do # killed before it could say so
    grep -q "^$earlier " "$engine/lives" 2>/dev/null || echo "$earlier 137 " >>"$engine/lives"
done
is_cancelled() { # a job that Slurm ends for none of these reasons is cancelled
    case "$(scontrol show job "$job" -o) " in
    *" Restarts=$((life + 1)) "* | *" PreemptTime=2"* | *" Reason=TimeLimit "*) return 1 ;;
    *" JobState=COMPLETING "*) ;;
    *) return 1 ;;
    esac
}
asked= left=
trap 'asked=${asked:-$SECONDS}' TERM # Slurm sends it to the tasks, too; this script waits for these
trap : USR1
echo "slurm: job $SLURM_JOB_ID, life $life, on $SLURM_JOB_NODELIST"
tasks() { # where srun is killed, bash says this name in place of all that follows
exec srun --kill-on-bad-exit=0 --ntasks-per-node=1 bash -c '
    trap : TERM USR1
    cd "$0" 2>/dev/null || cd /
    "$@"' /home/ann /opt/venv/bin/python -m trainer.launch.engines.carried
}
tasks &
step=$!
ended=
while kill -0 "$step" 2>/dev/null; do
    sleep 1
    if [ -n "$asked" ] && [ -z "$left" ]; then # Slurm may kill this script KillWait after its SIGTERM
        left=$(scontrol show config 2>/dev/null | sed -n 's/^KillWait *= *//p' | tr -dc 0-9)
        left=$((${left:-30} - 2))
    fi
    if [ -n "$left" ] && [ $((SECONDS - asked)) -ge "$left" ]; then
        asked= left=
        if is_cancelled; then
            echo "$life 130 " >>"$engine/lives"
            echo 130 >"$engine/code"
            carry once "$kept"
rm -rf "$kept" /tmp/trainer-"$SLURM_JOB_ID".log
exit 130
        fi
    fi
    if [ -s "$engine/ended.$life.0" ] || grep -qx 2 "$engine"/ended."$life".* 2>/dev/null; then # 2: refused
        ended=${ended:-$SECONDS}
        if [ $((SECONDS - ended)) -ge 40 ]; then # the hosts that are silent now are lost
            for one in $(squeue -h -s -j "$job" -o %i | grep '\.[0-9]'); do
                scancel --signal=KILL "$one" 2>/dev/null # it may be over
            done
            sleep 2
            kill -KILL "$step" 2>/dev/null
            break
        fi
    fi
done
wait "$step"
touch "$kept/over.tmp" # it copies once more
while kill -0 "$carrier" 2>/dev/null; do wait "$carrier"; done # a signal ends a wait

lost= number=0
for host in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    if [ ! -s "$engine/ended.$life.$number" ]; then
        lost=$lost${lost:+,}$host
    elif [ "$number" != 0 ] && ! grep -qx '0\|75' "$engine/ended.$life.$number"; then
        echo "slurm: host $number ($host) ended with exit code $(cat "$engine/ended.$life.$number"):"
        tail -n 12 "$engine/host.$number.log" | awk 1 # the last line gets its end
    fi
    number=$((number + 1))
done
code=$(cat "$engine/ended.$life.0" 2>/dev/null || cat "$engine"/ended."$life".* 2>/dev/null | sort -n | tail -n 1)
code=${code:-1}
echo "$life $code $lost" >>"$engine/lives"
again=
if [ -e "$engine/leave" ]; then
    :
elif [ -n "$lost" ] && [ "$code" != 0 ] && [ "$code" != 2 ]; then
    echo "slurm: $lost was lost"
    [ "$(grep -c '^[0-9]* [0-9]* .' "$engine/lives")" -le 3 ] && again=1
elif [ "$code" = 75 ]; then
    again=1
fi
[ -z "$again" ] || ! is_cancelled || again= code=130
if [ -n "$again" ]; then
    lost=$(cut -s -d ' ' -f 3 "$engine/lives" | grep . | paste -sd , -)
    carry once "$kept"; rm -rf "$kept"
    scontrol requeue "$job" && echo "slurm: requeued"
    # The job is pending from now on, and can be kept off the lost hosts until Slurm ends this script.
    [ -z "$lost" ] || scontrol update JobId="$job" ExcNodeList="$lost"
    while :; do sleep 5; done # SIGTERM ends the sleep alone: nothing may follow it
fi
echo "$code" >"$engine/code"
carry once "$kept"
rm -rf "$kept" /tmp/trainer-"$SLURM_JOB_ID".log
exit "$code"
