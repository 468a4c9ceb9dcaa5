"""What can be refused before anything starts, each with the reason and the nearest thing that works."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainer import machine, schema
from trainer.build import call_target, check_target, locate
from trainer.data.base import DataSource, Facts
from trainer.errors import UserError
from trainer.strategies.base import Declaration
from trainer.strategies.declared import AUTO


@dataclass
class Checked:
    """A config that may run: resolved, with what the checks have found out.

    Attributes:
        config: plain, resolved; ``strategy`` is never ``auto``, ``data.batch_size`` never null.
        auto_strategy: why a strategy was chosen for ``strategy=auto``; else empty.
        workers: over all hosts; nproc: of them on each host.
        device: ``cpu`` or ``cuda``.
        merge: batches per update.
    """

    config: dict[str, Any]
    declaration: Declaration
    source: DataSource
    facts: Facts
    auto_strategy: str
    workers: int
    nproc: int
    device: str
    merge: int

    @property
    def global_batch_size(self) -> int:
        """Samples per update over all workers."""
        return int(self.config["data"]["batch_size"] * self.workers * self.merge)


def check(config: dict[str, Any], typed: Iterable[str] = ()) -> Checked:
    """Everything that can be known without importing torch.

    Args:
        config: the composed config as a plain, resolved dict, without ``hydra``.
        typed: keys that the user typed on the command line.

    Raises:
        UserError: the first thing that cannot be.
    """
    check_keys(config)
    check_targets(config)
    device = choose_device(config)
    nproc = count_workers(config, device)
    workers = nproc * config["launch"]["nnodes"]
    auto_strategy = resolve_strategy(config, workers)
    declaration: Declaration = locate(config["strategy"]["_target_"], "strategy._target_")(
        **{k: v for k, v in config["strategy"].items() if k != "_target_"}
    )
    for refusal in declaration.refuse(config, workers):
        raise refusal
    check_devices(config, device, nproc)
    check_port(config)
    check_compiler(config, device)
    merge = config["strategy"]["gradient_merge"]["k_steps"]
    config["data"]["batch_size"] = batch_size(config["data"], workers, merge, set(typed))
    source: DataSource = call_target(config["data"], "data")
    facts = source.facts(config["data"]["batch_size"] * workers * merge)
    checked = Checked(config, declaration, source, facts, auto_strategy, workers, nproc, device, merge)
    check_data(checked)
    return checked


def check_keys(config: Mapping[str, Any]) -> None:
    """Unknown keys of closed groups, missing values, and values out of range."""
    for path, value, declared in _declared_values(config, schema.Config, ""):
        _check_value(path, value, declared)
    for group, classes in schema.GROUPS.items():
        node = config.get(group)
        if not isinstance(node, Mapping):
            raise UserError(f"{group}={node}", "must be one of the group's options", f"{group}=OPTION")
        keys = {k.path: k for c in classes for k in schema.keys(c)}
        for path, value in _leaves(node, ""):
            if value == "???":
                raise UserError(f"{group}.{path}", "has no value", f"{group}.{path}=VALUE")
            if path in keys:
                _check_value(f"{group}.{path}", value, keys[path])
            elif group not in schema.OPEN_GROUPS and not path.startswith("tags."):
                raise UserError(f"{group}.{path}", f"there is no such key; {group} has {', '.join(sorted(keys))}")


def _declared_values(config: Mapping[str, Any], declared: type, prefix: str) -> Iterable[tuple[str, Any, schema.Key]]:
    known = {k.path: k for k in schema.keys(declared)}
    for name, value in config.items():
        if name not in known:
            raise UserError(f"{prefix}{name}", "there is no such key")
        if name not in schema.GROUPS:
            yield prefix + name, value, known[name]


def _leaves(node: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        elif not isinstance(value, Mapping):
            yield f"{prefix}{name}", value


def _check_value(path: str, value: Any, key: schema.Key) -> None:
    rule = key.field.metadata
    if choices := rule.get("choices"):
        if value not in choices and str(value).lower() not in [str(c).lower() for c in choices]:
            words = [str(c).lower() for c in choices]
            nearest = schema.nearest(str(value), words)
            raise UserError(f"{path}={value}", f"must be one of {', '.join(words)}", f"{path}={nearest}" if nearest else "")  # fmt: skip
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return
    unit = f" {key.unit}" if key.unit else ""
    for name, words, wrong in (  # type: ignore[assignment]
        ("ge", "at least", lambda limit: value < limit),
        ("gt", "greater than", lambda limit: value <= limit),
        ("le", "at most", lambda limit: value > limit),
    ):
        limit = rule.get(name)
        if limit is not None and (wrong(limit) or value != value):  # type: ignore[no-untyped-call]
            default = f"{path}={key.default}" if key.default not in (None, "???") else ""
            raise UserError(f"{path}={value}", f"must be {words} {limit:g}{unit}", default)


def check_targets(config: Mapping[str, Any]) -> None:
    """Every ``_target_`` exists."""
    for group in schema.GROUPS:
        target = config[group].get("_target_")
        if target is not None and target != AUTO:
            check_target(str(target), f"{group}._target_")


def choose_device(config: Mapping[str, Any]) -> str:
    """``cpu`` or ``cuda``."""
    if config["device"] != "auto":
        return str(config["device"])
    return "cuda" if machine.gpus() else "cpu"


def count_workers(config: dict[str, Any], device: str) -> int:
    """Workers on each host; resolves launch.ips, launch.workers and launch.nproc into one another."""
    launch = config["launch"]
    if launch["ips"]:
        hosts = [ip.strip() for ip in str(launch["ips"]).split(",") if ip.strip()]
        launch["nnodes"], launch["master_addr"] = len(hosts), hosts[0]
        here = [i for i, ip in enumerate(hosts) if machine.port_is_free(ip, 0)]
        if not here and not config["plan"]:
            raise UserError(f"launch.ips={launch['ips']}", "none of these addresses is this host's")
        launch["node_rank"] = here[0] if here else 0
    nnodes = launch["nnodes"]
    if launch["node_rank"] >= nnodes:
        raise UserError(f"launch.node_rank={launch['node_rank']}", f"with launch.nnodes={nnodes} it must be below {nnodes}", "launch.node_rank=0")  # fmt: skip
    if nnodes > 1 and launch["master_port"] == 0:
        launch["master_port"] = 29500
    nproc, workers = launch["nproc"], launch["workers"]
    if workers is not None and workers % nnodes:
        raise UserError(f"launch.workers={workers}", f"cannot be spread evenly over {nnodes} hosts", f"launch.workers={max(nnodes, workers // nnodes * nnodes)}")  # fmt: skip
    if nproc is not None and workers is not None and nproc * nnodes != workers:
        raise UserError(f"launch.nproc={nproc}", f"on {nnodes} host(s) disagrees with launch.workers={workers}", f"launch.nproc={workers // nnodes}")  # fmt: skip
    if nproc is None:
        nproc = workers // nnodes if workers is not None else None
    if nproc is None:
        nproc = max(1, len(machine.gpus())) if device == "cuda" else 1
    return int(nproc)


def check_devices(config: Mapping[str, Any], device: str, nproc: int, gpus: int | None = None) -> None:
    """A GPU for every worker of this host. Not asked of a plan, which may be for another machine."""
    if device != "cuda" or config["plan"]:
        return
    gpus = len(machine.gpus()) if gpus is None else gpus
    if gpus == 0:
        raise UserError("device=cuda", "this machine shows no GPU", "device=cpu")
    if nproc > gpus:
        raise UserError(f"launch.nproc={nproc}", f"this host has {gpus} GPU{'s' if gpus > 1 else ''}, and every worker needs its own", f"launch.nproc={gpus} (or device=cpu)")  # fmt: skip


def resolve_strategy(config: dict[str, Any], workers: int) -> str:
    """Replace ``strategy=auto`` by the strategy that fits; returns the reason."""
    given = config["strategy"]
    if given["_target_"] != AUTO:
        return ""
    chosen = schema.StrategyConfig if workers == 1 else schema.CollectiveStrategy
    config["strategy"] = {**asdict(chosen()), **{k: v for k, v in given.items() if k != "_target_"}}
    return "one worker" if workers == 1 else f"{workers} workers"


def check_port(config: Mapping[str, Any]) -> None:
    """The meeting port is free on the host that serves it."""
    launch = config["launch"]
    port, serves = launch["master_port"], launch["node_rank"] == 0
    if port and serves and not config["plan"] and not machine.port_is_free(launch["master_addr"], port):
        raise UserError(
            f"launch.master_port={port}",
            f"is in use on {launch['master_addr']}, or that is not this host's address",
            "launch.master_port=0" if launch["nnodes"] == 1 else f"launch.master_port={port + 1}",
        )


def check_compiler(config: Mapping[str, Any], device: str) -> None:
    """torch.compile needs a C++ compiler for the CPU."""
    if config["compile"] and device == "cpu" and machine.cpp_compiler() is None:
        raise UserError("compile=true", "there is no C++ compiler on this machine (g++ or clang++)", "compile=false")


def batch_size(data: Mapping[str, Any], workers: int, merge: int, typed: set[str]) -> int:
    """Samples per worker and batch, from batch_size or global_batch_size; what was typed goes before the recipe."""
    mine, together = data["batch_size"], data["global_batch_size"]
    if together is None:
        return int(mine if mine is not None else 32)
    if "data.batch_size" in typed and "data.global_batch_size" not in typed:
        return int(mine)
    portions = workers * merge
    if together % portions:
        nearest = max(portions, round(together / portions) * portions)
        raise UserError(f"data.global_batch_size={together}", f"is not a multiple of {workers} workers" + (f" x {merge} merged batches" if merge > 1 else ""), f"data.global_batch_size={nearest}")  # fmt: skip
    share = together // portions
    if mine is not None and mine != share and ("data.batch_size" in typed) == ("data.global_batch_size" in typed):
        raise UserError(f"data.global_batch_size={together}", f"disagrees with data.batch_size={mine}: over {portions} portions it makes {share} each", f"data.batch_size={share} (or one of the two alone)")  # fmt: skip
    return int(share)


def check_data(checked: Checked) -> None:
    """The batch fits the data, and the model's classes are the data's."""
    config, facts = checked.config, checked.facts
    if config["data"]["num_classes"] != facts.classes:
        raise UserError(f"data.num_classes={config['data']['num_classes']}", f"{facts.source} has {facts.classes} classes", f"data.num_classes={facts.classes}")  # fmt: skip
    size, workers = config["data"]["batch_size"], checked.workers
    if facts.train_samples < workers:
        raise UserError(f"{workers} workers", f"{facts.source} has {facts.train_samples} training samples, fewer than workers", f"launch.nproc={max(1, facts.train_samples)}")  # fmt: skip
    if config["sampler"]["drop_last"] and size * workers > facts.train_samples:
        most = facts.train_samples // workers
        raise UserError(
            f"data.batch_size={size}",
            f"with {workers} worker{'s' if workers > 1 else ''} a batch of {size * workers} does not fit the "
            f"{facts.train_samples} training samples, and sampler.drop_last leaves out what is not full",
            f"data.batch_size={most} (or sampler.drop_last=false)",
        )
