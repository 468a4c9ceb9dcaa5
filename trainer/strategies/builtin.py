"""What each built-in strategy declares before any process starts: options, traits, refusals, its worker class."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from trainer.config import schema
from trainer.config.instantiate import locate
from trainer.config.run_config import RunConfig
from trainer.config.schema.strategy import DgcOptions, Entry, OuterOptions, PowerSgdOptions, StreamingOptions
from trainer.errors import UserError
from trainer.host import hardware
from trainer.strategies.contract import Declaration, Traits

if TYPE_CHECKING:
    import torch


COMM_HOOK_CHECKS, LOCAL_SGD_CHECKS = "trainer.strategies.comm_hook_checks", "trainer.strategies.local_sgd_checks"
SHARDED_CHECKS = "trainer.strategies.sharded_checks"
"""Modules of options that few runs use."""
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
        own_errors = self.comm_hook in ("powersgd", "dgc")  # what it left out of a gradient is each worker's own
        exact = self.comm_hook == "none" and self.options.gradient_scale == "mean"
        return Traits(exact=exact, same_everywhere=not own_errors, scatters=True, skips=True)

    @property
    def comm_hook(self) -> str:
        """The option that names what is sent instead of whole gradients (fp16, bf16, powersgd, dgc), or ``none``."""
        return str(self.options.comm_hook)

    def exchange(self, sizes: Sequence[int], size: int) -> str:
        return "" if self._plain else str(locate(f"{COMM_HOOK_CHECKS}:exchange")(self.options, sizes, size))

    def concern(self, sizes: Sequence[int]) -> str:
        return "" if self._plain else str(locate(f"{COMM_HOOK_CHECKS}:concern")(self.options, sizes))

    @property
    def _plain(self) -> bool:
        """Whether gradients travel as they are, and no option of another hook is set."""
        options = self.options
        ways = options.reduce_group is None and options.comm_streams == 1
        return ways and (options.comm_hook, options.powersgd, options.dgc) == ("none", PowerSgdOptions(), DgcOptions())

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
        if not self._plain:
            refused += locate(f"{COMM_HOOK_CHECKS}:refuse")(self.options, config, workers)
        return refused

    def refuse_model(self, config: RunConfig, model: torch.nn.Module, optimizer: Any) -> list[UserError]:
        refused = super().refuse_model(config, model, optimizer)
        sparse = sparse_module(model)
        if self.comm_hook == "dgc":
            refused += locate(f"{COMM_HOOK_CHECKS}:refuse_optimizer")(optimizer)
        if sparse and self.comm_hook != "none":
            why = f"is for dense gradients, and those of {sparse} are sparse"
            refused.append(UserError(f"strategy.comm_hook={self.comm_hook}", why, "strategy.comm_hook=none"))
        elif sparse and not self._plain:
            why = f"the gradients of {sparse} are sparse, and go over DDP's own group"
            instead = "strategy.reduce_group=null strategy.comm_streams=1"
            refused.append(UserError("strategy.reduce_group or strategy.comm_streams", why, instead))
        if sparse and (config.device == "cuda" or (config.device == "auto" and hardware.gpus())):
            why = f"strategy=collective cannot sum the sparse gradients of {sparse} over NCCL"
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
        return super().refuse(config, workers) + list(locate(f"{SHARDED_CHECKS}:refuse")(self.options, config, workers))

    def refuse_model(self, config: RunConfig, model: torch.nn.Module, optimizer: Any) -> list[UserError]:
        refused = super().refuse_model(config, model, optimizer)
        return refused + list(locate(f"{SHARDED_CHECKS}:refuse_model")(self.options, model, optimizer))


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
        options = self.options
        plain = (options.outer, options.exchange, options.streaming) == (OuterOptions(), "full", StreamingOptions())
        exact = options.k_steps == 1 and plain and not options.adaptive
        return Traits(exact=exact, same_everywhere=False, scatters=True, skips=True, replicas=True)

    def exchange(self, sizes: Sequence[int], size: int) -> str:
        return str(locate(f"{LOCAL_SGD_CHECKS}:exchange")(self.options, sizes, size))

    def refuse(self, config: RunConfig, workers: int) -> list[UserError]:
        refused = super().refuse(config, workers)
        return refused + list(locate(f"{LOCAL_SGD_CHECKS}:refuse")(self.options, config, workers))

    def refuse_model(self, config: RunConfig, model: torch.nn.Module, optimizer: Any) -> list[UserError]:
        refused = super().refuse_model(config, model, optimizer)
        if self.options.begin == "gradients" and (sparse := sparse_module(model)):
            why = f"is for dense gradients, and those of {sparse} are sparse"
            refused.append(UserError("strategy.begin=gradients", why, "strategy.begin=parameters"))
        return refused


def sparse_module(model: torch.nn.Module) -> str:
    """The name of the first module with sparse gradients; empty: there is none."""
    return next((name for name, module in model.named_modules() if getattr(module, "sparse", False)), "")


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

ADVISE = "trainer.strategies.builtin.advise"
"""``strategy=advise``: no training begins with it."""

EVALUATORS = "trainer.strategies.builtin.EvaluatorsDeclaration"
"""Takes the place of ``strategy`` where nothing is trained."""
