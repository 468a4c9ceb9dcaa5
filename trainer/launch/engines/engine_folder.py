"""The files of a job below the run's folder (``RUN/engine``), and how an engine's commands are called."""

from __future__ import annotations

import codecs
import json
import os
import re
import secrets
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.config import redact
from trainer.errors import RunPreempted, UserError, first_line
from trainer.host import json_text, private
from trainer.host.engine_tasks import ENGINE
from trainer.host.files import replace_file
from trainer.launch.engines.contract import Job, Point, Unreachable
from trainer.planning.run_secret import LEAST

SCRIPT, SECRET, LOG, CODE, LEAVE, LIVES = "job.sh", "secret", "log", "code", "leave", "lives"
SUBMITTED_JOB = "job"
"""The file that says which job of which engine was submitted last for this folder."""
SHOWN = "shown"
"""The file that says that a command has shown the end of this job."""
OF_THE_LAST = (LOG, CODE, LEAVE, LIVES, SHOWN, "ended.*", "host.*.log")
"""Files of an earlier job in the same folder."""
ASK_S = 30.0
"""Longest wait for an answer of the engine."""
ONE = 'eval "$setup" || exit\n'
SEVERAL = """\
if [ -n "$BASH_VERSION" ]; then
    depth=${#BASH_SOURCE[@]}
    trap 'code=$? line=$((LINENO - line + 1)); [ ${#BASH_SOURCE[@]} -gt "$depth" ] || setup_fails_at "$line"' ERR
else
    set -e
fi
line=$LINENO; eval "$setup"
[ -z "$BASH_VERSION" ] || trap - ERR
set +e
"""
"""How an entry of ``launch.setup`` of one line, or of several, is evaluated."""
FAILS_AT = """\
setup_fails_at() {
    line=$(printf '%s\\n' "$setup" | sed -n "$1s/^ *//p")
    setup=${line:-$setup}
    exit "$code"
}
"""
SAY = 'echo "$sentence" >&2'
"""Prints the sentence of a failed line of ``launch.setup``."""
REFUSAL_LINES = 3
"""Lines of an engine's refusal that are shown, the last ones."""
CHUNK = 1 << 20
"""Bytes that are read of a log at once."""


def begin(job: Job, script: str) -> Path:
    """Make the job's folder with a new secret (0600) and the script; returns the script's path."""
    folder = job.engine_folder
    folder.mkdir(parents=True, exist_ok=True)
    clear(folder)
    private.write(folder / SECRET, secrets.token_hex(LEAST))
    replace_file(folder / SCRIPT, script, private=True)
    return folder / SCRIPT


@contextmanager
def left_if_submitted(folders: Sequence[Path]) -> Iterator[None]:
    """Context manager: the folders are as before if the engine refuses the job, else without an earlier job's files.

    Args:
        folders: the engine folders of the job.
    """
    earlier = {
        path: path.with_name(f"previous.{path.name}")
        for folder in folders
        for name in (SCRIPT, SECRET, *OF_THE_LAST)
        for path in folder.glob(name)
    }
    with unmade_if_refused(folders):
        for path, kept in earlier.items():
            path.replace(kept)
        try:
            yield
        except BaseException:
            for path in (folder / name for folder in folders for name in (SCRIPT, SECRET)):
                path.unlink(missing_ok=True)
            for path, kept in earlier.items():
                kept.replace(path)
            raise
    for kept in earlier.values():
        kept.unlink(missing_ok=True)


@contextmanager
def unmade_if_refused(folders: Sequence[Path]) -> Iterator[None]:
    """Context manager: folders that are not there yet, and those above them, are removed again after an error."""
    made = missing(folders)
    try:
        yield
    except BaseException:
        unmake(made)
        raise


def missing(folders: Sequence[Path]) -> list[Path]:
    """Return those of these folders, and of those above them, that are not there; first the innermost."""
    found = {path for folder in folders for path in (folder, *folder.parents) if not path.exists()}
    return sorted(found, key=lambda path: -len(path.parts))


def unmake(folders: Sequence[Path]) -> None:
    """Remove folders that hold nothing, of :func:`missing`."""
    for path in folders:
        with suppress(OSError):  # something is in it meanwhile
            path.rmdir()


@dataclass(frozen=True)
class SubmittedJob:
    """The job that was submitted last for a run's folder, as the file ``RUN/engine/job`` (0600) has it.

    Attributes:
        engine: its name. number: of the job there. words: flags and overrides of the command.
        points: the jobs of a sweep by number.
    """

    engine: str
    number: str
    words: tuple[str, ...]
    points: Mapping[int, Point] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write it into a run's engine folder."""
        points = {
            str(number): {"words": one.words, "folder": str(one.folder), "name": one.name, "copies": one.copies}
            for number, one in self.points.items()
        }
        plain = {**asdict(self), "points": points}
        if not points:
            del plain["points"]
        replace_file(folder / SUBMITTED_JOB, json.dumps(plain) + "\n", private=True)

    @staticmethod
    def of(folder: Path) -> SubmittedJob | None:
        """Read it from a run's engine folder; None: there is none."""
        try:
            return _submitted(**json_text.read_object(folder / SUBMITTED_JOB))
        except (OSError, ValueError, TypeError, AttributeError):
            return None


def _submitted(engine: str, number: str, words: Sequence[str], points: Mapping[str, Any] | None = None) -> SubmittedJob:
    """The job of which the file has these values."""
    read = {int(number): _point(**one) for number, one in (points or {}).items()}
    return SubmittedJob(engine, number, tuple(words), read)


def _point(words: Sequence[str], folder: str, name: str, copies: str) -> Point:
    return Point(tuple(words), Path(folder), name, copies)


def clear(folder: Path) -> None:
    """Remove the files of an earlier job from a run's engine folder."""
    for path in (found for name in OF_THE_LAST for found in folder.glob(name)):
        path.unlink(missing_ok=True)


def shell_words(words: Sequence[str]) -> str:
    """Words as a shell reads them."""
    return " ".join(map(shlex.quote, words))


def ask(
    command: Sequence[str],
    what: str,
    text: str | None = None,
    instead: Callable[[str], str] = lambda words: "what it names, in launch.options",
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run one of the engine's commands that changes something; returns its output.

    Args:
        text: what it reads. instead: what to type where it refuses with these words.
        environment: its variables; None: those of this process.

    Raises:
        UserError: there is no such command, or it refuses.
    """
    try:
        done = subprocess.run(  # an engine's own command, by the user's PATH  # nosec B603
            command, input=text, capture_output=True, text=True, timeout=ASK_S, check=False, env=environment
        )
    except FileNotFoundError as error:
        raise UserError(
            what, f"there is no command {command[0]} here", "launch=local, or the command on a machine with it"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise UserError(what, f"{command[0]} has not answered within {ASK_S:g} s", "the same command again") from error
    if done.returncode:
        words = _last_words(done, REFUSAL_LINES)
        raise UserError(what, f"{command[0]} refuses: {words}", instead(words))
    return done.stdout


def query(command: Sequence[str]) -> str:
    """Run one of the engine's commands; returns its output.

    Raises:
        Unreachable: it fails, or does not answer.
    """
    try:
        done = subprocess.run(  # an engine's own command, by the user's PATH  # nosec B603
            command, capture_output=True, text=True, timeout=ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unreachable(f"{command[0]}: {first_line(error)}") from error
    if done.returncode:
        raise Unreachable(_last_words(done))
    return done.stdout


def _last_words(done: subprocess.CompletedProcess[str], count: int = 1) -> str:
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip() and "--help" not in line]
    own = rf"^(\w+: (error|fatal)|{re.escape(Path(done.args[0]).name)}): "
    said = [re.sub(own, "", line.strip()) for line in lines[-count:]]
    return "; ".join(dict.fromkeys(said)) if said else f"exit code {done.returncode}"


def made_by(job: Job) -> str:
    """Lines of a script, as comments: the command that has made it, without secrets, and the run's folder."""
    words = ["-m"] * bool(job.points) + [redact.command(job.words)]
    lines = f"Made by: python -m trainer {' '.join(words)}", f"Run folder: {job.folder}"
    return "".join("# {}\n".format(line.replace("\n", "\\n").replace("\r", "\\r")) for line in lines)


def setup_lines(entries: Sequence[str], failed: str = "") -> str:
    """The entries of ``launch.setup`` for a shell, the first failing one of which ends it, with its exit code where
    this says nothing else of a run (75 would be a pre-emption).

    Each is a complete piece of shell, and is evaluated as a whole. One of several lines fails where one of them fails,
    as with ``set -e``. But what happens within a script that it reads, or within a function such as ``module``, is
    their own matter: bash can tell by its ERR trap; other shells have ``set -e`` alone.

    Args:
        failed: what the shell does then besides printing the line, with the exit code in ``code`` and the sentence in
            ``sentence``; it is one line.
    """
    if not entries:
        return ""
    several = ["\n" in text.strip() for text in entries]
    texts = "".join(
        f"entry={number} setup={shlex.quote(text)}\n{SEVERAL if has_lines else ONE}"
        for number, (text, has_lines) in enumerate(zip(entries, several, strict=True), 1)
    )
    return (
        f"{FAILS_AT if any(several) else ''}"
        "setup_failed() {\n"
        "    code=$?\n"
        "    set +e\n"
        "    trap - EXIT\n"
        '    sentence="error: launch.setup: entry $entry ended with exit code $code: $setup"\n'
        '    case "$code" in 0 | 2 | 75 | 130) code=1 ;; esac # of a run: done, refused, pre-empted, cancelled\n'
        f"    {failed or SAY}\n"
        "    exit $code\n"
        "}\n"
        "trap setup_failed EXIT\n"
        "trap 'trap - EXIT TERM; kill -TERM $$' TERM USR1 # by a signal this shell ends as any other\n"
        f"{texts}"
        "trap - EXIT TERM USR1\n"
        "set +e\n"
    )


def memory_of(text: str, key: str = "launch.memory") -> tuple[str, str]:
    """Number and unit (K, M, G or T: powers of 1024) of an amount such as ``64G``, ``64GB`` or ``64Gi``.

    Raises:
        UserError: it is none, or has no unit.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGTkmgt])(?:i?[Bb]?)", str(text).strip())
    if found is None:
        number = re.match(r"\d+", str(text).strip())
        why = "needs a number and a unit: K, M, G or T"
        raise UserError(f"{key}={text}", why, f"{key}={number[0] if number else 64}G")
    return found[1], found[2].upper()


def read_code(folder: Path, name: str = CODE) -> int | None:
    """The exit code that a job, or one of its tasks, has left in the job's folder; None: it has not ended."""
    try:
        text = (folder / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def forget_ended(run_dir: Path) -> None:
    """Forget the engine's job whose run a new run in this folder replaces, if that job has ended."""
    if read_code(run_dir / ENGINE) is not None:
        (run_dir / ENGINE / SUBMITTED_JOB).unlink(missing_ok=True)


def last_lines(path: Path, count: int) -> str:
    """The last lines of a log, of its last MiB; '' if it cannot be read."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - CHUNK))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-count:])
    except OSError:
        return ""


def failed_hosts(folder: Path, codes: Mapping[int, int | None]) -> list[str]:
    """Sentences on the other hosts than host 0 that failed, with their logs.

    Args:
        codes: exit code of each host; None: it left none.
    """
    failed = {host: code for host, code in codes.items() if host and code not in (None, 0, RunPreempted.exit_code)}
    return [f"host {host} ended with exit code {code}: {folder}/host.{host}.log" for host, code in failed.items()]


class LogReader:
    """Reads what is appended to a log that another host may write.

    A line without its end is held back until nothing more has come from one call to the next: then it is a progress
    bar, or the last line of a process that was killed.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.position, self.rest = path, 0, ""
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode  # a piece may end within a character

    def lines(self) -> Iterator[str]:
        """Yield the text since the last call, in pieces of about 1 MB at most."""
        before = self.position
        try:
            with self.path.open("rb") as log:
                log.seek(self.position)
                while piece := log.read(CHUNK):
                    self.position += len(piece)
                    whole = self.rest + self._decode(piece)
                    end = whole.rfind("\n") + 1
                    if not end and len(whole) > CHUNK:
                        end = len(whole)
                    self.rest = whole[end:]
                    if end:
                        yield whole[:end]
        except OSError:  # not there yet, or not at the moment: a shared disk
            return
        if self.rest and self.position == before:
            rest, self.rest = self.rest, ""
            yield rest
