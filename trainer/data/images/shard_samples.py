"""Puts the members of tar shards together to samples: an image and its label, by their names.

WebDataset's rule comes first: members belong together that share their folder and name up to the first dot
(``7.input.jpg`` and ``7.target.cls``). Where that puts several images together (``img.7.jpg``, ``img.8.jpg``), names up
to the last dot decide. Nothing is dropped without a word: what cannot be a sample is an error, and images and labels
that are left over are named.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from trainer.data.folder_walk import is_hidden
from trainer.data.images.image_files import HEADER, ImageFiles, suffix
from trainer.data.images.tar_index import NotTar, TarMember, members
from trainer.data.regular_files import open_regular
from trainer.errors import UserError, why
from trainer.host import json_text
from trainer.visible import shortened
from trainer.wording import counted, some

MOST = 2**31
"""Labels are below this."""
LABELS = (".cls", ".json")
WHAT_A_LABEL_IS = "NAME.cls or NAME.json with a 'label', a whole number"


@dataclass(frozen=True)
class LabelLimits:
    """Limits on a sample's label in shards: its size, and how deeply it is nested.

    Attributes:
        kib: its size (``data.max_label_kib``).
        depth: how often lists and mappings lie in one another (``data.max_depth``).
    """

    kib: int
    depth: int


class WrongSample(Exception):
    """The error for members of a shard that make no sample; its text goes on after the sample's name."""


class AmbiguousSample(WrongSample):
    """The error for members that have several images, or several labels."""


@dataclass
class ShardIndex:
    """Where the samples of shards lie, as lists for JSON.

    Attributes:
        file: number of each sample's shard.
        spans: first byte and length of its image.
        labels, names: of each sample; a name is ``shard:member``.
        said: images and labels that belong to no sample, in sentences.
    """

    file: list[int] = field(default_factory=list)
    spans: list[Sequence[int]] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


def index_of(files: list[Path], limits: LabelLimits) -> ShardIndex:
    """Index the tar files of shards: where each sample's image lies, and its label.

    Raises:
        UserError: a file is no tar file, or samples have no label, several, or several images; how many, and which.
    """
    index, images, wrong = ShardIndex(), ImageFiles(), list[WrongSample]()
    left_over: list[str] = []
    for number, path in enumerate(files):
        try:
            with open_regular(path) as file:
                shard = _Shard(path, file, limits, images)
                wrong += shard.add_to(index, number)
                left_over += shard.left_over
        except NotTar as error:
            raise UserError(f"data.path ({path})", f"is not a plain tar file: {error}") from error
        except OSError as error:
            raise UserError(f"data.path ({path})", why(error)) from error
    if wrong:
        total, ambiguous = len(index.names) + len(wrong), any(isinstance(error, AmbiguousSample) for error in wrong)
        what = "cannot be told apart" if ambiguous else f"have no label ({WHAT_A_LABEL_IS})"
        raise UserError("data.path", f"{len(wrong)} of {total} samples {what}: {some(list(map(str, wrong)))}")
    if left_over:
        index.said.append(
            f"{counted(len(left_over), 'label')} belong{'s' * (len(left_over) == 1)} to no image: {some(left_over)}"
        )
    index.said += images.said()
    return index


class _Shard:
    """A shard that is read once, member by member."""

    def __init__(self, path: Path, file: IO[bytes], limits: LabelLimits, images: ImageFiles) -> None:
        self.path, self.file, self.limits, self.images = path, file, limits, images
        self.left_over: list[str] = []

    def add_to(self, index: ShardIndex, number: int) -> list[WrongSample]:
        """Add the samples of this shard to an index; returns what makes no sample, and why."""
        wrong: list[WrongSample] = []
        for key, found in self._samples():
            try:
                image = self._image(found)
                if image is None:
                    self._leave_over(found)
                    continue
                label = self._label(found)
            except WrongSample as error:
                wrong.append(type(error)(f"{self.path}:{shortened(key)} has {error}"))
                continue
            index.file.append(number)
            index.spans.append((image.start, image.size))
            index.labels.append(label)
            index.names.append(f"{self.path}:{image.name}")
        return wrong

    def _leave_over(self, found: list[TarMember]) -> None:
        """Note labels without an image; JSON of other things is no label."""
        labels = [member for member in found if isinstance(_label(self.file, member, self.limits), int)]
        self.left_over += [f"{self.path}:{shortened(member.name)}" for member in labels]

    def _samples(self) -> Iterator[tuple[str, list[TarMember]]]:
        """The members of each sample, by its name."""
        groups: dict[str, list[TarMember]] = {}
        for member in members(self.file, os.fstat(self.file.fileno()).st_size):
            if self._counts(member):
                folder, _, base = member.name.rpartition("/")
                groups.setdefault(f"{folder}/{base.partition('.')[0]}".lstrip("/"), []).append(member)
        for key, found in groups.items():
            parts: dict[str, list[TarMember]] = {}
            for member in found:
                parts.setdefault(os.path.splitext(member.name)[0], []).append(member)
            whole = (_is_sample(part) for part in parts.values())
            yield from [(key, found)] if _is_sample(found) or not any(whole) else parts.items()

    def _counts(self, member: TarMember) -> bool:
        """Whether a member is an image or may be a label."""
        if any(is_hidden(part) for part in member.name.split("/") if part not in (".", "..")):
            return False
        is_label = suffix(member.name) in LABELS
        if not is_label and not self.images.uses(member.name, lambda: self._head(member), str(self.path)):
            return False
        if member.sparse:
            raise NotTar(
                f"{shortened(member.name)} is a sparse member, which cannot be read where it lies; pack it plainly"
            )
        return True

    def _head(self, member: TarMember) -> bytes:
        self.file.seek(member.start)
        return self.file.read(min(HEADER, member.size))

    def _image(self, found: list[TarMember]) -> TarMember | None:
        images = [member for member in found if suffix(member.name) not in LABELS]
        if len(images) > 1:
            raise AmbiguousSample(_several("images", images))
        return images[0] if images else None

    def _label(self, found: list[TarMember]) -> int:
        """The label, of ``.cls`` before ``.json``, which may hold other things.

        Raises:
            WrongSample: there is none, it is no whole number, or there are several.
        """
        labels: dict[str, int | str] = {}
        for ending in LABELS:
            of_kind = [member for member in found if suffix(member.name) == ending]
            if len(of_kind) > 1:
                raise AmbiguousSample(_several("labels", of_kind))
            for member in of_kind:
                labels[ending] = _label(self.file, member, self.limits)
        first, *others = labels.values() or ["an image but no label"]
        if isinstance(first, str):
            raise WrongSample(first)
        if any(isinstance(other, int) and other != first for other in others):
            raise AmbiguousSample(f"the label {first} in {LABELS[0]} and {others[0]} in {LABELS[1]}")
        return first


def _is_sample(found: Sequence[TarMember]) -> bool:
    """Whether these members are one image with its label, of each kind at most once."""
    kinds = Counter("image" if suffix(m.name) not in LABELS else suffix(m.name) for m in found)
    return kinds["image"] == 1 and len(kinds) > 1 and max(kinds.values()) == 1


def _several(what: str, found: Sequence[TarMember]) -> str:
    name, times = Counter(member.name for member in found).most_common(1)[0]
    if times > 1:
        return f"{shortened(name)} {times} times"
    return f"{len(found)} {what} ({some([shortened(member.name) for member in found])})"


def _label(shard: IO[bytes], member: TarMember, limits: LabelLimits) -> int | str:
    """The label, or what stands in its place."""
    if member.size > limits.kib << 10:
        return (
            f"a label of {member.size:,} bytes in {shortened(member.name)}, more than data.max_label_kib={limits.kib}"
        )
    shard.seek(member.start)
    content = shard.read(member.size)
    as_json = suffix(member.name) == ".json"
    if as_json and _deeper(content, limits.depth):
        return f"lists or mappings deeper than data.max_depth={limits.depth} in {shortened(member.name)}"
    try:
        label = int(str(json_text.loads(content)["label"]) if as_json else content)
    except (ValueError, KeyError, TypeError):
        return f"{content[:40]!r} in {shortened(member.name)}"
    return label if abs(label) < MOST else f"a label of {len(str(label))} digits in {shortened(member.name)}"


def _deeper(content: bytes, depth: int) -> bool:
    """Whether a JSON text nests lists and mappings deeper than ``depth``; brackets inside strings do not count."""
    if content.count(b"[") + content.count(b"{") <= depth:
        return False
    now = 0
    for bracket in re.finditer(rb"[\[\]{}]", re.sub(rb'"(?:[^"\\]|\\.)*"', b"", content)):
        now += 1 if bracket[0] in b"[{" else -1
        if now > depth:
            return True
    return False
