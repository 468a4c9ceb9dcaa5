"""Where temporary files go: to a folder that no other user can enter, in one where nobody else can rename it."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.stranger import NOBODY
from tests.runs import ROOT, environment
from trainer.errors import UserError
from trainer.host import cache, private
from trainer.host.in_use import HERE


def use(monkeypatch: pytest.MonkeyPatch, folder: Path, mode: int) -> None:
    folder.mkdir(exist_ok=True)
    folder.chmod(mode)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))


@pytest.fixture
def short() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="short-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o1777])
def test_scratch_lies_in_the_usual_place_and_is_for_its_maker_alone(
    short: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    use(monkeypatch, short, mode)
    before = os.umask(0)
    try:
        made = private.scratch("x-")
    finally:
        os.umask(before)
    assert made.parent == short and stat.S_IMODE(made.stat().st_mode) == 0o700 and private.is_private(made)


def test_place_where_others_can_rename_is_not_taken(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, short, 0o777)
    assert private.temporary_root() in ("/tmp", "/var/tmp")
    monkeypatch.setattr(private, "_keeps", lambda folder: False)
    with pytest.raises(UserError, match=rf"TMPDIR={short}: other users can rename what lies there"):
        private.scratch("x-")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_place_of_another_user_is_not_taken(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, short, 0o755)
    os.chown(short, NOBODY, NOBODY)
    assert private.temporary_root() in ("/tmp", "/var/tmp")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_stranger_who_is_faster_with_a_folder_of_the_cache_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    mkdir = Path.mkdir

    def slower(self: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        mkdir(self)
        os.chown(self, NOBODY, NOBODY)
        mkdir(self, mode, parents, exist_ok)

    monkeypatch.setattr(Path, "mkdir", slower)
    with pytest.raises(UserError, match="belongs to another user"):
        cache.make(tmp_path / "cache" / "kind")


@pytest.mark.parametrize("name", ["long" * 15, os.fsdecode(b"b\xff")])
def test_folder_whose_path_no_socket_can_have_is_left_out_or_refused(
    short: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    use(monkeypatch, own := short / name, 0o700)
    assert private.temporary_root() in ("/tmp", "/var/tmp")
    private.check_sockets()
    monkeypatch.setattr(private, "_keeps", lambda folder: folder == str(own))
    assert private.temporary_root() == str(own), "one process alone needs no socket"
    with pytest.raises(UserError, match=r"Unix sockets .* Type instead: TMPDIR=FOLDER .* at most 60 bytes"):
        private.check_sockets()


def test_no_folder_for_temporary_files_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: (_ for _ in ()).throw(FileNotFoundError(2, "none")))
    with pytest.raises(UserError, match="no folder for temporary files can be written"):
        private.temporary_root()


@pytest.mark.parametrize(("flag", "there"), [("-P", False), ("-s", True)])
def test_processes_import_from_the_working_folder_only_if_this_one_does(tmp_path: Path, flag: str, there: bool) -> None:
    """The installed command does not, `python -m trainer` does; Python's -m and -c, by which others start, always
    would."""
    (tmp_path / "queue.py").write_text("import pathlib; pathlib.Path('taken').touch()\nraise ImportError\n")
    program = ("import queue\n" if flag == "-P" else "") + (
        "import subprocess, sys\n"
        "from trainer.__main__ import main\n"
        "sys.argv = ['trainer', '--version']\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(subprocess.run([sys.executable, '-c', 'import queue'], stderr=subprocess.DEVNULL).returncode)\n"
    )
    done = subprocess.run(
        [sys.executable, flag, "-c", program],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
    )
    assert (tmp_path / "taken").exists() == there, done.stderr


def test_what_a_killed_process_left_goes_with_the_next_one_and_what_is_in_use_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private, "temporary_root", lambda: str(tmp_path))
    left, other = tmp_path / "trainer-left", tmp_path / "trainer-other"
    for folder in (left, other):
        folder.mkdir(mode=0o700)
        (folder / "file").touch()
    (left / ".held").touch()
    own = private.scratch("trainer-")
    code = (
        f"from trainer.host import private; private.temporary_root = lambda: {str(tmp_path)!r}; "
        f"print(private.scratch('trainer-'))"
    )
    theirs = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert {path.name for path in tmp_path.iterdir()} == {own.name, other.name, Path(theirs).name}
    private.scratch("trainer-model-")
    private.scratch("trainer-")
    assert own.exists() and other.exists() and not Path(theirs).exists()
    HERE.leave()
