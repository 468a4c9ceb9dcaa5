"""The launcher tells that the disk of a run is full, and that it has room again, each once."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.errors import RunFailed
from trainer.launch.full_disk import POLL_S, FullDisk
from trainer.launch.process import Failure


def test_what_has_changed_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [0.0], list[str]()
    disk = SimpleNamespace(f_flag=0, f_blocks=100, f_bavail=1, f_bfree=1)
    monkeypatch.setattr(os, "statvfs", lambda path: disk)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    watch = FullDisk(Path("run"), said.append, lambda: now[0])

    def looked(**changes: int) -> list[str]:
        vars(disk).update(changes)
        said.clear()
        for _ in range(3):
            now[0] += POLL_S
            watch.poll()
        return [*said]

    assert looked() == []
    [line] = looked(f_bavail=0)
    assert line.startswith("\nATTENTION: the disk of run is full; the training goes on")
    assert looked() == []
    assert looked(f_bavail=1) == ["the disk of run has room again"]
    assert "the disk of run is read-only" in looked(f_flag=os.ST_RDONLY)[0]
    looked(f_flag=0)
    assert looked(f_bavail=0, f_blocks=0) == [], "a file system that does not know its size"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert looked(f_blocks=100) == [], "root may use what is reserved"


def test_what_is_told_for_users_stays_what_it_is_though_a_full_disk_was_the_cause() -> None:
    told = Failure.of(RunFailed("worker 1: no checkpoint: I/O error: No space left on device (os error 28)"))
    assert told.words.startswith("worker 1: no checkpoint") and told.ends_run
    bare = Failure.of(OSError("I/O error: No space left on device (os error 28)"))
    assert (bare.words, bare.for_users) == ("a file cannot be written: No space left on device", True)


def test_folder_that_may_not_be_written_to_is_a_sentence_and_a_file_that_may_not_be_read_is_the_users_own() -> None:
    part = ".model.safetensors.10477-2b2a2faa"
    for name, own in ((f"run/{part}", True), ("data/labels.csv", False), (None, False)):
        failure = Failure.of(PermissionError(errno.EACCES, "Permission denied", name))
        assert failure.for_users == own, name
        assert (failure.words == f"{name} cannot be written: Permission denied") == own, name
