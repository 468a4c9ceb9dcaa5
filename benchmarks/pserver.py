"""Parameter servers against one process without any, and against a plain server over torch.distributed.rpc.

    python benchmarks/pserver.py [--repetitions 5] [--only async]      throughput, bytes on the wire, CPU time
    python benchmarks/pserver.py --servers 1,2,4                       more servers; memory per row; snapshots
    python benchmarks/pserver.py --replay                              steps a second that servers sustain
    python benchmarks/pserver.py --against COMMIT              each mode's rate against that of a commit
    python benchmarks/pserver.py --straggler | --parity | --dense      one slow worker; AUC of all modes; LeNet and
    ResNet-18

Wide & Deep (1,000,001 x 10, 400 x 3) in fp32 on click rows that lie in memory, SGD, every process with one thread. The
cases run in turn, repetition after repetition, each in processes of its own; medians are compared. *meet* is two
processes that exchange nothing and wait for each other after each step: no synchronous mode can be faster.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import resource
import socket
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import rpc_server
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import Dataset

from trainer.cli import arguments
from trainer.config.instantiate import locate
from trainer.data.source import DataSource, Facts, Splits
from trainer.launch.forkserver import Forked, launch
from trainer.launch.rendezvous import Rendezvous
from trainer.launch.started_process import Role
from trainer.run_folder.report import Report
from trainer.strategies.pserver.server import server
from trainer.strategies.seat import Seat
from trainer.worker import train
from trainer.worker.build import build
from trainer.worker.loop import train_epoch
from trainer.worker.settings import settings

ROWS, COLUMNS, SLOTS, NUMBERS = 1_000_001, 10, 26, 13
ZIPF = 1.2
"""Exponent of the ids of a slot: 6,300 unique ids in 512 rows, 34,600 in 4096."""
POOL = {512: 32, 4096: 8}
"""Batches that are prepared and used in turn, by their size."""
STEPS = {512: 250, 4096: 40}
K_STEPS = 100
NEVER = 1_000_000
"""Steps between the means of local_sgd: two processes that exchange nothing, which shows what the machine lets two
do."""
LR = 0.01
CPU = "cpu"


class Batches(Dataset[Any]):
    """A few prepared batches, handed out as they are."""

    def __init__(self, size: int, samples: int = 0) -> None:
        generator = np.random.default_rng(size)
        self.size, self.samples = size, samples
        self.pool = [self._draw(generator) for _ in range(POOL[size])]

    def _draw(self, generator: np.random.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        token = generator.zipf(ZIPF, (self.size, SLOTS)).astype(np.uint64)
        mixed = (token * np.uint64(SLOTS) + np.arange(SLOTS, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        ids = (np.right_shift(mixed, np.uint64(20)) % np.uint64(ROWS)).astype(np.int64)
        dense = generator.random((self.size, NUMBERS), dtype=np.float32)
        labels = (generator.random(self.size) < 0.25).astype(np.float32)
        return {"dense": torch.from_numpy(dense), "sparse": torch.from_numpy(ids)}, torch.from_numpy(labels)

    def __len__(self) -> int:
        return self.samples

    def batch(self, indices: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The prepared batch whose turn it is."""
        inputs, labels = self.pool[int(indices[0]) // self.size % len(self.pool)]
        return dict(inputs), labels

    def unique(self) -> float:
        """Unique ids of a batch, on average."""
        return statistics.mean(len(inputs["sparse"].unique()) for inputs, _ in self.pool)


class Clicks(DataSource):
    """data._target_=pserver.Clicks: the prepared batches as a source."""

    def facts(self, global_batch_size: int) -> Facts:
        """As random images: ``batches`` of them."""
        samples = self.config["batches"] * global_batch_size
        shape: dict[str, tuple[int, ...]] = {"dense": (NUMBERS,), "sparse": (SLOTS,)}
        return Facts("random clicks", "random", samples, 512, shape, 2, task="binary", integers=("sparse",))

    def open(self, facts: Facts) -> Splits:
        """In each worker."""
        return Splits(Batches(self.config["batch_size"], facts.train_samples), Batches(512, facts.val_samples))


@dataclass(frozen=True)
class Case:
    """One row of the table: a strategy (or ``rpc``), its workers and servers, a batch size."""

    name: str
    strategy: str
    batch: int
    workers: int = 2
    servers: int = 1
    overrides: tuple[str, ...] = ()

    @property
    def geo(self) -> bool:
        """Whether the window has to hold whole rounds of exchange."""
        return self.strategy == "pserver_geo"

    @property
    def warm(self) -> int:
        """Steps before the steady state: every prepared batch was used once, and its rows exist."""
        return POOL[self.batch] + 5

    @property
    def steps(self) -> int:
        """Of each worker."""
        if not self.geo:
            return self.warm + STEPS[self.batch]
        return self.warm + K_STEPS * (2 if self.batch < 1024 else 1) + 10

    def config(self) -> list[str]:
        """The overrides that make this run."""
        servers = [f"launch.servers={self.servers}", "strategy.persistables=false"] if self.servers else []
        return [
            "model=wide_and_deep",
            f"model.table_size={ROWS}",
            f"model.embedding_dim={COLUMNS}",
            "data=random_images",
            "data._target_=pserver.Clicks",
            "data.num_classes=2",
            f"data.batch_size={self.batch}",
            f"data.batches={self.steps}",
            "loss=binary_cross_entropy",
            "optimizer=sgd",
            f"optimizer.lr={LR}",
            "sampler.shuffle=false",
            "epochs=1",
            "precision=fp32",
            "device=cpu",
            "execution.threads=1",
            "execution.log_every=100",
            "tracking=none",
            f"strategy={self.strategy}",
            f"launch.nproc={self.workers}",
            *servers,
            *([f"strategy.k_steps={K_STEPS}"] if self.geo else []),
            *self.overrides,
        ]


@dataclass
class Figures:
    """What the repetitions of one case gave: samples/s per worker, bytes per step, CPU milliseconds per step."""

    rates: list[float] = field(default_factory=list)
    wire: list[float] = field(default_factory=list)
    worker_ms: list[float] = field(default_factory=list)
    server_ms: list[float] = field(default_factory=list)
    statistics: list[dict[str, Any]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Median samples/s per worker."""
        return statistics.median(self.rates) if self.rates else float("nan")


def cases() -> list[Case]:
    """All rows."""
    found = []
    for batch in POOL:
        found += [
            Case("local", "single", batch, 1, 0),
            Case("local", "local_sgd", batch, 2, 0, (f"strategy.k_steps={NEVER}",)),
            Case("meet", "local_sgd", batch, 2, 0, (f"strategy.k_steps={NEVER}",)),
            Case("sync", "pserver_sync", batch),
            Case("async", "pserver_async", batch),
            Case("ssp", "pserver_ssp", batch),
            Case("geo", "pserver_geo", batch),
            Case("rpc", "rpc", batch),
            Case("async", "pserver_async", batch, 1),
            Case("geo", "pserver_geo", batch, 1),
        ]
    return found


# --- in the processes -------------------------------------------------------------------------------------------------


def measure(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """A worker: an epoch of the product's loop; after each step the time, CPU time, bytes received and sent."""
    config, plan = payload["assignment"].config, payload["assignment"].plan
    seat = train.seated(seat, config, plan)
    stamps: list[tuple[float, float, int, int]] = []
    with settings(config, plan, seat):
        strategy = locate(plan.strategy.worker)(config.node("strategy"), seat)
        report = Report(Path(plan.paths.run_dir) if seat.rank == 0 else None, 10**9)
        run = build(config, plan, seat, strategy, report)
        update, client = strategy.step, getattr(strategy, "client", None)

        def stamped(samples: int) -> None:
            update(samples)
            if payload["meet"]:
                torch.distributed.barrier()
            traffic = client.connections.traffic() if client else (0, 0)
            stamps.append((time.perf_counter(), time.process_time(), *traffic))

        strategy.step = stamped
        profile = payload.get("profile") if seat.rank == 0 else None
        if profile:
            import cProfile

            profiler = cProfile.Profile()
            profiler.runcall(train_epoch, run, 0)
            profiler.dump_stats(profile)
        else:
            train_epoch(run, 0)
        strategy.synchronize()
        run.feed.close()
        strategy.close()
    return {"stamps": stamps}


def serve(seat: Seat, payload: dict[str, Any]) -> dict[str, Any]:
    """A server: the product's, and the CPU time that it took, without that of its imports."""
    importlib.import_module("torch._dynamo")  # torch.optim does that when it is first used
    before = _cpu_s()
    found = server.serve(seat, payload["assignment"])
    return {**found, "cpu_s": _cpu_s() - before}


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# --- in the parent ----------------------------------------------------------------------------------------------------


def run_case(case: Case, figures: Figures, profile: str = "") -> None:
    """One repetition of a case; what came of it is added to its figures."""
    if case.strategy == "rpc":
        results = processes(case, ("rpc_server:work", "rpc_server:serve"))
    else:
        results = processes(case, ("pserver:measure", "pserver:serve"), profile)
    _add(case, figures, [r["stamps"] for r in results["worker"].values()], list(results.get("server", {}).values()))


def processes(case: Case, entries: tuple[str, str], profile: str = "") -> dict[str, dict[int, Any]]:
    """Run a case in processes of its own, workers and servers with these entries; returns what they have returned."""
    with tempfile.TemporaryDirectory() as folder, open("/dev/null", "w") as nowhere:
        if case.strategy == "rpc":
            payload: dict[str, Any] = {
                "meet": f"tcp://127.0.0.1:{_free_port()}",
                "workers": case.workers,
                "batch": case.batch,
                "steps": case.steps,
                "rows": ROWS,
                "columns": COLUMNS,
                "lr": LR,
            }
        else:
            payload = _payload(case, folder) | {"profile": profile, "meet": case.name == "meet"}
        roles = [Role("worker", case.workers, entries[0], [CPU] * case.workers)]
        if case.servers:
            roles.append(Role("server", case.servers, entries[1], [CPU] * case.servers))
        with contextlib.redirect_stdout(nowhere):
            return launch(roles, payload, Path(folder), Rendezvous(), Forked(["pserver"])).of


def _payload(case: Case, folder: str) -> dict[str, Any]:
    from trainer.cli import compose
    from trainer.job.check import get_ready

    overrides = case.config()
    with compose.hydra_app() as app:
        ready = get_ready(compose.plain(compose.compose(app, overrides)), arguments.typed_keys(overrides), folder)
    (Path(folder) / "checkpoints").mkdir()
    return {"assignment": ready.assignment}


def _add(case: Case, figures: Figures, workers: list[Any], servers: list[dict[str, Any]]) -> None:
    """The steady state: while all workers were at work and warm; of Geo whole rounds."""
    begin = max(stamps[min(case.warm, len(stamps) - 2)][0] for stamps in workers)
    end = min(stamps[-1][0] for stamps in workers)
    steps_in_all = sum(len(stamps) for stamps in workers)
    for stamps in workers:
        inside = [s for s in stamps if begin <= s[0] <= end]
        steps = len(inside) - 1
        if case.geo and steps >= K_STEPS:
            steps -= steps % K_STEPS
        if steps < 1:
            continue
        first, last = inside[0], inside[steps]
        figures.rates.append(steps * case.batch / (last[0] - first[0]))
        figures.worker_ms.append((last[1] - first[1]) / steps * 1e3)
        figures.wire.append((last[2] + last[3] - first[2] - first[3]) / steps)
    figures.server_ms.append(sum(s["cpu_s"] for s in servers) / steps_in_all * 1e3)
    figures.statistics += [s for s in servers if "tables" in s]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def least_bytes(batch: int) -> float:
    """Of a step that pulls and pushes everything it touches: dense parameters both ways, ids once, rows both ways."""
    from trainer.models.wide_and_deep import WideAndDeep

    dense = sum(p.numel() for n, p in WideAndDeep(ROWS, COLUMNS).named_parameters() if not n.startswith("embedding"))
    unique = Batches(batch).unique()
    return 2 * 4 * dense + 8 * unique + 2 * 4 * COLUMNS * unique


def throughput(chosen: list[Case], repetitions: int) -> dict[Case, Figures]:
    """All repetitions of these cases, in turn; every other round backwards."""
    console = Console(stderr=True)
    figures = {case: Figures() for case in chosen}
    for number in range(repetitions):
        for case in chosen if number % 2 == 0 else reversed(chosen):
            run_case(case, figures[case])
            name = f"{case.name}, batch {case.batch}, {case.workers} worker(s), {case.servers} server(s)"
            console.print(f"repetition {number + 1}: {name}: {figures[case].rates[-1]:,.0f} samples/s per worker")
    return figures


def show(figures: dict[Case, Figures]) -> None:
    """The table, and a line for each bar."""
    table = Table(
        title=f"Wide & Deep, SGD, fp32, one thread per process, medians of {_repetitions(figures)} repetitions"
    )
    for column in (
        "mode",
        "batch",
        "workers",
        "servers",
        "samples/s per worker",
        "of local",
        "of as many locals",
        "of rpc",
        "MB per step",
        "of least",
        "CPU ms per step, worker",
        "servers",
    ):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for case, found in figures.items():
        wire = statistics.median(found.wire)
        least = least_bytes(case.batch)
        per_step = case.strategy in ("pserver_sync", "pserver_async", "pserver_ssp")
        table.add_row(
            case.name,
            str(case.batch),
            str(case.workers),
            str(case.servers or "-"),
            f"{found.rate:,.0f} ({min(found.rates):,.0f}-{max(found.rates):,.0f})",
            _ratio(figures, case, "local", 1),
            _ratio(figures, case, "local", case.workers),
            _ratio(figures, case, "rpc", case.workers),
            f"{wire / 1e6:.2f}" if wire else "-",
            f"{wire / least:.3f}" if per_step else "-",
            f"{statistics.median(found.worker_ms):.1f}",
            f"{statistics.median(found.server_ms):.1f}" if case.servers else "-",
        )
    Console(width=160).print(table)
    for line in bars(figures):
        print(line)


def _repetitions(figures: dict[Case, Figures]) -> int:
    return max((len(f.rates) // c.workers for c, f in figures.items()), default=0)


def _find(figures: dict[Case, Figures], name: str, batch: int, workers: int) -> Figures | None:
    return next((f for c, f in figures.items() if (c.name, c.batch, c.workers) == (name, batch, workers)), None)


def _ratio(figures: dict[Case, Figures], case: Case, rival: str, workers: int) -> str:
    other = _find(figures, rival, case.batch, workers)
    return f"{figures[case].rate / other.rate:.2f}" if other and other is not figures[case] else "-"


def bars(figures: dict[Case, Figures]) -> list[str]:
    """Each aim, what came out, met or not; nothing fails for a time."""
    lines = []
    for batch in POOL:
        for mode, workers, rival, rivals, bar in (
            ("async", 2, "rpc", 2, 1.5),
            ("async", 1, "local", 1, 0.75),
            ("geo", 1, "local", 1, 0.92),
        ):
            ours, theirs = _find(figures, mode, batch, workers), _find(figures, rival, batch, rivals)
            if ours and theirs:
                ratio = ours.rate / theirs.rate
                lines.append(
                    _bar(f"batch {batch}: {mode} / {rival}, {workers} worker(s)", ratio, ">=", bar, ratio >= bar)
                )
        if ours := _find(figures, "async", batch, 2):
            ratio = statistics.median(ours.wire) / least_bytes(batch)
            lines.append(
                _bar(f"batch {batch}: bytes on the wire of async / least possible", ratio, "<=", 1.10, ratio <= 1.10)
            )
    return lines


def _bar(what: str, value: float, sign: str, bar: float, met: bool) -> str:
    return f"{what}: {value:.3f} (aim {sign} {bar:.2f}): {'met' if met else 'NOT met'}"


# --- servers, memory, snapshots ---------------------------------------------------------------------------------------


def more_servers(numbers: list[int], repetitions: int) -> None:
    """Throughput and memory with so many servers."""
    chosen = [Case("async", "pserver_async", batch, 2, n) for batch in POOL for n in numbers]
    figures = throughput(chosen, repetitions)
    table = Table(title="async, 2 workers")
    for column in ("batch", "servers", "samples/s per worker", "MB per step", "rows", "bytes per row", "of its values"):
        table.add_column(column, justify="right")
    for case, found in figures.items():
        memory = [t for s in found.statistics[-case.servers :] for t in s["tables"].values()]
        rows = sum(t["rows"] for t in memory)
        each = sum(t["bytes"] for t in memory) / max(1, rows)
        table.add_row(
            str(case.batch),
            str(case.servers),
            f"{found.rate:,.0f}",
            f"{statistics.median(found.wire) / 1e6:.2f}",
            f"{rows:,}",
            f"{each:.0f}",
            f"{each / (4 * COLUMNS):.2f}",
        )
    Console(width=140).print(table)


def snapshots(repetitions: int, rows: int = 2_000_000, columns: int = 16) -> None:
    """Gigabytes per second of saving and reading a table with Adagrad's state."""
    from trainer.strategies.pserver.protocol import snapshot
    from trainer.strategies.pserver.server.sparse_table import SparseTable
    from trainer.strategies.pserver.tables.kernels import kernel
    from trainer.weights.fresh_rows import RowInit

    table = SparseTable("t", columns, torch.float32, 0, RowInit(), kernel("adagrad"), num_rows=rows)
    began = time.perf_counter()
    for first in range(0, rows, 1 << 16):
        table.pull(np.arange(first, min(first + (1 << 16), rows)))
    made = time.perf_counter() - began
    print(
        f"{rows:,} x {columns} with adagrad: made in {made:.1f} s, {table.memory()['bytes_per_row']:.0f} bytes per row"
    )
    spent: dict[str, list[float]] = {"state": [], "write": [], "read, checked": [], "load": []}
    meta = {"tables": {"t": {"dim": columns, "dtype": "float32", "kernel": "adagrad", "rows": rows}}, "dense": []}
    size = 0
    for _ in range(repetitions):
        with tempfile.TemporaryDirectory() as folder:
            clock = [time.perf_counter()]
            tensors = {f"table|t|{key}": value for key, value in table.state().items()}
            clock.append(time.perf_counter())
            target = Path(folder) / "persistables"
            written = snapshot.begin(target, 0)
            snapshot.write_part(written, 0, tensors, meta)
            snapshot.complete(written, 1, target)
            clock.append(time.perf_counter())
            found = snapshot.read(target)
            clock.append(time.perf_counter())
            [part] = found.parts
            fresh = SparseTable("t", columns, torch.float32, 0, RowInit(), kernel("adagrad"), num_rows=rows)
            own = {name.removeprefix("table|t|"): part[name] for name in part}
            fresh.load(own, lambda ids: np.ones(len(ids), dtype=bool))
            clock.append(time.perf_counter())
            size = sum(t.nbytes for t in tensors.values())
        for name, before, after in zip(spent, clock, clock[1:], strict=False):
            spent[name].append(after - before)
    for name, seconds in spent.items():
        print(f"snapshot of {size / 1e9:.2f} GB: {name} {size / 1e9 / statistics.median(seconds):.2f} GB/s")


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only", default="", help="cases by name, separated by commas: local,async")
    parser.add_argument("--batch", type=int, choices=tuple(POOL), help="one batch size alone")
    parser.add_argument("--servers", default="", help="numbers of servers, separated by commas")
    parser.add_argument("--replay", action="store_true", help="8 workers that compute nothing on 1, 2 and 4 servers")
    parser.add_argument("--straggler", action="store_true")
    parser.add_argument("--parity", action="store_true")
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--seeds", type=int, default=5, help="of --parity")
    parser.add_argument("--against", default="", help="a commit: sync, async, ssp and geo of it and of now, in turn")
    parser.add_argument("--profile", default="", help="file for cProfile's data of worker 0, of the first chosen case")
    arguments = parser.parse_args()
    if arguments.straggler or arguments.parity or arguments.dense:
        import pserver_modes

        if arguments.straggler:
            pserver_modes.straggler()
        if arguments.parity:
            pserver_modes.parity(arguments.seeds)
        if arguments.dense:
            pserver_modes.dense()
        return
    if arguments.against:
        import pserver_against

        modes = [mode for mode in pserver_against.MODES if not arguments.only or mode in arguments.only.split(",")]
        pserver_against.table(arguments.against, arguments.batch or min(POOL), modes, arguments.repetitions)
        return
    if arguments.replay:
        import pserver_replay

        pserver_replay.table(arguments.repetitions)
        return
    if arguments.servers:
        more_servers([int(n) for n in arguments.servers.split(",")], arguments.repetitions)
        snapshots(arguments.repetitions)
        return
    wanted = [n for n in arguments.only.split(",") if n]
    chosen = [c for c in cases() if (not wanted or c.name in wanted) and arguments.batch in (None, c.batch)]
    if arguments.profile:
        run_case(chosen[0], Figures(), arguments.profile)
        return
    if why := rpc_server.available():
        print(f"ATTENTION: no torch.distributed.rpc ({why}): there is no rival, and async/rpc is not measured")
        chosen = [c for c in chosen if c.name != "rpc"]
    show(throughput(chosen, arguments.repetitions))


if __name__ == "__main__":
    main()
