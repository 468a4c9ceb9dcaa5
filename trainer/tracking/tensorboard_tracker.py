"""TensorBoard: scalars and pictures as event files in the run's folder (``tracking=tensorboard``).

A resumed run adds an event file to the same folder, which TensorBoard shows as one run.
"""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.tracking.contract import Point, TrackedRun, Tracker
from trainer.wording import quoted

FILES = "events.out.tfevents.*"
FOLDER = "tensorboard"


class TensorBoardTracker(Tracker):
    """Writes event files below the run's folder.

    Args:
        folder: their folder; relative to the run's.
    """

    title = "TensorBoard"

    def __init__(self, run_dir: Path, folder: str = FOLDER) -> None:
        super().__init__(run_dir)
        self.folder = run_dir / folder
        self.writer: Any = None
        self.new_id = uuid.uuid4().hex

    def check(self) -> None:
        """Refuse a run without the package ``tensorboard``."""
        if importlib.util.find_spec("tensorboard") is None:
            raise UserError(
                "tracking=tensorboard",
                "needs the package tensorboard, which is not installed",
                "pip install 'trainer[tensorboard]' (in a checkout: '.[tensorboard]')",
            )

    def prepare(self) -> None:
        """Import the writer of event files."""
        from tensorboard.summary.writer import event_file_writer  # noqa: F401

    def where(self) -> str:
        """Return the folder and the command."""
        below = self.folder.is_relative_to(Path.cwd())
        folder = self.folder.relative_to(Path.cwd()) if below else self.folder
        return f"tensorboard --logdir {quoted(str(folder))}"

    def start(self, run: TrackedRun, before: str | None) -> str:
        """Write the run's keys as a text. A new run takes away the event files of another run in the same folder."""
        there = list(self.folder.glob(FILES))
        if before is not None and there:
            return before
        if self.writer is None:
            for file in there:
                file.unlink()
            self._write(0, run.start_time, [_text("config", run.params)])
        return self.new_id

    def log(self, points: Sequence[Point]) -> None:
        """Write points as scalars."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        for point in points:
            self._write(point.step, point.time, [Summary.Value(tag=point.name, simple_value=point.value)], flush=False)
        self.writer.flush()

    def sent(self, name: str) -> Iterable[int]:
        """Return the updates of a scalar in the event files."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        found = EventAccumulator(str(self.folder), size_guidance={"scalars": 0})
        found.Reload()
        return [event.step for event in found.Scalars(name)] if name in found.Tags()["scalars"] else []

    def artifact(self, path: Path) -> None:
        """Write a picture; other files are in the run's folder anyway."""
        if path.suffix != ".png":
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        picture = Summary.Image(encoded_image_string=path.read_bytes())
        self._write(0, int(path.stat().st_mtime * 1000), [Summary.Value(tag=path.stem, image=picture)])

    def close(self) -> None:
        """Close the event file."""
        if self.writer is not None:
            self.writer.close()

    def _write(self, step: int, time: int, values: list[Any], flush: bool = True) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self.writer is None:
            self.writer = EventFileWriter(str(self.folder))
        self.writer.add_event(Event(wall_time=time / 1000, step=step, summary=Summary(value=values)))
        if flush:
            self.writer.flush()


def _text(tag: str, params: Mapping[str, Any]) -> Any:
    """A table of the run's keys, as TensorBoard's page of texts shows it."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    table = "\n".join(["| key | value |", "|---|---|", *_rows(params)])
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary.Value(tag=tag, metadata=metadata, tensor=TensorProto(dtype=DT_STRING, string_val=[table.encode()]))


def _rows(params: Mapping[str, Any]) -> Iterator[str]:
    for key, value in params.items():
        cell = str(value).replace("|", "\\|").replace("\n", " ")
        yield f"| {key} | {cell} |"
