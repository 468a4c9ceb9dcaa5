"""A Ray cluster of several nodes on this host, on loopback. A Python that has ray runs this file as a script.

It prints the cluster's address, and then obeys the lines of its input: ``kill N`` kills a node, ``drain N`` announces
that it is pre-empted, ``add`` starts another one. The end of the input ends the cluster.
"""

from __future__ import annotations

import sys
from typing import Any


def main(count: int) -> None:
    """Start so many nodes with two cores each, and obey."""
    from ray.cluster_utils import Cluster

    cluster, nodes = Cluster(), list[Any]()

    def add() -> None:
        own = {"include_dashboard": False} if not nodes else {}
        address = f"127.0.0.{21 + len(nodes)}"
        memory = 80 * 1024 * 1024
        nodes.append(cluster.add_node(num_cpus=2, node_ip_address=address, object_store_memory=memory, **own))

    for _ in range(count):
        add()
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    for line in sys.stdin:
        what, _, number = line.strip().partition(" ")
        if what == "kill":
            cluster.remove_node(nodes[int(number)], allow_graceful=False)
        elif what == "drain":
            drain(cluster.address, nodes[int(number)].node_id)
        else:
            add()
        print("done", flush=True)
    cluster.shutdown()


def drain(address: str, node: str) -> None:
    """Announce that a node is pre-empted within a minute."""
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    preemption = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, why = GcsClient(address=address).drain_node(node, preemption, "test", 0)
    assert accepted, why


if __name__ == "__main__":
    main(int(sys.argv[1]))
