"""The rows and columns of docs/equality.md: what is trained on what, as one would type it."""

from __future__ import annotations

from dataclasses import dataclass

SHORT = (
    "seed=3",
    "optimizer=momentum",
    "optimizer.lr=0.003",
    "scheduler=constant",
    "tracking=none",
    "execution.threads=1",
    "execution.val_every=0",
    "device=cpu",
    "verbosity=quiet",
)


@dataclass(frozen=True)
class Column:
    """A model and its data.

    Attributes:
        several: overrides of all rows but the one process.
        score: metric of a validation.
    """

    name: str
    base: tuple[str, ...]
    several: tuple[str, ...] = ()
    score: str = "acc1"


def _images(side: int, channels: int, noise: float) -> tuple[str, ...]:
    values = f"data.side={side}", f"data.channels={channels}", f"data.noise={noise}", "data.global_batch_size=16"
    return ("data=tiny", *values, "data.train_samples=1024", "data.val_samples=512")


RESNET = ("model=resnet18", *_images(16, 3, 2))
COLUMNS = (
    Column("LeNet", ("model=lenet", "model.image_size=8", *_images(8, 1, 1.2))),
    Column("ResNet-18", RESNET),
    Column("ResNet-18, sync batch norm", RESNET, ("strategy.sync_batch_norm=true",)),
    Column(
        "wide_and_deep",
        (
            "model=wide_and_deep",
            "model.hidden=[8]",
            "data=synthetic_criteo",
            "data.train_rows=2000",
            "data.val_rows=1000",
            "data.hash_size=501",
            "data.global_batch_size=16",
            "optimizer=adam",
            "optimizer.lr=0.01",
        ),
        score="auc",
    ),
    Column(
        "ViT",
        ("model=timm", "model.model_name=test_vit", "+model.img_size=16", "+model.patch_size=4", *_images(16, 3, 2)),
    ),
)


@dataclass(frozen=True)
class Row:
    """A strategy with an option.

    Attributes:
        typed: what one types.
        alone: overrides of the one process that it is compared with.
        servers: 0: workers of a process group.
    """

    typed: tuple[str, ...]
    alone: tuple[str, ...] = ()
    servers: int = 0

    @property
    def name(self) -> str:
        """As one types it."""
        return " ".join((*self.typed, *self.alone))

    @property
    def overrides(self) -> tuple[str, ...]:
        """All that it is started with."""
        launch = (f"launch.servers={self.servers}", "launch.workers=2") if self.servers else ("launch.nproc=2",)
        return (*launch, *self.typed, *self.alone)


def _collective(*options: str, alone: tuple[str, ...] = ()) -> Row:
    return Row(("strategy=collective", *options), alone)


def _local(*options: str) -> Row:
    return Row(("strategy=local_sgd", *options))


def _server(mode: str, *options: str) -> Row:
    return Row((f"strategy=pserver_{mode}", *options), servers=2)


ROWS = (
    _collective(),
    _collective(alone=("strategy.gradient_merge.k_steps=2",)),
    _collective(alone=("strategy.clip_norm=1",)),
    _collective("recompute=auto"),
    *(_collective(alone=(f"optimizer={name}",)) for name in ("adamw", "lars", "lamb", "lion", "muon", "schedule_free")),
    _collective("strategy.comm_hook=fp16"),
    _collective("strategy.comm_hook=bf16"),
    _collective("strategy.comm_hook=powersgd"),
    _collective("strategy.comm_hook=dgc", "strategy.dgc.min_size=100"),
    _collective("strategy.comm_hook=dgc", "strategy.dgc.min_size=100", "strategy.dgc.sparsity=[0]"),
    _collective("strategy.gradient_scale=sum", "optimizer.lr=0.0015"),
    _collective("strategy.comm_streams=2"),
    _collective("strategy.reduce_group=2", "launch.nproc=4"),
    Row(("strategy=sharded",)),
    Row(("strategy=sharded", "strategy.shard=gradients")),
    Row(("strategy=sharded", "strategy.shard=optimizer")),
    Row(("strategy=sharded", "recompute=auto")),
    _local("strategy.k_steps=1"),
    _local("strategy.k_steps=4"),
    _local("strategy.begin=gradients", "strategy.begin_step=10"),
    _local("strategy.adaptive=true"),
    _local("strategy.k_steps=1", "strategy.outer.lr=1", "strategy.outer.momentum=0"),
    _local("strategy.k_steps=4", "strategy.outer.lr=0.7", "strategy.outer.momentum=0.9"),
    _local("strategy.k_steps=4", "strategy.exchange=bf16"),
    _local("strategy.k_steps=4", "strategy.exchange=int8"),
    _local("strategy.k_steps=4", "strategy.streaming.fragments=2"),
    _server("sync"),
    _server("sync", "strategy.wire=bf16"),
    _server("sync", "strategy.wire=int8"),
    _server("async"),
    _server("ssp", "strategy.staleness=2"),
    _server("geo", "strategy.k_steps=4"),
)
