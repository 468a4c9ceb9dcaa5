"""launch, execution, tracking, predict, and what decides over a run: processes, arithmetic and rhythm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Optional  # OmegaConf reads them

from trainer.config.schema.declare import AUTO, LONGEST_S, MOST_HOSTS, MOST_PROCESSES, key


@dataclass
class LaunchConfig:
    """launch: how many processes, where, and what starts them."""

    _target_: str = key("trainer.launch.builtin.Local", "class, a trainer.planning.launcher.Launcher")
    nproc: Optional[int] = key(
        None, "workers on this host (null: one per GPU, else 1)", "processes", ge=1, le=MOST_PROCESSES
    )
    servers: Optional[int] = key(
        None, "parameter-server processes, for strategies that have them", "processes", ge=1, le=MOST_PROCESSES
    )
    server_hosts: str = key(
        "auto",
        "hosts of parameter servers: all, first, or numbers (0,2); auto: all, or first with fewer servers than hosts",
    )
    server_ports: Optional[str] = key(
        None, "ports of the parameter servers by their numbers: 8000-8003, or 8000,8001 (null: free ones)"
    )
    workers: Optional[int] = key(None, "workers on all hosts; on one host the same as nproc", "processes", ge=1)
    nnodes: Any = key(
        1, "hosts; as MIN:MAX they may come and go while MIN are there", "hosts", ge=1, le=MOST_HOSTS, or_range=True
    )
    least_nnodes: Optional[int] = key(
        None, "MIN of launch.nnodes=MIN:MAX (null: all hosts stay to the end)", "hosts", ge=1, le=MOST_HOSTS
    )
    join_s: float = key(
        30.0, "with launch.nnodes=MIN:MAX: at the start, wait for more hosts than MIN", "seconds", ge=0, le=LONGEST_S
    )
    node_rank: int = key(0, "which of the hosts this one is", ge=0)
    master_addr: str = key("127.0.0.1", "address of host 0 that the others can reach")
    master_port: int = key(
        0,
        "port on host 0 where the hosts meet (0: a free one; on one host nothing listens there)",
        ge=0,
        le=65535,
        example=29500,
    )
    address: Optional[str] = key(
        None, "address of this host by which the others reach it (null: that of the route to host 0)"
    )
    ips: Optional[str] = key(None, "the hosts' addresses, separated by commas, instead of nnodes and master_addr")
    role: Optional[str] = key(
        None, "this command is one process of the run (null: this host's part of the run)", choices=("server", "worker")
    )
    rank: Optional[int] = key(None, "with launch.role: this process's number within its role", ge=0)
    server_endpoints: Optional[str] = key(None, "with launch.role: ADDRESS:PORT of each server, separated by commas")
    worker_endpoints: Optional[str] = key(
        None, "with launch.role: ADDRESS:PORT of each worker; all meet at the first one's"
    )
    env: Optional[str] = key(
        "auto",
        "whose variables say which process of the run this is; auto: those that are there; none: no one's",
        choices=("auto", "none", "paddle", "slurm", "mpi", "kubernetes", "ray", "torchrun"),
    )
    secret_file: Optional[str] = key(
        None, "file with the secret by which hosts know each other, mode 0600 (null: $TRAINER_RUN_SECRET)"
    )
    insecure: bool = key(
        False, "parameter servers between hosts without a secret: whoever reaches master_port can change the training"
    )
    max_restarts: int = key(
        3, "restarts within an hour where processes die, on one host or with nnodes=MIN:MAX (0: none)", "restarts", ge=0
    )
    hang_timeout_s: Optional[float] = key(
        1800.0,
        "no worker makes progress for this time: one is named, its stack logged, and it counts as dead (null: never)",
        "seconds",
        gt=0,
        le=LONGEST_S,
    )
    timeout_s: float = key(300.0, "longest wait for all hosts and processes to arrive", "seconds", gt=0, le=LONGEST_S)


@dataclass
class InProcessLaunch(LaunchConfig):
    """launch=in_process: the only worker is the process that you start."""

    _target_: str = key("trainer.launch.builtin.InProcess", "class, a trainer.planning.launcher.Launcher")


@dataclass
class ForkserverLaunch(LaunchConfig):
    """launch=forkserver: every process of this host is a child of a forkserver, also a worker alone."""

    _target_: str = key("trainer.launch.builtin.Forkserver", "class, a trainer.planning.launcher.Launcher")


@dataclass
class SubmitLaunch(LaunchConfig):
    """Keys of launchers that submit the command to an engine (Slurm, Kubernetes, Ray, MPI)."""

    _target_: str = key("???", "class, a trainer.launch.engines.contract.Submitter")
    options: Dict[str, Any] = key({}, "the engine's own options by name, e.g. launch.options.partition=gpu for sbatch")
    setup: Optional[Any] = key(
        None, "lines of the shell before the command on the engine's machines (modules, a container)", texts=True
    )
    python: Optional[str] = key(None, "what starts Python there (null: the interpreter of this command)")
    cores: Optional[int] = key(None, "cores of a host (null: the engine's default)", "cores", ge=1)
    memory: Optional[str] = key(None, "memory of a host with its unit, e.g. 64G (null: the engine's default)")
    gpus: Optional[int] = key(None, "GPUs of a host (null: one per worker with device=cuda, else none)", "GPUs", ge=0)
    max_preemptions: Optional[int] = key(
        None, "so often the job may be pre-empted or run out of time (null: no limit)", "preemptions", ge=0
    )
    shared_storage: bool = key(
        True, "all hosts and this machine see the run folder; false: what they write comes by checkpoint.to"
    )
    wait: bool = key(True, "follow the job to its end; false: print its number and return")
    dry_run: bool = key(False, "print what the engine would get; nothing is submitted or written")


@dataclass
class SlurmLaunch(SubmitLaunch):
    """launch=slurm: the command as a batch job of Slurm."""

    _target_: str = key("trainer.launch.engines.slurm.Slurm", "class, a trainer.launch.engines.contract.Submitter")


@dataclass
class QueueLaunch(SubmitLaunch):
    """launch=queue: the command waits in this machine's queue until there are slots for it."""

    _target_: str = key("trainer.service.engine.LocalQueue", "class, a trainer.launch.engines.contract.Submitter")
    priority: int = key(0, "runs of higher priority start first, and running ones of lower priority make room")
    runner: bool = key(True, "start this machine's runner where none runs")
    once: Optional[str] = key(None, "a name of your own: a second submission with it is the same run")


@dataclass
class KubernetesLaunch(SubmitLaunch):
    """launch=kubernetes: the command as a TrainJob, with parameter servers as a JobSet."""

    _target_: str = key(
        "trainer.launch.engines.kubernetes.Kubernetes", "class, a trainer.launch.engines.contract.Submitter"
    )
    image: Optional[str] = key(None, "container image with trainer and its Python")
    namespace: Optional[str] = key(None, "namespace of the pods (null: kubectl's own)")
    apply: bool = key(False, "hand the manifest to kubectl, and follow the job; false: print the manifest")
    volume: Optional[str] = key(None, "PersistentVolumeClaim for run folders, which all pods can write to")
    volume_path: str = key("/runs", "where the pods have this volume")
    volumes: Dict[str, str] = key({}, "further claims by name, and where the pods have them, e.g. {images: /data}")
    env_from: Optional[Any] = key(
        None, "Secrets of the namespace that become variables of the pods, e.g. one for MLflow", texts=True
    )
    runtime: Optional[str] = key(
        None, "ClusterTrainingRuntime, such as torch-distributed, whose rules of restarts count (null: one of its own)"
    )
    queue: Optional[str] = key(None, "Kueue's LocalQueue that admits the job (null: no queue)")
    server_cores: Optional[int] = key(None, "cores of a parameter server's pod (null: as a worker's)", "cores", ge=1)
    server_memory: Optional[str] = key(None, "memory of a parameter server's pod, e.g. 16Gi (null: as a worker's)")


@dataclass
class RayLaunch(SubmitLaunch):
    """launch=ray: the command on the nodes of a Ray cluster. launch.options are custom resources of a host's node."""

    _target_: str = key("trainer.launch.engines.ray.Ray", "class, a trainer.launch.engines.contract.Submitter")
    cluster: str = key("auto", "the cluster: auto (this machine's, or $RAY_ADDRESS), ADDRESS:6379, or ray://HOST:10001")
    variables: Optional[Any] = key(
        None, "further variables of this command that all hosts get, besides TRAINER_* and MLFLOW_*", texts=True
    )


@dataclass
class MpiLaunch(SubmitLaunch):
    """launch=mpi: the command by mpirun, one task on each host."""

    _target_: str = key("trainer.launch.engines.mpi.Mpi", "class, a trainer.launch.engines.contract.Submitter")
    mpirun: str = key("mpirun", "what starts the tasks, with its own first words")
    flavour: str = key(
        "openmpi",
        "whose options mpirun has: Open MPI's, or hydra's (MPICH, Intel MPI, MVAPICH)",
        choices=("openmpi", "mpich"),
    )
    hostfile: Optional[str] = key(None, "file with the hosts, one a line (null: launch.hosts, or the engine's own)")
    hosts: Optional[str] = key(None, "the hosts' names, separated by commas, instead of a file")


@dataclass
class ExecutionConfig:
    """execution: how the model is computed, and how often the run logs and validates."""

    channels_last: Any = key("auto", "images in memory as (N, H, W, C)", choices=AUTO)
    keep_memory: Any = key("auto", "keep freed memory in the process (glibc mallopt), for CPU training", choices=AUTO)
    fused_optimizer: Any = key(
        "auto", "one kernel for the update of all parameters (auto: SGD, Adam, AdamW on GPUs)", choices=AUTO
    )
    deterministic: bool = key(False, "only deterministic kernels")
    tf32: Any = key("auto", "on GPUs: products of fp32 in TF32 (auto: not where precision=fp32 is typed)", choices=AUTO)
    expandable_segments: Any = key(
        "auto", "on GPUs: torch's blocks of memory grow (PYTORCH_CUDA_ALLOC_CONF)", choices=AUTO
    )
    nccl_priority: Any = key(
        "auto", "on GPUs: exchanges go before the model's kernels (TORCH_NCCL_HIGH_PRIORITY)", choices=AUTO
    )
    numa: Any = key("auto", "each worker runs on the cores of its GPU's NUMA node", choices=AUTO)
    compile_backend: str = key(
        "inductor",
        "with compile=true: inductor writes kernels; aot_eager and eager run the traced graph with torch's own",
        choices=("inductor", "aot_eager", "eager"),
    )
    compile_mode: str = key(
        "default",
        "with compile: how long torch.compile searches for fast kernels, and whether it records CUDA graphs",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    )
    compile_regions: Any = key(
        "auto", "with compile: the model's repeated blocks, each kind once, in place of the whole", choices=AUTO
    )
    cuda_graph: bool = key(False, "on GPUs: capture the whole update as a CUDA graph, and replay it")
    threads: Optional[int] = key(
        None,
        "CPU threads per worker (null: cores / workers; 1 where a batch is little work)",
        "threads",
        ge=1,
        le=MOST_PROCESSES,
    )
    log_every: int = key(5, "batches that a printed and logged line averages, across epochs", "batches", ge=1)
    log_workers: bool = key(False, "with each line a line of each worker's own values, on the screen as in workerlog.N")
    line_of: str = key(
        "mean",
        "mean of the log_every batches since the last line, or batch 0, log_every, ... of an epoch alone",
        choices=("mean", "batch"),
    )
    val_every: int = key(1, "epochs between two validations (0: only after the last)", "epochs", ge=0)
    val_every_steps: Optional[int] = key(None, "updates between two validations, besides val_every", "updates", ge=1)
    profile_after: int = key(10, "with profile=true: updates before the first that is traced", "updates", ge=0)
    profile_steps: int = key(5, "with profile=true: updates that are traced", "updates", ge=1)


@dataclass
class CheckpointConfig:
    """checkpoint: when a run saves checkpoints, and how many of them stay."""

    every_steps: Optional[int] = key(None, "updates between two checkpoints (null: no such rhythm)", "updates", ge=1)
    every_minutes: Optional[float] = key(
        10.0, "minutes between two checkpoints (null: no such rhythm)", "minutes", gt=0, le=LONGEST_S
    )
    every_epochs: Optional[int] = key(
        1, "epochs between two checkpoints, after their validation (null: no such rhythm)", "epochs", ge=1
    )
    keep_last: int = key(2, "newest checkpoints that stay", "checkpoints", ge=1)
    keep_best: int = key(0, "checkpoints of the best validations that stay besides", "checkpoints", ge=0)
    to: Optional[str] = key(
        None, "fsspec address to which checkpoints are copied, e.g. s3://BUCKET/RUNS; each run has a folder there"
    )
    background: bool = key(True, "write while the training goes on; it waits only for the copy in memory")
    grace_s: float = key(
        30.0, "after SIGTERM or SIGUSR1: longest wait for the last checkpoint", "seconds", gt=0, le=LONGEST_S
    )


@dataclass
class ResumeConfig:
    """resume: whether the run goes on from a checkpoint. ``resume=auto`` on the command line is
    ``resume.path=auto``."""

    path: Optional[str] = key(
        None, "auto (the newest checkpoint of hydra.run.dir), fresh, a checkpoint, a run's folder, or an MLflow run id"
    )
    allow_changes: bool = key(False, "resume although keys have changed that change the numbers")


MLFLOW = "mlflow"
"""MLflow's name among the trackers."""


@dataclass
class TrackingConfig:
    """tracking: where metrics go besides the run's own folder. Several: ``tracking=[mlflow,tensorboard]``."""

    trackers: Dict[str, Any] = key(
        {}, "by name: {csv: {_target_: my_package.Csv}}; an option such as tracking=mlflow brings its own"
    )
    uri: Optional[str] = key(None, "MLflow tracking URI (null: $MLFLOW_TRACKING_URI, else sqlite:///mlflow.db)")
    experiment: Optional[str] = key(None, "MLflow experiment (null: the run's name)")
    run_name: Optional[str] = key(None, "MLflow run name (null: what differs from the recipe)")
    tags: Dict[str, str] = key({}, "further tags of the MLflow run")
    flush_timeout_s: float = key(
        60.0,
        "longest wait at the end for what trackers have not sent yet, the model included; 10 s where nothing listens",
        "seconds",
        ge=0,
        le=LONGEST_S,
    )
    log_model: bool = key(True, "the best model becomes an MLflow model, for mlflow.pyfunc.load_model")
    log_last_model: bool = key(False, "beside the best model, the one at the end becomes an MLflow model")
    registered_model: Optional[str] = key(
        None, "model of MLflow's registry that gets best and last model as versions, with the aliases best and last"
    )
    system_every_s: Optional[float] = key(
        10.0, "between two measurements of each host's load (null: none)", "seconds", gt=0, le=LONGEST_S
    )


@dataclass
class PredictConfig:
    """predict: which images or rows mode=predict reads, and where it writes the predictions."""

    input: Optional[str] = key(None, "folder of images, with all folders in it; of rows a file, folder or pattern")
    output: Optional[str] = key(None, "CSV file of the predictions (null: predictions.csv in the run's folder)")


@dataclass
class SweepConfig:
    """sweep: how the jobs of ``-m`` run."""

    parallel: Optional[Any] = key(
        None, "jobs at a time; auto: as there are slots (null: one; on an engine all)", "jobs", ge=1, or_auto=True
    )
    on_error: str = key("continue", "after a failed job: start the others or not", choices=("continue", "stop"))
    resume: bool = key(False, "do only what is not done in hydra.sweep.dir, as resume=auto")
    objective: Optional[Any] = key(
        None, "metric that sorts the jobs, of a search several: val/loss, max perf/samples_per_s", texts=True
    )
    search: Optional[str] = key(None, "who chooses the values (null: every combination)", choices=("optuna",))
    trials: int = key(20, "jobs of a search", "jobs", ge=1)
    sampler: str = key("tpe", "how a search chooses values", choices=("tpe", "random", "cmaes", "grid"))
    space: Optional[Any] = key(
        None, "values of a search, e.g. {optimizer.lr: log 1e-4..1, data.batch_size: [16,32]}", texts=True
    )
    seed: int = key(0, "of the search's choices", ge=0)
    storage: Optional[str] = key(None, "address of the search's database (null: study.log in the sweep's folder)")
    retries: int = key(1, "of a job of a search whose process has died", "restarts", ge=0)
    pruner: Optional[str] = key(
        None,
        "how a search ends bad jobs early; asha: they wait at rungs of epochs, and the best go on",
        choices=("median", "halving", "asha"),
    )
    reduction: int = key(3, "with halving and asha: one of so many goes on from a rung to the next", "jobs", ge=2)
    rung: int = key(1, "with halving and asha: length of the first rung", "epochs", ge=1)


@dataclass
class LrFindConfig:
    """lr_find: the learning rates that mode=lr_find tries."""

    first: float = key(1e-6, "optimizer.lr at the first update", gt=0, le=1e6)
    last: float = key(10.0, "optimizer.lr at the last update", gt=0, le=1e6)
    updates: int = key(300, "updates from the first learning rate to the last", "updates", ge=10, le=100_000)
    diverged: float = key(4.0, "the test ends where the smoothed loss is so many times its least value", gt=1)


@dataclass
class ScalingConfig:
    """scaling: how long mode=scaling trains with each number of workers."""

    updates: int = key(60, "updates of each training, of which the first third is not counted", "updates", ge=15)


@dataclass
class AdviseConfig:
    """advise: what strategy=advise and strategy=auto measure, and for which machines they predict."""

    updates: int = key(
        20, "updates of each short training, of which the first third is not counted", "updates", ge=6, le=100_000
    )
    workers: Optional[str] = key(None, "further numbers of workers to predict, e.g. 8,64,1024", "workers")
    per_host: Optional[int] = key(
        None, "workers of each host in the prediction (null: as in this run)", "workers", ge=1, le=MOST_PROCESSES
    )
    gbit: Optional[float] = key(
        None, "bandwidth of the link between hosts in Gbit/s (null: as measured here)", gt=0, le=1_000_000
    )
    latency_ms: Optional[float] = key(
        None,
        "latency between hosts in milliseconds each way, half of what ping says (null: as measured here)",
        ge=0,
        le=LONGEST_S,
    )


@dataclass
class EvalConfig:
    """eval: which part of the data mode=eval measures."""

    split: str = key("val", "the validation samples, or the test samples", choices=("val", "test"))


@dataclass
class EmaConfig:
    """ema: a moving average of the weights, evaluated and saved beside the model."""

    decay: Optional[float] = key(
        None, "share of the average that each update keeps, e.g. 0.999 (null: no average)", ge=0, lt=1, example=0.999
    )
    warmup: bool = key(False, "the decay grows with the updates n, as 1 - (1 + n / gamma) ** -power")
    gamma: float = key(1.0, "of the warm-up: twice the gamma needs twice the updates", gt=0)
    power: float = key(2 / 3, "of the warm-up: 2/3 for a million updates and more, 3/4 for fewer", gt=0, le=1000)


@dataclass
class BestConfig:
    """best: which model checkpoints/best.safetensors is."""

    metric: Optional[str] = key(None, "validation metric, e.g. val/loss, val/acc5, val_ema/acc1 (null: the task's)")


@dataclass
class EarlyStopConfig:
    """early_stop: end before the last epoch when a validation metric has stopped getting better."""

    metric: Optional[str] = key(None, "validation metric that is watched, e.g. val/loss (null: never stop early)")
    patience: int = key(5, "validations in a row without a better value after which the run ends", "validations", ge=1)
    min_delta: float = key(0.0, "a value counts as better only when it is better by more than this", ge=0)
