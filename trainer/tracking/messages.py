"""Messages of the parent to the recorder: JSON lines about one run each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def subject(message: Mapping[str, Any]) -> str:
    """The folder of the run that a message is about."""
    return str(next(filter(None, map(message.get, ("open", "back", "trained", "close")))))


def for_another(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The messages for a recorder in place of one that died: each open run's, with how far it has gone back since."""
    for message in messages:
        if run_dir := message.get("open"):
            backs = [one for one in messages if one.get("back") == run_dir]
            yield {**message, "run": {**message["run"], "resumed": True}, "backs": backs}
        elif "back" not in message:
            yield message
