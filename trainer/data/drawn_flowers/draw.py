"""The embedded flowers: 102 classes of drawn flowers in the user's cache, an offline stand-in for Oxford Flowers-102.

The pictures lie as `<folder>/{train,val}/<class 000-101>/<index>.jpg`, the layout of torchvision's ImageFolder. A set
is whole or absent: it is drawn into a folder beside its place, a marker is written last, and the folder is renamed.
"""

import contextlib
import json
import os
import selectors
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from trainer.data.drawn_flowers.species import CLASSES, VERSION, chosen
from trainer.data.drawn_flowers.worker import SPLITS, Drawing, Job
from trainer.data.prepared import MARKER, cache_root, known, locked, replacing_folder
from trainer.host.hardware import cores
from trainer.host.signals import beginning_undisturbed

__all__ = ["CLASSES", "VERSION", "Drawing", "draw", "folder", "is_drawn"]

_MOST_PROCESSES = 16
_WORTH_A_PROCESS = 24  # pictures; below that, starting an interpreter costs more than it saves


def folder(drawing: Drawing) -> Path:
    """The cache folder for the flowers drawn with these parameters, whether or not they exist."""
    name = f"v{VERSION}-seed{drawing.seed}-{drawing.per_class}x{drawing.size}px"
    return cache_root() / "drawn-flowers" / (name if drawing.classes == CLASSES else f"{name}-{drawing.classes}classes")


def is_drawn(drawing: Drawing) -> bool:
    """Whether all flowers with these parameters were drawn. Reads one small file, so it misses deleted pictures."""
    return known(folder(drawing)) is not None


def draw(drawing: Drawing, processes: int | None = None, on_progress: Callable[[int, int], None] | None = None) -> Path:
    """Draw all flowers with these parameters unless they exist; returns their folder. An error leaves no set.

    Args:
        processes: drawing processes, 1 or more; None: one for each usable core, at most 16. The bytes do not depend
            on it.
        on_progress: called in this thread with the numbers of drawn and of all pictures; not called if the set exists,
            or if another process has drawn it while this one waited.

    Raises:
        UserError: the cache cannot be written, or another user can write there.
        OSError: the disk is full; with the path.
        RuntimeError: a drawing process died of something else.
    """
    target = folder(drawing)
    if is_drawn(drawing):
        return target
    with _naming(target.parent), locked(target):
        if not is_drawn(drawing):
            _draw_in_place(drawing, target, processes, on_progress)
    return target


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Gives an OSError that names no path this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error
        raise


def _draw_in_place(
    drawing: Drawing, target: Path, processes: int | None, on_progress: Callable[[int, int], None] | None
) -> None:
    """With the lock held: removes what a killed process left, draws beside the target, and renames."""
    by_default = min(cores(), _MOST_PROCESSES, drawing.total // _WORTH_A_PROCESS)
    workers = max(1, min(processes or by_default, drawing.total))
    with replacing_folder(target) as part:
        jobs = [Job(drawing, str(part), worker, workers, parent=os.getpid()) for worker in range(workers)]
        for split in SPLITS:
            for number in chosen(drawing.classes):
                (part / split / f"{number:03d}").mkdir(parents=True)
        _run(jobs, drawing.total, on_progress)
        with _naming(part / MARKER):
            (part / MARKER).write_text(json.dumps({"version": VERSION, **asdict(drawing)}) + "\n")


def _run(jobs: list[Job], total: int, on_progress: Callable[[int, int], None] | None) -> None:
    """Runs one process for each job to its end; ends them all on the way out, however that happens."""
    children: list[subprocess.Popen[bytes]] = []
    try:
        for job in jobs:
            children.append(_start(job))
        done = 0
        for line in _lines(children):
            if line != b".":
                continue
            done += 1
            if on_progress is not None:
                on_progress(done, total)
        if done != total or any(child.wait() for child in children):
            raise RuntimeError(f"the flowers were not drawn: {done} of {total} pictures, no reason given")
    finally:
        for child in children:
            child.kill()
        for child in children:
            child.wait()
            if child.stdout is not None:
                child.stdout.close()


def _start(job: Job) -> subprocess.Popen[bytes]:
    """Starts one drawing process.

    A plain command, not `multiprocessing`: fork is unsafe where the caller has threads, and spawn would import the
    caller's `__main__` again, which a notebook or a script without a main guard does not survive.
    """
    home = Path(__file__).resolve().parents[3]
    paths = [
        str(home),
        *(os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry),
    ]
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    with beginning_undisturbed():
        return subprocess.Popen(  # this interpreter with this package's module; no shell  # nosec B603
            job.command(),
            cwd=home,  # `-m` puts the working directory first on the path, where a stray numpy.py could lie
            env={**os.environ, **single, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )


def _lines(children: list[subprocess.Popen[bytes]]) -> Iterator[bytes]:
    """The children's lines as they come; raises at the first child that fails, with the reason it gave."""
    with selectors.DefaultSelector() as selector:
        pending = {child.pid: b"" for child in children}
        said: dict[int, list[bytes]] = {child.pid: [] for child in children}
        for child in children:
            assert child.stdout is not None
            selector.register(child.stdout, selectors.EVENT_READ, child)
        while selector.get_map():
            for key, _ in selector.select():
                child = key.data
                chunk = os.read(key.fd, 65536)
                *lines, pending[child.pid] = (pending[child.pid] + chunk).split(b"\n")
                said[child.pid] += [line for line in lines if line != b"."]
                yield from lines
                if chunk:
                    continue
                selector.unregister(key.fileobj)
                if status := child.wait():
                    raise _failure(status, said[child.pid])


def _failure(status: int, said: list[bytes]) -> Exception:
    """The exception that tells why a drawing process ended with `status` after these words."""
    words = [line.decode(errors="replace") for line in said]
    if words and words[-1].startswith("{"):
        error = json.loads(words[-1])
        return OSError(error["errno"], error["strerror"], error["filename"])
    return RuntimeError(f"a flower-drawing process ended with status {status}:\n" + "\n".join(words[-20:]))
