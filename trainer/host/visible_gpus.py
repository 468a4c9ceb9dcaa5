"""CUDA's rules for which GPUs of a machine a process sees, and as which number.

``CUDA_VISIBLE_DEVICES`` is read as the driver and torch read it (``torch.cuda._parse_visible_devices``): numbers as C's
``strtoul`` reads them, or starts of UUIDs. A number below 0 or above the last card ends the list; a repeated one leaves
no GPU. Numbers count the cards in the order of ``CUDA_DEVICE_ORDER``. Its default, ``FASTEST_FIRST``, begins with the
card that CUDA believes to be the fastest. CUDA does not document how it finds that, so the order of unlike cards is a
guess until CUDA itself is asked. A process sees one MIG device at most, and then no card beside it (CUDA 13.4,
programming guide; MIG user guide).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.visible import shortened
from trainer.wording import counted

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
BY_BUS = "PCI_BUS_ID"
CARD, MIG = "GPU-", "MIG-"
NUMBER = re.compile(r"[+-]?[0-9]+")
MOST = 1024
"""More cards than a machine has."""


@dataclass(frozen=True)
class Gpu:
    """One GPU or MIG device, as CUDA shows it.

    Attributes:
        capability: CUDA's compute capability, e.g. (9, 0); (0, 0): the driver does not say.
        memory: bytes, of a MIG device its own; 0: the driver does not say.
        uuid: ``GPU-...`` or ``MIG-...``; empty: not known.
    """

    name: str
    capability: tuple[int, int]
    memory: int = 0
    uuid: str = ""


@dataclass(frozen=True)
class Card:
    """One card, as the driver lists it.

    Attributes:
        slices: its MIG devices; None: it is not in MIG mode.
        older: the names of ``slices`` before driver 470, ``MIG-GPU-UUID/GPU INSTANCE/COMPUTE INSTANCE``.
        speed: cores times clock; 0: the driver does not say.
    """

    gpu: Gpu
    slices: tuple[Gpu, ...] | None = None
    older: tuple[str, ...] = ()
    speed: int = 0


@dataclass(frozen=True)
class Visible:
    """The GPUs that CUDA shows; without one, the reason. ``unsure``: why CUDA may count them otherwise; else empty."""

    gpus: tuple[Gpu, ...]
    why: str = ""
    unsure: str = ""


def visible(cards: Sequence[Card], environ: Mapping[str, str]) -> Visible:
    """Find the GPUs that CUDA shows to a process with these variables.

    Args:
        cards: all of the machine, in the order of their PCI bus.
    """
    if not cards:
        return Visible((), "the driver finds none")
    value, ordered = environ.get(VISIBLE), _in_order(cards, environ.get(ORDER))
    if value is not None and value.startswith(MIG):
        slices = _named_slice(value, cards)
        return Visible(slices, "" if slices else f"{_spelled(value)} is no MIG device of this machine")
    chosen = ordered if value is None else [ordered[i] for i in ordinals(value, [card.gpu.uuid for card in ordered])]
    if not chosen:
        return Visible((), _why_hidden(str(value), len(cards)))
    gpus = _shown(chosen)
    if not gpus:
        return Visible((), "the card is in MIG mode and has no MIG device (nvidia-smi mig -cgi makes them)")
    return Visible(gpus, unsure=_unsure(value, environ, cards))


def ordinals(value: str, uuids: Sequence[str]) -> list[int]:
    """The positions of the cards that a value of ``CUDA_VISIBLE_DEVICES`` names, in its order.

    Args:
        uuids: of all cards, in CUDA's order.
    """
    found: list[int] = []
    if value.startswith(CARD):
        entries = _listed(value, CARD)
        matches = [[i for i, uuid in enumerate(uuids) if uuid.startswith(entry)] for entry in entries]
        numbers = [match[0] if len(match) == 1 else -1 for match in matches]
    else:
        starts = [NUMBER.match(entry.strip()) for entry in value.split(",")]
        numbers = [int(start[0]) if start else -1 for start in starts]
    for number in numbers:
        if number in found:
            return []
        if number < 0:
            break
        found.append(number)
    return found[: next((i for i, number in enumerate(found) if number >= len(uuids)), len(found))]


def hides_all(environ: Mapping[str, str]) -> bool:
    """Whether ``CUDA_VISIBLE_DEVICES`` shows no GPU on any machine."""
    value = environ.get(VISIBLE)
    if value is None or value.startswith((CARD, MIG)):
        return False
    return not ordinals(value, [""] * MOST)


def _listed(value: str, prefix: str) -> list[str]:
    """The entries of a list of UUIDs up to the first that is none; a repeated entry leaves none."""
    found: list[str] = []
    for entry in value.split(","):
        if entry in found:
            return []
        if not entry.startswith(prefix):
            break
        found.append(entry)
    return found


def _named_slice(value: str, cards: Sequence[Card]) -> tuple[Gpu, ...]:
    """The MIG device that the list names first: CUDA shows one at most."""
    for entry in _listed(value, MIG)[:1]:
        for card in cards:
            for slice, older in zip(card.slices or (), card.older, strict=True):
                if entry in (slice.uuid, older):
                    return (slice,)
    return ()


def _shown(chosen: Sequence[Card]) -> tuple[Gpu, ...]:
    """The cards that are not in MIG mode; if there are MIG devices, the first of them alone."""
    slices = [slice for card in chosen for slice in card.slices or ()]
    return tuple(slices[:1]) or tuple(card.gpu for card in chosen if card.slices is None)


def _alike(cards: Sequence[Card]) -> bool:
    return len({(card.gpu.name, card.gpu.capability) for card in cards}) == 1


def _in_order(cards: Sequence[Card], order: str | None) -> list[Card]:
    """The cards in CUDA's order: by bus, or with the fastest first and the others as they are."""
    if order == BY_BUS or _alike(cards):
        return list(cards)
    fastest = max(cards, key=lambda card: (card.speed, card.gpu.capability))
    return [fastest, *(card for card in cards if card is not fastest)]


def _unsure(value: str | None, environ: Mapping[str, str], cards: Sequence[Card]) -> str:
    """Why CUDA may count these cards otherwise; empty where their order is certain or makes no difference."""
    if environ.get(ORDER) == BY_BUS or _alike(cards) or (value or "").startswith((CARD, MIG)):
        return ""
    return f"which of these unlike cards CUDA counts first is a guess; {ORDER}={BY_BUS} makes it certain"


def _why_hidden(value: str, cards: int) -> str:
    if not value.strip():
        return f"{VISIBLE} is set and empty"
    if not value.startswith(CARD):
        numbers = [found[0] for entry in value.split(",") if (found := NUMBER.match(entry.strip()))]
        if len(set(map(int, numbers))) < len(numbers) and int(numbers[0]) >= 0:
            return f"{_spelled(value)} names a GPU twice, and CUDA then shows none"
    return f"{_spelled(value)} shows none of {counted(cards, 'GPU')}"


def _spelled(value: str) -> str:
    return f"{VISIBLE}={shortened(value, 60)}"
