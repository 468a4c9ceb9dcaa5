"""Whatever happens to the files of a checkpoint is found, and the one before is taken and named; whatever stops a write
is said, leaves the older checkpoint whole, and the next one is written."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

import trainer
from tests.checkpoint import disk, saving
from trainer.checkpoint import durable_folder, store, tensor_tree, writer
from trainer.checkpoint.durable_folder import final_folder, life_folder
from trainer.checkpoints import main as tools
from trainer.errors import UserError
from trainer.strategies.pserver.protocol import snapshot_parts
from trainer.worker import best_model
from trainer.worker import checkpoints as of_worker

FILES = (
    "COMPLETE",
    "checkpoint.json",
    "worker-0.safetensors",
    "worker-1.safetensors",
    "server-0.safetensors",
    "full-0.safetensors",
    "best.safetensors",
)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """With those of updates 10 and 20, of two workers and a server."""
    folder = tmp_path / "run" / "checkpoints"
    for step in (10, 20):
        saving.save(folder, step, workers=2, keep_last=2, beside=FILES[4:])
    return folder


def flipped(path: Path) -> Iterator[Callable[[], None]]:
    """Each bit of each seventh byte, one after the other."""
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        broken = bytearray(content)
        broken[place] ^= 1 << place % 8
        yield lambda broken=broken: path.write_bytes(broken)  # type: ignore[misc]


def cut(path: Path) -> Iterator[Callable[[], None]]:
    """To nothing, to a half, by one byte; or one byte longer."""
    content = path.read_bytes()
    for shown in (b"", content[: len(content) // 2], content[:-1], content + b"}"):
        yield lambda shown=shown: path.write_bytes(shown)  # type: ignore[misc]


def gone(path: Path) -> Iterator[Callable[[], None]]:
    """Removed; a folder, or a link that leads nowhere or to itself, in its place."""
    yield path.unlink
    yield lambda: (path.unlink(), path.mkdir())  # type: ignore[func-returns-value]
    for leads in ("nowhere", path.name):
        yield lambda leads=leads: (path.unlink(), path.symlink_to(leads))  # type: ignore[misc]


def swapped(path: Path) -> Iterator[Callable[[], None]]:
    """With that of the other checkpoint, or of the other worker."""
    older = store.folder_of(path.parent.parent, 10) / path.name
    yield lambda: shutil.copy(older, path)
    if path.name == "worker-0.safetensors":
        yield lambda: shutil.copy(path.with_name("worker-1.safetensors"), path)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", [flipped, cut, gone, swapped])
def test_a_damaged_file_is_found_and_named_and_the_checkpoint_before_is_taken(
    how: Callable[[Path], Iterator[Callable[[], None]]], name: str, checkpoints: Path
) -> None:
    newest = store.folder_of(checkpoints, 20)
    path = newest / name
    content, done = path.read_bytes(), 0
    for damage in how(path):
        damage()
        if path.is_file() and path.read_bytes() == content:
            continue
        said: list[str] = []
        found = store.newest_whole(checkpoints, said.append)
        assert found is not None and saving.read(found) == (10, 1)
        assert len(said) == 1 and said[0].startswith(f"passed over: {newest}/"), said
        assert name in said[0] or name == "COMPLETE", said
        done += 1
        if path.is_dir():
            path.rmdir()
        elif path.is_symlink():
            path.unlink()
        path.write_bytes(content)
    assert done
    assert store.newest_whole(checkpoints) == newest


def test_a_whole_checkpoint_under_the_name_of_another_is_passed_over(checkpoints: Path) -> None:
    shutil.copytree(store.folder_of(checkpoints, 10), store.folder_of(checkpoints, 30))
    said: list[str] = []
    assert store.newest_whole(checkpoints, said.append) == store.folder_of(checkpoints, 20)
    assert said == [f"passed over: {store.folder_of(checkpoints, 30)}: it holds the checkpoint of update 10"]


def test_a_damaged_checkpoint_does_not_count_among_those_that_are_kept(checkpoints: Path) -> None:
    (store.folder_of(checkpoints, 20) / "worker-0.safetensors").write_bytes(b"")
    saving.save(checkpoints, 30, workers=2, keep_last=2)
    whole = [folder for folder in store.found(checkpoints) if store.is_whole(folder)]
    assert whole == [store.folder_of(checkpoints, 30), store.folder_of(checkpoints, 10)]


def test_the_best_stay_and_a_damaged_one_or_nan_is_not_the_best(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for step, value in ((10, 0.5), (20, 0.9), (30, float("nan")), (40, None), (50, 0.7)):
        saving.save(folder, step, keep_last=1, keep_best=1, value=value)
    assert [path.name[-2:] for path in store.found(folder)] == ["50", "20"]
    (store.folder_of(folder, 20) / store.ABOUT).write_text("{")
    saving.save(folder, 60, keep_last=1, keep_best=1)
    assert [path.name[-2:] for path in store.found(folder)] == ["60", "50"]


def marker(told: Any) -> str:
    body = {"format_version": store.FORMAT, "files": told}
    return json.dumps({**body, "checksum": durable_folder._digest(json.dumps(body, sort_keys=True).encode())})


@pytest.mark.parametrize(
    "told",
    [
        None,
        1,
        [],
        [["checkpoint.json", {}]],
        {"checkpoint.json": 1},
        {"../latest": {"bytes": 15}},
        {"/etc/hostname": {}},
        {"": {}},
        {".": {}},
        {"..": {}},
        {"a" * 300: {}},
        {"a\0": {}},
        {"\ud800": {}},
    ],
)
def test_a_crafted_marker_is_refused_with_a_sentence(checkpoints: Path, told: Any) -> None:
    (store.folder_of(checkpoints, 20) / "COMPLETE").write_text(marker(told))
    with pytest.raises(UserError, match="COMPLETE"):
        store.check(store.folder_of(checkpoints, 20))


@pytest.mark.parametrize("text", ["[" * 200_000 + "]" * 200_000, '{"files":' * 100_000, "\ufeff", "null", "\x00"])
def test_a_marker_of_nested_brackets_is_damage_and_the_checkpoint_before_is_taken(
    checkpoints: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = store.folder_of(checkpoints, 20)
    (newest / "COMPLETE").write_text(text)
    taken = store.newest_whole(checkpoints)
    assert taken is not None and taken.name == store.folder_of(checkpoints, 10).name
    for command in ("list", "verify"):
        assert tools([command, str(checkpoints.parent)]) == (1 if command == "verify" else 0)
    with pytest.raises(UserError, match="COMPLETE"):
        store.one_in(newest, print)
    assert "damaged" in capsys.readouterr().out


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
    lambda inner: st.lists(inner, max_size=2),
    max_leaves=3,
)


@pytest.mark.all
@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.sampled_from([*json.loads(saving.about(1)), "more"]), JSON)
def test_a_crafted_checkpoint_json_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: Any
) -> None:
    folder = tmp_path_factory.getbasetemp() / "crafted"
    folder.mkdir(exist_ok=True)
    (folder / store.ABOUT).write_text(json.dumps({**json.loads(saving.about(1)), key: value}))
    try:
        found = store.about(folder)
    except UserError:
        return
    assert isinstance(found.step, int) and isinstance(found.config, dict) and found.watched.worth is not None


@pytest.mark.parametrize("text", ["", "[]", "1", "null", '"text"', "{}", "[" * 100_000, '{"watched": 3}'])
def test_a_checkpoint_json_of_another_kind_is_refused_with_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / store.ABOUT).write_text(text)
    with pytest.raises(UserError, match=r"checkpoint\.json: it "):
        store.about(tmp_path)


@contextmanager
def failing(at: int) -> Iterator[list[str]]:
    """Inside, that change of the disk finds it full; the list has it then. Removing still works, as on a full disk."""
    done: list[str] = []
    count = 0

    def change(name: str, real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == at:
                done.append(name)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in disk.CHANGES:
            patch.setattr(os, name, change(name, getattr(os, name)))
        patch.setattr("trainer.checkpoint.tensor_tree.save_file", change("write", saving.tensor_tree.save_file))
        patch.setattr(Path, "write_text", change("write_text", Path.write_text))
        yield done


def test_a_disk_that_is_full_at_any_moment_is_said_and_the_next_checkpoint_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    failed = []
    for at in range(1, 200):
        run = tmp_path / str(at)
        saving.save(run, 10)
        with failing(at) as done:
            saving.save(run, 20)
        said = capsys.readouterr().out
        if not done:
            break
        failed += done
        newest = store.newest_whole(run)
        assert newest is not None and saving.read(newest) in ((10, 1), (20, 1))
        if saving.read(newest) == (10, 1):
            assert "no checkpoint at step-000000020: " in said and "No space left on device" in said, (at, done, said)
            assert "the one before stays, and it is tried again" in said
            assert [path.name for path in run.iterdir() if path.name.startswith("step")] == ["step-000000010"]
        latest = run / "latest"
        assert not latest.exists() or store.check(run / latest.read_text().strip())
        saving.save(run, 30)
        assert sorted(path.name for path in run.iterdir()) == ["latest", "step-000000030"]
    assert {"write", "write_text", "fsync", "replace", "rename", "unlink", "mkdir"} <= set(failed) and len(failed) > 20


def test_two_processes_of_one_number_write_one_file(tmp_path: Path) -> None:
    """On two hosts with one folder, or in two containers."""
    path = tmp_path / "latest"

    def overtaken(temporary: Path) -> None:
        temporary.write_text("step-000000010")
        durable_folder.durable_text(path, "step-000000020")

    durable_folder.durable(path, overtaken)
    assert path.read_text() == "step-000000010" and list(tmp_path.iterdir()) == [path]


def test_what_a_death_leaves_of_latest_does_not_stay(tmp_path: Path) -> None:
    saving.save(tmp_path, 10)
    (tmp_path / "latest.4711.tmp").write_text("step-0000")
    (tmp_path / "latest.mine").write_text("mine")
    saving.save(tmp_path, 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "latest.mine", "step-000000020"]


def test_a_checkpoint_whose_folder_is_removed_while_it_is_written_is_given_up_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "step-000000010"
    durable_folder.write(folder, "worker-0.safetensors", lambda path: path.write_text("part"))
    removed: list[str] = []

    def looks(name: str) -> bool:
        if not removed:
            shutil.rmtree(durable_folder.partial_of(folder))
            removed.append(name)
        return False

    said = writer.complete(folder, "{}", ["worker-0.safetensors", "worker-1.safetensors"], 1e9, looks)
    assert said == "step-000000010.partial was removed while it was written" and removed


def test_a_part_of_a_worker_that_hangs_is_not_waited_for_at_the_end(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(of_worker, "HUNG_S", 0.01)
    first, folder = saving.saver(checkpoints, workers=2, keep_last=2), store.folder_of(checkpoints, 30)
    first.patience_s, first.writer.background = 1e9, True
    parts = [store.part_of(0), store.part_of(1)]
    packed = tensor_tree.Packed(saving.state(30, 1))
    first.writer.begin(lambda: first._write(saving.RUN, folder, packed, saving.about(30), parts, 0.0))
    first.close(others_hang=True)
    assert "no checkpoint at step-000000030: worker-1.safetensors was not written" in capsys.readouterr().out
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step-000000010", "step-000000020"]


def test_a_note_that_comes_while_a_checkpoint_is_given_up_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, remove = tmp_path / "step-000000010", durable_folder.remove
    durable_folder.write(folder, "worker-0.safetensors", lambda path: path.write_text("part"))
    late = iter([True])

    def interrupted(path: Path) -> None:
        remove(path)
        if next(late, False):
            path.mkdir()
            assert writer.leave_failure(folder, "server-1.safetensors", "the disk is full")

    monkeypatch.setattr(durable_folder, "remove", interrupted)
    durable_folder.begin(folder)
    assert not list(tmp_path.iterdir())
    assert writer.leave_failure(folder, "server-1.safetensors", "the disk is full"), "nobody is there to tell"
    assert not list(tmp_path.iterdir())


def test_what_a_worker_of_the_life_before_writes_when_it_wakes_is_in_no_checkpoint_of_this_one(tmp_path: Path) -> None:
    """Its host was suspended in the middle of a write; the others went on without it, with another worker 1."""
    place, about, names = store.folder_of(tmp_path, 10), saving.about(10), [store.part_of(0), store.part_of(1)]
    before, now = (life_folder(place, f"0123456789abcde{life}") for life in (1, 2))
    assert before != now and final_folder(before) == final_folder(now) == place == life_folder(place, "")
    assert not writer.write_part(now, names[0], tensor_tree.Packed(saving.state(10, 2)))
    assert not writer.write_part(before, names[1], tensor_tree.Packed(saving.state(10, 1, 1)))
    assert writer.leave_failure(before, names[0], "it is of another life")
    assert "worker-1.safetensors was not written" in writer.complete(now, about, names, 0.01)
    assert not writer.write_part(now, names[1], tensor_tree.Packed(saving.state(10, 2, 1)))
    assert writer.complete(now, about, names, 1e9) == ""
    assert store.is_whole(place) and tensor_tree.read(place / names[1])["life"] == 2
    saving.save(tmp_path, 20, keep_last=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000000010", "step-000000020"]


def test_a_folder_that_is_replaced_while_it_is_read_is_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, files = tmp_path / "persistables", durable_folder.files

    def write(text: str) -> None:
        durable_folder.write(folder, "part", lambda path: path.write_text(text))
        durable_folder.complete(folder, ["part"], 1)

    def read_while_it_is_replaced(path: Path, version: int) -> Any:
        monkeypatch.setattr(durable_folder, "files", files)
        found = files(path, version)
        write("a longer part")
        return found

    write("a part")
    monkeypatch.setattr(durable_folder, "files", read_while_it_is_replaced)
    assert durable_folder.whole(folder, 1) == folder and (folder / "part").read_text() == "a longer part"
    (folder / "part").write_text("damaged")
    with pytest.raises(UserError, match="7 bytes, but 13 were written"):
        durable_folder.whole(folder, 1)


def test_nobody_sees_a_note_or_a_seal_that_is_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others look for these files all the time, and take what they read."""
    folder, name, write_text = tmp_path / "step-000000010", "server-1.safetensors", Path.write_text
    durable_folder.write(folder, "server-0.safetensors", lambda path: path.write_text("part"))
    pieces, seal = iter((b"part", b"")), durable_folder.seals(folder, ["server-0.safetensors"])["server-0.safetensors"]
    looks = []

    def halfway(path: Path, *arguments: Any, **options: Any) -> int:
        path.touch()
        looks.append(writer.failure_of(folder, name).exists() or durable_folder.is_written(folder, name))
        return write_text(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", halfway)
    assert writer.leave_failure(folder, name, "the disk is full")
    assert writer.failure_of(folder, name).read_text() == "the disk is full"
    writer.failure_of(folder, name).unlink()
    snapshot_parts.receive(folder, 1, lambda start: (seal, np.frombuffer(next(pieces), np.uint8)))
    assert durable_folder.seals(folder, [name]) == {name: seal}
    assert looks == [False, False]


def test_a_full_disk_leaves_room_for_an_empty_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, name = tmp_path / "step-000000010", "server-1.safetensors"
    durable_folder.partial_of(folder).mkdir()

    def full(path: Path, *arguments: Any, **options: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        assert writer.leave_failure(folder, name, "the disk is full")
    assert [path.name for path in durable_folder.partial_of(folder).iterdir()] == [f"{name}.failed"]
    assert writer.complete(folder, "{}", [name], 1e9) == f"{name} cannot be written"


def test_who_completes_an_older_checkpoint_late_does_not_name_it_the_newest(tmp_path: Path) -> None:
    saving.save(tmp_path, 20, keep_last=2)
    saving.save(tmp_path, 10, keep_last=2)
    assert (tmp_path / store.LATEST).read_text() == "step-000000020\n"
    assert [store.step_of(path.name) for path in store.found(tmp_path)] == [20, 10]


def test_a_full_disk_at_a_validation_costs_the_best_model_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save, tries = (
        best_model.save_by_first,
        iter((OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left on device"))),
    )

    def full(*arguments: Any) -> None:
        if (error := next(tries, None)) is not None:
            raise error
        save(*arguments)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(best_model, "save_by_first", full)
    trainer.run(
        [
            "+recipe=digits_lenet",
            "epochs=7",
            "limit_train_batches=20",
            "tracking=none",
            "hydra.run.dir=run",
            "data.batch_size=16",
            "checkpoint=none",
            "optimizer.lr=0.005",
            "scheduler=constant",
        ]
    )
    said = capsys.readouterr().out
    assert said.count("the best model cannot be written: ") == 2 and said.count("o space left on device") == 2
    assert (tmp_path / "run" / "checkpoints" / "best.safetensors").is_file()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_small_file_system_that_is_full_and_then_has_room_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import ctypes

    mount = ctypes.CDLL(None, use_errno=True)
    if mount.mount(b"none", os.fsencode(tmp_path), b"tmpfs", 0, b"size=48k"):
        pytest.skip("this container may not mount")
    try:
        run = tmp_path / "run"
        saving.save(run, 10)
        with pytest.raises(OSError, match="No space left"):
            (tmp_path / "filler").write_bytes(bytes(1 << 20))
        capsys.readouterr()
        saving.save(run, 20)
        assert (
            "no checkpoint at step-000000020" in (said := capsys.readouterr().out) and "o space left on device" in said
        )
        assert saving.read(store.newest_whole(run) or run) == (10, 1)
        (tmp_path / "filler").unlink()
        saving.save(run, 30)
        assert saving.read(store.newest_whole(run) or run) == (30, 1)
    finally:
        mount.umount2(os.fsencode(tmp_path), 2)


OBSTACLES: dict[str, Callable[[Path], Any]] = {
    "latest is a link": lambda run: ((run / "latest").unlink(), (run / "latest").symlink_to("../precious/file")),
    "latest is a loop": lambda run: ((run / "latest").unlink(), (run / "latest").symlink_to("latest")),
    "latest is a folder": lambda run: ((run / "latest").unlink(), (run / "latest").mkdir()),
    "a file where parts are written": lambda run: (run / "step-000000020.partial").write_text(""),
    "a loop where parts are written": lambda run: (run / "step-000000020.partial").symlink_to("step-000000020.partial"),
    "a link where parts are written": lambda run: (run / "step-000000020.partial").symlink_to("../precious"),
    "a link in its place": lambda run: (run / "step-000000020").symlink_to("step-000000010"),
    "a loop in its place": lambda run: (run / "step-000000020").symlink_to("step-000000020"),
    "a link to a folder in its place": lambda run: (run / "step-000000020").symlink_to("../precious"),
    "a file in its place": lambda run: (run / "step-000000020").write_text("mine"),
    "a folder in its place": lambda run: shutil.copytree(run.parent / "precious", run / "step-000000020"),
    "a link where the older steps aside": lambda run: (run / "step-000000020.previous").symlink_to("../precious"),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_nothing_in_the_way_loses_a_checkpoint_or_is_followed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, precious = tmp_path / "run", tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("mine")
    saving.save(run, 10)
    OBSTACLES[name](run)
    capsys.readouterr()
    saving.save(run, 20)
    newest = store.newest_whole(run)
    assert newest is not None
    if saving.read(newest) == (10, 1):
        assert "no checkpoint at step-000000020: " in capsys.readouterr().out
    saving.save(run, 30)
    assert saving.read(store.newest_whole(run) or run) == (30, 1)
    assert [path.name for path in precious.iterdir()] == ["file"] and (precious / "file").read_text() == "mine"


def test_a_folder_that_is_a_loop_or_a_file_has_no_checkpoints_and_gets_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("mine")
    for name in ("loop", "file"):
        assert store.newest_whole(tmp_path / name) is None
        saving.save(tmp_path / name, 10)
        assert "no checkpoint at step-000000010: " in capsys.readouterr().out
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_files_of_another_user_and_a_folder_that_is_read_only(capsys: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to others
        Path(folder).chmod(0o755)
        of_another_user(Path(folder) / "checkpoints", capsys)


def of_another_user(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (10, 20):
        saving.save(checkpoints, step, workers=2, keep_last=2)
    for path in checkpoints.glob("step-*/*"):
        path.chmod(0o644)
    (store.folder_of(checkpoints, 20) / "worker-0.safetensors").chmod(0o600)
    said: list[str] = []
    os.seteuid(65534)
    try:
        newest = store.newest_whole(checkpoints, said.append)
        saving.save(checkpoints, 30)
    finally:
        os.seteuid(0)
    assert newest == store.folder_of(checkpoints, 10)
    assert "worker-0.safetensors: it cannot be read (Permission denied)" in said[0]
    assert "no checkpoint at step-000000030: " in (shown := capsys.readouterr().out) and "Permission denied" in shown
    assert sorted(path.name[-2:] for path in store.found(checkpoints)) == ["10", "20"]
