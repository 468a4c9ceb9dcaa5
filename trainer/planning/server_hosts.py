"""Decides on which hosts the parameter servers run: ``launch.server_hosts`` as a list of host numbers."""

from __future__ import annotations

from trainer.config.schema import LaunchConfig
from trainer.errors import UserError
from trainer.wording import counted

AUTO, ALL, FIRST = "auto", "all", "first"
KEY = "launch.server_hosts"


def server_hosts(launch: LaunchConfig, servers: int) -> list[int]:
    """The host number of each parameter server, by server number; servers of one host have consecutive numbers.

    The servers are spread evenly over the chosen hosts; where the division leaves a rest, the first hosts have one more.

    Raises:
        UserError: there is no such host, a host would have no server, or the text names no hosts.
    """
    hosts = _chosen(launch, servers)
    if len(hosts) > servers:
        what, least = f"{KEY}={launch.server_hosts}", len(hosts)
        why = f"{counted(servers, 'server')} cannot be on {counted(least, 'host')}: some would have none"
        raise UserError(what, why, f"launch.servers={least} (or {KEY}=first)")
    each, rest = divmod(servers, len(hosts))
    return [host for place, host in enumerate(hosts) for _ in range(each + (place < rest))]


def _chosen(launch: LaunchConfig, servers: int) -> list[int]:
    told, everywhere = launch.server_hosts.strip(), list(range(launch.nnodes))
    if told == AUTO:
        return everywhere if servers >= launch.nnodes else [0]
    return {ALL: everywhere, FIRST: [0]}.get(told) or _numbers(told, launch.nnodes)


def _numbers(told: str, nnodes: int) -> list[int]:
    """The hosts of a list such as ``0,2``."""
    what, instead = f"{KEY}={told}", f"{KEY}=auto (or all, first, or hosts' numbers such as 0,1)"
    words = [word.strip() for word in told.split(",") if word.strip()]
    if not words:
        raise UserError(what, "names no host", instead)
    hosts: list[int] = []
    for word in words:
        if not (word.isascii() and word.isdecimal()):
            raise UserError(what, f"{word} is no host's number, and neither auto, all nor first", instead)
        if (host := int(word)) >= nnodes:
            last = f"the last of {nnodes} is host {nnodes - 1}" if nnodes > 1 else "the run has host 0 alone"
            raise UserError(what, f"there is no host {word}: {last} (launch.nnodes, launch.ips)", instead)
        if host in hosts:
            raise UserError(what, f"names host {host} twice", f"{KEY}={','.join(map(str, dict.fromkeys(map(int, words))))}")  # fmt: skip
        hosts.append(host)
    return hosts
