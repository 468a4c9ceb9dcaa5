"""Starts this host's processes of a plan with an engine, for launchers that start several."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.run_config import RunConfig
from trainer.config.schema import LaunchConfig
from trainer.errors import RunFailed
from trainer.host.files import if_the_disk_takes, replace_file
from trainer.host.signals import Grace
from trainer.planning.find_checkpoint import can_go_on, has_begun
from trainer.planning.launcher import Assignment, Supervision
from trainer.planning.plan import Plan

if TYPE_CHECKING:
    from trainer.launch.engine import Engine
    from trainer.launch.rendezvous import Rendezvous
    from trainer.launch.started_process import Role


SERVED = "served until its workers had left"
"""The outcome of a host without workers."""


def start_processes(assignment: Assignment, supervision: Supervision, engine: Engine | None = None) -> dict[str, Any]:
    """Start this host's processes of an :class:`Assignment` with an engine, and run them to their end.

    Args:
        engine: starts each process; None: a forkserver.
    """
    from trainer.launch.forkserver import Forked, launch
    from trainer.launch.preload import modules_of
    from trainer.launch.process_reports import ProcessReports
    from trainer.launch.terms import terms

    plan, config = assignment.plan, assignment.config
    settings = config.launch
    rendezvous = replace(
        rendezvous_of(config, plan),
        terms=terms(plan, config, assignment),
        watch=supervision.watch,
        store_opened=supervision.store,
    )
    entries = [plan.strategy.worker, *plan.strategy.entries.values()]
    preload = [*modules_of(config, entries), *assignment.imported]
    run_dir = Path(plan.paths.run_dir)
    folders = [run_dir, plan.own_folder] if config.saves_checkpoints else []  # of host 0, or where hosts share none
    grace = Grace(config.checkpoint.grace_s, lambda: any(map(has_begun, folders)), partial(can_go_on, config, plan))
    seen = "workers" if config.execution.log_workers and config.verbosity == "normal" else config.verbosity
    results = launch(
        _roles(plan, config),
        assignment,
        run_dir,
        rendezvous,
        engine or Forked(preload),
        seen,
        grace,
        settings.hang_timeout_s if config.mode == "train" else None,
        ProcessReports(plan),
        supervision.deaths,
        plan.topology.restarts > 0,
    )
    _leave_statistics(Path(plan.paths.run_dir), results.of.get("server", {}))
    if "worker" not in results.of:
        return {"ended": SERVED}
    if not (workers := results.of["worker"]):
        raise RunFailed("; ".join(results.lost.values()) or "no worker of this host is left")
    more = {
        "lost_workers": {str(rank): why.splitlines()[0] for rank, why in results.lost.items()},
        "asked": results.asked,
    }
    return {**workers[min(workers)], **{name: settings for name, settings in more.items() if settings}}


def rendezvous_of(config: RunConfig, plan: Plan) -> Rendezvous:
    """The hosts of a run as this host knows them, without the terms on which they have to agree."""
    from trainer.launch.rendezvous import Rendezvous
    from trainer.planning.hosts import hosts_of, listens_at
    from trainer.planning.launch_role import peers
    from trainer.planning.run_secret import secret_of_hosts

    settings, everybody = config.launch, peers(config.launch)
    return Rendezvous(
        host=settings.master_addr,
        here=listens_at(settings),
        named_here=settings.address is not None,
        port=settings.master_port,
        number=plan.topology.node_rank,
        hosts=plan.topology.nnodes,
        timeout_s=settings.timeout_s,
        patience_s=config.node("strategy").get("timeout_s", settings.timeout_s),
        secret=secret_of_hosts(settings),
        addresses=[str(peer.endpoint) for peer in everybody] or hosts_of(settings),
        labels=[str(peer) for peer in everybody],
    )


def _roles(plan: Plan, config: RunConfig) -> list[Role]:
    """The roles to start on this host."""
    from trainer.launch.started_process import Role

    roles, survives = [], plan.strategy.traits.survives
    # a worker alone: where a server dies, all go back to the newest checkpoint
    restartable = survives and plan.batches.leased and config.saves_checkpoints and plan.topology.nnodes == 1
    for name in plan.topology.roles:
        if here := [p for p in plan.topology.processes if p.role == name and p.node == plan.topology.node_rank]:
            is_server = name == "server"
            ports = _ports(config.launch, plan.topology.roles[name], [p.rank for p in here]) if is_server else []
            roles.append(
                Role(
                    name,
                    plan.topology.roles[name],
                    plan.strategy.entries[name],
                    [p.device for p in here],
                    here[0].rank,
                    apart=survives and not is_server,
                    restartable=restartable and not is_server,
                    ports=ports,
                )
            )
    return roles


def _leave_statistics(run_dir: Path, servers: Mapping[int, Any]) -> None:
    """Write ``server.N.json`` of all servers, also of servers on hosts that do not share the run's folder."""
    with if_the_disk_takes():
        for rank, statistics in servers.items():
            replace_file(run_dir / f"server.{rank}.json", json.dumps(statistics, indent=1))


def _ports(settings: LaunchConfig, servers: int, ranks: Sequence[int]) -> list[int]:
    """The ports of this host's servers, by rank; empty: free ports."""
    from trainer.planning.endpoints import server_ports
    from trainer.planning.launch_role import peers

    if everybody := peers(settings):
        return [everybody[settings.node_rank].endpoint.port]
    ports = server_ports(settings.server_ports, servers)
    return [ports[number] for number in ranks] if ports else []
