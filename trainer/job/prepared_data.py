"""Prepares a job's data in the parent process, takes their fingerprint, and compares it with that of a checkpoint."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from trainer.checkpoint import store
from trainer.data.source import Facts, OnProgress, digest_of, named_sizes
from trainer.errors import NOTHING_NEW, AskedToLeave, RunFailed, RunPreempted, UserError, failed
from trainer.host.signals import termination_raises
from trainer.job.balanced_weights import weighed
from trainer.job.ready import Ready
from trainer.planning.checked_config import Checked
from trainer.planning.class_names import of_outputs
from trainer.planning.find_checkpoint import can_go_on
from trainer.planning.plan import measured_by
from trainer.planning.user_class_checks import checked_facts


def prepared(ready: Ready) -> Ready:
    """Prepare the data of a job (download, draw); returns the job, planned again if the facts have changed."""
    from trainer.planning.user_class_checks import before_start
    from trainer.terminal.bar import preparing

    checked = ready.checked
    if checked.files or ready.digest:  # the data set is not read, or is prepared already
        return ready
    with preparing(checked.config.verbosity) as show:
        facts = _prepared_facts(_with_measured(ready), show)
    before_start("prepare", checked.config.model)
    return weighed(_named(ready, facts))


def _named(ready: Ready, facts: Facts) -> Ready:
    """The job planned again for the facts of its prepared data. Downloaded data may name their classes only now.

    Raises:
        UserError: the saved weights, or the weights that the run starts from, have other classes.
    """
    checked = ready.checked
    if facts == checked.classes.undone(checked.facts):
        return ready
    classes = of_outputs(checked.config, checked.source, facts)
    ready = replace(ready, checked=replace(checked, classes=classes))
    return ready.with_facts(classes.applied(facts))


def _with_measured(ready: Ready) -> Checked:
    """The job's checked config, with the facts that its run had measured before the checkpoint."""
    checked = ready.checked
    if ready.plan.resume is None:
        return checked
    before = measured_by(ready.plan.resume.source)
    node = checked.config.node("data")
    known = {key: value for key, value in before.items() if node.get(key) == "auto"}
    return replace(checked, facts=replace(checked.facts, measured={**checked.facts.measured, **known}))


def _prepared_facts(checked: Checked, show: OnProgress) -> Facts:
    """Call the data source's ``prepare``; returns the facts of the data.

    Raises:
        UserError: ``prepare`` does not return facts.
    """
    what = f"data._target_={checked.config.data._target_}"
    facts = checked_facts(checked.source.prepare(checked.classes.undone(checked.facts), show), what, "prepare")
    return replace(facts, train_samples=checked.facts.train_samples) if facts.iterable else facts


def fingerprinted(ready: Ready, tracked: bool) -> Ready:
    """The job with the fingerprint of its prepared data, if MLflow or checkpoints need it.

    Host 0 computes it once for all workers, because a source of files asks for the size of each file.
    """
    kept = ready.checked.config.saves_checkpoints and ready.checked.source.knows_its_data
    if ready.digest or ready.plan.topology.node_rank or not (tracked or kept):
        return ready
    return replace(ready, digest=_fingerprint(ready))


def _fingerprint(ready: Ready) -> str:
    """The data's fingerprint; in mode=predict, that of the files that are read.

    Raises:
        RunFailed: the data source cannot compute it.
    """
    source, facts = ready.checked.source, ready.checked.facts
    if ready.checked.files:
        paths = [os.path.join(str(ready.checked.config.predict.input), file) for file in ready.checked.files]
        return digest_of(named_sizes([path for path in paths if os.path.isfile(path)]))
    name = f"{type(source).__module__}.{type(source).__qualname__}"
    try:
        fingerprint = source.fingerprint(facts)
    except OSError as error:
        raise RunFailed(f"the fingerprint of {facts.source} cannot be taken: {error}") from error
    except (RunFailed, UserError):
        raise
    except Exception as error:
        raise failed(name, "fingerprint", source.fingerprint, error) from error
    if not isinstance(fingerprint, str):
        raise RunFailed(f"{name}: fingerprint returned something of type {type(fingerprint).__name__}. Return a text")
    return fingerprint


def of_the_same_data(ready: Ready) -> Ready:
    """Check, before anything is written, that a resumed job has the data of its checkpoint.

    Raises:
        UserError: it has other data.
        RunPreempted: SIGTERM or SIGUSR1 came meanwhile.
    """
    resume = ready.plan.resume
    if resume is None or ready.plan.topology.node_rank or not ready.checked.source.knows_its_data:
        return ready
    if not store.about(Path(resume.folder)).data:
        return ready
    from trainer.planning.resume import with_data

    try:
        with termination_raises(partial(can_go_on, ready.checked.config, ready.plan)):
            ready = fingerprinted(prepared(ready), True)
    except AskedToLeave as error:
        raise RunPreempted(NOTHING_NEW.format(error)) from None
    return ready.with_plan(resume=with_data(resume, ready.digest, ready.checked.config))
