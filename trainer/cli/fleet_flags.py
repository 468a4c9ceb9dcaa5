"""Refuses the flags of ``fleetrun`` and ``paddle.distributed.launch``, and names the equal config keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainer.errors import UserError

KEYS = {
    "nproc_per_node": "launch.nproc={}",
    "server_num": "strategy=pserver_async launch.servers={}",
    "worker_num": "launch.workers={}",
    "trainer_num": "launch.workers={}",
    "ips": "launch.ips={}",
    "cluster_node_ips": "launch.ips={}",
    "started_port": "launch.master_port={}",
    "log_dir": "hydra.run.dir={}",
    "servers": "launch.server_endpoints={} launch.role=ROLE launch.rank=N",
    "workers": "launch.worker_endpoints={} launch.role=ROLE launch.rank=N",
    "use_paddlecloud": "launch.env=paddle",
    "print_config": "plan=true",
    "rank": "launch.node_rank={}",
    "max_restart": "launch.max_restarts={}",
}
"""The equal override for each flag, with a place for the value."""
COUNTED = {"servers": "launch.servers={}", "workers": "launch.workers={}"}
"""The equal override for a number."""
QUOTES = "\"'"
GPUS = ("gpus", "selected_gpus", "devices")
MODES = {"collective": "strategy=collective", "ps": "strategy=pserver_async"}
NOT_NEEDED = {
    "node_ip": "each host finds its own address in launch.ips",
    "http_port": "the processes meet without it, hosts at launch.master_port",
}
NOT_THERE = {
    "elastic_server": (
        "the number of processes does not change while a run lasts. Of those that die, launch.max_restarts starts "
        "all again"
    ),
    "heter_workers": "there are servers and workers, and no third role",
    "heter_worker_num": "there are servers and workers, and no third role",
    "heter_devices": "there are servers and workers, and no third role",
    "xpus": "device is cpu or cuda",
    "npus": "device is cpu or cuda",
}
WITHOUT_VALUE = ("use_paddlecloud", "print_config")
VALUES = {
    "ips": "ADDRESS,ADDRESS",
    "cluster_node_ips": "ADDRESS,ADDRESS",
    "log_dir": "FOLDER",
    "started_port": "PORT",
    "servers": "ADDRESS:PORT,...",
    "workers": "ADDRESS:PORT,...",
}
"""Placeholders for missing values; for others N."""


def refuse(argv: Sequence[str]) -> None:
    """Refuse a command line that has flags of ``fleetrun``.

    Raises:
        UserError: there is one; the message has the equal keys for all of them.
    """
    typed = list(_flags(argv))
    if not typed:
        return
    keys = dict.fromkeys(word for name, value, _ in typed for word in _keys(name, value).split())
    gpus = [value.strip(QUOTES) for name, value, _ in typed if name in GPUS]
    meant = " ".join(keys) + (f" (and CUDA_VISIBLE_DEVICES={gpus[-1] or '0,1'} before the command)" if gpus else "")
    others = {**NOT_NEEDED, **NOT_THERE}
    reasons = "; ".join(f"--{name}: {others[name]}" for name, _, _ in typed if name in others)
    why = "there is no such flag; what a run does is said in keys"
    raise UserError(" ".join(words for _, _, words in typed), f"{why}. {reasons}".removesuffix(". "), meant)


def _flags(argv: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Name, value and spelling of each flag of Fleet."""
    for place, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or name not in {*KEYS, *GPUS, *NOT_NEEDED, *NOT_THERE, "run_mode", "master"}:
            continue
        after = argv[place + 1] if place + 1 < len(argv) else ""
        if not equals and name not in WITHOUT_VALUE and _is_value(after):
            yield name, after, f"{word} {after}"
        else:
            yield name, value, word


def _is_value(word: str) -> bool:
    return bool(word) and not word.startswith(("-", "+", "~")) and "=" not in word and not word.endswith(".py")


def _keys(name: str, value: str) -> str:
    """The equal override; empty: none is needed."""
    value = value.strip(QUOTES)
    if name in GPUS:
        return f"launch.nproc={len([gpu for gpu in value.split(',') if gpu]) or 'N'}"
    if name == "run_mode":
        return MODES.get(value, "strategy=collective")
    if name == "master":
        address, _, port = value.removeprefix("http://").rpartition(":")
        return f"launch.master_addr={address.strip('[]') or 'ADDRESS'} launch.master_port={port or 'PORT'}"
    template = COUNTED.get(name, "") if value.isdecimal() else ""
    return (template or KEYS.get(name, "")).format(value or VALUES.get(name, "N"))
