"""Predicts what an update costs with a strategy: computation of the workers, and the exchange that it does not hide.

The parts, and where they come from:

- **Link.** A message of ``m`` bytes takes ``alpha + beta m`` seconds (Hockney, 1994). The exchange also takes
  cores that compute, ``gamma`` seconds for each byte that a worker sends: the third number of Thakur et al., 2005.
- **Ring.** Of ``n`` workers each sends and receives ``n - 1`` pieces of ``S / n`` bytes to reduce, and as many to
  gather (Thakur, Rabenseifner and Gropp, 2005). Its slowest link decides: a ring over hosts goes at their link.
- **Gloo.** It asks for a message and then gets it: a message costs the latency twice. An all-reduce has pieces of at
  most 1 MiB, of which two are under way (gloo/allreduce.cc), so that a long link is idle for most of the time.
- **Overlap.** DDP reduces a bucket when the backward has all its gradients, one after another (Li et al., VLDB 2020).
  What is left when the backward has ended is *exposed*: the update waits for it.
- **Shards.** ZeRO-1 reduces gradients and sends updated parameters, 3 S (n-1)/n bytes; ZeRO-2 gathers parameters once
  and scatters gradients, 2 S (n-1)/n; ZeRO-3 gathers twice, 3 S (n-1)/n (Rajbhandari et al., 2020).
- **Servers.** Each worker pushes S and pulls S. A server's link carries the share of all workers.
- **Cores.** Workers of one host share its cores: a worker alone was measured, and two that exchange nothing.
- **Own work.** What compressing, or gathering of blocks, computes was measured with two workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

GLOO_PIECE = 2.0**20
"""Bytes of the largest piece of Gloo's all-reduce."""
GLOO_THREADS = 2
"""All-reduces of a process group of Gloo that go side by side."""
HIDDEN = 0.05
"""Share of an update below which exchanging less cannot pay."""


@dataclass(frozen=True)
class Work:
    """Seconds of a worker's update without an exchange. ``rest``: reading the batch, logging and the loop itself."""

    forward: float
    backward: float
    update: float
    rest: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the whole update."""
        return self.forward + self.backward + self.update + self.rest

    def times(self, factor: float) -> Work:
        """The same work, so many times slower."""
        return Work(self.forward * factor, self.backward * factor, self.update * factor, self.rest * factor)

    def with_batch(self, factor: float) -> Work:
        """The work where the passes take so many times longer; an update costs the same with any batch."""
        return Work(self.forward * factor, self.backward * factor, self.update, self.rest)


@dataclass(frozen=True)
class Link:
    """A link between two workers: ``alpha`` seconds for a message, ``beta`` seconds for each byte. ``gloo``: Gloo uses
    it, else NCCL."""

    alpha: float
    beta: float
    gloo: bool = False

    def or_slower(self, other: Link) -> Link:
        """The slower of two links, in latency and in bandwidth."""
        return Link(max(self.alpha, other.alpha), max(self.beta, other.beta), self.gloo or other.gloo)

    @staticmethod
    def declared(gbit: float | None, latency_ms: float | None, gloo: bool = False) -> Link:
        """A link of so many Gbit/s, and so many milliseconds each way."""
        ways = 2 if gloo else 1
        return Link(ways * (latency_ms or 0.0) / 1e3, 0.0 if gbit is None else 8 / (gbit * 1e9), gloo)


def fitted(samples: Sequence[tuple[int, float]]) -> Link:
    """The link of all-reduces between two workers: ``2 alpha + beta S`` seconds for S bytes.

    Least squares of relative errors, so that the short messages count, too.

    Args:
        samples: bytes and seconds.
    """
    weights = [1 / seconds**2 for _, seconds in samples]
    total = sum(weights)
    mean_x = sum(w * size for w, (size, _) in zip(weights, samples, strict=True)) / total
    mean_y = sum(w * seconds for w, (_, seconds) in zip(weights, samples, strict=True)) / total
    spread = sum(w * (size - mean_x) ** 2 for w, (size, _) in zip(weights, samples, strict=True))
    both = sum(w * (size - mean_x) * (seconds - mean_y) for w, (size, seconds) in zip(weights, samples, strict=True))
    beta = max(0.0, both / spread) if spread else 0.0
    return Link(max(0.0, (mean_y - beta * mean_x) / 2), beta)


@dataclass(frozen=True)
class Cores:
    """What workers of a host leave each other: measured of one worker alone and of two that exchange nothing.

    Attributes:
        number: cores of the host; 0: each worker has a GPU of its own. threads: of a worker; 0: an equal share of the
        cores, as ``execution.threads=auto``. alone, beside: an update of one worker, and of each of two.
    """

    number: int
    threads: int
    alone: Work
    beside: Work

    def share(self, workers: int) -> float:
        """Cores that each of so many workers can use."""
        if not self.number:
            return 1.0
        equal = self.number / workers
        return min(self.threads, equal) if self.threads else equal

    def slowdown(self, workers: int) -> float:
        """How many times longer than with two workers each computes, by the cores that it has left."""
        return max(1.0, self.share(2) / self.share(workers)) if workers > 2 else 1.0

    def work(self, workers: int) -> Work:
        """An update of each of so many workers on the host."""
        return self.alone if workers == 1 else self.beside.times(self.slowdown(workers))


@dataclass(frozen=True)
class Group:
    """Workers of a training: what each computes, and how they are linked.

    Attributes:
        size: workers. work: of each. link: the slowest of a ring. gamma: seconds of cores for each byte sent. own: what
        strategies compute beside that, as they were measured: seconds of an update by kind.
    """

    size: int
    work: Work
    link: Link
    gamma: float = 0.0
    own: Mapping[str, float] = field(default_factory=dict)

    @property
    def ring(self) -> Ring:
        """All workers in a ring."""
        return Ring(self.size, self.link)


@dataclass(frozen=True)
class Machine:
    """What was measured with one worker and with two, from which any number of workers is predicted.

    Attributes:
        link: between two workers of a host. between: of hosts, as declared; None: as within a host. per_host: workers
        of each host. gamma, own: see :class:`Group`. passes: batch size and seconds of the passes of a worker alone,
        of two sizes; None: the batch of a worker is fixed. batch: of the measured workers.
    """

    cores: Cores
    link: Link
    per_host: int
    between: Link | None = None
    gamma: float = 0.0
    own: Mapping[str, float] = field(default_factory=dict)
    passes: tuple[tuple[float, float], tuple[float, float]] | None = None
    batch: float = 0.0

    def group(self, size: int, batch: float | None = None) -> Group:
        """So many workers, each with this batch (None: the measured one)."""
        here = min(size, self.per_host)
        work, busy = self.cores.work(here), self.cores.slowdown(here)
        if batch and self.passes:
            work = work.with_batch(line(*self.passes, batch) / line(*self.passes, self.batch))
        link = replace(
            self.link, beta=self.link.beta * busy
        )  # between processes of a host bytes are copied by its cores
        if size > here and self.between is not None:
            link = link.or_slower(self.between)
        own = {kind: seconds * busy for kind, seconds in self.own.items()}
        return Group(size, work, link, self.gamma * busy, own)


@dataclass(frozen=True)
class Ring:
    """A ring of ``size`` workers over its slowest link."""

    size: int
    link: Link

    def half(self, size: float) -> float:
        """Seconds of a reduce-scatter or an all-gather of so many bytes."""
        return (self.size - 1) * (self.link.alpha + size / self.size * self.link.beta)

    def all_reduce(self, size: float, streams: int = 1) -> float:
        """Seconds of an all-reduce of so many bytes, where so many go side by side and share the bandwidth."""
        seconds = 2 * (self._in_pieces(size) if self.link.gloo else self.half(size))
        return max(seconds / streams, 2 * self.part * size * self.link.beta)

    def _in_pieces(self, size: float) -> float:
        """Seconds of a half of Gloo's all-reduce. A piece is asked for when the last but one has arrived."""
        of_a_worker = max(2, math.ceil(size / GLOO_PIECE / self.size))
        pairs, seconds = (self.size - 1) * of_a_worker / 2, size / self.size / of_a_worker * self.link.beta
        return self.link.alpha + 2 * seconds + (pairs - 1) * max(2 * seconds, self.link.alpha + seconds)

    def everyone(self, size: float) -> float:
        """Seconds where each worker sends so many bytes to all: numbers, and in another message places or scales."""
        return (self.size - 1) * (2 * self.link.alpha + size * self.link.beta)

    @property
    def part(self) -> float:
        """Share of its bytes that a worker sends in a reduce-scatter or an all-gather."""
        return (self.size - 1) / self.size


@dataclass(frozen=True)
class Cost:
    """What an update costs.

    Attributes:
        computation, exposed: seconds that it computes, and that it waits for the exchange. sent: bytes of a worker.
    """

    computation: float
    exposed: float
    sent: float

    @property
    def step(self) -> float:
        """Seconds of the update."""
        return self.computation + self.exposed

    @property
    def share(self) -> float:
        """Share of the update that waits for the exchange."""
        return self.exposed / self.step if self.step else 0.0

    def with_cores(self, gamma: float, more: float = 0.0) -> Cost:
        """The cost where the exchange takes the cores ``gamma`` seconds for each byte sent, and ``more`` seconds."""
        return Cost(self.computation, self.exposed + gamma * self.sent + more, self.sent)


def overlapped(seconds: Sequence[float], sizes: Sequence[float], backward: float) -> float:
    """Seconds of exchanges that are left when a backward has ended.

    Args:
        seconds: of each exchange, in their order. sizes: of each; one is ready when the backward has done the share of
        it and of those before.
    """
    whole, done, free = sum(sizes), 0.0, 0.0
    for one, size in zip(seconds, sizes, strict=True):
        done += size
        free = max(free, backward * done / whole) + one  # one after another
    return max(0.0, free - backward)


def averaged_gradients(work: Work, ring: Ring, buckets: Sequence[float], streams: int = 1) -> Cost:
    """DDP: gradients of these bytes, in buckets, are averaged while the backward goes on, over so many groups."""
    beside = min(len(buckets), GLOO_THREADS if ring.link.gloo and streams == 1 else streams)
    left = overlapped([ring.all_reduce(size, beside) for size in buckets], buckets, work.backward)
    return Cost(work.total, left, 2 * ring.part * sum(buckets))


def after_backward(work: Work, ring: Ring, size: float, times: int, to_all: bool = False) -> Cost:
    """So many bytes of compressed gradients go when the backward has ended, in a ring or from each worker to all, by so
    many exchanges one after another."""
    exchange = ring.everyone if to_all else ring.all_reduce
    sent = (ring.size - 1) * size if to_all else 2 * ring.part * size
    return Cost(work.total, times * exchange(size / times), sent)


def sharded_optimizer(work: Work, ring: Ring, buckets: Sequence[float], parameters: float) -> Cost:
    """ZeRO-1: gradients as DDP, each worker updates its part, and sends these parameters (bytes) to the others."""
    gradients = averaged_gradients(work, ring, buckets)
    computation = work.total - work.update * ring.part
    return Cost(computation, gradients.exposed + ring.half(parameters), gradients.sent + ring.part * parameters)


def sharded(work: Work, ring: Ring, blocks: Sequence[float], reduced: Sequence[float], gathers: int) -> Cost:
    """ZeRO-2 and 3: parameters of blocks (bytes) are gathered once or twice, gradients (``reduced``) are scattered.

    A block is gathered while the one before computes, and its gradients are scattered while the next one does.
    """
    gathered, scattered = [ring.half(size) for size in blocks], [ring.half(size) for size in reduced]
    again = gathered if gathers > 1 else [0.0] * len(blocks)
    forward = _waits(gathered, [0.0] * len(blocks), blocks, work.forward)
    backward = _waits(again[::-1], scattered[::-1], blocks[::-1], work.backward)
    sent = ring.part * (gathers * sum(blocks) + sum(reduced))
    return Cost(work.total - work.update * ring.part, forward + backward, sent)


def _waits(gathered: Sequence[float], scattered: Sequence[float], sizes: Sequence[float], computation: float) -> float:
    """Seconds by which a pass over blocks is longer than its computation: one link gathers and scatters in turn."""
    link = begun = ended = last = 0.0
    for gather, scatter, size in zip(gathered, scattered, sizes, strict=True):
        there = max(link, begun) + gather  # asked for when the block before begins
        link = max(there, ended) + last  # then the gradients of that block, when it has ended
        begun = max(ended, there)
        ended, last = begun + computation * size / sum(sizes), scatter
    return max(ended, max(link, ended) + last) - computation


def averaged_parameters(work: Work, ring: Ring, size: float, every: int, to_all: bool = False) -> Cost:
    """local_sgd: so many bytes are averaged after each ``every`` updates, which wait for it."""
    seconds = ring.everyone(size) if to_all else ring.all_reduce(size)
    sent = (ring.size - 1) * size if to_all else 2 * ring.part * size
    return Cost(work.total, seconds / every, sent / every)


def served(work: Work, link: Link, workers: int, servers: int, size: float) -> Cost:
    """pserver_sync: all workers push gradients, servers update once, all pull (bytes each way)."""
    way = link.alpha + size * link.beta * max(1.0, workers / servers)
    return Cost(work.total - work.update + work.update / servers, 2 * way, size)


def served_apart(work: Work, link: Link, workers: int, servers: int, size: float) -> Cost:
    """pserver_async and ssp: a push goes while the next batch computes, and the pull is waited for. A server makes an
    update for each push, and is the limit where it is slower than the workers together."""
    computation = work.total - work.update
    pull = link.alpha + size * link.beta
    limit = workers / servers * max(work.update, size * link.beta)
    return Cost(computation, max(pull, limit - computation), size)


def served_now_and_then(work: Work, link: Link, workers: int, servers: int, size: float, every: int) -> Cost:
    """pserver_geo: replicas train apart, and differences go after ``every`` updates while the training goes on."""
    exchange = 2 * (link.alpha + size * link.beta * max(1.0, workers / servers))
    return Cost(work.total, max(0.0, exchange / every - work.total), size / every)


def line(small: tuple[float, float], large: tuple[float, float], at: float) -> float:
    """The value at a batch size, on the line through two measured ones; at least the value at 0."""
    (x, y), (other_x, other_y) = small, large
    slope = max(0.0, (other_y - y) / (other_x - x)) if other_x != x else 0.0
    return max(y - slope * x, 0.0) + slope * at
