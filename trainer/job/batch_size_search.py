"""data.batch_size=auto: finds the largest batch per worker that fits into memory, by trials in separate processes.

The peak of memory grows by the same amount with each sample. Two small batches tell how much, and with it the largest
batch that should fit, which a third try confirms. Where the peaks are not on a line, or are not known, the sizes are
doubled and then bisected.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.config.run_config import RunConfig
from trainer.data.source import Facts
from trainer.errors import Died, RunFailed, UserError, first_line
from trainer.host import memory
from trainer.host.memory import GIB
from trainer.job.ready import Ready
from trainer.launch.builtin import Forkserver, InProcess, Local
from trainer.planning.batches import FIRST_TRY, most
from trainer.planning.launcher import Assignment, Supervision, start_here
from trainer.run_folder.leftovers import TRIALS
from trainer.wording import counted

KEY = "data.batch_size"
ENTRY = "trainer.worker.batch_size_trial:trial"
MOST = 1 << 20
"""Most samples per worker that are tried, if the data source makes any number of samples."""
KILLED = re.compile(r"was killed by SIG(KILL|ABRT|BUS|SEGV)")
"""Signals by which a process without memory ends, if it cannot report its error."""
STEPS = 16
"""The found size is less than a sixteenth below the largest."""
TWO = 2
"""Points of a line."""
FARTHEST = 64
"""A prediction reaches up to so many times the largest batch that has fitted."""
GROWTH = 0.01
"""Share of a peak by which it has to be above the one before. Less is noise, from which nothing follows."""
MARGIN = 0.99
"""Share of the predicted size that is tried: memory comes in blocks."""


@dataclass(frozen=True)
class Try:
    """The result of trying one batch size.

    Attributes:
        fits: memory was enough.
        how: in a few words.
        peak, most: bytes that the batch needed, and that there are; 0: not known.
    """

    fits: bool
    how: str
    peak: int = 0
    most: int = 0


def largest(try_size: Callable[[int], Try], most: int) -> int:
    """The largest batch size up to ``most`` that fits into memory; 0 if none fits.

    Sizes up to 16 are found exactly; larger ones to less than a sixteenth, as tried or, where it fits, as predicted.
    """
    low, high, size = 0, most + 1, min(FIRST_TRY, most)
    bounded, retreated, peaks = False, False, list[tuple[int, Try]]()
    while size > low:
        tried = try_size(size)
        if tried.fits:
            low = size
            peaks.append((size, tried))
        else:
            high, bounded = size, True
        size, limit = _next(low, high, bounded), _predicted(peaks)
        if limit is None:
            continue
        if len(peaks) > TWO and low > STEPS and limit < low * STEPS / (STEPS - 1):
            return low
        aim = 0
        if limit < high:
            aim = _rounded(int(min(limit * MARGIN, FARTHEST * low)))
        elif not bounded:
            aim = min(most, FARTHEST * low)
        elif not retreated:  # the prediction was a little too much
            retreated, aim = True, _rounded(high * (STEPS - TWO) // STEPS)
        size = aim if aim > low else size
    return low


def _predicted(peaks: Sequence[tuple[int, Try]]) -> float | None:
    """The most samples that should fit, by the line through the last two peaks; None: they tell nothing."""
    if len(peaks) < TWO or not all(tried.peak and tried.most for _, tried in peaks[-TWO:]):
        return None
    (one, less), (other, more) = peaks[-TWO:]
    if more.peak < less.peak * (1 + GROWTH):
        return None
    return one + (more.most - less.peak) * (other - one) / (more.peak - less.peak)


def _rounded(size: int) -> int:
    """A size, or one up to a thirty-second below it, that is a multiple of a power of two."""
    return size >> (drop := max(0, size.bit_length() - STEPS.bit_length() - 1)) << drop


def _next(low: int, high: int, bounded: bool) -> int:
    """The next size to try without a prediction; ``low`` if the search is over."""
    if not bounded:
        return min(2 * low, high - 1)
    if not low:
        return high // 2
    step = 1 << max(0, low.bit_length() - STEPS.bit_length())
    gap = high - low
    return low if gap <= step else low + max(1, gap // 2 // step) * step


def found(before: Ready, ready: Ready, prepared: Callable[[Ready], Ready], say: Callable[[str], None]) -> Ready:
    """Return the job with the largest batch size that fits into memory.

    Args:
        before: the job before its data were prepared; ready: with its data; prepared: prepares a job's data.
        say: shows a line to the user.

    Raises:
        RunFailed: not even one sample per worker fits, or a try failed for another reason.
    """
    search = Search(before, ready, prepared, say)
    try:
        size = largest(search.try_size, search.most)
    finally:
        if not search.broken:
            shutil.rmtree(search.folder, ignore_errors=True)
    if not size:
        raise RunFailed(f"{KEY}=auto: memory is not enough for one sample per worker ({search.last.how})")
    job = search.sized(size)
    why = f"the most that fits into {search.memory}" if size < search.most else "all training samples fit"
    say(f"{KEY}=auto: {size}, {why}{_rate(job)}")
    return job.with_plan(remarks={"why": {**job.plan.remarks.why, "batch_size": why}})


def _rate(job: Ready) -> str:
    """Describe the learning rate that follows from the batch size."""
    plan, scaling = job.plan, str(job.checked.config.optimizer.get("lr_scaling", "none"))
    if plan.batches.lr is None:
        return ""
    if scaling == "none":
        return f"; optimizer.lr stays {plan.batches.lr:g} (optimizer.lr_scaling=linear goes by the batch size)"
    return f"; optimizer.lr is {plan.batches.lr:g} by optimizer.lr_scaling={scaling}"


class Search:
    """Tries batch sizes, each in processes that end with the trial.

    Attributes:
        most: the largest size that the data allow.
        broken: a try failed for another reason than memory; its folder is kept.
        last: the last try.
    """

    def __init__(
        self, before: Ready, ready: Ready, prepared: Callable[[Ready], Ready], say: Callable[[str], None]
    ) -> None:
        import psutil

        self.before, self.ready, self.prepare, self.say = before, ready, prepared, say
        checked = ready.checked
        self.folder = Path(ready.plan.paths.run_dir) / TRIALS
        shutil.rmtree(self.folder, ignore_errors=True)
        self.most = most(checked.config, checked.facts.train_samples, checked.workers)
        if _as_many_as_asked_for(ready):
            self.most = MOST
        limit = checked.config.data.memory_limit_gib
        self.limit = None if limit is None else int(limit * GIB)
        device = "GPU" if checked.device == "cuda" else "host"
        self.memory = f"the memory of the {device}" if limit is None else f"{limit:g} GiB (data.memory_limit_gib)"
        self.others = [psutil.Process().pid, *(child.pid for child in psutil.Process().children(recursive=True))]
        self.broken = False
        self.last = Try(False, "no sample for each worker")
        self.tries = 0

    def sized(self, size: int) -> Ready:
        """Return the job with this batch size, and with its data prepared."""
        fresh = self.ready.with_batch_size(size)
        known = self._prepared_facts(fresh.checked.facts)
        return self.prepare(fresh) if known is None else fresh.with_facts(known)

    def _prepared_facts(self, facts: Facts) -> Facts | None:
        """The facts after preparation, if they are known already; else None."""
        return self.ready.checked.facts if facts in (self.before.checked.facts, self.ready.checked.facts) else None

    def try_size(self, size: int) -> Try:
        """Try a batch size, print how it went, and return it."""
        began = time.monotonic()
        try:
            self.last = self._tried(size)
        except RunFailed as error:
            self.broken = not isinstance(error.__cause__, UserError)  # a refused size leaves no log to keep
            raise
        self.tries += 1
        fits = "fits" if self.last.fits else "does not fit"
        self.say(f"{KEY}=auto: {size} {fits} ({self.last.how}, {time.monotonic() - began:.1f} s)")
        return self.last

    def _tried(self, size: int) -> Try:
        try:
            job = self.sized(size)
        except UserError as error:
            why = f"with {counted(size, 'sample')} per worker: {error.what}: {error.why}"
            if not self.last.fits and self.tries:  # more do not fit, so no other number is worth proposing
                why = f"memory is not enough ({self.last.how}), and fewer samples are refused ({why})"
            raise RunFailed(f"{KEY}=auto: {why}") from error
        from trainer.run_folder.json_files import leave
        from trainer.worker.batch_size_trial import TOO_LARGE, Needed, TrialLimits

        run_dir, folder = Path(job.plan.paths.run_dir), self.folder / str(size)
        doing = f"{KEY}=auto: tries {size}"
        leave(run_dir / "status.json", {"state": "starting", "doing": doing, "step": 0, "total": 0, "metrics": {}})
        (folder / "checkpoints").mkdir(parents=True)
        TrialLimits(self.limit, memory.free(), self.others, len(job.plan.topology.processes)).leave(folder)
        try:
            outcome = start_here(_of_trial(job, folder), Supervision())
        except RunFailed as error:
            if reasons := sorted(folder.glob(TOO_LARGE.format("*"))):
                return Try(False, reasons[0].read_text())
            if isinstance(error, Died) and KILLED.search(str(error)):
                return Try(False, first_line(error))
            raise RunFailed(f"{KEY}=auto: a try with {counted(size, 'sample')} per worker failed: {error}") from error
        if lost := outcome.get("lost_workers"):
            return Try(False, "; ".join(lost.values()))
        needed = Needed(*outcome.pop("needed"))
        return Try(True, f"{needed.peak / GIB:.2f} of {needed.most / GIB:.2f} GiB", needed.peak, needed.most)


def _as_many_as_asked_for(ready: Ready) -> bool:
    """Whether the number of samples follows the batch size, as with noise."""
    checked = ready.checked
    one, two = (checked.source.facts(n * checked.global_batch_size).train_samples for n in (1, 2))
    return one != two


def _of_trial(job: Ready, folder: Path) -> Assignment:
    """The :class:`Assignment` of a trial's processes: the run's own, with another entry function and another folder."""
    config, plan = job.checked.config, job.plan
    streams = plan.data.facts.streams
    config = config.changed(
        callbacks=[],
        profile=False,
        verbosity="quiet",
        limit_val_batches=1,
        **one_process_config(config),
        checkpoint=dict.fromkeys(("every_steps", "every_minutes", "every_epochs")),
        **({} if streams else {"data": {"work": "static"}}),
    )
    plan = plan.changed(
        paths={"run_dir": str(folder)},
        strategy={"entries": {**plan.strategy.entries, "worker": ENTRY}},
        topology={"restarts": 0},
        batches={"leased": plan.batches.leased and streams},
    )
    return replace(job.assignment, config=config, plan=plan)


def one_process_config(config: RunConfig) -> dict[str, dict[str, str]]:
    """Launch keys that start the only worker as a process of its own, so that its death does not end this process."""
    target = config.launch._target_
    if target not in {f"{kind.__module__}.{kind.__qualname__}" for kind in (InProcess, Local)}:
        return {}
    return {"launch": {"_target_": f"{Forkserver.__module__}.{Forkserver.__qualname__}"}}
