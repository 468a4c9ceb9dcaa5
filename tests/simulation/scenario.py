"""What is drawn from a seed: a run of some mode, and what happens to it."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

MODES = ("async", "ssp", "geo", "sync")
LOST_AFTER_S = 10.0
TIMEOUT_S = 200.0
SHORT = (0.01, 0.05, 0.3, 0.5, 1.0, 3.0, 8.0)
LONG = (12.0, 20.0, 25.0)
"""Seconds of a stop or a cut: below and above ``LOST_AFTER_S``."""
PARTED = (60.0, 150.0, 300.0, 500.0)
"""Of hosts and of the board also: below and above ``TIMEOUT_S``."""
TO_PART = SHORT[3:] + LONG + PARTED
LONG_RUNS = 7, 30
"""Runs whose seeds end in it have up to 8 workers, 4 servers and 288 batches. The others are short, and find the same
in less time."""
WAKING_RUNS = 3, 30
"""Runs of ssp whose seeds end in it are made for workers that rest and wake."""
DYING_SERVERS = (2, 14, 16)
"""Runs whose seeds leave these in a division by 20 are made for servers that are killed: all go back to the newest
checkpoint."""
CLOSE_DEATHS = (6, 11)
"""Runs whose seeds leave these in a division by 20 are made for workers and servers that die close together, and again
as they begin from the checkpoint."""
BEHIND = (0, 3)
"""Runs whose seeds leave these in a division by 4 have checkpoint.background=true."""
RESUMED_RUNS = 19, 20
"""All processes of runs whose seeds leave this in such a division die, and others go on: as many in sync, else other
numbers of them."""
ON_HOSTS = (7, 9)
"""Runs whose seeds leave these in a division by 20 are on two or three hosts, which lose their ways to each other and
to the board."""
JUMPS = (0.5, 5.0, 12.0, 40.0, 300.0)
MOST_SAVES = 12
"""Stops of a run whose disks are slower than all else."""
SHARED_VALIDATIONS = 7, 19
"""Runs whose seeds leave this in such a division have validations that workers divide among themselves."""
HELPLESS = 3
"""In one run of so many, the launcher is stopped."""
WRITES_FIRST = 4
"""In one run of so many, a server answers SAVE when its disk is done; in the others its disk is slow after the
answer."""
FAULTS = (
    "stop worker",
    "stop server",
    "suspend worker",
    "suspend server",
    "kill worker",
    "kill server",
    "cut",
    "reset",
    "clock of worker",
    "clock of server",
    "nonsense",
    "torn push",
)
OF_HOSTS = ("cut of hosts", "board away", "board slow")
"""Of runs on several hosts."""
DEATHS = ("kill worker", "torn push", "torn stop", "torn goodbye")
"""Of a worker: at a time, in the middle of its next push, at the next stop of all, or as it leaves."""
CLOSE_BY = ("kill worker", "torn push", "torn stop", "torn stop", "torn meeting", "torn meeting")
"""Its deaths in runs for deaths that come close together: also at the end of an epoch."""
WEIGHTS = (4, 4, 1, 1, 5, 0.15, 3, 3, 1, 1, 3, 6)


@dataclass(frozen=True)
class Fault:
    """At a time something happens to a worker, a server, or the way between them; or to two hosts, in the place of
    worker and server."""

    at: float
    kind: str
    worker: int
    server: int
    seconds: float


@dataclass(frozen=True)
class Scenario:
    """A run and its faults.

    Attributes:
        merge: batches of an update. leased: work is handed out while an epoch lasts. block: batches of a block.
        take_over: blocks of a lost worker go to others. saves: the run ends with a checkpoint. hosts: of each server;
        0: the workers' host. Other parts have to be fetched, and then
            a second checkpoint follows.
        buffers: the model has one, on which all agree at the end of an epoch. bulky: the rows of the table are torch's
        own, and travel with the start. evaluates: rows are looked up at the end of an epoch. returns: so many workers
        that are killed are started again. stops: batches of the first worker after which all stop for a
            checkpoint; 0: they stop only for one that has come back.
        validates: workers meet at the end of an epoch. Else they do for a checkpoint alone. ends: all processes die so
        long after the first checkpoint of their lives, and others go on from the newest one. goes_back: so often all
        processes are started again from the newest checkpoint because a server was killed. others: how many workers
        and servers go on in each life after the first, if not as many. vectors: of the model; 0: one per server. close:
        a server often dies with a worker, and either may die again when all have gone back.
        places: the host of each worker, then of each server; empty: all on one. helpless: the launcher is stopped
        itself, and ends no silent worker. shares: workers divide the validation among themselves, and repeat it where
        one is lost meanwhile. options: of the strategy. table: the model has a sparse table. drop, double, late,
        slow_s, latency_s: of the network. disk_s: a server writes for so long. writes_first: before it answers SAVE,
        not after that. pace: seconds that a batch takes, by worker.
    """

    seed: int
    mode: str
    workers: int
    servers: int
    epochs: int
    blocks: int
    block: int
    merge: int
    leased: bool
    take_over: bool
    saves: bool
    table: bool
    options: dict[str, Any]
    drop: float
    double: float
    late: float
    slow_s: float
    latency_s: float
    disk_s: float
    pace: tuple[float, ...]
    faults: tuple[Fault, ...] = field(default_factory=tuple)
    hosts: tuple[int, ...] = ()
    buffers: bool = False
    bulky: bool = False
    evaluates: bool = False
    returns: int = 0
    stops: int = 0
    ends: tuple[float, ...] = ()
    validates: bool = True
    goes_back: int = 0
    close: bool = False
    writes_first: bool = False
    others: tuple[tuple[int, int], ...] = ()
    vectors: int = 0
    places: tuple[int, ...] = ()
    helpless: bool = False
    shares: bool = False

    @staticmethod
    def drawn(seed: int, mode: str | None = None) -> Scenario:
        """Everything from one seed."""
        r = random.Random(seed)
        drawn_mode = r.choices(MODES, (4, 4, 4, 2))[0]
        mode = mode or drawn_mode
        long = _is_one_of(LONG_RUNS, seed)
        workers = r.choices((1, 2, 3, 4, 6, 8), (3, 8, 6, 2, 1, 1) if long else (2, 9, 2, 0, 0, 0))[0]
        servers = r.choices((1, 2, 3, 4), (5, 6, 2, 1) if long else (9, 5, 0.5, 0.3))[0]
        leased = mode != "sync" and r.random() < 0.85
        merge = r.choices((1, 2), (4, 1))[0]
        table = r.random() < (0.5 if long else 0.3)
        calm = r.random() < 0.15  # no bad weather: whether the faults alone are survived
        scenario = Scenario(
            seed,
            mode,
            workers,
            servers,
            epochs=r.choices((1, 2), (3, 1) if long else (20, 1))[0],
            blocks=r.choice((1, 2, 3, 4, 6, 9) if long else (1, 1, 2, 2, 3)),
            block=merge * r.choice((1, 2, 3, 3, 8) if long else (1, 2, 2, 2, 3)),
            merge=merge,
            leased=leased,
            take_over=r.random() < 0.9,
            saves=long or r.random() < 0.25,
            table=table,
            options=_options(r, mode, table),
            drop=0.0 if calm else r.choice((0.0, 0.05, 0.1, 0.2)),
            double=0.0 if calm else r.choice((0.0, 0.1, 0.2)),
            late=0.0 if calm else r.choice((0.0, 0.15, 0.3)),
            slow_s=r.choice((0.01, 0.1, 3.0, 20.0) if long else (0.01, 0.1, 0.1, 3.0, 20.0)),
            latency_s=r.choice((0.002, 0.002, 0.05, 0.3)),
            disk_s=r.choice((0.0, 0.5, 15.0)),
            pace=tuple(r.choice((0.001, 0.01, 0.01, 0.05, 0.5)) for _ in range(workers)),
            faults=tuple(
                sorted((_fault(r, workers, servers) for _ in range(r.choice((1, 1, 2, 2, 3)))), key=lambda f: f.at)
            ),
            helpless=seed % HELPLESS == 0,
            shares=_is_one_of(SHARED_VALIDATIONS, seed),
        )
        return (
            scenario._drawn_later(random.Random(~seed))
            ._with_a_slow_disk(random.Random(f"a slow disk {seed}"))
            ._resumed(random.Random(f"other numbers {seed}"))
            ._with_admission_by_chance(random.Random(f"admission {seed}"))
            ._on_hosts(random.Random(f"hosts {seed}"))
        )

    def _drawn_later(self, r: random.Random) -> Scenario:
        """What was added to scenarios has a generator of its own: the rest of a seed's scenario stays what it was."""
        told = self._waking(r) if self.mode == "ssp" and _is_one_of(WAKING_RUNS, self.seed) else self
        more: dict[str, Any] = {"options": told.options | told._without_effect(r), "buffers": r.random() < 0.1}
        if told.saves and r.random() < 0.6:
            more["hosts"] = tuple(r.choice((0, server + 1)) for server in range(told.servers))
        if told.leased and told.workers > 1 and r.random() < 0.22:
            more |= {"faults": told._with_a_kill(r), "returns": 3, "stops": r.choice((0, 1, 2, 5))}
            if (chance := r.random()) < 0.2:
                more |= told._dies_as_it_comes(r)
            elif chance < 0.3:
                more["faults"] = told._dies_as_it_leaves(r)
        if told.saves and r.random() < 0.2:
            more["options"]["persistables"] = True
        if more["buffers"] and r.random() < 0.5:
            more["options"]["buffers"] = "average"
        if self.mode != "sync" and r.random() < 0.04:
            more |= told._ends(r, more)
        more |= {"bulky": told.table and r.random() < 0.15, "evaluates": told.table and r.random() < 0.15}
        if self.mode != "sync" and r.random() < (0.4 if more.get("ends") else 0.02):
            more |= {"epochs": 2, "validates": False}
        told = replace(told, **more)
        if self.seed % 20 in CLOSE_DEATHS and self.mode != "sync":
            return told._with_close_deaths(r)
        return told._with_dying_servers(r) if self.seed % 20 in DYING_SERVERS else told

    def _with_a_kill(self, r: random.Random) -> tuple[Fault, ...]:
        """Whoever comes back has died before."""
        return (*self.faults[:-1], replace(self.faults[-1], kind=r.choice(DEATHS)))

    def _dies_as_it_comes(self, r: random.Random) -> dict[str, Any]:
        """A worker dies in the middle of its first messages, some of which come after those of its next life."""
        dies = Fault(r.uniform(0.0, 0.1), "kill worker", r.randrange(1, self.workers), 0, 0.0)
        return {"faults": (dies, *self.faults[1:]), "late": 0.3, "slow_s": 20.0}

    def _dies_as_it_leaves(self, r: random.Random) -> tuple[Fault, ...]:
        """A worker dies, comes back, and dies again when all its work is done."""
        rank = r.randrange(self.workers)
        return (
            Fault(0.0, "torn goodbye", rank, 0, 0.0),
            Fault(r.uniform(0.1, 1.0), "kill worker", rank, 0, 0.0),
            *self.faults[2:],
        )

    def _ends(self, r: random.Random, more: dict[str, Any]) -> dict[str, Any]:
        """All processes die once or twice. There are two epochs, so that a checkpoint may lie between them."""
        ends = tuple(10 ** r.uniform(-2.5, 0.7) for _ in range(r.choice((1, 1, 2))))
        return {"ends": ends, "stops": more.get("stops") or r.choice((1, 1, 2, 3)), "epochs": r.choice((1, 2))}

    def _with_dying_servers(self, r: random.Random) -> Scenario:
        """All stop for checkpoints often, batches take their time, and servers are killed, most of them when there is
        one."""
        kills = [
            Fault(r.uniform(0.1, 5.0), "kill server", 0, r.randrange(self.servers), r.choice((0.0, *[0.05, 0.4] * 4)))
            for _ in range(r.choice((1, 1, 2, 3)))
        ]
        if r.random() < 0.3:  # two at once, or one twice
            kills.append(
                replace(kills[0], at=kills[0].at + r.choice((0.0, 0.3, 2.0)), server=r.randrange(self.servers))
            )
        return replace(
            self,
            goes_back=r.choice((1, 4, 4)),
            ends=(),
            hosts=(),
            slow_s=min(self.slow_s, 3.0),
            stops=r.choice((1, 1, 2, 4)),
            blocks=max(self.blocks, r.choice((2, 4, 6))),
            pace=tuple(r.choice((0.05, 0.2, 0.5)) for _ in range(self.workers)),
            faults=tuple(sorted([*self.faults, *kills], key=lambda fault: fault.at)),
        )._with_blocks_of_the_lost(r)

    def _with_close_deaths(self, r: random.Random) -> Scenario:
        """A worker dies at a stop or at any time, a server dies at about that time, and so on when all have gone
        back."""
        workers = self.workers if self.workers > 1 else r.choice((2, 3))
        rank, at = r.randrange(workers), r.uniform(0.1, 3.0)
        kills = [
            Fault(at, r.choice(CLOSE_BY), rank, 0, 0.05),
            Fault(at + r.choice((0.0, 0.1, 1.0)), "kill server", 0, r.randrange(self.servers), 0.05),
        ]
        return replace(
            self,
            close=True,
            workers=workers,
            leased=True,
            returns=3,
            goes_back=4,
            ends=(),
            hosts=(),
            slow_s=min(self.slow_s, 3.0),
            stops=r.choice((1, 2, 3)),
            blocks=max(self.blocks, r.choice((2, 4, 6))),
            pace=tuple(r.choice((0.05, 0.5, 1.0, 3.0)) for _ in range(workers)),
            faults=tuple(sorted([*self.faults[:1], *kills], key=lambda fault: fault.at)),
        )

    def _resumed(self, r: random.Random) -> Scenario:
        """All processes die while checkpoints are written. In sync as many go on, else other numbers of workers and
        servers."""
        if not _is_one_of(RESUMED_RUNS, self.seed):
            return self
        ends = tuple(10 ** r.uniform(-2.0, 1.0) for _ in range(r.choice((1, 2, 2))))
        more: dict[str, Any] = {
            "ends": ends,
            "stops": r.choice((1, 1, 2, 3)),
            "blocks": max(self.blocks, r.choice((2, 3, 5))),
        }
        if self.mode == "sync":
            return replace(self, **more)
        workers = r.choice((1, 2, 2, 3, 4))
        numbers = [(r.choice((1, 2, 3, 4)), r.choice((1, 1, 2, 3))) for _ in ends]
        if r.random() < 0.5:  # as many go on once more, and have states of their own
            numbers[-1] = numbers[0]
        told = replace(
            self,
            workers=workers,
            leased=True,
            hosts=(),
            returns=r.choice((0, 3)),
            slow_s=min(self.slow_s, 3.0),
            pace=tuple(r.choice((0.01, 0.05, 0.2, 0.5)) for _ in range(workers)),
            block=max(self.block, self.merge * r.choice((2, 3))),
            others=tuple(numbers),
            vectors=max(self.servers, *(servers for _, servers in numbers)),
            **more,
        )
        kinds = {"nonsense": "reset", "kill server": "stop server"}
        return replace(
            told, faults=tuple(replace(f, kind=kinds.get(f.kind, f.kind)) for f in told._faults_of(self.faults))
        )

    def _faults_of(self, faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
        """Those of other numbers of processes."""
        return tuple(replace(f, worker=f.worker % self.workers, server=f.server % self.servers) for f in faults)

    def without(self, faults: Iterable[Fault]) -> Scenario:
        """The same, but for faults that have happened and do not happen again when all go back."""
        happened = {*faults}
        return replace(self, faults=tuple(fault for fault in self.faults if fault not in happened))

    def of_life(self, life: int) -> Scenario:
        """What the processes of one life are told."""
        if not (life and self.others):
            return self
        workers, servers = self.others[life - 1]
        pace = tuple(self.pace[rank % len(self.pace)] for rank in range(workers))
        told = replace(self, workers=workers, servers=servers, pace=pace)
        return replace(told, faults=told._faults_of(self.faults))

    def _with_blocks_of_the_lost(self, r: random.Random) -> Scenario:
        """A worker dies with a part of a block, of which server 1 knows, and a server dies before another worker has
        it."""
        if not self.leased or self.workers < 2 or r.random() > 0.3:
            return self
        at, twice = r.uniform(0.5, 3.0), r.random() < 0.5
        worker = Fault(at, "kill worker", r.randrange(self.workers), 0, 0.05)
        server = Fault(at + r.choice((0.02, 0.1, 0.3)), "kill server", 0, 0, 0.05)
        if twice:
            worker = replace(worker, at=at + r.uniform(1.0, 6.0))
            server = replace(server, server=1)
            again = replace(server, at=worker.at + r.choice((0.3, 0.8, 2.0)))
        return replace(
            self,
            servers=max(2, self.servers),
            block=self.merge * (12 if twice else 6),
            blocks=max(4, self.blocks),
            stops=r.choice((3, 8)),
            faults=(server, worker, again) if twice else (worker, server),
            drop=0.0,
            late=0.3,
            slow_s=r.choice((0.1, 3.0)),
            returns=r.choice((0, 3)),
            goes_back=4,
        )

    def _with_a_slow_disk(self, r: random.Random) -> Scenario:
        """In a few runs servers write for longer than anybody waits for a worker that does not save."""
        often = self.stops > 0 and self.batches > MOST_SAVES * self.stops
        if often or not (self.saves or self.stops) or r.random() > 0.1:
            return replace(self, writes_first=True) if self.seed % WRITES_FIRST == 0 else self
        return replace(self, disk_s=1.25 * TIMEOUT_S, writes_first=True)

    def _with_admission_by_chance(self, r: random.Random) -> Scenario:
        """An id becomes a row at each push with a probability."""
        if not self.table or self.mode == "geo" or self.options.get("count", 1) > 1 or r.random() > 0.2:
            return self
        return replace(self, options=self.options | {"probability": r.choice((0.2, 0.6))})

    def _on_hosts(self, r: random.Random) -> Scenario:
        """Between hosts no process is started again. All connections of two hosts are cut at once, and the board is
        away or slow."""
        if self.seed % 20 not in ON_HOSTS:
            return self
        hosts = r.choice((2, 2, 2, 3))
        workers = max(self.workers, hosts)
        places = [rank * hosts // workers for rank in range(workers)]
        spread = r.random() < 0.5
        places += [r.randrange(hosts) if spread else 0 for _ in range(self.servers)]
        times = [10 ** r.uniform(-2.3, 0.8) for _ in range(r.choice((1, 1, 2)))]
        cuts = [Fault(at, "cut of hosts", *sorted(r.sample(range(hosts), 2)), r.choice(TO_PART)) for at in times]
        if r.random() < 0.5:
            kind = r.choice(OF_HOSTS[1:])
            cuts.append(Fault(10 ** r.uniform(-2.3, 0.8), kind, 0, 0, r.choice(TO_PART)))
        own = [fault for fault in self.faults if r.random() < 0.3]
        long = any(fault.seconds in PARTED for fault in cuts)
        return replace(
            self,
            workers=workers,
            places=tuple(places),
            faults=tuple(sorted([*own, *cuts], key=lambda fault: fault.at)),
            pace=tuple(r.choice((0.05, 0.2, 0.5)) for _ in range(workers)),
            stops=self.stops or r.choice((0, 0, 1, 3)),
            blocks=max(self.blocks, r.choice((2, 4))),
            returns=0,
            ends=(),
            hosts=() if long else self.hosts,
        )

    def _without_effect(self, r: random.Random) -> dict[str, Any]:
        """Keys of the strategy that leave pieces whole: limits that nothing reaches, and forms in which 0 and 1 travel
        unchanged."""
        told: dict[str, Any] = {}
        if r.random() < 0.1:
            told["clip_value"] = 1e9
        if self.mode in ("async", "ssp") and r.random() < 0.1:
            told |= {"clip_norm": 1e9, "delay_compensation": 1e-12}
        if self.mode != "geo" and r.random() < 0.15:
            told["wire"] = r.choice(("bf16", "int8"))
        if self.table and r.random() < 0.1:
            told["evict_by"] = "event_time"
        return told

    def _waking(self, r: random.Random) -> Scenario:
        """One of three workers finds no second block and rests; of the others one is killed in its second block, which
        the one that rested takes over, while the third takes steps of which the servers know more and less."""
        return replace(
            self,
            workers=3,
            servers=2,
            epochs=1,
            leased=True,
            take_over=True,
            blocks=5,
            block=r.choice((3, 4)),
            merge=1,
            drop=r.choice((0.0, 0.02)),
            late=r.choice((0.1, 0.3)),
            slow_s=3.0,
            latency_s=0.002,
            pace=(0.5,) * 3,
            options=self.options | {"staleness": r.choice((0, 1))},
            faults=(Fault(r.uniform(3.0, 12.0), "kill worker", r.randrange(3), 0, 0.0),),
        )

    @property
    def background(self) -> bool:
        """Servers write their parts of checkpoints while pushes go on."""
        return self.seed % 4 in BEHIND

    @property
    def chooses_rows(self) -> bool:
        """Not all ids become rows of the table, or rows are removed."""
        told = self.options
        return self.table and (told.get("count", 1) > 1 or "probability" in told or bool(told.get("evict_after")))

    @property
    def timed(self) -> bool:
        """Batches have a time of their own."""
        return self.options.get("evict_by") == "event_time"

    @property
    def parted_s(self) -> float:
        """So long hosts, or the board, may be out of reach in all."""
        return sum(fault.seconds for fault in self.faults if fault.kind in OF_HOSTS)

    @property
    def batches(self) -> int:
        """Of an epoch, over all workers."""
        return self.blocks * self.block if self.leased else self.workers * self.each

    @property
    def each(self) -> int:
        """Batches of an epoch for each worker, where they are split beforehand."""
        return self.merge * self.blocks


def _options(r: random.Random, mode: str, table: bool) -> dict[str, Any]:
    """Keys of the strategy."""
    told: dict[str, Any] = {
        "timeout_s": TIMEOUT_S,
        "lost_after_s": LOST_AFTER_S,
        "slice_above": None,
        "persistables": False,
    }
    if mode in ("async", "ssp"):
        told |= {"send_queue_size": r.choice((1, 2, 4)), "launch_barrier": r.random() < 0.5}
    if mode == "async":
        merged = r.choice((1, 1, 2, 4))
        told |= {
            "max_merge_var_num": merged,
            "send_wait_times": r.choice((0, merged - 1)),
            "independent_recv_thread": r.choice(("auto", True, False)),
            "min_send_grad_num_before_recv": r.choice((1, 1, 3)),
        }
    if mode == "ssp":
        told["staleness"] = r.choice((0, 0, 1, 3))
    if mode == "geo":
        told |= {"k_steps": r.choice((1, 2, 5)), "overlap": r.random() < 0.5}
        told["launch_barrier"] = told["k_steps"] != 2  # no draw of its own, so that the seeds stay what they were
    if mode == "sync":
        told |= {"on_lost_worker": r.choice(("stop", "continue")), "clip_norm": r.choice((None, 1e9))}
    if table and mode != "geo":
        told |= {"evict_after": r.choice((None, None, 1)), "count": r.choice((1, 1, 2))}
    return told


def _fault(r: random.Random, workers: int, servers: int) -> Fault:
    kind = r.choices(FAULTS, WEIGHTS)[0]
    seconds = r.choice(JUMPS) if kind.startswith("clock") else r.choice(SHORT + LONG)
    return Fault(10 ** r.uniform(-2.3, 0.8), kind, r.randrange(workers), r.randrange(servers), seconds)


def _is_one_of(which: tuple[int, int], seed: int) -> bool:
    """Whether a seed is of these runs: (remainder, divisor)."""
    remainder, divisor = which
    return seed % divisor == remainder
