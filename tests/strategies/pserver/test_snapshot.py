"""Snapshots: complete or refused, with the file at fault; never a moment without the older one."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from trainer.checkpoint import streamed
from trainer.errors import UserError
from trainer.strategies.pserver.protocol import snapshot
from trainer.strategies.pserver.protocol.snapshot import of_worker, read, write_part

SERVERS = 3


def tensors(server: int, value: float) -> dict[str, torch.Tensor]:
    return {"user/ids": torch.arange(server), "user/rows": torch.full((server, 4), value), "fc": torch.ones(server, 2)}


def write(folder, value=1.0, servers=SERVERS, **extra):
    for server in range(servers):
        table = {"dim": 3, "dtype": "float32", "kernel": "rowwise_adagrad", "rows": server, "num_rows": 9}
        dense = [{"name": "fc", "start": server, "stop": server + 2}]
        meta = {"tables": {"user": table}, "dense": dense, "step": value, "mine": server, **extra}
        streams = {name: streamed.of(tensor.numpy()) for name, tensor in tensors(server, value).items()}
        write_part(of_worker(folder, 0), server, streams, meta)


def complete(folder, servers):
    snapshot.complete(of_worker(folder, 0), servers, folder)


def save(folder, value=1.0, servers=SERVERS):
    write(folder, value, servers)
    complete(folder, servers)


def refused(folder, file: str, verify: bool = True) -> str:
    with pytest.raises(UserError) as error:
        read(folder, verify)
    assert error.value.what == str(folder / file) and error.value.instead
    return error.value.why


def test_what_was_written_is_read(tmp_path):
    save(tmp_path / "last", 2.0)
    found = read(tmp_path / "last")
    assert found.servers == 3
    assert found.tables == {
        "user": {"dim": 3, "dtype": "float32", "kernel": "rowwise_adagrad", "rows": 3, "num_rows": 9}
    }
    assert found.dense[2] == {"name": "fc", "start": 2, "stop": 4, "server": 2}
    assert found.meta == {"step": 2.0, "mine": 0}
    assert [part.meta["mine"] for part in found.parts] == [0, 1, 2]
    for server, part in enumerate(found.parts):
        assert set(part.keys()) == set(tensors(server, 2.0))
        for name, tensor in tensors(server, 2.0).items():
            assert torch.equal(part.tensor(name), tensor)
    names = {path.name for path in (tmp_path / "last").iterdir()}
    assert names == {"COMPLETE", "index.json", *(f"server-{n}.safetensors" for n in range(3))}
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_killed_between_the_parts_there_is_no_snapshot(tmp_path):
    write(tmp_path / "last", servers=2)
    assert "last.by-0.partial" in refused(tmp_path / "last", ".")
    assert "not completed" in refused(tmp_path / "last.by-0.partial", "COMPLETE")
    with pytest.raises(UserError, match=r"server-2\.safetensors"):
        complete(tmp_path / "last", SERVERS)


def test_killed_between_the_parts_the_older_one_stays(tmp_path):
    save(tmp_path / "last", 1.0)
    write(tmp_path / "last", 2.0, servers=2)
    assert read(tmp_path / "last").meta["step"] == 1.0


def test_a_part_that_grew_or_shrank_before_the_end_is_refused(tmp_path):
    write(tmp_path / "last")
    with (tmp_path / "last.by-0.partial" / "server-1.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match=r"server-1\.safetensors"):
        complete(tmp_path / "last", SERVERS)


def test_parts_that_disagree_about_a_table_are_refused(tmp_path):
    write(tmp_path / "last")
    meta = {"tables": {"user": {"dim": 9, "dtype": "float32", "kernel": "sgd", "rows": 1}}}
    write_part(of_worker(tmp_path / "last", 0), 1, {}, meta)
    with pytest.raises(UserError, match=r"server-1\.safetensors"):
        complete(tmp_path / "last", SERVERS)


class Killed(BaseException):
    """The process is gone."""


def test_whenever_it_is_killed_there_is_a_complete_one(tmp_path, monkeypatch):
    """Every step on the disk in turn is the last one; afterwards the next save succeeds."""
    steps = [(os, "rename"), (os, "replace"), (os, "fsync"), (os, "unlink"), (shutil, "rmtree"), (streamed, "write")]
    folder, at, seen = tmp_path / "last", 0, set()
    save(folder, 0.0)
    finished = False
    while not finished:
        at += 1
        left = at
        with monkeypatch.context() as patch:

            def counted(real):
                def call(*args, **options):
                    nonlocal left
                    left -= 1
                    if left == 0:
                        raise Killed
                    return real(*args, **options)

                return call

            for module, name in steps:
                patch.setattr(module, name, counted(getattr(module, name)))
            before = read(folder).meta["step"]
            try:
                save(folder, float(at), servers=2)
                finished = True
            except Killed:
                pass
        found = read(folder)
        seen.add(found.folder.name)
        assert found.meta["step"] in (before, float(at))
        assert torch.equal(found.parts[1].tensor("user/rows"), torch.full((1, 4), found.meta["step"]))
    assert at > 20 and seen == {"last", "last.previous"}
    save(folder, 99.0)
    assert read(folder).meta["step"] == 99.0
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_fewer_servers_leave_no_part_of_more(tmp_path):
    write(tmp_path / "last", servers=5)
    save(tmp_path / "last", servers=2)
    assert not (tmp_path / "last" / "server-4.safetensors").exists() and read(tmp_path / "last").servers == 2


def test_another_format_version_is_refused_by_its_number(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "FORMAT", 7)
    save(tmp_path / "last")
    monkeypatch.undo()
    assert "version 7" in refused(tmp_path / "last", "COMPLETE")


def test_what_is_no_snapshot_is_refused_and_not_replaced(tmp_path):
    refused(tmp_path / "nowhere", ".")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"meow")
    assert "no snapshot" in refused(tmp_path / "photos", "COMPLETE")
    with pytest.raises(UserError, match="photos"):
        write_part(tmp_path / "photos", 0, {}, {})
    with pytest.raises(UserError, match="photos"):
        complete(tmp_path / "photos", 0)
    assert (tmp_path / "photos" / "cat.png").read_bytes() == b"meow"
