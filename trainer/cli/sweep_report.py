"""Writes ``report.html`` into a sweep's folder: one file without network, library or script, from its jobs' files."""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from trainer.cli import sweep_svg
from trainer.config.keys import key_of
from trainer.errors import UserError
from trainer.host import json_text
from trainer.host.files import replace_file
from trainer.metrics.best import falls
from trainer.run_folder import lives
from trainer.run_folder.points import read_points
from trainer.terminal.status import read_status
from trainer.visible import one_line

FILE = "report.html"
AXES = "swept.json"
"""The swept keys, each with whether its values are searched on a logarithmic scale."""
MOST_LABELS = 6
"""Values of a key that its axis names one by one."""
DECADES = 100.0
"""The axis of a key is logarithmic where its largest value is more than so many times the smallest."""
STYLE = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --faint: #ddd; --job: #8aa4bd; --best: #d9480f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ddd; --paper: #181a1b; --faint: #3a3d40; --job: #5f7f9f; --best: #ff922b; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; } td, th { padding: .25rem .6rem; border-bottom: 1px solid var(--faint);
  text-align: right; font-variant-numeric: tabular-nums; } td:nth-child(2), th:nth-child(2) { text-align: left; }
tr.best { font-weight: bold; color: var(--best); } .wide { overflow-x: auto; } svg { width: 100%; height: auto; }
pre { padding: .7rem; background: var(--faint); white-space: pre-wrap; } text { fill: var(--ink); font-size: 12px; }
.grid, .axis { stroke: var(--faint); } .axis { stroke: var(--ink); } .line { fill: none; stroke-width: 1.5;
  stroke: var(--job); opacity: .6; } .line.good { opacity: 1; } .line.best { stroke: var(--best); stroke-width: 3;
  opacity: 1; }
circle, .bar { fill: var(--job); } circle.best { fill: var(--best); }
"""


@dataclass(frozen=True)
class Job:
    """A job of a sweep, as its folder describes it.

    Attributes:
        words: of its command, without secrets. own: its values of the swept keys. metric, value: its objective.
        curve: (update, value) of the objective's metric. rate: median of samples per second. batch: samples of an
        update.
    """

    name: str
    state: str
    words: list[str]
    metric: str
    value: float | None
    metrics: Mapping[str, float]
    seconds: float
    curve: list[tuple[float, float]]
    rate: float | None
    batch: float | None

    @property
    def own(self) -> dict[str, str]:
        """The values of its overrides, by key."""
        return {key_of(word): one_line(word.partition("=")[2]) for word in self.words if "=" in word}


def report(folder: Path) -> Path:
    """Write ``report.html`` into the folder of a sweep; returns its path.

    Raises:
        UserError: it has no folder of a job.
    """
    jobs = sorted(_jobs(folder), key=lambda job: (len(job.name), job.name))
    if not jobs:
        raise UserError(
            str(folder), "has no folder of a sweep's job", "the folder of a sweep, such as multirun/NAME/TIME"
        )
    replace_file(folder / FILE, page(folder.name, jobs, _axes(folder)), private=True)
    return folder / FILE


def found(folder: Path) -> tuple[list[Job], dict[str, bool]]:
    """The jobs of a sweep, the best first, and the keys in which they differ, as of :func:`swept`."""
    jobs = sorted(_jobs(folder), key=lambda job: (len(job.name), job.name))
    return ordered(jobs), swept(jobs, _axes(folder))


def write_axes(folder: Path, keys: Iterable[str], space: Sequence[str]) -> None:
    """Write the swept keys into the folder of a sweep.

    Args:
        space: of a search the values of its keys, as ``optimizer.lr=log 0.0001..1``.
    """
    logs = {key_of(one) for one in space if one.partition("=")[2].startswith("log ")}
    replace_file(folder / AXES, json.dumps({key: key in logs for key in sorted(keys)}) + "\n", private=True)


def _axes(folder: Path) -> dict[str, bool]:
    try:
        return json_text.read_object(folder / AXES)
    except (OSError, ValueError):  # a sweep of an earlier version
        return {}


def leave(folder: Path) -> None:
    """Write ``report.html`` at the end of a sweep, if a job has begun, and print where it is."""
    from trainer.cli.last_lines import shown

    if any(_jobs(folder)):
        print(f"report: {shown(report(folder))}", flush=True)


def _jobs(folder: Path) -> Iterator[Job]:
    for path in sorted(folder.rglob("status.json")):
        below = path.parent
        if below == folder or not (below / "config.yaml").is_file() or "checkpoints" in path.parts:
            continue
        status, result, plan = (read_status(below, name) for name in ("status.json", "result.json", "plan.json"))
        metric = str(plan.get("objective", {}).get("best", ""))
        value = (result.get("best") or status.get("bests") or {}).get(metric)
        curve, rates = _points(below, metric)
        known = lives.read(below)
        yield Job(
            str(below.relative_to(folder)),
            str(status.get("state", "lost")),
            shlex.split(known[0].command) if known else [],
            metric,
            value if value is not None and math.isfinite(value) else None,
            result.get("metrics") or {},
            float(result.get("seconds") or 0.0),
            curve,
            statistics.median(rates) if rates else None,
            plan.get("batches", {}).get("update_size"),
        )


def _points(folder: Path, metric: str) -> tuple[list[tuple[float, float]], list[float]]:
    """The objective over updates, and the rates, of a job's ``metrics.jsonl``."""
    curve, rates = [], []
    for point in read_points(folder):
        values = point["metrics"]
        if metric in values and math.isfinite(values[metric]):
            curve.append((point["step"], values[metric]))
        if "perf/samples_per_s" in values:
            rates.append(values["perf/samples_per_s"])
    return curve, rates


def ordered(jobs: Sequence[Job]) -> list[Job]:
    """The jobs, the best first; those without a value last. As they are if their objectives differ."""
    metrics = {job.metric for job in jobs if job.value is not None}
    if len(metrics) != 1:
        return list(jobs)
    sign = 1.0 if falls(metrics.pop()) else -1.0
    return sorted(jobs, key=lambda job: (job.value is None, sign * (job.value or 0.0)))


def swept(jobs: Sequence[Job], axes: Mapping[str, bool]) -> dict[str, bool]:
    """The swept keys in whose values the jobs differ, each with whether it is searched on a logarithmic scale.

    Args:
        axes: of :func:`write_axes`; empty: all keys of the jobs.
    """
    keys = dict.fromkeys(key for job in jobs for key in job.own if key in axes or (not axes and key != "hydra.run.dir"))
    return {key: axes.get(key, False) for key in keys if len({job.own.get(key) for job in jobs}) > 1}


def page(name: str, jobs: Sequence[Job], axes: Mapping[str, bool]) -> str:
    """The report as HTML.

    Args:
        axes: the swept keys, as of :func:`swept`.
    """
    jobs, keys = ordered(jobs), swept(jobs, axes)
    measured = [job for job in jobs if job.value is not None]
    one_objective = len({job.metric for job in measured}) == 1
    best = measured[0] if measured and one_objective else None
    title = f"Sweep {name}: {len(jobs)} jobs"
    parts = [f"<h1>{escape(title)}</h1>"]
    if best is not None:
        what = f"Best: job {best.name}, {best.metric} {best.value:.5g}"
        parts += [f"<p><strong>{escape(what)}</strong></p>", "<p>Its command:</p>", _command(best)]
    elif measured:
        parts.append("<p>The jobs have different objectives, so none is the best.</p>")
    parts += ["<h2>Jobs</h2>", _table(jobs, keys, best)]
    curves = {_label(job, keys): job.curve for job in jobs if job.curve and job.metric == jobs[0].metric}
    marked = _label(best, keys) if best is not None else None
    if curves:
        parts += [
            f"<h2>{escape(jobs[0].metric)} over updates</h2>",
            sweep_svg.curves(curves, marked, "update", jobs[0].metric),
        ]
    if best is not None and keys and len(measured) > 1:
        parts += ["<h2>Parallel coordinates</h2>", _parallel(measured, keys)]
        parts += ["<h2>Importance</h2>", f"<p>{IMPORTANCE}</p>", sweep_svg.bars(importance(measured, keys))]
    rates = {_label(job, keys): (job.batch, job.rate) for job in jobs if job.rate is not None and job.batch is not None}
    if rates:
        drawn = sweep_svg.points(rates, marked, "samples of an update", "samples per second")
        parts += ["<h2>Throughput against batch</h2>", drawn]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head><body>\n{body}\n</body></html>\n'


IMPORTANCE = (
    "Numbers: the absolute rank correlation (Spearman) of the key with the objective. Other values: the share of the "
    "variance of the objective's ranks that the value explains (eta squared). Few jobs make both uncertain."
)


def _label(job: Job, keys: Iterable[str]) -> str:
    own = " ".join(f"{key}={job.own[key]}" for key in keys if key in job.own)
    value = "" if job.value is None else f": {job.value:.5g}"
    return f"job {job.name} {own}{value}"


def _command(job: Job) -> str:
    return f"<pre>python -m trainer {escape(shlex.join(job.words))}</pre>"


def _table(jobs: Sequence[Job], keys: Iterable[str], best: Job | None) -> str:
    metric = next((job.metric for job in jobs if job.value is not None), "objective")
    head = "".join(
        f"<th>{escape(one)}</th>"
        for one in ("job", "overrides", "state", f"best {metric}", "val/loss", "samples/s", "seconds")
    )
    rows = []
    for job in jobs:
        own = " ".join(f"{key}={job.own[key]}" for key in keys if key in job.own)
        loss = job.metrics.get("val/loss")
        cells = (
            job.name + (" (best)" if job is best else ""),
            own,
            job.state,
            "" if job.value is None else f"{job.value:.5g}",
            "" if loss is None else f"{loss:.5g}",
            "" if job.rate is None else f"{job.rate:.0f}",
            f"{job.seconds:.1f}",
        )
        kind = ' class="best"' if job is best else ""
        rows.append(f"<tr{kind}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _numbers(values: Sequence[str]) -> list[float] | None:
    try:
        found = [float(value) for value in values]
    except ValueError:
        return None
    return found if all(map(math.isfinite, found)) else None


def coordinates(jobs: Sequence[Job], keys: Mapping[str, bool]) -> tuple[dict[str, list[str]], list[list[float]]]:
    """The axes of parallel coordinates: labels from bottom to top, by key, and of each axis the jobs' places on it.

    Args:
        keys: each with whether it is searched on a logarithmic scale.
    """
    axes: dict[str, list[str]] = {}
    shares: list[list[float]] = []
    metric = jobs[0].metric
    columns = [(key, [job.own.get(key, "") for job in jobs]) for key in keys]
    columns.append((metric, [repr(job.value) for job in jobs]))
    for key, values in columns:
        numbers, searched = _numbers(values), keys.get(key, False)
        if numbers is not None and (key == metric or searched or len(set(numbers)) > MOST_LABELS):
            low, high = min(numbers), max(numbers)
            if key != metric and low > 0 and (searched or high > DECADES * low):
                key, numbers = f"{key} (log)", [math.log(value) for value in numbers]
                marks = [low, math.sqrt(low * high), high] if high > low else [low]
            else:
                marks = [low, high] if high > low else [low]
            axes[key] = [sweep_svg.number(mark) for mark in marks]
            shares.append(_shares(numbers))
            continue
        kinds = sorted(set(values), key=float if numbers is not None else str)
        axes[key] = [kind[:24] for kind in kinds]
        shares.append(_shares([kinds.index(value) for value in values]))
    return axes, shares


def _shares(values: Sequence[float]) -> list[float]:
    """The place of each value between the smallest (0) and the largest one (1)."""
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.5 for value in values]


def _parallel(jobs: Sequence[Job], keys: Mapping[str, bool]) -> str:
    axes, shares = coordinates(jobs, keys)
    rows = {_label(job, keys): [column[n] for column in shares] for n, job in enumerate(jobs)}
    quarter = max(1, len(jobs) // 4)
    kinds_of = {_label(job, keys): "best" if not n else "good" if n < quarter else "job" for n, job in enumerate(jobs)}
    return sweep_svg.parallel(axes, rows, kinds_of)


def importance(jobs: Sequence[Job], keys: Iterable[str]) -> dict[str, float]:
    """How much each key decides the objective, from 0 to 1: see ``IMPORTANCE``."""
    goal = ranks([job.value or 0.0 for job in jobs])
    found = {}
    for key in keys:
        values = [job.own.get(key, "") for job in jobs]
        numbers = _numbers(values)
        found[key] = abs(_correlation(ranks(numbers), goal)) if numbers is not None else _explained(values, goal)
    return found


def ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value from 1; equal values have their mean rank."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) + 1) / 2 for value in values]


def _correlation(one: Sequence[float], other: Sequence[float]) -> float:
    try:
        return statistics.correlation(one, other)
    except statistics.StatisticsError:  # all values are equal
        return 0.0


def _explained(kinds: Sequence[str], goal: Sequence[float]) -> float:
    mean, groups = statistics.fmean(goal), dict[str, list[float]]()
    for kind, value in zip(kinds, goal, strict=True):
        groups.setdefault(kind, []).append(value)
    whole = sum((value - mean) ** 2 for value in goal)
    between = sum(len(group) * (statistics.fmean(group) - mean) ** 2 for group in groups.values())
    return between / whole if whole else 0.0
