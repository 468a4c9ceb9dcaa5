"""What can be refused before anything starts, each with the reason and the nearest thing that works."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trainer.config import keys, schema
from trainer.config.instantiate import call_target, locate
from trainer.data.source import DataSource, Facts
from trainer.errors import UserError
from trainer.host import hardware
from trainer.host.cache import check_code
from trainer.host.writable import check_name
from trainer.metrics import best
from trainer.planning.batches import batch_size, check_batch_fits, check_padding, nearest
from trainer.planning.key_checks import check_group, check_keys, check_targets
from trainer.planning.modes import check_mode, evaluation_batch_size, facts_of, looked_at
from trainer.planning.tracking_store import check_store
from trainer.strategies.builtin import AUTO
from trainer.strategies.contract import Declaration
from trainer.wording import counted


class Lacks(list[str]):
    """Reasons why a run would be refused: a plan goes on and lists them all, a run ends with the first.

    Args:
        plan: only the plan is asked for.
    """

    def __init__(self, plan: bool) -> None:
        super().__init__()
        self.plan = plan
        self.errors: list[UserError] = []

    def __enter__(self) -> Lacks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if not self.plan or not isinstance(error, UserError):
            return False
        if str(error) not in self:
            self.append(str(error))
            self.errors.append(error)
        return True


@dataclass
class Checked:
    """A config that may run: resolved, with what the checks have found out.

    Attributes:
        config: plain, resolved; ``strategy`` is never ``auto``, ``data.batch_size`` never null.
        auto_strategy: why a strategy was chosen for ``strategy=auto``; else empty.
        workers: over all hosts; nproc: of them on each host.
        device: ``cpu`` or ``cuda``.
        merge: batches per update.
        lacks: why a run would be refused, where only its plan is asked for.
        elsewhere: the plan is for other machines than this one.
        files: what mode=predict looks at, in the order of its rows, relative to predict.input.
        samples: images or about how many rows there are in these files.
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
    lacks: Lacks = field(default_factory=lambda: Lacks(False))
    elsewhere: bool = False
    files: tuple[str, ...] = ()
    samples: int = 0

    @property
    def leased(self) -> bool:
        """Training data is handed out in blocks while an epoch lasts, not split beforehand."""
        return self.declaration.leases and self.config["data"]["work"] != "static"

    @property
    def update_batch(self) -> int:
        """Samples behind one update: the global batch, or where each worker's gradient is applied alone, its own."""
        alone = self.config["data"]["batch_size"] * self.merge
        return int(alone) if self.declaration.alone else self.global_batch_size

    @property
    def lr_factor(self) -> float:
        """What optimizer.lr is multiplied by, so that it keeps its meaning for another batch (Goyal et al., 2017)."""
        node = self.config["optimizer"]
        power = {"linear": 1.0, "sqrt": 0.5}.get(str(node.get("lr_scaling", "none")))
        return 1.0 if power is None else float((self.update_batch / node["lr_base_batch"]) ** power)

    @property
    def global_batch_size(self) -> int:
        """Samples per update over all workers."""
        data = self.config["data"]
        given = data["global_batch_size"] if self.config["mode"] == "train" else None
        return int(given or data["batch_size"] * self.workers * self.merge)


def check(config: dict[str, Any], typed: Iterable[str] = ()) -> Checked:
    """Everything that can be known without importing torch.

    Args:
        config: the composed config as a plain, resolved dict, without ``hydra``.
        typed: keys that the user typed on the command line.

    Raises:
        UserError: the first thing that cannot be.
    """
    typed = set(typed)
    check_keys(config)
    check_targets(config, typed)
    check_mode(config)
    check_name(config["name"])
    lacks = Lacks(config["plan"])
    device = choose_device(config)
    nproc = count_workers(config, device, default_workers(config))
    elsewhere = is_elsewhere(config, device, nproc)
    with lacks:
        check_tracking(config)
    workers = nproc * config["launch"]["nnodes"]
    auto_strategy = resolve_strategy(config, workers)
    check_group(config, "strategy")
    declaration: Declaration = call_target(config["strategy"], "strategy", kind=Declaration)
    for refusal in declaration.refuse(config, workers):
        with lacks:
            raise refusal
    check_devices(config, device, nproc)
    check_port(config)
    if not elsewhere:
        with lacks:
            check_compiler(config, device)
    merge = config["strategy"]["gradient_merge"]["k_steps"]
    if config["mode"] == "train":
        leased = declaration.leases and config["data"]["work"] != "static"
        refused = len(lacks)
        with lacks:
            config["data"]["batch_size"] = batch_size(config["data"], workers, merge, typed, leased)
        if len(lacks) > refused:
            config["data"] |= nearest(config["data"], workers * merge)
        with lacks:
            check_padding(config, typed)
    else:
        config["data"]["batch_size"] = evaluation_batch_size(config["data"], workers)
    source: DataSource = call_target(config["data"], "data", kind=DataSource)
    together = config["data"]["global_batch_size"] if config["mode"] == "train" else None
    facts = facts_of(config, source, together or config["data"]["batch_size"] * workers * merge)
    take_classes(config, facts)
    checked = Checked(
        config, declaration, source, facts, auto_strategy, workers, nproc, device, merge, lacks, elsewhere
    )
    for step in (check_orders, check_data, check_enough, check_optimization):
        with lacks:
            step(checked)
    if config["mode"] != "train":
        looked = looked_at(config, source, facts)
        checked.files, checked.samples = looked.files, looked.samples
        checked.facts = replace(facts, attention=looked.attention)
        return checked
    with lacks:
        check_batch_fits(config, facts.train_samples, workers)
    return checked


def is_elsewhere(config: Mapping[str, Any], device: str, nproc: int) -> bool:
    """Whether a plan is for other machines than this one: for several hosts, or for GPUs that are not here."""
    return bool(config["plan"]) and (
        config["launch"]["nnodes"] > 1 or (device == "cuda" and nproc > len(hardware.gpus()))
    )


def check_tracking(config: Mapping[str, Any]) -> None:
    """Where MLflow's points go can work, and takes the names of run, experiment and tags."""
    tracking = config["tracking"]
    check_store(tracking, experiment_of(config))
    for key, most in (("experiment", 256), ("run_name", 250)):
        if len(given := str(tracking[key] or "")) > most:
            raise UserError(f"tracking.{key}={given}", f"is longer than {most} characters", f"tracking.{key}=null")
    for name, value in tracking["tags"].items():
        if not re.fullmatch(r"[\w\-. :/]{1,250}", str(name)) or os.path.normpath(str(name)) != str(name):
            raise UserError(f"tracking.tags.{name}", "is no name that MLflow takes: letters, digits, _ - . : / and spaces", "+tracking.tags.NAME=VALUE")  # fmt: skip
        if len(str(value)) > 8000:
            raise UserError(f"tracking.tags.{name}", "is longer than the 8000 characters that MLflow takes")


def experiment_of(config: Mapping[str, Any]) -> str:
    """The MLflow experiment of the run."""
    return str(config["tracking"]["experiment"] or config["name"])


def choose_device(config: Mapping[str, Any]) -> str:
    """``cpu`` or ``cuda``."""
    if config["device"] != "auto":
        return str(config["device"])
    return "cuda" if hardware.gpus() else "cpu"


def default_workers(config: Mapping[str, Any]) -> int | None:
    """How many workers the strategy starts where nobody says; None: one per GPU, else one."""
    target = config["strategy"]["_target_"]
    return None if target == AUTO else getattr(locate(str(target), "strategy._target_"), "default_workers", None)


def count_workers(config: dict[str, Any], device: str, default: int | None = None) -> int:
    """Workers on each host; resolves launch.ips, launch.workers and launch.nproc into one another."""
    launch = config["launch"]
    if launch["ips"]:
        if not (hosts := hosts_of(launch)):
            raise UserError(f"launch.ips={launch['ips']}", "holds no address", "launch.ips=10.0.0.1,10.0.0.2")
        launch["nnodes"], launch["master_addr"] = len(hosts), hosts[0]
        here = [i for i, ip in enumerate(hosts) if hardware.port_is_free(ip, 0)]
        if not here and not config["plan"]:
            raise UserError(f"launch.ips={launch['ips']}", "none of these addresses is this host's")
        launch["node_rank"] = here[0] if here else 0
    nnodes = launch["nnodes"]
    if launch["node_rank"] >= nnodes:
        raise UserError(f"launch.node_rank={launch['node_rank']}", f"with launch.nnodes={nnodes} it must be below {nnodes}", "launch.node_rank=0")  # fmt: skip
    if nnodes > 1 and launch["master_port"] == 0:
        launch["master_port"] = 29500
    nproc, workers = launch["nproc"], launch["workers"]
    if workers is not None and workers < nnodes and not launch["ips"]:
        raise UserError(
            f"launch.workers={workers}", f"is not one for each of {nnodes} hosts", f"launch.nnodes={workers}"
        )
    if workers is not None and workers % nnodes:
        raise UserError(f"launch.workers={workers}", f"cannot be spread evenly over {nnodes} hosts", f"launch.workers={max(nnodes, workers // nnodes * nnodes)}")  # fmt: skip
    if nproc is not None and workers is not None and nproc * nnodes != workers:
        raise UserError(f"launch.nproc={nproc}", f"on {counted(nnodes, 'host')} disagrees with launch.workers={workers}", f"launch.nproc={workers // nnodes}")  # fmt: skip
    if nproc is None:
        nproc = workers // nnodes if workers is not None else None
    if nproc is None:
        nproc = max(1, len(hardware.gpus())) if device == "cuda" else default or 1
    return int(nproc)


def hosts_of(launch: Mapping[str, Any]) -> list[str]:
    """The addresses of ``launch.ips``; none where it is not given."""
    return [ip.strip() for ip in str(launch["ips"] or "").split(",") if ip.strip()]


def check_devices(config: Mapping[str, Any], device: str, nproc: int, gpus: int | None = None) -> None:
    """A GPU for every worker of this host. Not asked of a plan, which may be for another machine."""
    if device != "cuda" or config["plan"]:
        return
    gpus = len(hardware.gpus()) if gpus is None else gpus
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
    address, single = launch["master_addr"], launch["nnodes"] == 1
    if not (port and serves) or config["plan"] or hardware.port_is_free(address, port):
        return
    if not hardware.port_is_free(address, 0):
        mine = schema.LaunchConfig.master_addr if single else hardware.address()
        raise UserError(f"launch.master_addr={address}", "is not this host's address, and host 0 serves the meeting", f"launch.master_addr={mine}" + ("" if single else " (or launch.node_rank=1)"))  # fmt: skip
    free = next((p for p in range(port + 1, 65536) if hardware.port_is_free(address, p)), 29500)
    raise UserError(f"launch.master_port={port}", f"is in use on {address}", "launch.master_port=0" if single else f"launch.master_port={free}")  # fmt: skip


def check_compiler(config: Mapping[str, Any], device: str) -> None:
    """torch.compile needs a C++ compiler for the CPU, and a cache that nobody else can put code into."""
    if config["compile"] and device == "cpu" and hardware.cpp_compiler() is None:
        raise UserError("compile=true", "there is no C++ compiler on this machine (g++ or clang++)", "compile=false")
    if config["compile"]:
        check_code()


def take_classes(config: dict[str, Any], facts: Facts) -> None:
    """Where nobody says how many classes there are, the data do."""
    for node in (config["data"], config["model"]):
        if "num_classes" in node and node["num_classes"] is None:
            node["num_classes"] = facts.classes


def check_orders(checked: Checked) -> None:
    """The samples' order and the mixing of batches can be had with these data."""
    check_order(checked.config, checked.facts)
    check_mixing(checked.config)


def check_data(checked: Checked) -> None:
    """The config's classes are the data's, and what is asked for can be done with them."""
    config, facts = checked.config, checked.facts
    if config["data"]["num_classes"] != facts.classes:
        raise UserError(f"data.num_classes={config['data']['num_classes']}", f"{facts.source} has {counted(facts.classes, 'class')}", f"data.num_classes={facts.classes}")  # fmt: skip
    inputs = facts.shape if isinstance(facts.shape, dict) else ()
    for refusal in checked.declaration.refuse_inputs(inputs, facts.source):
        raise refusal
    if facts.streams and not checked.declaration.leases:
        raise UserError("data.cache=false", f"strategy={checked.declaration.name} reads samples by number, from the cache", "data.cache=true")  # fmt: skip
    ids, rows = config["data"].get("hash_size", 0), config["model"].get("table_size")
    if rows is not None and (ids is None or ids > rows):
        raise UserError(f"model.table_size={rows}", f"the ids of {facts.source} go up to {ids or '2^63'} (data.hash_size)", f"model.table_size={keys.spelled(ids)}")  # fmt: skip


def check_enough(checked: Checked) -> None:
    """Every worker gets a training sample."""
    config, facts, workers = checked.config, checked.facts, checked.workers
    if config["mode"] == "train" and facts.train_samples < workers:
        raise UserError(f"{workers} workers", f"{facts.source} has {facts.train_samples} training samples, fewer than workers", fewer(checked))  # fmt: skip


def fewer(checked: Checked) -> str:
    """How to ask for no more workers than there are training samples."""
    config, samples = checked.config, max(1, checked.facts.train_samples)
    if config["sampler"]["drop_last"] and config["data"]["global_batch_size"] is None:
        samples = max(1, samples // config["data"]["batch_size"])
    nodes, nproc = config["launch"]["nnodes"], samples // config["launch"]["nnodes"]
    if not nproc:
        nodes, nproc = max(1, samples // checked.nproc), min(checked.nproc, samples)
    each = f"launch.nproc={nproc}" if config["launch"]["workers"] is None else f"launch.workers={nodes * nproc}"
    return (f"launch.nnodes={nodes} " if nodes != config["launch"]["nnodes"] else "") + each


def check_order(config: Mapping[str, Any], facts: Facts) -> None:
    """Orders that use samples more than once shuffle them, and need to know which there are."""
    order = config["sampler"]["order"]
    if order == "each_once":
        return
    if not config["sampler"]["shuffle"]:
        raise UserError("sampler.shuffle=false", f"sampler.order={order} draws the samples by lot", "sampler.shuffle=true")  # fmt: skip
    if facts.streams or facts.kind == "random":
        raise UserError(f"sampler.order={order}", f"{facts.source} have no samples to choose from by their class or number", "sampler.order=each_once")  # fmt: skip


def check_mixing(config: Mapping[str, Any]) -> None:
    """Mixed labels are shares of classes, which the loss must take."""
    data, loss = config["data"], str(config["loss"]["_target_"])
    for key in ("mixup", "cutmix"):
        if data.get(key) and loss == schema.BinaryCrossEntropyLoss._target_:
            raise UserError(f"data.{key}={data[key]}", "makes labels that are shares of classes, which loss=binary_cross_entropy does not take", "loss=cross_entropy")  # fmt: skip


def check_optimization(checked: Checked) -> None:
    """What goes by validations can: they come, and measure what is watched. Clipping and scaling can be done."""
    config = checked.config
    strategy, node = config["strategy"], config["optimizer"]
    if strategy["clip_norm"] is not None and strategy["clip_value"] is not None:
        raise UserError(f"strategy.clip_value={strategy['clip_value']}", f"the gradient is clipped by strategy.clip_norm={strategy['clip_norm']} already, and their order would matter", "strategy.clip_norm=null")  # fmt: skip
    if node.get("lr_scaling", "none") != "none" and node.get("lr") is None:
        raise UserError(f"optimizer.lr_scaling={node['lr_scaling']}", "this optimizer has no lr to scale", "optimizer.lr_scaling=none")  # fmt: skip
    for pattern, factor in (node.get("lr_factors") or {}).items():
        if not isinstance(factor, (int, float)) or isinstance(factor, bool) or not 0 <= factor < math.inf:
            raise UserError(f"optimizer.lr_factors={{{pattern}: {keys.spelled(factor)}}}", "a factor is a number, at least 0 (which freezes)", f"optimizer.lr_factors={{{pattern}: 1}}")  # fmt: skip
    check_metric_names(config, checked.facts)
    averaged, known = config["ema"]["decay"] is not None, best.names(checked.facts, True, config["metrics"])
    for path, metric, default in watching(config):
        if metric in known and not averaged and metric.startswith(best.AVERAGED):
            raise UserError(f"{path}={metric}", "no average of the weights is kept (ema.decay=null)", f"{path}={metric} ema.decay=0.999")  # fmt: skip
        if metric not in known:
            near = best.meant(metric, known) or keys.nearest(metric if "/" in metric else best.RAW + metric, known) or default  # fmt: skip
            there = ", ".join(best.names(checked.facts, averaged, config["metrics"]))
            raise UserError(f"{path}={metric}", f"a validation here measures {there}", f"{path}={near}")
        if (
            path != "best.metric"
            and not config["execution"]["val_every"]
            and not config["execution"]["val_every_steps"]
        ):
            raise UserError(f"{path}={metric}", "it goes by validations, and execution.val_every=0 has one alone, at the end", "execution.val_every=1")  # fmt: skip


def check_metric_names(config: Mapping[str, Any], facts: Facts) -> None:
    """The user's own metrics have names of their own, which MLflow takes as well."""
    for name in config["metrics"]:
        if not re.fullmatch(r"[A-Za-z][\w-]*", str(name)):
            raise UserError(f"metrics.{name}", "a name is a letter, then letters, digits, _ and -", f"metrics.{re.sub(r'[^A-Za-z0-9_-]', '_', f'm{name}')}={{...}}")  # fmt: skip
        if name in best.measured(facts):
            raise UserError(f"metrics.{name}", "is measured anyway, as val/" + name, f"metrics.my_{name}={{...}}")


def watching(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The keys that name a validation metric, what they name, and what they could."""
    for node in ("best", "early_stop", "scheduler"):
        watches = node != "scheduler" or best.is_plateau(config[node])
        if watches and config[node].get("metric") is not None:
            yield f"{node}.metric", str(config[node]["metric"]), "val/loss"
