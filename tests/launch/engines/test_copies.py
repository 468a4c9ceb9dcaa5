"""launch.shared_storage=false: files of hosts that share no disk, at an address and on the machine that submits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.launch.engines.apart import end_with, left_on_disks, python_apart
from tests.launch.engines.test_slurm import asked
from tests.runs import environment
from trainer import __main__
from trainer.checkpoint.remote import Remote
from trainer.cli import submit
from trainer.errors import UserError
from trainer.launch.engines import copies, slurm_script
from trainer.launch.engines.carried import _unpacked
from trainer.launch.engines.contract import ENDED, RUNNING, Handle, Job, Point, State
from trainer.launch.engines.copies import Away, Carried, Copies, Mirror
from trainer.launch.engines.slurm import Slurm
from trainer.launch.engines.slurm_job import SlurmJob

GOLDEN = Path(__file__).with_name("goldens") / "slurm_apart.sh"


def read(folder: Path) -> dict[str, str]:
    """The files below a folder by their names."""
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    (tmp_path / "run").mkdir()
    return Mirror(tmp_path / "run", f"file://{tmp_path}/store")


def test_what_has_changed_is_copied_and_what_is_gone_is_removed(mirror: Mirror, tmp_path: Path) -> None:
    (tmp_path / "run" / "status.json").write_text("1")
    (tmp_path / "run" / "host.1").mkdir()
    (tmp_path / "run" / "host.1" / "plan.json").write_text("plan")
    mirror.push()
    (tmp_path / "run" / "status.json").write_text("22")
    (tmp_path / "run" / "host.1" / "plan.json").unlink()
    assert mirror.left() == ["status.json"]
    mirror.push()
    assert read(tmp_path / "store") == {"status.json": "22"} and mirror.left() == []
    assert (tmp_path / "store" / "status.json").stat().st_mode & 0o077 == 0


def test_checkpoints_and_files_that_are_not_whole_are_left_out(mirror: Mirror, tmp_path: Path) -> None:
    names = ["checkpoints/step-000000001/COMPLETE", "checkpoints/step-000000002.partial/x", ".x.12-0123abcd", ".lock"]
    for name in [*names, "checkpoints/best.safetensors", "checkpoints/persistables/x", "a.tmp", ".hydra/config.yaml"]:
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text("")
    (tmp_path / "run" / "link").symlink_to("/etc/hostname")
    mirror.push()
    wanted = {"checkpoints/best.safetensors", "checkpoints/persistables/x", ".hydra/config.yaml"}
    assert read(tmp_path / "store").keys() == wanted


def test_a_folder_that_is_gone_takes_no_copies_with_it(mirror: Mirror, tmp_path: Path) -> None:
    (tmp_path / "run" / "log").write_text("lines")
    mirror.push()
    (tmp_path / "run").rename(tmp_path / "gone")
    with pytest.raises(FileNotFoundError):
        mirror.push()
    assert read(tmp_path / "store") == {"log": "lines"}


def test_the_next_life_begins_with_the_copies_and_copies_them_not_again(mirror: Mirror, tmp_path: Path) -> None:
    (tmp_path / "run" / "workerlog.0").write_text("one\n")
    mirror.push()
    after = Mirror(tmp_path / "other", f"file://{tmp_path}/store")
    after.fetch()
    assert read(tmp_path / "other") == {"workerlog.0": "one\n"} and after.left() == []


def brought(tmp_path: Path) -> tuple[Path, Copies]:
    """The place of the hosts' files, and what brings them to this machine."""
    return tmp_path / "store" / "run", Copies(f"file://{tmp_path}/store", tmp_path / "here")


def put(place: Path, name: str, text: str) -> None:
    (place / name).parent.mkdir(parents=True, exist_ok=True)
    (part := place / f"{name}.new").write_text(text)
    part.rename(place / name)


def test_of_equal_names_the_file_of_host_0_counts(tmp_path: Path) -> None:
    place, hosts = brought(tmp_path)
    for host in ("0", "1", "10", "server-0"):
        put(place, f"{host}/status.json", host)
        put(place, f"{host}/workerlog.{host}", host)
    hosts.bring(whole=True)
    found = read(tmp_path / "here")
    assert found.pop("status.json") == "0" and len(found) == 4


def test_while_the_job_runs_its_log_is_brought_as_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, hosts = brought(tmp_path)
    put(place, "job/engine/log", "one\n")
    put(place, "0/metrics.jsonl", "{}\n")
    hosts.bring(whole=False)
    assert read(tmp_path / "here") == {"engine/log": "one\n"}
    starts: list[int] = []
    cat = hosts.files.cat_file
    monkeypatch.setattr(hosts.files, "cat_file", lambda path, start: starts.append(start) or cat(path, start=start))
    put(place, "job/engine/log", "one\ntwo\n")
    hosts.bring(whole=True)
    assert starts == [4] and read(tmp_path / "here") == {"engine/log": "one\ntwo\n", "metrics.jsonl": "{}\n"}


class Ending(Handle):
    """A job that ends at the second question, and whose exit code is in a file."""

    name, cancels, log, early = "job 1", "cancel 1", "log", "n1:/tmp/log"

    def __init__(self, folder: Path) -> None:
        self.folder, self.questions, self.calls = folder, 0, list[str]()

    def state(self) -> State:
        self.questions += 1
        if self.questions < 2:
            return State(RUNNING)
        code = self.folder / "engine" / "code"
        return State(ENDED, "", int(code.read_text())) if code.exists() else State(ENDED, "unknown", 1)

    def lines(self) -> Any:
        return iter(())

    def signal(self, number: int) -> None:
        self.calls.append(f"signal {number}")

    def cancel(self) -> None:
        self.calls.append("cancel")


def test_an_ended_job_is_asked_again_after_its_files_have_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "BRING_S", 0.0)
    place, hosts = brought(tmp_path)
    said: list[str] = []
    away = Away(Ending(tmp_path / "here"), [hosts], said.append)
    assert away.state() == State(RUNNING)
    put(place, "job/engine/code", "3\n")
    put(place, "0/result.json", "{}")
    assert away.state() == State(ENDED, "", 3)
    assert "result.json" in read(tmp_path / "here") and said == []


def test_it_is_said_where_nothing_came_and_where_nothing_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "BRING_S", 0.0)
    monkeypatch.setattr(copies, "PATIENCE_S", 0.0)
    _, hosts = brought(tmp_path)
    said: list[str] = []
    away = Away(Ending(tmp_path / "here"), [hosts], said.append)
    with monkeypatch.context() as broken:
        broken.setattr(copies, "listed", lambda *_: (_ for _ in ()).throw(ConnectionError("no route")))
        away.state(), away.state()
    assert said[0].startswith(f"ATTENTION: files of the hosts cannot be read from file://{tmp_path}/store")
    assert (
        "no route" in said[0] and len(said) == 2 and "nothing has come" in said[1] and said[1].endswith("n1:/tmp/log")
    )


def test_a_request_to_leave_is_at_the_address_before_the_engine_hears_of_it(tmp_path: Path) -> None:
    place, hosts = brought(tmp_path)
    away = Away(inner := Ending(tmp_path / "here"), [hosts], print)
    away.signal(signal.SIGTERM)
    away.cancel()
    assert inner.calls == ["signal 15", "cancel"] and (place / "job" / "engine" / "leave").exists()


def test_a_new_job_finds_no_exit_codes_of_the_one_before(tmp_path: Path) -> None:
    place, hosts = brought(tmp_path)
    for name in ("job/engine/code", "1/engine/ended.0.1", "0/workerlog.0"):
        put(place, name, "1")
    hosts.begin()
    assert read(place).keys() == {"0/workerlog.0"}


# --- Slurm ----------------------------------------------------------------------------------------------------------


def job(tmp_path: Path, fakes: Path, **changes: Any) -> Job:
    made = Job(
        name="lenet",
        words=("+recipe=digits_lenet", "name=it's $(touch x)"),
        folder=tmp_path / "my run",
        command=(python_apart(fakes, "SLURM_NODEID"),),
        started_in=str(tmp_path / "not on the hosts"),
        hosts=2,
        grace_s=1,
        copies=f"file://{tmp_path}/store/my run",
    )
    return replace(made, **changes)


def play(job: Job, fakes: Path, life: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the batch script once, on a host with a disk of its own."""
    (script := fakes / "job.sh").write_text(Slurm(options={}).render(job))
    environment = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_RESTART_COUNT": str(life)}
    (disk := fakes / "disk.batch").mkdir(exist_ok=True)
    with (fakes / "said").open("w") as out:  # a pipe would be held by what the script has left running
        done = subprocess.run(
            ["bash", str(script)],
            env={**os.environ, **environment, "TMPDIR": str(disk), **variables},
            stdout=out,
            stderr=out,
            timeout=60,
            check=False,
        )
    return subprocess.CompletedProcess([], done.returncode, (fakes / "said").read_text())


def log(job: Job, place: Path) -> str:
    return (place / "run" / "job" / "engine" / "log").read_text()


@pytest.mark.all
def test_files_of_both_hosts_come_to_the_address_and_none_stay(tmp_path: Path, fakes: Path) -> None:
    one, place = job(tmp_path, fakes), tmp_path / "store" / "my run"
    end_with(fakes, 0, 0)
    done = play(one, fakes)
    assert done.returncode == 0, done.stdout
    found = read(place / "run")
    assert found["job/engine/code"] == "0\n" and found["job/engine/lives"] == "0 0 \n"
    assert found["0/result.json"] == '{"status": "done"}' and found["1/workerlog.1"] == "life of host 1\n"
    assert found["0/engine/ended.0.0"] == found["1/engine/ended.0.1"] == "0\n"
    words = "['+recipe=digits_lenet', \"name=it's $(touch x)\"]"
    line = f"words of host {{}} {words} {one.copies} {one.folder}\n"
    assert line.format(0) in log(one, place) and found["1/engine/host.1.log"] == line.format(1)
    assert not [name for name in found if "step-" in name] and not one.folder.exists()
    assert left_on_disks(fakes) == [] and not (tmp_path / "x").exists()


@pytest.mark.all
def test_a_preempted_job_goes_on_on_other_hosts_with_its_lives_and_logs(tmp_path: Path, fakes: Path) -> None:
    one, place = job(tmp_path, fakes, max_preemptions=1), tmp_path / "store" / "my run"
    end_with(fakes, 75, 75)
    play(one, fakes)
    assert asked(fakes) == "requeue 12\n" and not (place / "run" / "job" / "engine" / "code").exists()
    for disk in fakes.glob("disk.*"):  # other machines
        disk.rename(disk.with_name(f"gone.{disk.name}"))
    done = play(one, fakes, life=1)
    assert done.returncode == 75 and asked(fakes) == "requeue 12\n", "pre-empted more often than it may be"
    found = read(place / "run")
    assert found["job/engine/lives"] == "0 75 \n1 75 \n" and found["job/engine/code"] == "75\n"
    assert found["1/workerlog.1"] == "life of host 1\n" * 2
    assert log(one, place).count("words of host 0") == 2


@pytest.mark.all
def test_a_request_to_leave_reaches_the_script(tmp_path: Path, fakes: Path) -> None:
    one = job(tmp_path, fakes)
    Copies(one.copies, one.folder).leave()
    end_with(fakes, 75, 75)
    done = play(one, fakes)
    assert (done.returncode, asked(fakes)) == (75, "")


@pytest.mark.all
def test_a_cancelled_job_waits_for_its_files_although_signals_come(tmp_path: Path, fakes: Path) -> None:
    one, srun = job(tmp_path, fakes), fakes / "srun"
    signals = "(for i in $(seq 30); do kill -TERM $PPID; sleep 0.1; done) >/dev/null 2>&1 &\n"
    srun.write_text(srun.read_text() + signals)
    Copies(one.copies, one.folder).leave()
    end_with(fakes, 75, 75)
    done = play(one, fakes)
    assert (done.returncode, asked(fakes)) == (75, "")


def test_the_error_of_another_host_is_shown(tmp_path: Path, fakes: Path) -> None:
    one = job(tmp_path, fakes)
    end_with(fakes, 1, 3)
    assert play(one, fakes).returncode == 1
    assert "slurm: host 1 (n2) ended with exit code 3:\nwords of host 1" in log(one, tmp_path / "store" / "my run")


@pytest.mark.all
def test_a_host_whose_exit_code_does_not_come_is_lost_and_stays_excluded(
    tmp_path: Path, fakes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_script, "COPIES_S", 3.0)
    one, lives = job(tmp_path, fakes), tmp_path / "store" / "my run" / "run" / "job" / "engine" / "lives"
    end_with(fakes, 1)
    play(one, fakes)
    assert asked(fakes) == "scancel --signal=KILL 12.0\nrequeue 12\nupdate JobId=12 ExcNodeList=n2\n"
    assert lives.read_text() == "0 1 n2\n" and left_on_disks(fakes) == []


def test_an_address_that_cannot_be_reached_ends_the_job_with_the_reason(tmp_path: Path, fakes: Path) -> None:
    (tmp_path / "store").write_text("a file")
    end_with(fakes, 0, 0)
    done = play(job(tmp_path, fakes), fakes)
    assert done.returncode == 1 and "an address that all hosts can reach" in done.stdout


@pytest.mark.all
def test_each_job_of_a_sweep_has_copies_of_its_own_and_the_id_of_the_sweep(tmp_path: Path, fakes: Path) -> None:
    points = tuple(Point((f"x={i}",), tmp_path / str(i), "", f"file://{tmp_path}/store/sw/{i}") for i in range(2))
    one = job(tmp_path, fakes, points=points, swept=("x",), copies=f"file://{tmp_path}/store/sw")
    (tmp_path / "my run").mkdir()
    (tmp_path / "my run" / "tracking.json").write_text("id")
    Copies(one.copies, one.folder).give("tracking.json")
    task = fakes / "task"
    shows = 'print("sweep", open(os.environ["TRAINER_SWEEP_DIR"] + "/tracking.json").read())\nsys.exit('
    task.write_text(task.read_text().replace("sys.exit(", shows))
    end_with(fakes, 0, 0)
    assert play(one, fakes, SLURM_ARRAY_TASK_ID="1").returncode == 0
    lines = log(one, tmp_path / "store" / "sw" / "1")
    assert "words of host 0 ['x=1']" in lines and "sweep id" in lines
    assert not (tmp_path / "store" / "sw" / "0").exists()


def test_the_script_is_the_one_that_was_read() -> None:
    one = Job(
        name="lenet",
        words=("+recipe=digits_lenet", "name='a $b c'"),
        folder=Path("/home/ann/outputs/one"),
        command=("/opt/venv/bin/python",),
        started_in="/home/ann",
        hosts=2,
        setup=("module load cuda",),
        copies="s3://bucket/runs/outputs/one",
    )
    text = Slurm().render(one)
    assert text == GOLDEN.read_text()
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_the_secret_is_in_the_script_alone(tmp_path: Path, fakes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fakes / "sbatch").write_text("#!/bin/bash\necho 12\n")
    (fakes / "sbatch").chmod(0o755)
    one = job(tmp_path, fakes)
    handle = Slurm().submit(one)
    assert isinstance(handle, SlurmJob) and handle.early == "/tmp/trainer-12.log on its first host"
    script = one.engine_folder / "job.sh"
    (line,) = [line for line in script.read_text().splitlines() if line.startswith("TRAINER_RUN_SECRET=")]
    assert len(line.split()[0]) >= len("TRAINER_RUN_SECRET=") + 32 and script.stat().st_mode & 0o077 == 0
    assert "drawn" in Slurm().render(one), "what is printed has none"


# --- what is typed --------------------------------------------------------------------------------------------------


def test_without_an_address_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["+recipe=digits_lenet", "tracking=none", "launch=slurm", "launch.shared_storage=false"]
    assert __main__.main([*words, "launch.dry_run=true"]) == 2
    said = capsys.readouterr().err
    assert "launch.shared_storage=false" in said and "checkpoint.to=s3://BUCKET/RUNS" in said


class Elsewhere(Slurm):
    """An engine of one's own, which knows nothing of hosts without a common disk."""

    runs_apart = False


APART = ["+recipe=digits_lenet", "launch=slurm", "launch.shared_storage=false", "checkpoint.to=file:///copies"]


def test_an_engine_that_needs_a_common_disk_refuses_to_do_without(capsys: pytest.CaptureFixture[str]) -> None:
    own = "launch._target_=tests.launch.engines.test_copies.Elsewhere"
    assert __main__.main([*APART, "tracking=none", "launch.dry_run=true", own]) == 2
    assert "Elsewhere runs its jobs on hosts that share the run folder" in capsys.readouterr().err


def test_a_tracking_store_that_ends_with_the_hosts_is_named(
    tmp_path: Path, fakes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (fakes / "sbatch").write_text("#!/bin/bash\necho 12\n")
    (fakes / "sbatch").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    words = [*APART[:-1], f"checkpoint.to=file://{tmp_path}/store", "launch.wait=false"]
    assert __main__.main([*words, f"tracking.uri=sqlite:///{tmp_path}/mlflow.db", "hydra.run.dir=run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"ATTENTION: tracking.uri=sqlite:///{tmp_path}/mlflow.db is a file" in said and "http://SERVER:PORT" in said
    assert f"Its files come to file://{tmp_path}/store/run; the command that follows it brings them here" in said
    assert __main__.main([*words, "tracking=none", "hydra.run.dir=other"]) == 0
    assert "is a file" not in capsys.readouterr().out


def test_what_an_ended_job_has_left_at_the_address_is_brought_by_the_same_command(
    tmp_path: Path, fakes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job has ended while nobody followed it, and Slurm has forgotten it."""
    (fakes / "sbatch").write_text("#!/bin/bash\necho 12\n")
    (fakes / "sbatch").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    words = [*APART[:-1], f"checkpoint.to=file://{tmp_path}/store", "tracking=none", "hydra.run.dir=run"]
    assert __main__.main([*words, "launch.wait=false"]) == 0
    place = tmp_path / "store" / "run" / "run"
    for name, text in {"job/engine/log": "its lines\n", "job/engine/code": "3\n", "0/metrics.jsonl": "{}\n"}.items():
        put(place, name, text)
    (fakes / "sbatch").unlink()
    (fakes / "scontrol").write_text("#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2\nexit 1\n")
    assert __main__.main(words) == 3
    assert "its lines\n" in capsys.readouterr().out and (tmp_path / "run" / "metrics.jsonl").read_text() == "{}\n"


@pytest.mark.parametrize(
    ("state", "more", "refused"), [("", "", True), ("done", "", False), ("", "resume=auto", False)]
)
def test_checkpoints_of_an_unfinished_run_at_the_address_are_not_given_up(
    tmp_path: Path,
    fakes: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    state: str,
    more: str,
    refused: bool,
) -> None:
    """No host begins, hours later, to refuse what this machine can see."""
    (fakes / "sbatch").write_text('#!/bin/bash\ntouch "$FAKES/submitted"\necho 12\n')
    (fakes / "sbatch").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    (step := tmp_path / "store" / "run" / "step-000000002").mkdir(parents=True)
    (step / "COMPLETE").write_text("{}")
    monkeypatch.setattr(Remote, "_is_whole", lambda remote, name: True)
    put(tmp_path / "store" / "run" / "run", "0/status.json", f'{{"state": "{state or "running"}"}}')
    words = [*APART[:-1], f"checkpoint.to=file://{tmp_path}/store", "tracking=none", "hydra.run.dir=run"]
    code = __main__.main([*words, "launch.wait=false", *filter(None, [more])])
    assert code == (2 if refused else 0) and (fakes / "submitted").exists() != refused
    assert ("holds checkpoints of a run in a folder of that name" in capsys.readouterr().err) == refused


def test_the_files_of_config_dir_travel_with_the_job(tmp_path: Path) -> None:
    (tmp_path / "mine" / "recipe").mkdir(parents=True)
    (tmp_path / "mine" / "recipe" / "one.yaml").write_text("seed: 3")
    (tmp_path / "mine" / "weights.bin").write_bytes(b"x" * 1000)
    words, packed = submit._with_config(["--config-dir", str(tmp_path / "mine"), "+recipe=one"])
    assert words == ("+recipe=one",)
    assert _unpacked(packed, tmp_path / "there") == ["--config-dir", str(tmp_path / "there")]
    assert read(tmp_path / "there") == {"recipe/one.yaml": "seed: 3"}
    (tmp_path / "mine" / "two.yaml").write_bytes(os.urandom(200_000))
    with pytest.raises(UserError, match="FOLDER with this run's files alone"):
        submit._with_config(["--config-dir", str(tmp_path / "mine")])


def test_files_of_config_dir_that_come_from_a_secret_are_unpacked_and_not_handed_on(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "one.yaml").write_text("seed: 3")
    _, packed = submit._with_config(["--config-dir", str(tmp_path / "mine")])
    task = "import os, sys; print(sys.argv, os.listdir(sys.argv[-2]), sorted(os.environ))"
    (tmp_path / "task").write_text(f"#!{sys.executable}\n{task}\n")
    (tmp_path / "task").chmod(0o755)
    start = f"import sys; sys.executable = {str(tmp_path / 'task')!r}; from trainer.launch.engines import carried; "
    asked = Carried(("seed=1",), f"file://{tmp_path}/store", "", "", str(tmp_path / "run"))
    variables = {
        "TRAINER_CARRIED": asked.text(),
        "TRAINER_CARRIED_CONFIG": packed,
        "TRAINER_SUBMITTED": "kubernetes",
        "JOB_COMPLETION_INDEX": "0",
        "TMPDIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", f"{start}sys.exit(carried.main([]))"],
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "'seed=1'] ['one.yaml']" in done.stdout, done.stdout + done.stderr
    assert "TRAINER_SUBMITTED" in done.stdout and "TRAINER_CARRIED" not in done.stdout


def test_what_a_host_gets_can_be_read_again() -> None:
    asked = Carried(("a=' b'",), "s3://x/y", "", "/home/ann", "/home/ann/run")
    read_again = Carried.of(asked.text())
    assert replace(read_again, words=tuple(read_again.words)) == asked


def test_a_host_says_where_the_command_was_typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from trainer.cli.last_lines import shown

    monkeypatch.setenv("TRAINER_RUN_DIR", str(tmp_path / "scratch" / "run"))
    monkeypatch.setenv("TRAINER_NAMED", "/home/ann/outputs/one")
    assert shown(tmp_path / "scratch" / "run" / "result.json") == "/home/ann/outputs/one/result.json"
