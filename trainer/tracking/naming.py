"""Names runs and models in MLflow: a run by the overrides that differ from the recipe, a run of a sweep by the swept
keys."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from trainer.config.keys import is_of, key_of
from trainer.visible import printed

MOST = 30
"""Most letters of a run's name: as many as MLflow's lists show."""
FEW = 3
"""Up to this number of parts, each is shown, shortened if it is long."""
SHORT = {
    "data.batch_size": "b{}",
    "data.global_batch_size": "gb{}",
    "launch.nproc": "w{}",
    "launch.workers": "w{}",
    "launch.servers": "s{}",
    "launch.nnodes": "h{}",
    "precision": "{}",
    "device": "{}",
    "mode": "{}",
    "epochs": "{}ep",
    "max_steps": "{} steps",
}
"""Short names of keys: workers are ``w``, servers ``s``, hosts ``h``, a global batch ``gb``."""
IRRELEVANT = ("recipe", "hydra", "tracking", "plan", "debug", "verbosity", "name", "launch")
"""Keys that make no difference to what is trained, but for those of ``SHORT``."""
FORBIDDEN = re.compile(r"[/:.%\"'\s]+")
"""Characters that MLflow refuses in a model's name."""


def run_name(recipe: str, overrides: Sequence[str], swept: Collection[str] = (), first: str = "") -> str:
    """The MLflow run's name, at most 30 letters: ``lr=0.1 b64 local_sgd``; the recipe's name if nothing differs.

    Args:
        overrides: as typed, without secrets.
        swept: keys of which a sweep takes several values; where there are some, they alone are named.
        first: what is said before all.
    """
    parts = _briefly([o for o in overrides if not swept or key_of(o) in swept]) or [recipe]
    return _fitted([f"{first} {parts[0]}" if first else parts[0], *parts[1:]])


def sweep_name(overrides: Sequence[str], swept: Collection[str]) -> str:
    """The name of a sweep's MLflow parent run, at most 30 letters: ``sweep lr=0.1,0.05 b16,32``."""
    return run_name("", overrides, swept, "sweep")


def model_name(recipe: str, which: str) -> str:
    """The logged model's name: the recipe's; ``RECIPE-last`` for the last model beside the best one."""
    name = FORBIDDEN.sub("_", recipe).strip("_") or "model"
    return name if which == "best" else f"{name}-{which}"


def _briefly(overrides: Sequence[str]) -> list[str]:
    """Shorten each override as far as it still differs from the others."""
    named = [o for o in overrides if key_of(o) in SHORT or not is_of(key_of(o), IRRELEVANT)]
    last = {key_of(o): o for o in named}
    return [_short(o, _unlike(key, list(last))) for key, o in last.items()]


def _unlike(key: str, others: Sequence[str]) -> str:
    """The shortest ending of the key that no other key has."""
    parts = key.split(".")
    for count in range(1, len(parts)):
        tail = ".".join(parts[-count:])
        if not any(other != key and other.endswith(f".{tail}") for other in others):
            return tail
    return key


def _short(override: str, name: str) -> str:
    key, _, value = override.lstrip("+~").partition("=")
    value = value.strip("'\"")
    if override.startswith("~"):
        return f"no {name}"
    if key in SHORT:
        return SHORT[key].format(value)
    if "." not in key and value and value not in ("true", "false", "null") and not _number(value):
        return value  # an option of a group: adam, local_sgd, convnet
    return {"true": name, "false": f"no {name}"}.get(value.lower(), f"{name}={value}")


def _number(value: str) -> bool:
    return re.fullmatch(r"[-+.\deE,_]+", value) is not None


def _fitted(parts: Sequence[str]) -> str:
    """Join the parts of a name within 30 letters. Long parts are cut; parts without room are counted: ``lr=0.1 b64
    +5``."""
    parts = [printed(part) for part in parts]
    if len(" ".join(parts)) <= MOST:
        return " ".join(parts)
    if len(parts) <= FEW:
        return " ".join(_shared(parts))
    for kept in range(len(parts) - 1, 0, -1):
        line = " ".join([*parts[:kept], f"+{len(parts) - kept}"])
        if len(line) <= MOST:
            return line
    more = f" +{len(parts) - 1}"
    return _cut(parts[0], MOST - len(more)) + more


def _shared(parts: Sequence[str]) -> list[str]:
    """Cut every part to a fair share of the line; long parts get the room that short ones leave."""
    room, shares = MOST - (len(parts) - 1), [0] * len(parts)
    for place, number in enumerate(sorted(range(len(parts)), key=lambda n: len(parts[n]))):
        shares[number] = min(len(parts[number]), room // (len(parts) - place))
        room -= shares[number]
    return [_cut(part, share) for part, share in zip(parts, shares, strict=True)]


def _cut(part: str, room: int) -> str:
    """Cut a part to ``room`` letters; of ``key=value`` the value is kept first."""
    if len(part) <= room:
        return part
    key, equal, value = part.partition("=")
    if equal and len(value) + 4 <= room:
        return f"{key[: room - len(value) - 2]}…={value}"
    return part[: room - 1] + "…"
