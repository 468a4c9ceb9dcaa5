"""What each built-in strategy declares before any process starts: options, traits, refusals, its worker class."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from trainer.config import schema
from trainer.config.instantiate import locate
from trainer.config.keys import spelled
from trainer.config.run_config import RunConfig
from trainer.config.schema.strategy import Entry, PowerSgdOptions
from trainer.errors import UserError
from trainer.host import hardware
from trainer.strategies.contract import Declaration, Traits

if TYPE_CHECKING:
    import torch


SEVERAL = ("launch.nproc", "launch.workers", "launch.nnodes", "launch.ips")
"""The keys that ask for more than one worker."""


class SingleDeclaration(Declaration):
    """What strategy=single declares: one process, the reference that exact strategies are compared with."""

    worker = "trainer.strategies.single:Single"

    @property
    def traits(self) -> Traits:
        return Traits(exact=True, scatters=True, skips=True)

    def refuse(self, config: RunConfig, workers: int) -> list[UserError]:
        refused = super().refuse(config, workers)
        if workers > 1:
            refused.append(
                UserError(f"{workers} workers", "strategy=single is one process", "strategy=collective", SEVERAL)
            )
        return refused


class CollectiveDeclaration(Declaration):
    """What strategy=collective declares: torch's DDP, gradients averaged over all workers in every update."""

    Options = schema.CollectiveStrategy
    options: schema.CollectiveStrategy
    worker = "trainer.strategies.collective:Collective"

    @property
    def traits(self) -> Traits:
        own_errors = self.comm_hook == "powersgd"  # what it left out of a gradient is each worker's own
        return Traits(exact=self.comm_hook == "none", same_everywhere=not own_errors, scatters=True, skips=True)

    @property
    def comm_hook(self) -> str:
        """The option that names what is sent instead of whole gradients (fp16, bf16, powersgd), or ``none``."""
        return str(self.options.comm_hook)

    def refuse(self, config: RunConfig, workers: int) -> list[UserError]:
        refused = super().refuse(config, workers)
        if self.options.static_graph and self.options.gradient_merge.k_steps > 1:
            why = "DDP learns the graph from the first backward, and with gradient merge that one exchanges nothing"
            refused.append(
                UserError(
                    "strategy.static_graph=true",
                    why,
                    "strategy.static_graph=false (or strategy.gradient_merge.k_steps=1)",
                )
            )
        if config.compile and self.options.bucket_cap_mb < 1:
            why = "with compile=true torch divides the model into parts of at least 1 MiB of gradients"
            instead = "strategy.bucket_cap_mb=1 (or compile=false)"
            refused.append(UserError(f"strategy.bucket_cap_mb={self.options.bucket_cap_mb:g}", why, instead))
        if self.options.static_graph and self.options.find_unused_parameters:
            why = "with strategy.static_graph=true DDP finds unused parameters once, in the first step"
            refused.append(
                UserError(
                    "strategy.find_unused_parameters=true",
                    why,
                    "strategy.find_unused_parameters=false (or strategy.static_graph=false)",
                )
            )
        return refused + list(self._refuse_hook(config, workers))

    def _refuse_hook(self, config: RunConfig, workers: int) -> Iterator[UserError]:
        hook, powersgd = f"strategy.comm_hook={self.comm_hook}", self.options.powersgd
        if self.comm_hook != "none" and workers == 1:
            yield UserError(hook, "one worker exchanges no gradients", "strategy.comm_hook=none (or launch.nproc=2)")
        if self.comm_hook != "powersgd":
            for name, default in asdict(PowerSgdOptions()).items():
                if (value := getattr(powersgd, name)) != default:
                    yield UserError(
                        f"strategy.powersgd.{name}={value}",
                        f"with {hook} nothing is compressed that way",
                        "strategy.comm_hook=powersgd",
                    )
            return
        if config.precision == "fp16":
            why = "what it leaves out of a gradient is added to the next, and with fp16 each has a scale of its own"
            yield UserError("precision=fp16", f"{hook}: {why}", "precision=bf16 (or strategy.comm_hook=fp16)")
        if config.max_steps is not None and powersgd.start_step >= config.max_steps:
            why = f"with max_steps={config.max_steps} no gradient would be compressed"
            yield UserError(
                f"strategy.powersgd.start_step={powersgd.start_step}",
                why,
                f"strategy.powersgd.start_step={max(2, config.max_steps // 10)}",
            )

    def refuse_model(self, config: RunConfig, model: torch.nn.Module, optimizer: Any) -> list[UserError]:
        refused = super().refuse_model(config, model, optimizer)
        sparse = [name for name, module in model.named_modules() if getattr(module, "sparse", False)]
        if sparse and self.comm_hook != "none":
            why = f"is for dense gradients, and those of {sparse[0]} are sparse"
            refused.append(UserError(f"strategy.comm_hook={self.comm_hook}", why, "strategy.comm_hook=none"))
        if sparse and (config.device == "cuda" or (config.device == "auto" and hardware.gpus())):
            why = f"strategy=collective cannot sum the sparse gradients of {sparse[0]} over NCCL"
            refused.append(UserError("device=cuda", why, "strategy=pserver_sync (or device=cpu)"))
        return refused


class ShardedDeclaration(Declaration):
    """What strategy=sharded declares: torch's FSDP2, each worker holds a shard of parameters and optimizer state; or of
    the optimizer state alone, under DDP."""

    Options = schema.ShardedStrategy
    options: schema.ShardedStrategy
    worker = "trainer.strategies.sharded:Sharded"

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        if self.options.whole_model:
            self.worker = "trainer.strategies.sharded_optimizer:ShardedOptimizer"

    @property
    def traits(self) -> Traits:
        exact = self.options.param_dtype == self.options.reduce_dtype == "full"
        return Traits(exact=exact, scatters=True, skips=True, shards=not self.options.whole_model)

    def refuse(self, config: RunConfig, workers: int) -> list[UserError]:
        refused, options = super().refuse(config, workers), self.options
        group = options.shard_group
        if workers == 1:
            why = "one worker has nobody to share the model with"
            refused.append(UserError("strategy=sharded", why, "launch.nproc=2 (or strategy=single)"))
        elif group is not None and (group < 2 or workers % group):
            why = f"{workers} workers do not make groups of {group}"
            instead = next(n for n in range(2, workers + 1) if workers % n == 0)
            refused.append(UserError(f"strategy.shard_group={group}", why, f"strategy.shard_group={instead}"))
        refused += self._refuse_unused()
        if config.compile is True and not self.options.whole_model:
            why = "strategy=sharded gathers parameters between the parts that torch would compile as one"
            refused.append(UserError("compile=true", why, "compile=false (or strategy=collective)"))
        for key in ("param_dtype", "reduce_dtype"):
            if getattr(options, key) == "fp16" and config.precision != "fp16":
                why = "fp16 overflows above 65504 without a loss scale"
                refused.append(UserError(f"strategy.{key}=fp16", why, f"strategy.{key}=bf16 (or precision=fp16)"))
        if options.offload and (config.device == "cpu" or not hardware.gpus()):
            why = "without a GPU the model is in the memory of the host"
            refused.append(UserError("strategy.offload=true", why, "strategy.offload=false"))
        return refused

    def _refuse_unused(self) -> Iterator[UserError]:
        """Refuse keys that the kind of shards has no use for."""
        whole, usual = self.options.whole_model, schema.ShardedStrategy
        for key in ("wrap", "param_dtype", "offload") if whole else ("find_unused_parameters",):
            if (value := getattr(self.options, key)) != getattr(usual, key):
                why = "the model is whole on each worker" if whole else "all workers use the same parameters in a step"
                instead = f"strategy.{key}={spelled(getattr(usual, key))}"
                other = "strategy.shard=parameters" if whole else "strategy.shard=optimizer"
                what = f"strategy.{key}={spelled(value)}"
                yield UserError(what, f"with strategy.shard={self.options.shard} {why}", f"{instead} (or {other})")

    def refuse_model(self, config: RunConfig, model: torch.nn.Module, optimizer: Any) -> list[UserError]:
        refused = super().refuse_model(config, model, optimizer)
        sparse = [name for name, module in model.named_modules() if getattr(module, "sparse", False)]
        if sparse:
            why = f"strategy=sharded shards dense parameters, and the gradients of {sparse[0]} are sparse"
            refused.append(UserError("strategy=sharded", why, "strategy=pserver_sync (or collective)"))
        if self.options.whole_model:
            if why := locate("trainer.optim.separable:why_not")(optimizer):  # imports torch
                what, kind = "strategy.shard=optimizer", type(optimizer).__name__
                refused.append(UserError(what, f"{kind} {why}", "strategy.shard=parameters (or strategy=collective)"))
            return refused
        scalars = [name for name, parameter in model.named_parameters() if not parameter.dim()]
        try:
            locate("trainer.models.blocks:chosen")(model, self.options.wrap, "strategy.wrap")  # imports torch
        except UserError as error:
            refused.append(error)
        if scalars:
            why = f"FSDP cuts parameters along their first dimension, and {scalars[0]} has none"
            refused.append(UserError("strategy=sharded", why, "strategy=collective (or a parameter of shape (1,))"))
        return refused


class EvaluatorsDeclaration(Declaration):
    """What mode=eval and mode=predict declare instead of the recipe's strategy: workers with whole models."""

    Options = schema.GroupStrategy
    options: schema.GroupStrategy
    worker = "trainer.strategies.evaluators:Evaluators"

    def refuse_model(self, config: RunConfig, model: torch.nn.Module, optimizer: Any) -> list[UserError]:
        unbounded = [n for n, m in model.named_modules() if getattr(m, "unbounded", False)]
        if unbounded:
            why = f"mode={config.mode} holds the model whole in its workers, and {unbounded[0]} takes any id"
            return [UserError("model.table_size=null", why, "mode=train (which evaluates against the servers)")]
        return []


class LocalSgdDeclaration(Declaration):
    """What strategy=local_sgd declares: workers average their parameters every ``k_steps`` updates (Stich, 2019)."""

    Options = schema.LocalSgdStrategy
    options: schema.LocalSgdStrategy
    worker = "trainer.strategies.local_sgd:LocalSgd"

    @property
    def traits(self) -> Traits:
        """The traits of local_sgd: exact with k_steps=1 and an optimizer linear in the gradient (SGD, momentum)."""
        return Traits(exact=self.options.k_steps == 1, same_everywhere=False, scatters=True, skips=True, replicas=True)

    def refuse(self, config: RunConfig, workers: int) -> list[UserError]:
        refused = super().refuse(config, workers)
        for limit, value in (("clip_norm", self.options.clip_norm), ("clip_value", self.options.clip_value)):
            if value is not None and self.options.k_steps == 1 and workers > 1:
                why = "local_sgd clips each worker's own gradient, so with k_steps=1 it is not what collective does"
                refused.append(
                    UserError(f"strategy.{limit}={value}", why, "strategy.k_steps=2 (or strategy=collective)")
                )
        return refused


ELEMENTWISE = ("SGD", "Adagrad", "Adam", "AdamW", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD")
"""torch's optimizers that treat every element by itself, so that a parameter may be cut into pieces."""


MOST_SERVERS = 1024
"""Buckets of rows that servers share (pserver/protocol/sharding.py)."""


class PserverDeclaration(Declaration):
    """What all pserver strategies declare: servers hold the parameters; workers pull, compute and push."""

    Options = schema.PserverStrategy
    options: schema.PserverStrategy
    entries = {"server": "trainer.strategies.pserver.server.server:serve"}
    default_workers = 2
    mode = ""

    def roles(self, workers: int, launch: schema.LaunchConfig) -> dict[str, int]:
        return {"server": launch.servers or 1, "worker": workers}

    def refuse(self, config: RunConfig, workers: int) -> list[UserError]:
        refused = super().refuse(config, workers)
        if config.precision == "fp16":
            refused.append(
                UserError("precision=fp16", f"strategy={self.name}: servers know no loss scale", "precision=bf16")
            )
        if self.options.transport == "ipc" and config.launch.nnodes > 1:
            why = "Unix sockets join processes of one host alone"
            refused.append(UserError("strategy.transport=ipc", why, "strategy.transport=auto"))
        if (servers := config.launch.servers or 1) > MOST_SERVERS:
            why = f"a table's rows fall into {MOST_SERVERS} buckets, and each server needs one at least"
            refused.append(UserError(f"launch.servers={servers}", why, f"launch.servers={MOST_SERVERS}"))
        if config.execution.val_every_steps and self.traits.leases and config.data.work != "static":
            refused.append(
                UserError(
                    f"execution.val_every_steps={config.execution.val_every_steps}",
                    "where work is leased, workers have no common step to stop at",
                    "execution.val_every=1 (or data.work=static)",
                )
            )
        return refused

    def refuse_inputs(self, names: Collection[str], source: str) -> list[UserError]:
        if self.options.evict_by != "event_time" or "time" in names:
            return []
        why = f"{source} has no input called time, so no row would ever be old"
        return [UserError("strategy.evict_by=event_time", why, "strategy.evict_by=steps")]

    def refuse_model(self, config: RunConfig, model: torch.nn.Module, optimizer: Any) -> list[UserError]:
        refused = super().refuse_model(config, model, optimizer)
        kind = type(optimizer).__name__
        if kind not in ELEMENTWISE and self.mode != "geo":
            why = f"strategy={self.name} cuts parameters into pieces, and {kind} needs them whole"
            refused.append(UserError(f"optimizer ({kind})", why, "optimizer=sgd (or momentum, adagrad, adam, adamw)"))
        elif self.options.load_from is not None:
            refused += locate("trainer.strategies.pserver.server.saved_state_checks:refuse")(
                config, self, model, optimizer
            )  # imports torch
        for name, module in model.named_modules():
            if getattr(module, "sparse", False) and config.ema.decay is not None:
                why = (
                    f"strategy={self.name} keeps the rows of {name} in servers, and no worker has all of them to "
                    f"average"
                )
                refused.append(
                    UserError(f"ema.decay={config.ema.decay}", why, "strategy=collective (or ema.decay=null)")
                )
            for option in ("max_norm", "scale_grad_by_freq"):
                if getattr(module, "sparse", False) and getattr(module, option, None):
                    why = f"strategy={self.name} has only a batch's rows of table {name} at hand"
                    refused.append(UserError(f"model ({name}.{option})", why, f"a table without {option}"))
        return refused


class PserverSyncDeclaration(PserverDeclaration):
    """What strategy=pserver_sync declares: servers combine all workers' gradients, apply them once, and all pull."""

    Options = schema.PserverSyncStrategy
    options: schema.PserverSyncStrategy
    worker = "trainer.strategies.pserver.worker.sync:PserverSync"
    mode = "sync"

    @property
    def traits(self) -> Traits:
        """The traits of pserver_sync: exact if values are sent unrounded and table rows stay from first use to end."""
        options = self.options
        exact = options.wire == "full" and options.evict_after is None and options.entry == Entry()
        return Traits(exact=exact, survives=options.on_lost_worker == "continue", tables_at_servers=True)


class OutOfStepDeclaration(PserverDeclaration):
    """What pserver_async, _ssp and _geo declare in common: traits and refusals of workers without a common step."""

    @property
    def traits(self) -> Traits:
        return Traits(lockstep=False, same_everywhere=False, survives=True, leases=True, tables_at_servers=True)

    def refuse(self, config: RunConfig, workers: int) -> list[UserError]:
        refused = super().refuse(config, workers)
        if config.ema.decay is not None:
            why = (
                f"strategy={self.name}: each worker sees other parameters, so there is no common row of them to average"
            )
            refused.append(UserError(f"ema.decay={config.ema.decay}", why, "strategy=pserver_sync (or ema.decay=null)"))
        return refused


class StaleDeclaration(OutOfStepDeclaration):
    """What pserver_async and _ssp declare in common: servers apply each push when it arrives."""

    Options = schema.StaleStrategy
    options: schema.StaleStrategy

    @property
    def traits(self) -> Traits:
        return replace(super().traits, alone=True)


class PserverAsyncDeclaration(StaleDeclaration):
    """What strategy=pserver_async declares: servers apply each push when it arrives; no worker waits for another."""

    Options = schema.PserverAsyncStrategy
    options: schema.PserverAsyncStrategy
    worker = "trainer.strategies.pserver.worker.async_and_ssp:PserverAsync"
    mode = "async"

    def refuse(self, config: RunConfig, workers: int) -> list[UserError]:
        refused = super().refuse(config, workers)
        compensates = self.options.delay_compensation and self.options.max_merge_var_num > 1
        if compensates:
            why = "compensates the gradient of one pull, and merged gradients come from several"
            refused.append(UserError("strategy.delay_compensation", why, "strategy.max_merge_var_num=1"))
        if self.options.send_wait_times > 0 and self.options.max_merge_var_num == 1:
            what, why = (
                f"strategy.send_wait_times={self.options.send_wait_times}",
                "a push of one gradient waits for no more of them",
            )
            refused.append(
                UserError(
                    what,
                    f"with strategy.max_merge_var_num=1 {why}",
                    f"strategy.max_merge_var_num={self.options.send_wait_times + 1}",
                )
            )
        return refused


class PserverSspDeclaration(StaleDeclaration):
    """What strategy=pserver_ssp declares: asynchronous, but workers are at most ``staleness`` steps apart."""

    Options = schema.PserverSspStrategy
    options: schema.PserverSspStrategy
    worker = "trainer.strategies.pserver.worker.async_and_ssp:PserverSsp"
    mode = "ssp"


class PserverGeoDeclaration(OutOfStepDeclaration):
    """What strategy=pserver_geo declares: workers train replicas and exchange differences every ``k_steps``."""

    Options = schema.PserverGeoStrategy
    options: schema.PserverGeoStrategy
    worker = "trainer.strategies.pserver.worker.geo:PserverGeo"
    mode = "geo"

    def refuse(self, config: RunConfig, workers: int) -> list[UserError]:
        refused = super().refuse(config, workers)
        elsewhere = "strategy=pserver_async (or pserver_sync, pserver_ssp)"
        for name, all_of_them in asdict(Entry()).items():
            if (value := getattr(self.options.entry, name)) != all_of_them:
                why = "its workers train rows of their own, which a server that does not let them in would never get"
                refused.append(UserError(f"strategy.entry.{name}={value}", f"strategy={self.name}: {why}", elsewhere))
        if self.options.evict_after is not None:
            why = "its workers keep replicas of the rows, from which none would go"
            refused.append(
                UserError(f"strategy.evict_after={self.options.evict_after}", f"strategy={self.name}: {why}", elsewhere)
            )
        return refused


AUTO = "trainer.strategies.builtin.auto"
"""``strategy=auto``: replaced by single or collective, with its defaults, once the number of workers is known."""

EVALUATORS = "trainer.strategies.builtin.EvaluatorsDeclaration"
"""Takes the place of ``strategy`` where nothing is trained."""
