"""Limits of the machine are named, with what to do: processes and threads, and shared memory. Other errors are left as
they are."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.stranger import folder_for_all
from tests.runs import SMALL, environment
from trainer.errors import RunFailed
from trainer.host import machine_limits
from trainer.launch.process import Failure

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount or to be another user")


def raised_in(file: str, error: Exception) -> Exception:
    """An error as C raises it that code of this file has called."""
    try:
        exec(compile("raise error", f"/python/lib/{file}", "exec"), {"error": error})
    except Exception as caught:
        return caught
    raise AssertionError("nothing was raised")


def full(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    "error",
    [
        raised_in("multiprocessing/popen_fork.py", full(errno.EAGAIN)),
        raised_in("subprocess.py", full(errno.EAGAIN)),
        RuntimeError("can't start new thread"),
        RuntimeError("Resource temporarily unavailable"),
    ],
)
def test_process_or_thread_that_cannot_be_started_is_put_down_to_the_limit(error: Exception) -> None:
    failure = Failure.of(error)
    assert failure.for_users and failure.words.startswith("the machine starts no further process or thread")
    assert "fewer launch.workers" in failure.words


@pytest.mark.parametrize(
    "error",
    [
        raised_in("multiprocessing/synchronize.py", full(errno.ENOSPC)),
        RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"),
    ],
)
def test_semaphore_or_tensor_without_room_is_put_down_to_shared_memory(error: Exception) -> None:
    failure = Failure.of(error)
    assert (
        failure.for_users
        and failure.words.startswith("shared memory is full: /dev/shm")
        and "--shm-size" in failure.words
    )


@pytest.mark.parametrize(
    "error",
    [
        BlockingIOError(errno.EAGAIN, "a pipe that is full"),
        OSError(errno.ENOSPC, "full"),
        OSError(errno.ENOSPC, "full", "/a/file"),
        RuntimeError("shapes differ"),
        ValueError("can't start new thread"),
        RunFailed("Resource temporarily unavailable"),
    ],
)
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as found, machine_limits.named():
        raise error
    assert found.value is error and machine_limits.reached(error) == ""


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    with folder_for_all(0o777) as folder:
        yield folder


@pytest.mark.all
@AS_ROOT
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="util-linux is not here")
def test_run_of_a_user_with_few_processes_names_ulimit(open_to_all: Path) -> None:
    user = (
        "setpriv --reuid 54321 --clear-groups --inh-caps +dac_override --ambient-caps +dac_override "
        "--bounding-set -all,+dac_override prlimit --nproc=12:12"
    )
    command = [*user.split(), sys.executable, "-m", "trainer", *SMALL, "launch.workers=6", "tracking=none"]
    done = subprocess.run(
        command, cwd=open_to_all, env=environment(HOME=str(open_to_all)), capture_output=True, text=True, timeout=100
    )
    # Which process or thread is the one too many is chance: the launcher's, a worker, or a thread of one that has a
    # log.
    said = [line for line in done.stderr.splitlines() if not line.startswith("  its log: ")][-1]
    assert done.returncode == 1 and said.startswith("failed: ") and "ulimit -u is 12" in said, done.stderr


@pytest.mark.all
@AS_ROOT
def test_run_with_little_shared_memory_names_it(tmp_path: Path) -> None:
    mounted = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"'
    command = [sys.executable, "-m", "trainer", *SMALL, "data.num_workers=1", "tracking=none"]
    if subprocess.run(["unshare", "-m", "sh", "-c", mounted, "sh", "true"], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mounted, "sh", *command],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1 and "failed: worker 0: shared memory is full: /dev/shm" in done.stderr, done.stderr


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, os.strerror(errno.EMFILE), "data.csv"),
        OSError(errno.ENFILE, os.strerror(errno.ENFILE)),
        ImportError("libtorch.so: cannot open shared object file: Too many open files"),
        RuntimeError("Too many open files (errno 24)"),
    ],
)
def test_descriptors_that_are_used_up_are_named_with_their_limit(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (20, 40))
    with pytest.raises(RunFailed, match=r"no further file: ulimit -n is 40\. Raise it"), machine_limits.named():
        raise error
    monkeypatch.setattr("resource.getrlimit", lambda which: (256, resource.RLIM_INFINITY))
    assert "ulimit -n is 256. Type ulimit -n 4096 before the command" in machine_limits.reached(error)


def test_file_that_may_not_grow_is_named_with_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (8192, 8192))
    noted = machine_limits.reached(OSError(errno.EFBIG, os.strerror(errno.EFBIG), "run/metrics.jsonl"))
    assert noted.startswith(
        "run/metrics.jsonl cannot be written: it would be larger than a file may be (ulimit -f, 8.2 kB)"
    )
    assert "ulimit -f unlimited" in machine_limits.reached(Exception("I/O error: File too large (os error 27)"))
