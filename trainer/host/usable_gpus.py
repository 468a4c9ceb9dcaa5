"""The GPUs that this process can use: what the driver shows, and then what torch says when it is asked.

The answers hold for the life of the process. Torch is asked once, and only where there may be a GPU.
"""

from __future__ import annotations

import functools
import os

from trainer.host import nvml
from trainer.host.found_gpus import Found, joined
from trainer.host.gpu_memo import remember_answer, remembered_answer
from trainer.host.nvml import Driver
from trainer.host.torch_gpus import Answer, Question
from trainer.host.visible_gpus import Visible, hides_all, visible

_ANSWERS: list[Answer] = []
"""Torch's answer, once it has been asked in this process."""


def found() -> Found:
    """The GPUs that this process can use, and what is to be said about them."""
    return joined(_driver(), _shown(), _ANSWERS[-1] if _ANSWERS else _remembered())


def learn(answer: Answer) -> None:
    """Let torch's answer hold in this process."""
    _ANSWERS.append(answer)


class TorchCheck:
    """Asks torch for its GPUs, beside the command; its answer then holds for :func:`found`."""

    def __init__(self) -> None:
        self.question: Question | None = None

    def start(self, plan: bool, has_cuda: bool) -> None:
        """Ask torch, if it has to be asked; the answer comes seconds later.

        Args:
            plan: only a plan is asked for: what torch said to an earlier command is enough.
            has_cuda: there is a sign of a GPU, even where the driver's library cannot be asked.
        """
        known = bool(_ANSWERS) or (plan and _remembered() is not None)
        may_have = bool(_shown().gpus) or (has_cuda and bool(_driver().why) and not hides_all(os.environ))
        if self.question is None and not known and may_have:
            self.question = Question()

    def changes_gpus(self) -> bool:
        """Wait for torch, if it was asked, and return whether a plan for its GPUs is another one."""
        if self.question is None or _ANSWERS:
            return False
        before, answer = found().matters, self.question.answer()
        learn(answer)
        if answer.gpus:
            remember_answer(answer, _driver())
        return found().matters != before

    def end(self) -> None:
        """End the question, if nobody waits for it any more."""
        if self.question is not None:
            self.question.end()


@functools.cache
def _driver() -> Driver:
    return nvml.read()


@functools.cache
def _shown() -> Visible:
    return visible(_driver().cards, os.environ)


@functools.cache
def _remembered() -> Answer | None:
    return remembered_answer(_driver()) if _shown().gpus else None
