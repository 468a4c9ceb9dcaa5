"""``python benchmarks/between_hosts.py [--gbit 1] [--ms 1]``: strategies on two hosts with two workers each.

The hosts are network namespaces, whose link has this rate and latency each way (``slow_link.py``). They share this
machine's cores, so that only the exchange is that of two hosts. Each row is an update of ``resnet50_flowers_demo``, and
the bytes that the first host has sent to the other for it.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

from advice import measured
from slow_link import HOSTS, hosts

CASES = {
    "collective": ("strategy=collective",),
    "reduce_group=2": ("strategy=collective", "strategy.reduce_group=2"),
    "comm_hook=bf16": ("strategy=collective", "strategy.comm_hook=bf16"),
    "sharded": ("strategy=sharded",),
    "sharded, shard_group=2": ("strategy=sharded", "strategy.shard_group=2"),
    "sharded, shard=optimizer": ("strategy=sharded", "strategy.shard=optimizer"),
    "local_sgd, k_steps=4": ("strategy=local_sgd", "strategy.k_steps=4"),
}


def sent() -> int:
    """Bytes that the first host has sent."""
    where = "/sys/class/net/eth/statistics/tx_bytes"
    read = subprocess.run(["ip", "netns", "exec", HOSTS[0], "cat", where], check=True, capture_output=True, text=True)
    return int(read.stdout)


def main() -> None:
    """Print the table, a row when it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gbit", type=float, default=1.0)
    parser.add_argument("--ms", type=float, default=1.0)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES), help="rows of the table")
    words = parser.parse_args()
    print(f"2 hosts with 2 workers each, {words.gbit:g} Gbit/s, {words.ms:g} ms", flush=True)
    print("| strategy | update | sent by a host |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as made:
        for number, name in enumerate(words.only):
            with hosts(words.gbit, words.ms) as within:
                took = measured(Path(made, f"{number}"), words.updates, *CASES[name], within=within, per_host=2)
                each = sent() / words.updates
            print(f"| `{name}` | {took:.2f} s | {each / 1e6:.1f} MB |", flush=True)


if __name__ == "__main__":
    main()
