"""Plans a job for the GPUs that torch can use.

The plan begins with the GPUs that the driver shows, and torch is asked in a process of its own while this one imports
torch. Where its answer makes another plan, such as one for the CPU, the job is planned again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from trainer.errors import UserError
from trainer.host import hardware
from trainer.host.usable_gpus import TorchCheck
from trainer.planning.checked_config import Checked

Ready = TypeVar("Ready")
ABOUT_GPUS = ("device=", "launch.nproc=")
"""What refusals are about that may not hold with the GPUs that torch can use."""


def planned_for_usable_gpus(
    plan_job: Callable[[Callable[[Checked], None]], Ready], on_checked: Callable[[Checked], None]
) -> Ready:
    """Plan a job, and again if torch's answer changes its GPUs.

    Args:
        plan_job: plans the job for the GPUs that are known at its call, and calls its argument when the light checks
            are passed. on_checked: called then, once.

    Raises:
        UserError: the job cannot run.
    """
    torch_check, calls = TorchCheck(), [on_checked]

    def light_checks_passed(checked: Checked) -> None:
        for call in calls:
            call(checked)
        calls.clear()
        if checked.config.device != "cpu" and checked.config.launch.role != "server":
            torch_check.start(checked.config.plan, hardware.has_cuda())

    try:
        try:
            ready = plan_job(light_checks_passed)
        except UserError as error:
            if not error.what.startswith(ABOUT_GPUS):
                raise
            torch_check.start(False, hardware.has_cuda())
            if not torch_check.changes_gpus():
                raise
        else:
            if not torch_check.changes_gpus():
                return ready
        return plan_job(light_checks_passed)
    finally:
        torch_check.end()
