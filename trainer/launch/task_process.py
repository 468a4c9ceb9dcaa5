"""``python -m trainer.launch.task_process FILE``: the main function of a process that a task launcher has started."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.errors import Interrupted
from trainer.host import json_text, private
from trainer.launch.engine import Start
from trainer.launch.forkserver import enter
from trainer.launch.meeting_place import MeetingPlace
from trainer.launch.process import FailureReport, returned, to_log
from trainer.launch.started_process import Role
from trainer.launch.tasks import BEGUN, place_of
from trainer.planning.launcher import Assignment
from trainer.strategies.seat import Address, Life


def main(file: Path) -> int:
    """Run the process that the file describes, and write its result to the run's board; returns the exit code."""
    try:
        start = _start_of(**json_text.loads(private.read(file)))
        file.unlink()
    except FileNotFoundError:
        print("the run ended before this process began", file=sys.stderr)
        return 1
    to_log(str(start.log), str(start.scratch))
    board = start.place.open()[0].under(place_of(start.role.name, start.rank))
    board.set(BEGUN, "")
    report = FailureReport(lambda failure: board.set("failure", failure))
    try:
        board.set("value", json.dumps(returned(enter, (start, report))))
    except (Exception, Interrupted) as error:
        report(error)
        return 1
    board.wait(["leave"])  # all end together: a peer may still read from this process
    return 0


def _start_of(
    role: Mapping[str, Any],
    payload: Mapping[str, Any],
    place: Mapping[str, Any],
    address: Mapping[str, Any],
    life: Mapping[str, Any],
    log: str,
    scratch: str,
    **others: Any,
) -> Start:
    """Rebuild the :class:`Start` from the plain data of :func:`trainer.launch.tasks.as_json_data`."""
    return Start(
        Role(**role),
        payload=Assignment.of(payload),
        place=MeetingPlace(**_unsealed(place)),
        address=Address(**_unsealed(address)),
        life=Life(**life),
        log=Path(log),
        scratch=Path(scratch),
        **others,
    )


def _unsealed(plain: Mapping[str, Any]) -> dict[str, Any]:
    return {**plain, "secret": bytes.fromhex(plain["secret"])}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
