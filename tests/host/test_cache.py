"""The cache is used only where no other user could have put something."""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch._inductor.codecache as codecache

import trainer as package
from tests.faults.stranger import NOBODY, said_by_nobody
from trainer.config.run_config import RunConfig
from trainer.data.prepared import MARKER, known, prepare_once
from trainer.errors import UserError
from trainer.host import cache, private
from trainer.planning.validate import check_compiler
from trainer.worker.compiling import own_code

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
COMPILE = RunConfig(compile=True)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/torchinductor_somebody")
    tmp_path.chmod(0o755)
    return tmp_path / "cache"


def make(part: Path) -> dict[str, Any]:
    return {"made": "by us"}


def reachable(folder: Path) -> None:
    """Let everybody enter the folders above."""
    for above in folder.parents:
        if above.owner() == "root" and above.parent != above and not os.stat(above).st_mode & 0o1000:
            above.chmod(0o755)


def planted(folder: Path) -> Path:
    """What somebody has put there for us to find."""
    folder.mkdir(parents=True)
    (folder / MARKER).write_text(json.dumps({"made": "by them"}))
    return folder


def test_a_new_cache_is_for_its_user_alone_whatever_the_umask(root: Path) -> None:
    before = os.umask(0)
    try:
        assert prepare_once(root / "kind" / "abc", make) == {"made": "by us"}
        with own_code():  # whatever torch has chosen when it was imported
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(root / "compiled")
            assert os.environ["TRITON_CACHE_DIR"] == str(root / "compiled" / "triton")
            assert private.is_private(Path(tempfile.gettempdir())) and os.environ["TMPDIR"] == tempfile.gettempdir()
            assert codecache._HEADER_DIR.startswith(str(root))
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/tmp/torchinductor_somebody"
    finally:
        os.umask(before)
    for folder in (root, root / "kind", root / "compiled"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
    assert known(root / "kind" / "abc") == {"made": "by us"}


@pytest.mark.parametrize("at", ["", "kind", "kind/abc"])
@pytest.mark.parametrize("mode", [0o777, 0o757, 0o772])
def test_folder_that_others_can_write_is_refused_and_the_repair_is_told(root: Path, at: str, mode: int) -> None:
    target = planted(root / "kind" / "abc")
    (root / at).chmod(mode)
    for ask in (lambda: known(target), lambda: prepare_once(target, make)):
        if mode == 0o772 and cache._is_private_group((root / at).stat().st_gid):
            (root / at).chmod(0o777)
        with pytest.raises(UserError, match=rf"the cache {root / at}.*: can be written by other users") as caught:
            ask()
        assert caught.value.instead == f"chmod go-w {root / at}"
    (root / at).chmod(0o755)
    assert known(target) == {"made": "by them"}


def test_what_cannot_be_read_now_is_not_prepared_anew(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, read = planted(root / "kind" / "abc"), Path.open

    def fails(path: Path, *arguments: Any) -> Any:
        if path.name == MARKER:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fails)
        with pytest.raises(UserError, match=rf"{target / MARKER}: cannot be read: Input/output error"):
            prepare_once(target, make)
    assert known(target) == {"made": "by them"}


@needs_root
@pytest.mark.parametrize("at", ["", "kind", "kind/abc"])
def test_folder_that_another_user_made_first_is_refused(root: Path, at: str) -> None:
    target = planted(root / "kind" / "abc")
    os.chown(root / at, NOBODY, NOBODY)
    with pytest.raises(UserError, match=r"belongs to another user .* who could put prepared data of theirs there"):
        prepare_once(target, make)
    assert json.loads((target / MARKER).read_text()) == {"made": "by them"}, "nothing of theirs is touched"


@needs_root
def test_below_a_common_folder_only_ones_own_is_used(root: Path) -> None:
    root.mkdir()
    root.chmod(0o1777)  # as /tmp
    assert prepare_once(root / "kind" / "abc", make) == {"made": "by us"}
    os.chown(root / "kind", NOBODY, NOBODY)
    with pytest.raises(UserError, match="belongs to another user"):
        known(root / "kind" / "abc")


def test_below_a_folder_that_nobody_can_enter_all_is_well(root: Path) -> None:
    target = planted(root / "kind" / "abc")
    (root / "kind").chmod(0o777)
    root.chmod(0o700)
    assert known(target) == {"made": "by them"}


@needs_root
def test_cache_of_root_is_read_by_others_and_written_by_root_alone(root: Path) -> None:
    planted(root / "kind" / "abc")
    reachable(root)
    assert said_by_nobody(lambda: prepare_once(root / "kind" / "abc", make)) == "{'made': 'by them'}"
    refused = f"UserError: the cache {root / 'kind'}: cannot be written by this user, and does not hold"
    assert said_by_nobody(lambda: prepare_once(root / "kind" / "new", make)).startswith(refused)


def test_only_inductor_asks_for_a_compiler_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.host.hardware.cpp_compiler", lambda: None)
    with pytest.raises(UserError, match="no C\\+\\+ compiler"):
        check_compiler(COMPILE, "cpu")
    check_compiler(COMPILE.changed(execution={"compile_backend": "aot_eager"}), "cpu")
    check_compiler(COMPILE, "cuda")


def test_triton_asks_for_the_compiler_that_it_would_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that is called ``cc`` is none that Triton knows."""
    for name in ("c++", "cc", "g++"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    build = pytest.importorskip("triton.runtime.build")
    for found in (False, True):
        if found:
            (tmp_path / "clang").touch(0o755)
            check_compiler(COMPILE, "cuda")
            assert build._find_compiler.__wrapped__("c") == str(tmp_path / "clang")
            continue
        with pytest.raises(UserError, match=r"no C compiler on this machine .*, which Triton needs.*: compile=false"):
            check_compiler(COMPILE, "cuda")
        with pytest.raises(RuntimeError, match="Failed to find C compiler"):
            build._find_compiler.__wrapped__("c")
        check_compiler(COMPILE.changed(execution={"compile_backend": "eager"}), "cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_compiled_kernels_ask_for_pythons_header(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(UserError, match=rf"there is no {tmp_path}/Python\.h, .*install Python's development files"):
        check_compiler(COMPILE, device)
    (tmp_path / "Python.h").touch()
    check_compiler(COMPILE, device)


@needs_root
@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_compiled_code_is_refused_where_anybody_could_have_put_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    theirs.chmod(mode)
    if mode == 0o755:
        os.chown(theirs, NOBODY, NOBODY)
    monkeypatch.setenv("TRAINER_CACHE", str(theirs / "cache"))  # ours, but the folder above is not
    (theirs / "cache").mkdir(mode=0o700)
    with pytest.raises(UserError, match=rf"the cache {theirs}: .* who could put compiled code of theirs there"):
        check_compiler(COMPILE, "cuda")
    check_compiler(RunConfig(), "cuda")
    assert prepare_once(theirs / "cache" / "abc", make) == {"made": "by us"}, (
        "data need no more than folders of one's own"
    )


@needs_root
def test_link_to_a_folder_of_another_user_is_looked_through(root: Path, tmp_path: Path) -> None:
    theirs = planted(tmp_path / "theirs" / "abc")
    os.chown(theirs.parent, NOBODY, NOBODY)
    root.mkdir()
    (root / "kind").symlink_to(theirs.parent)
    with pytest.raises(UserError, match="belongs to another user"):
        known(root / "kind" / "abc")
    (root / "compiled").symlink_to(theirs.parent)
    with pytest.raises(UserError, match="compiled code"):
        cache.check_code()


@pytest.mark.parametrize("data", ["embedded_flowers", "flowers102", "cifar10", "synthetic_criteo", "mnist"])
def test_job_that_would_use_a_cache_of_others_is_refused_and_writes_nothing(
    root: Path, tmp_path: Path, data: str
) -> None:
    root.mkdir()
    root.chmod(0o777)
    here = ["data.download=false", "data.on_missing=embedded", f"data.root={tmp_path}"]
    more = {
        "synthetic_criteo": ["+recipe=wide_and_deep"],
        "embedded_flowers": ["model=resnet18"],
        "mnist": ["model=lenet", *here],
    }.get(data, ["model=resnet18", *here])
    argv = [*more, f"data={data}", "tracking=none", f"hydra.run.dir={tmp_path / 'run'}"]
    if data == "mnist":  # scikit-learn's digits need no cache
        package.run([*argv, "plan=true"])
        return
    with pytest.raises(UserError, match=f"the cache {root}: can be written by other users"):
        package.run(argv)
    assert list(root.iterdir()) == [] and not (tmp_path / "run").exists()
