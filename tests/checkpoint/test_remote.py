"""Checkpoints that are copied to an address: what another machine goes on from, and what it must not take."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
import s3fs
from fsspec.implementations.local import LocalFileSystem
from moto.server import ThreadedMotoServer

import trainer
from tests import runs
from tests.checkpoint.test_identity import DIGITS, EVERYTHING, back_at, check_equal, lines
from trainer import checkpoints as commands
from trainer.checkpoint import durable_folder, store
from trainer.checkpoint.remote import ASIDE, OF_RUN, Remote
from trainer.errors import UserError
from trainer.job import claim_folder
from trainer.job.fetch_checkpoints import _fetch_newer, _into_cache
from trainer.job.uploads import Uploads
from trainer.run_folder.folder_lock import FolderLock

RUN = (*DIGITS, *EVERYTHING, "epochs=2", "ema.decay=0.9", "hydra.run.dir=run")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of an empty bucket of a server on loopback."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    told = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    for name, value in {**told, "AWS_DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()  # one of another test knows another server
    boto3.client("s3").create_bucket(Bucket="checkpoints")
    yield "s3://checkpoints/of/us"
    server.stop()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was never interrupted, and its copies in ``copies``; none of its tests changes it."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        trainer.run([*RUN, f"checkpoint.to=file://{folder}/copies"])
    return folder


@pytest.fixture
def machine(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh machine, on which the copies are at hand up to update 9."""
    shutil.copytree(whole / "copies", tmp_path / "copies")
    for step in steps(tmp_path / "copies" / "run")[9:]:
        shutil.rmtree(tmp_path / "copies" / "run" / step)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def steps(folder: Path) -> list[str]:
    return sorted(found.name for found in folder.glob("step-*"))


def goes_on(machine: Path, *more: str) -> str:
    ended = runs.trainer(*RUN, f"checkpoint.to=file://{machine}/copies", "resume=auto", *more, cwd=machine)
    assert ended.returncode == 0, ended.stdout[-1500:] + ended.stderr[-3000:]
    return ended.stdout


def test_every_checkpoint_is_there_when_the_run_has_ended(whole: Path) -> None:
    here, there = whole / "run" / "checkpoints", whole / "copies" / "run"
    assert steps(there) == steps(here) and len(steps(here)) == 14
    for step in steps(here):
        for file in (here / step).iterdir():
            assert (there / step / file.name).read_bytes() == file.read_bytes()


@pytest.mark.all
def test_another_machine_goes_on_as_if_nothing_had_happened(machine: Path, whole: Path) -> None:
    assert "fetches file://" in goes_on(machine)
    assert len(lines(machine / "run")) > 0
    check_equal(machine / "run", whole / "run")
    assert steps(machine / "copies" / "run") == steps(whole / "copies" / "run")


@pytest.mark.all
def test_it_goes_on_from_an_object_store(
    bucket: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for machine in ("one", "other"):
        (tmp_path / machine).mkdir()
        monkeypatch.chdir(tmp_path / machine)
        trainer.run([*RUN, f"checkpoint.to={bucket}", "resume=auto"])
        if machine == "one":
            remote = Remote(f"{bucket}/run")
            assert len(remote.found()) == 14
            for step in remote.found()[:5]:
                remote.remove(step)
            assert remote.found()[0] == "step-000000009"
    check_equal(tmp_path / "other" / "run", whole / "run")
    assert Remote(f"{bucket}/run").found()[0] == "step-000000014"
    assert lines(tmp_path / "other" / "run")[-1][0] == 14


@pytest.mark.all
def test_another_run_starts_from_an_address(
    bucket: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    remote = Remote(f"{bucket}/run")
    remote.put(whole / "run" / "checkpoints" / "step-000000009", whole / "run", ())
    for address in (f"{bucket}/run", f"{bucket}/run/step-000000009"):
        monkeypatch.chdir(tmp_path)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        trainer.run([*RUN, f"resume={address}"])
        assert (tmp_path / "run" / "model.safetensors").read_bytes() == (
            whole / "run" / "model.safetensors"
        ).read_bytes()


def test_of_two_commands_that_fetch_the_same_one_fetches_and_the_other_waits(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    begun, may_end, fetch, fetched, said = Event(), Event(), Remote.fetch, list[str](), list[str]()

    def slow(remote: Remote, step: str, checkpoints: Path) -> Path:
        fetched.append(step)
        (begun if len(fetched) == 1 else may_end).set()  # a second one would be the defect
        assert may_end.wait(60)
        return fetch(remote, step, checkpoints)

    def say(line: str) -> None:
        said.append(line)
        if line.startswith("waits for another command, which fetches from file://"):
            may_end.set()

    monkeypatch.setattr(Remote, "fetch", slow)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(_into_cache, f"file://{whole}/copies/run/step-000000009", say)
        assert begun.wait(60)
        other = pool.submit(_into_cache, f"file://{whole}/copies/run/step-000000009", say)
        folder = first.result()
        assert other.result() == folder and fetched == ["step-000000009"] and len(said) == 2, said
    assert store.check(folder) == folder
    assert (folder.parent.parent / "metrics.jsonl").is_file()


def flipped(file: Path) -> None:
    """Its last bit is another one now, as after a fault of the disk that nobody has noticed."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_damaged_copy_is_passed_over(machine: Path, whole: Path) -> None:
    damaged = machine / "copies" / "run" / "step-000000009" / "worker-0.safetensors"
    flipped(damaged)
    said = goes_on(machine)
    assert "passed over: file://" in said and "worker-0.safetensors" in said and "step-000000008" in said
    check_equal(machine / "run", whole / "run")


def test_a_plan_does_not_refuse_what_the_copy_would_mend(machine: Path, whole: Path) -> None:
    back_at(whole / "run", 9, machine / "run")
    for step in (machine / "run" / "checkpoints").glob("step-*"):
        flipped(step / "worker-0.safetensors")
    told = ("resume=auto", "plan=true", "verbosity=normal")
    planned = runs.trainer(*RUN, f"checkpoint.to=file://{machine}/copies", *told, cwd=machine)
    assert planned.returncode == 0 and "would be fetched first" in planned.stdout
    assert "the run begins" not in planned.stdout


def checkpoints(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return runs.trainer(*argv, cwd=cwd, module="trainer.checkpoints")


class Broken(Exception):
    """The machine dies here."""


@pytest.mark.parametrize("alive", range(5))
def test_a_copy_that_was_cut_off_is_none(
    alive: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever file is the last one that arrives, also where a copy of that name is replaced."""
    remote, source = Remote(f"file://{tmp_path}/copies"), whole / "run" / "checkpoints" / "step-000000009"
    names = ("metrics.jsonl", "status.json")
    written = len(names) + len(durable_folder.files(source, store.FORMAT)) + 1
    assert written >= 5
    remote.put(source, whole / "run", names)
    assert remote.found() == [source.name]
    put, left = remote.files.put_file, [alive]

    def dying(*told: object, **more: object) -> None:
        if not left[0]:
            raise Broken
        left[0] -= 1
        put(*told, **more)

    monkeypatch.setattr(remote.files, "put_file", dying)
    if alive < written:
        with pytest.raises(Broken):
            remote.put(source, whole / "run", names)
    assert Remote(f"file://{tmp_path}/copies").found() == ([] if alive < written else [source.name])


def test_copies_of_a_training_that_was_given_up_are_not_taken(machine: Path, whole: Path) -> None:
    """The user goes back to update 5 and changes the training: what follows update 5 there is of the other one."""
    back_at(whole / "run", 5, machine / "run")
    goes_on(machine, "resume=run/checkpoints/step-000000005", "checkpoint.every_steps=100", "checkpoint.keep_last=1")
    remote = Remote(f"file://{machine}/copies/run")
    assert remote.found()[0] == steps(machine / "run" / "checkpoints")[-1]
    given_up = [f"step-{step:09d}" for step in range(6, 10)]
    assert not set(remote.found()) & set(given_up)
    assert all((machine / "copies" / "run" / step / ASIDE).exists() for step in given_up)


def test_what_is_retired_here_is_removed_there(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "run", tmp_path / "run")
    there = tmp_path / "copies" / "run"
    uploads = Uploads(tmp_path / "run", Remote(f"file://{there}"), print)
    uploads.step()
    assert len(steps(there)) == 14 and not uploads.left()
    for step in steps(there)[:-2]:
        shutil.rmtree(tmp_path / "run" / "checkpoints" / step)
    newest = tmp_path / "run" / "checkpoints" / "step-000000014"
    newest.rename(newest.with_name("step-000000015"))
    uploads.step()
    assert steps(there) == ["step-000000013", "step-000000015"]


def test_an_address_that_fails_is_told_and_tried_again(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, said = [0.0], []
    remote = Remote(f"file://{tmp_path}/copies")
    uploads = Uploads(whole / "run", remote, said.append, clock=lambda: now[0])
    put = remote.files.put_file

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(remote.files, "put_file", full)
    uploads.step()
    uploads.step()
    assert len(said) == 1 and "No space left" in said[0] and "14 checkpoints" in said[0]
    assert uploads.again_at > 0
    left = uploads.close(patience_s=0)
    assert len(left) == 14 and "resume=auto copies what is left" in said[-1]
    monkeypatch.setattr(remote.files, "put_file", put)
    uploads.step()
    assert not uploads.left() and "is copied to" in said[-1]


def test_the_copies_of_a_folder_named_by_its_whole_path_are_found_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = [*RUN, f"checkpoint.to=file://{tmp_path}/copies", f"hydra.run.dir={tmp_path}/at/run", "limit_train_batches=2"]
    for here in ("at", "at/run", "cron"):
        (tmp_path / here).mkdir(parents=True)
        monkeypatch.chdir(tmp_path / here)
        trainer.run([*run, "resume=auto"])
        assert len(steps(tmp_path / "copies" / str(tmp_path / "at" / "run").lstrip("/"))) == 4
        lives = json.loads((tmp_path / "at" / "run" / "lives.json").read_text())
        assert len(lives) == (1 if here == "at" else 2), "the copy was found: it knows the life before"
        shutil.rmtree(tmp_path / "at")


def test_copies_by_the_other_name_are_told_and_an_empty_address_is_named(machine: Path) -> None:
    told = (f"checkpoint.to=file://{machine}/copies", "resume=auto", f"hydra.run.dir={machine}/run")
    whole_name = f"file://{machine}/copies{machine}/run"
    refused = runs.trainer(*RUN, *told, cwd=machine)
    assert refused.returncode == 2 and not (machine / "run" / "checkpoints").exists()
    assert f"there is no copy at {whole_name}, and step-000000009 is at file://{machine}/copies/run" in refused.stderr
    assert f"python -m trainer.checkpoints fetch file://{machine}/copies/run {machine}/run first" in refused.stderr
    shutil.rmtree(machine / "copies")
    begun = runs.trainer(*RUN, *told, "plan=true", "verbosity=normal", cwd=machine)
    assert begun.returncode == 0 and f"resume=auto: there is no checkpoint at {whole_name}" in begun.stdout


def test_a_run_that_could_go_on_is_not_written_over(machine: Path) -> None:
    ended = runs.trainer(*RUN, f"checkpoint.to=file://{machine}/copies", cwd=machine)
    assert ended.returncode == 2 and "resume=auto" in ended.stderr and "step-000000009" in ended.stderr
    assert len(steps(machine / "copies" / "run")) == 9 and not (machine / "run").exists()


def test_a_whole_copy_takes_the_place_of_a_damaged_checkpoint(machine: Path, whole: Path) -> None:
    back_at(whole / "run", 9, machine / "run")
    flipped(machine / "run" / "checkpoints" / "step-000000009" / "worker-0.safetensors")
    said = goes_on(machine)
    assert "passed over: " in said and "step-000000009/worker-0.safetensors" in said
    assert f"fetches file://{machine}/copies/run/step-000000009" in said
    check_equal(machine / "run", whole / "run")
    assert not list((machine / "copies" / "run").glob("*/ASIDE"))


def test_an_older_checkpoint_is_not_taken_because_the_network_fails(
    machine: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back_at(whole / "run", 8, machine / "run")

    def away(*arguments: Any, **more: Any) -> None:
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr(LocalFileSystem, "get_file", away)
    with pytest.raises(UserError, match=r"Connection reset by peer\. Type instead: an address that can be reached"):
        trainer.run([*RUN, f"checkpoint.to=file://{machine}/copies", "resume=auto"])
    assert not list((machine / "copies" / "run").glob("*/ASIDE"))
    assert steps(machine / "run" / "checkpoints")[-1] == "step-000000008"


def test_hosts_that_have_to_see_a_checkpoint_are_told_how_it_is_fetched(machine: Path) -> None:
    plan: Any = SimpleNamespace(
        paths=SimpleNamespace(run_dir=str(machine / "run"), whole_path=False), topology=SimpleNamespace(nnodes=2)
    )
    config: Any = SimpleNamespace(plan=False, checkpoint=SimpleNamespace(to=f"file://{machine}/copies"))
    address = f"file://{machine}/copies/run"
    with pytest.raises(UserError, match=rf"several hosts have to see it.*checkpoints fetch {address} {machine}/run$"):
        _fetch_newer(Remote(address), machine / "run", plan, config, print)
    assert not (machine / "run").exists()


def fetches(machine: Path, said: list[str]) -> bool:
    """What ``resume=auto checkpoint.to=...`` does in the folder ``run`` before it is planned."""
    plan: Any = SimpleNamespace(
        paths=SimpleNamespace(run_dir=str(machine / "run"), whole_path=False), topology=SimpleNamespace(nnodes=1)
    )
    config: Any = SimpleNamespace(plan=False, checkpoint=SimpleNamespace(to=f"file://{machine}/copies"))
    return _fetch_newer(Remote(f"file://{machine}/copies/run"), machine / "run", plan, config, said.append)


def test_nobody_works_in_the_folder_into_which_a_copy_is_fetched(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command, submitted twice, on a machine where there is no folder yet."""
    address, run, fetch, fetch_run, free = (
        f"file://{machine}/copies/run",
        machine / "run",
        Remote.fetch,
        Remote.fetch_run,
        list[bool](),
    )

    def other() -> None:
        hold = FolderLock(run)
        free.append(hold.share())
        hold.leave()

    def watched(remote: Remote, step: str, checkpoints: Path) -> Path:
        other()
        assert commands.main(["fetch", address, str(run)]) == 2
        return fetch(remote, step, checkpoints)

    def watched_run(remote: Remote, *told: Any) -> None:
        fetch_run(remote, *told)
        other()

    monkeypatch.setattr(Remote, "fetch", watched)
    monkeypatch.setattr(Remote, "fetch_run", watched_run)
    assert not fetches(machine, [])
    assert free == [False, False]
    other()
    assert free[-1] and steps(run / "checkpoints") == ["step-000000009"]
    shutil.rmtree(run)
    assert commands.main(["fetch", address, str(run)]) == 0
    assert free[3:] == [False, False], "nor in one that `fetch` makes"


def test_what_another_command_has_fetched_and_trained_meanwhile_stays(
    machine: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, said = claim_folder._take, list[str]()

    def late(*told: Any) -> None:
        shutil.rmtree(machine / "run")
        back_at(whole / "run", 11, machine / "run")
        (machine / "run" / "metrics.jsonl").write_text("of the other command")
        take(*told)

    monkeypatch.setattr(claim_folder, "_take", late)
    assert not fetches(machine, said) and not said
    assert (machine / "run" / "metrics.jsonl").read_text() == "of the other command"


def test_a_live_runs_empty_place_for_checkpoints_stays(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    fetches(tmp_path, said := [])
    assert "there is no checkpoint at" in said[0] and (tmp_path / "run" / "checkpoints").is_dir()


def test_copies_that_are_all_damaged_are_given_up_by_nobody_unasked(machine: Path) -> None:
    copies = machine / "copies" / "run"
    for step in steps(copies)[:-1]:
        shutil.rmtree(copies / step)
    flipped(copies / "step-000000009" / "worker-0.safetensors")
    ended = runs.trainer(*RUN, f"checkpoint.to=file://{machine}/copies", "resume=auto", cwd=machine)
    assert ended.returncode == 2 and "could be fetched; the newest is step-000000009" in ended.stderr
    assert steps(copies) == ["step-000000009"] and not (copies / "step-000000009" / ASIDE).exists()
    assert not (machine / "run" / "checkpoints").exists(), "nothing half fetched stays"


def test_a_run_that_begins_from_another_gives_up_no_copies_unasked(machine: Path, whole: Path) -> None:
    told = [*RUN, f"checkpoint.to=file://{machine}/copies"]
    for source in (f"{whole}/run", f"file://{machine}/copies/run"):
        ended = runs.trainer(*told, f"resume={source}", cwd=machine)
        assert ended.returncode == 2 and "resume=auto to go on with that run" in ended.stderr, ended.stderr
    assert len(steps(machine / "copies" / "run")) == 9 and not list((machine / "copies" / "run").glob("*/ASIDE"))


def test_the_plan_fetches_nothing(machine: Path) -> None:
    ended = runs.trainer(
        *RUN, f"checkpoint.to=file://{machine}/copies", "resume=auto", "plan=true", "verbosity=normal", cwd=machine
    )
    assert ended.returncode == 0 and "would be fetched first" in ended.stdout
    assert "copied to" in ended.stdout and f"{machine}/copies/run" in ended.stdout.replace("\n", "")
    assert not (machine / "run").exists()


@pytest.mark.parametrize(
    ("to", "said"),
    [
        ("s3://", "names no bucket"),
        ("s3:/bucket", "names no bucket"),
        ("backup", "names no bucket"),
        ("file://", "names no bucket"),
        ("foo://a/b", "foo"),
        ("gs://a/b", "gcsfs"),
        ("file:///proc/copies", "/proc"),
    ],
)
def test_addresses_that_cannot_be_used_are_refused(to: str, said: str, tmp_path: Path) -> None:
    ended = runs.trainer(*RUN, f"checkpoint.to={to}", cwd=tmp_path)
    assert ended.returncode == 2 and said in ended.stderr and "Traceback" not in ended.stderr
    assert not (tmp_path / "run").exists() and not (tmp_path / "s3:").exists()


def test_two_runs_that_try_one_address_at_once_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are of one recipe, and begin in the same second."""
    address, write, tried = f"file://{tmp_path}/copies/T", LocalFileSystem.pipe_file, list[str]()

    def and_the_other(files: LocalFileSystem, path: str, *told: Any, **more: Any) -> None:
        write(files, path, *told, **more)
        tried.append(path)
        if len(tried) == 1:
            Remote(address).try_writing()

    monkeypatch.setattr(LocalFileSystem, "pipe_file", and_the_other)
    Remote(address).try_writing()
    assert len(tried) == 2 and not list((tmp_path / "copies" / "T").iterdir())


def test_an_object_store_that_is_away_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    ended = runs.trainer(*RUN, "checkpoint.to=s3://a/b", cwd=tmp_path)
    assert ended.returncode == 2 and "s3://a/b/run" in ended.stderr and "Traceback" not in ended.stderr
    assert not (tmp_path / "run").exists()


def test_list_and_fetch(machine: Path, whole: Path) -> None:
    address = f"file://{machine}/copies/run"
    listed = checkpoints("list", address, cwd=machine)
    assert listed.returncode == 0 and len(listed.stdout.splitlines()) == 2 + 9, listed.stdout + listed.stderr
    fetched = checkpoints("fetch", address, "run", cwd=machine)
    assert fetched.returncode == 0, fetched.stderr
    folder = machine / "run" / "checkpoints" / "step-000000009"
    for file in (whole / "run" / "checkpoints" / folder.name).iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()
    assert (machine / "copies" / "run" / folder.name / OF_RUN / "metrics.jsonl").exists()
    none = checkpoints("list", f"file://{machine}/nothing", cwd=machine)
    assert none.returncode == 2 and "no whole checkpoint" in none.stderr


@pytest.mark.parametrize("read", ["about", "size", "fetch"])
def test_a_copy_that_its_run_removes_meanwhile_is_told_and_not_taken_for_a_damaged_one(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], read: str
) -> None:
    monkeypatch.setenv("TRAINER_CACHE", str(machine / "cache"))
    address, real = f"file://{machine}/copies/run", getattr(Remote, read)

    def late(remote: Remote, step: str, *told: Any) -> Any:
        if step == "step-000000009":
            remote.remove(step)
        return real(remote, step, *told)

    monkeypatch.setattr(Remote, read, late)
    if read != "fetch":
        assert commands.main(["list", address]) == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == [
            str(step) for step in range(8, 0, -1)
        ]
    if read == "about":
        return
    shutil.copytree(
        machine / "copies" / "run" / "step-000000008", machine / "copies" / "run" / "step-000000009", dirs_exist_ok=True
    )
    gone = rf"^{address}/step-000000009: the run that wrote this copy has removed it since it was found"
    with pytest.raises(UserError, match=gone):
        _into_cache(address, print)
    shutil.copytree(
        machine / "copies" / "run" / "step-000000008", machine / "copies" / "run" / "step-000000009", dirs_exist_ok=True
    )
    with pytest.raises(UserError, match=gone):
        fetches(machine, [])
    assert not steps(machine / "run" / "checkpoints"), "older ones were given up"


def test_a_copy_whose_mark_is_damaged_is_passed_over(machine: Path) -> None:
    (machine / "copies" / "run" / "step-000000009" / durable_folder.MARKER).write_text("{")
    assert not fetches(machine, said := [])
    assert "step-000000009/COMPLETE: it cannot be read" in said[0]
    assert steps(machine / "run" / "checkpoints") == ["step-000000008"]


def test_fetch_writes_over_no_run_that_is_not_at_the_address(machine: Path, whole: Path) -> None:
    address, run = f"file://{machine}/copies/run", machine / "run"
    shutil.copytree(whole / "run", run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    refused = checkpoints("fetch", address, "run", cwd=machine)
    assert refused.returncode == 2 and "holds a run whose newest checkpoint is step-000000014" in refused.stderr
    shutil.rmtree(run / "checkpoints")
    refused = checkpoints("fetch", address, "run", cwd=machine)
    assert refused.returncode == 2 and "no checkpoint in common" in refused.stderr
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}.items() <= before.items()
    shutil.copytree(whole / "run" / "checkpoints" / "step-000000008", run / "checkpoints" / "step-000000008")
    assert checkpoints("fetch", address, "run", cwd=machine).returncode == 0
    assert steps(run / "checkpoints") == ["step-000000008", "step-000000009"]


def test_copies_and_what_is_fetched_are_for_their_owners_eyes_alone(machine: Path, whole: Path) -> None:
    """As the run's config.yaml, which they hold a copy of."""
    assert commands.main(["fetch", f"file://{machine}/copies/run", str(machine / "run")]) == 0
    places = (machine / "copies", machine / "run" / "checkpoints", whole / "run" / "checkpoints")
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"checkpoint.json", "COMPLETE", "lives.json", "worker-0.safetensors"}
    assert [str(path) for path in (*files, whole / "run" / "lives.json") if path.stat().st_mode & 0o077] == []
