"""Verbs before a command line: ``submit``, ``ps`` and the like of the queue, ``runs``, ``serve``."""

from __future__ import annotations


def answer(argv: list[str]) -> int | list[str]:
    """Do what a verb asks for.

    Returns:
        The exit code; or the command line that is to be run, which ``submit`` stands for, or ``argv`` without a verb.
    """
    from trainer.cli import queue_verbs

    verb, *words = argv
    if verb == queue_verbs.SUBMIT:
        return queue_verbs.submitted(words)
    if verb in queue_verbs.VERBS:
        return queue_verbs.answer(verb, words)
    if verb == "runs":
        from trainer.cli import runs_verbs

        return runs_verbs.answer(words)
    if verb == "serve":
        from trainer.cli import serve

        return serve.answer(words)
    return argv
