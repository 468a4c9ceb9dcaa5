"""Checks a whole config before anything starts; each refusal has a reason and the nearest thing that works."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from trainer.config import schema
from trainer.config.instantiate import call_target
from trainer.config.run_config import RunConfig
from trainer.data.epoch_order import epoch_order
from trainer.data.source import DataSource, Facts
from trainer.errors import UserError
from trainer.host import hardware, torchrun
from trainer.planning.auto import with_strategy
from trainer.planning.batches import (
    FIRST_TRY,
    at_most,
    batch_sizes,
    evaluation_batch_size,
    nearest,
    searched,
    with_padding,
)
from trainer.planning.checked_config import Checked, Lacks
from trainer.planning.class_names import Classes, new_head, of_outputs
from trainer.planning.data_checks import (
    check_batch_fits,
    check_data,
    check_enough,
    check_orders,
    check_unsharded,
    with_classes,
    with_length,
)
from trainer.planning.engine_hosts import check_alone, of_engine
from trainer.planning.key_checks import check_group, check_keys, check_mode, check_name, check_targets
from trainer.planning.launcher import launcher_of
from trainer.planning.processes import (
    check_devices,
    choose_device,
    default_workers,
    is_elsewhere,
    workers_everywhere,
    workers_here,
)
from trainer.planning.task_checks import with_task
from trainer.planning.training_checks import check_optimization, check_validation, check_weights
from trainer.planning.user_class_checks import check_declaration, facts_of, refusals
from trainer.strategies.contract import Declaration

OF_HOSTS = ("nnodes", "node_rank", "ips", "workers", "role", "rank", "server_endpoints", "worker_endpoints")
"""Keys of ``launch`` about hosts, and about processes that are started one by one."""


def check(composed: Mapping[str, Any], typed: Iterable[str] = (), elsewhere: bool = False) -> Checked:
    """Check everything about a config that can be known without importing torch.

    Args:
        composed: the config as plain data, resolved, without ``hydra``; it stays as it is.
        typed: keys that the user typed on the command line.
        elsewhere: the run is for other machines than this one.

    Raises:
        UserError: the first thing that cannot be.
    """
    typed = set(typed)
    check_keys(composed)
    check_targets(composed, typed)
    config = _on_hosts(_in_its_mode(RunConfig.of(composed)))
    check_name(config.name)
    lacks, device = Lacks(config.plan), choose_device(config)
    nproc = workers_here(config.launch, device, default_workers(config))
    submitted, elsewhere = elsewhere, elsewhere or is_elsewhere(config, device, nproc)
    for check_one in (check_alone, _check_tracking, partial(check_validation, typed=typed)):
        with lacks:
            check_one(config)
    workers = workers_everywhere(config.launch, nproc)
    config, auto_strategy = with_strategy(config, workers, typed)
    declaration = _declared(config, workers, lacks)
    _check_processes(config, declaration, workers, lacks, submitted)
    if not elsewhere:
        check_devices(config, device, nproc)
    _check_port(config)
    if not elsewhere:
        with lacks:
            check_compiler(config, device)
        with lacks:
            check_repeatable(config, device)
    merge, searches = config.strategy.gradient_merge.k_steps, False
    with lacks:
        searches = searched(config, typed)
    if searches:
        config = config.changed(data={"batch_size": FIRST_TRY, "global_batch_size": None})
    config = _with_batches(config, declaration, workers, merge, typed, lacks)
    source: DataSource = call_target(config.node("data"), "data", kind=DataSource)
    config, facts, classes, auto_task = _with_facts(config, source, workers, merge, typed, lacks, searches)
    config, head = new_head(config, source, facts)
    checked = Checked(
        config,
        declaration,
        source,
        facts,
        auto_strategy,
        workers,
        nproc,
        device,
        merge,
        lacks,
        elsewhere,
        searches=searches,
        classes=classes,
        head=head,
        auto_task=auto_task,
    )
    for check_other in (check_orders, check_data, check_enough, check_optimization):
        with lacks:
            check_other(checked)
    check_weights(checked)  # not in ``lacks``: a plan cannot be made without the loss
    if config.mode != "train":
        return _with_inputs(checked)
    with lacks:
        _check_nonfinite(checked)
    with lacks:
        check_batch_fits(config, len(epoch_order(config, facts.train_samples)), workers)
    return checked


# A training on one host, without servers and trackers, does not import what only other runs need.


def _in_its_mode(config: RunConfig) -> RunConfig:
    """Return the config adapted to its mode."""
    check_mode(config)
    if config.mode == "train":
        return config
    from trainer.planning.eval_and_predict import as_evaluation

    return as_evaluation(config)


def _on_hosts(config: RunConfig) -> RunConfig:
    """Return the config with its hosts filled in."""
    config = of_engine(config)
    launch = config.launch
    if launch.env != "paddle" and all(getattr(launch, name) == getattr(schema.LaunchConfig, name) for name in OF_HOSTS):
        return config
    from trainer.planning.hosts import on_hosts

    return on_hosts(config)


def _check_tracking(config: RunConfig) -> None:
    """Refuse a tracking store that cannot work, and names that it does not accept."""
    if config.tracking == schema.TrackingConfig():
        return
    from trainer.planning.tracking_store import check_tracking

    check_tracking(config)


def _check_port(config: RunConfig) -> None:
    """Refuse a meeting endpoint that is in use, or not of this host."""
    if config.launch.master_port:
        from trainer.planning.endpoints import check_port

        check_port(config)


def _check_nonfinite(checked: Checked) -> None:
    """Refuse ``on_nonfinite=skip`` or ``rewind`` for a run that cannot do it."""
    if checked.config.on_nonfinite != "stop":
        from trainer.planning.restart_checks import check_nonfinite

        check_nonfinite(checked)


def _facts_of(config: RunConfig, source: DataSource, global_batch_size: int) -> Facts:
    """Ask the data source for its facts; in mode=predict the run of the weights may know them."""
    if config.mode == "train":
        return facts_of(config, source, global_batch_size)
    from trainer.planning.eval_and_predict import evaluated_facts

    return evaluated_facts(config, source, global_batch_size)


def _check_processes(config: RunConfig, declaration: Declaration, workers: int, lacks: Lacks, submitted: bool) -> None:
    """Refuse servers, hosts and launchers that cannot run these processes. An engine's job brings a secret."""
    roles = declaration.roles(workers, config.launch)
    if "server" in roles:
        from trainer.planning.hosts import check_servers

        check_servers(config, declaration.name, roles)
    if config.launch.nnodes > 1 and not submitted:
        from trainer.planning.run_secret import check_secret

        with lacks:
            check_secret(config, roles)
    if config.launch.least_nnodes is not None:
        from trainer.planning.restart_checks import check_elastic

        with lacks:
            check_elastic(config, declaration)
    _check_launcher(config, workers, declaration, lacks)


def _with_facts(
    config: RunConfig, source: DataSource, workers: int, merge: int, typed: set[str], lacks: Lacks, searches: bool
) -> tuple[RunConfig, Facts, Classes, str]:
    """Ask the data source for its facts. Returns the config completed from the facts, the facts, the classes, and why
    ``task=auto`` chose this task.

    Args:
        searches: the batch size is a guess.
    """
    global_size = config.data.global_batch_size if config.mode == "train" else None
    together = global_size or config.batch_size * workers * merge
    facts, classes = _facts_of(config, source, together), Classes()
    config, auto_task = with_task(config, facts, typed, lacks)
    with lacks:
        classes = of_outputs(config, source, facts)
        if classes.labels and config.data.num_classes == facts.classes:  # of the folder, not of the weights
            config = config.changed(data={"num_classes": len(classes.names)})
        facts = classes.applied(facts)
    with lacks:
        config, facts = with_length(config, facts, together, workers, typed, searches)
    config = at_most(config, facts.train_samples, workers) if searches else config
    return with_classes(config, facts), facts, classes, auto_task


def _declared(config: RunConfig, workers: int, lacks: Lacks) -> Declaration:
    """Instantiate and check the config's strategy; returns its :class:`Declaration`."""
    check_group(config.plain(), "strategy")
    declaration: Declaration = call_target(config.node("strategy"), "strategy", kind=Declaration)
    what = f"strategy._target_={config.strategy._target_}"
    check_declaration(declaration, what)
    for refusal in refusals(what, "refuse", lambda: declaration.refuse(config, workers)):
        with lacks:
            raise refusal
    return declaration


def _check_launcher(config: RunConfig, workers: int, declaration: Declaration, lacks: Lacks) -> None:
    """Refuse a launcher that cannot start this many processes."""
    roles = declaration.roles(workers, config.launch)
    others = sum(size for role, size in roles.items() if role != "worker")
    if others and torchrun.is_rank():
        with lacks:
            more = " and ".join(f"{role}s" for role in roles if role != "worker")
            why = f"{torchrun.starter_of()} starts workers alone, and this strategy has {more}"
            instead = "one task on each host" if torchrun.RANKS in os.environ else "python -m trainer without torchrun"
            raise UserError(f"strategy={declaration.name}", why, f"{instead} (or strategy=collective)")
    launcher, what = launcher_of(config), f"launch._target_={config.launch._target_}"
    for refusal in refusals(what, "refuse", lambda: launcher.refuse(config, workers, others)):
        with lacks:
            raise refusal


def _with_batches(
    config: RunConfig, declaration: Declaration, workers: int, merge: int, typed: set[str], lacks: Lacks
) -> RunConfig:
    """Return the config with valid batch sizes; a plan that would be refused gets the nearest ones."""
    if config.mode != "train":
        return config.changed(data={"batch_size": evaluation_batch_size(config.data, workers)})
    sizes = nearest(config.data, workers * merge)
    with lacks:
        sizes = batch_sizes(config.data, workers, merge, typed, declaration.leased(config))
    config = config.changed(data=sizes)
    with lacks:
        check_unsharded(config, declaration.leased(config))
    with lacks:
        return with_padding(config, typed, declaration.leased(config))
    return config


def _with_inputs(checked: Checked) -> Checked:
    """Return the checked config with the images or rows that mode=predict reads; none for mode=eval."""
    from trainer.planning.eval_and_predict import evaluated_inputs

    config = checked.config
    inputs, output = evaluated_inputs(config, checked.source, checked.facts), config.predict.output
    predict = {"input": inputs.folder or config.predict.input, "output": output and os.path.abspath(output)}
    return replace(
        checked,
        config=config.changed(predict=predict),
        files=inputs.files,
        samples=inputs.samples,
        facts=replace(checked.facts, attention=inputs.attention),
    )


def check_repeatable(config: RunConfig, device: str) -> None:
    """Refuse ``execution.deterministic=true`` on GPUs whose matrix products cannot be repeated."""
    workspace = os.environ.get(hardware.CUBLAS, hardware.REPEATABLE[0])
    if config.execution.deterministic and device == "cuda" and workspace not in hardware.REPEATABLE:
        why = f"with {hardware.CUBLAS}={workspace} the same matrix product may have other numbers"
        instead = f"{hardware.CUBLAS}={hardware.REPEATABLE[0]} before the command"
        raise UserError("execution.deterministic=true", why, instead)


def check_compiler(config: RunConfig, device: str) -> None:
    """Refuse ``compile=true`` without a compiler of C++ (CPU) or C (GPU), or with a cache that others can write to."""
    if config.compile == "auto":  # decides against it where that is not possible
        return
    if config.compile and config.execution.compile_backend == "inductor":
        from trainer.planning.compiling import lacks_for_kernels

        if lacks := lacks_for_kernels(device):
            raise UserError("compile=true", lacks, "compile=false")
    if config.compile:
        from trainer.host.cache import check_code

        check_code()
