"""A run's folder belongs to one run at a time."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import time
from pathlib import Path

import pytest

from tests import runs
from tests.pace import wait_for
from trainer.__main__ import main
from trainer.errors import UserError
from trainer.job import claim_folder
from trainer.run_folder.folder_lock import BUSY, FolderLock, refusal, user_name

DIGITS = ("+recipe=digits_lenet", "tracking=none", "execution.threads=1", "execution.log_every=1", "hydra.run.dir=run")
STRANGER = 65534
GATE = "callbacks=[{_target_:tests.faults.gate.Gate,at:2,until:go}]"
FILES = ("config.yaml", "plan.json", "lives.json", ".hydra/overrides.yaml", ".hydra/config.yaml")


def test_many_share_a_folder_and_one_takes_it(tmp_path: Path) -> None:
    one, other, third = FolderLock(tmp_path), FolderLock(tmp_path), FolderLock(tmp_path)
    waited: list[str] = []
    assert one.share() and other.share() and not third.take()
    assert not third.take_within(0.0, lambda: waited.append("told")) and waited == ["told"]
    one.leave()
    assert third.take_within(60.0, other.leave)
    assert not FolderLock(tmp_path).share(), "it is taken"
    third.leave()
    assert FolderLock(tmp_path / "nowhere").take(), "there is nothing to hold"


def test_a_stranger_who_may_read_the_folder_holds_nobody_up(tmp_path: Path) -> None:
    """A stranger can lock whatever file or folder he can open; of the lock's file only its owner is one who can."""
    reader = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(reader, fcntl.LOCK_EX)
    hold = FolderLock(tmp_path)
    assert hold.take() and (tmp_path / ".lock").stat().st_mode & 0o777 == 0o600
    os.close(reader)


def test_who_only_looks_makes_no_file_and_a_link_is_not_followed(tmp_path: Path) -> None:
    assert FolderLock(tmp_path, make=False).take() and list(tmp_path.iterdir()) == []
    (tmp_path / ".lock").symlink_to(tmp_path / "other")
    refused(tmp_path, rf"\.lock in it is no ordinary file, .* rm -r {tmp_path}/\.lock; or another folder")
    assert not (tmp_path / "other").exists()


def test_a_folder_in_the_place_of_the_lock_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    refused(tmp_path, rf"\.lock in it is a folder, .* Type instead: rm -r {tmp_path}/\.lock; or another folder")


def test_who_holds_a_folder_is_named(tmp_path: Path) -> None:
    one, other = FolderLock(tmp_path), FolderLock(tmp_path)
    assert one.take() and refusal(other, "", "").why == BUSY
    one.sign()
    who = rf"process {os.getpid()} of user \S+ on host {re.escape(socket.gethostname())}, since \d{{4}}-\d\d-\d\d "
    assert re.search(who, refusal(other, "", "").why) and not other.take()
    (tmp_path / ".lock").write_text("[" * 5000)
    assert refusal(other, "", "").why == BUSY


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
@pytest.mark.parametrize(("mode", "who_can"), [(0o777, "you"), (0o1777, user_name(0)), (0o755, user_name(0))])
def test_a_lock_of_another_user_is_refused_at_once_with_his_name_and_what_removes_it(
    mode: int, who_can: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "run").mkdir()
    folder.chmod(mode)
    (folder / ".lock").touch(0o600)
    monkeypatch.chdir(folder)  # a stranger may not enter those above it
    os.seteuid(STRANGER)
    try:
        advice = rf"rm -f \.lock \({who_can} can\), once no run of {user_name(0)} works there; or another folder"
        refused(Path(), rf"\.lock in it belongs to user {user_name(0)}, .* Type instead: {advice}")
        if who_can == "you":
            os.remove(".lock")
            assert FolderLock(Path()).take()
    finally:
        os.seteuid(0)


def refused(folder: Path, sentence: str) -> None:
    """A run in the folder is refused at once, and nobody is said to work there."""
    said: list[str] = []
    began = time.monotonic()
    with pytest.raises(UserError, match=sentence) as caught, claim_folder.alone(folder, said.append):
        pass
    assert not said and time.monotonic() - began < claim_folder.PATIENCE_S / 3
    assert BUSY not in str(caught.value) and not FolderLock(folder).share()


def test_a_second_run_in_the_folder_is_refused_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(claim_folder, "PATIENCE_S", 0.1)
    first = runs.start(*DIGITS, GATE, "launch.nproc=2", "max_steps=4", cwd=tmp_path)
    try:
        wait_for(lambda: runs.read(tmp_path / "run" / "status.json").get("step", 0) >= 1, 90, "it trains")
        wait_for(
            lambda: all(one["pid"] for one in runs.read(tmp_path / "run" / "plan.json")["topology"]["processes"]),
            90,
            "numbers",
        )
        before = {name: (tmp_path / "run" / name).read_bytes() for name in FILES}
        code, said = main([*DIGITS, "resume=fresh", "seed=5"]), capsys.readouterr()
        assert code == 2, said.out
        assert "waits for the end of the run" in said.out, "it may be a life that has been killed"
        who = f"process {first.pid} of user {user_name(os.geteuid())} on host {socket.gethostname()}, since 2"
        assert "processes of a run still work in this folder" in said.err and who in said.err, said.err
        assert {name: (tmp_path / "run" / name).read_bytes() for name in FILES} == before
        (tmp_path / "run" / "go").touch()
        assert first.wait(90) == 0
    finally:
        first.kill()
    third = runs.trainer(*DIGITS, "max_steps=4", cwd=tmp_path)
    assert third.returncode == 0 and "written over" in third.stdout
