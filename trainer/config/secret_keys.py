"""Which keys hold secrets: those whose name contains one of ten words, or ends in one of a few more, but for a short
list."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

WORDS = ("pass", "pwd", "secret", "cred", "apikey", "accesskey", "privkey", "privatekey", "token", "auth")
"""A key that contains one of these is a secret's, ``db_pass``, ``myPassword`` and ``oauth2`` too; ``_``, ``-`` and case
are no matter."""
STRONG = ("passw", "passphrase", "passcode", *WORDS[1:8])
"""What can mean nothing else: there short numbers and plain words are secret as well."""
ENDS = (
    *("key", "cookie", "cookies", "bearer", "webhook", "signature", "sig", "sas", "otp", "pat", "jwt", "session_id"),
    "connection_string",
)
"""What says the same as the last word of a key."""
INNOCENT = re.compile(
    r"""(?<![a-z])(?:
    (?:de)?tokeni[sz](?:er|ers|ed|e|ation) | authors? | authorship | authentic(?:ity)? | secretary
    | secret(?:es?|ed|ions?) | secret_file
    | credits? | (?:in)?credib(?:le|ly|ility) | (?:ac|dis)credit[a-z]* | sacred | (?:mon|don|tur|hoc|joc|whis)key
    | pass(?:es|ing|ed|ages?|engers?|ive|ions?|ports?|erines?|through)
    | (?:by|com|encom|sur|tres|over|under)pass(?:es|ing|ed|ion)?
    )(?![a-z])""",
    re.VERBOSE,
)
"""Words that contain one of ours by chance, and a path. They are passed over."""
OF_MODELS = re.compile(
    r"""(?<![a-z])(?:
    (?:pass|tokens?|auth)(?=[_@][a-z])(?!_(?:w|wd|word|phrase|code|header|value|string|data|hash)s?(?![a-z]))
    | (?:low|high|band|all|single|two|multi|first|second|forward|backward|num|n|max)_pass(?![a-z])
    | (?:max|min|num|n|total|new|bad|extra|added|text|prompt|vocab|keep|drop|use|input|output|query|latent|memory
      |pad|cls|class|mask|eos|bos|unk|sep|start|end|stop|image|special|next|patch|reg|register|visual|dist)_tokens?(?![a-z])
    | (?:sort|cache|share|foreign|primary|dict|image|label|input|output|target|metric|state|data|batch|monitor|num|full
      |text|caption|prompt|mask|box|bbox|boxes|depth|audio|video|features?|id|index|group|class|field|column|score|lq|gt|h5)_key(?![a-z])
    )""",
    re.VERBOSE,
)
"""Names of models and data: a word of ours before a noun (``token_mode``), tokens of a text, entries of a mapping.
There the value decides. Names in capitals are of environment variables, where these words mean what they say."""
_ENDS = re.compile(rf"(?:(?:^|_)(?:{'|'.join(ENDS)})|key)\d*$")
PLAIN = re.compile(r"[A-Z]?[a-z]*(?:[_./-][a-z]+)*\d?")
"""A word or two, as ``image`` or ``val/acc1``: nothing that protects anything."""
TELLS_NOTHING = (
    "",
    "none",
    "null",
    "true",
    "false",
    "auto",
    "default",
    "yes",
    "no",
    "on",
    "off",
    "ok",
    "env",
    "value",
    "name",
    "path",
    "text",
    "option",
    "folder",
    "file",
    "another",
)
"""Values that are no secret, whatever their key is."""
_LONG = re.compile(r"[A-Za-z0-9]{12,}")
_SWITCH = re.compile(r"[A-Za-z](?=\d)|\d(?=[A-Za-z])")


def sounds_secret(key: str, value: Any = "") -> bool:
    """Whether a key (the last part of its path) is a secret's, by its name; of a key as models have them, by its value
    too."""
    found, _, by_value = _told_by(key)
    return found or (by_value and _is_random(value))


def means_secret(key: str) -> bool:
    """Whether a key's name can mean nothing but a secret, so that even a number is hidden."""
    return _told_by(key)[1]


@functools.lru_cache(maxsize=4096)
def _told_by(key: str) -> tuple[bool, bool, bool]:
    """Whether a key is a secret's, whether its name can mean nothing else, and whether a random value makes it one."""
    spelled = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key[:200]).lower().replace(" ", "_").replace("-", "_")
    whole = INNOCENT.sub("", spelled)
    kept = whole if key.isupper() else OF_MODELS.sub("", whole)
    return _has_word(kept, WORDS), any(word in _joined(kept) for word in STRONG), _has_word(whole, WORDS)


def _has_word(spelled: str, words: tuple[str, ...]) -> bool:
    return any(word in _joined(spelled) for word in words) or _ENDS.search(spelled) is not None


def _joined(spelled: str) -> str:
    return spelled.replace("_", "").replace(".", "")


def _is_random(value: Any) -> bool:
    """Whether a value, or one inside it, has a long part in which letters and digits take turns, as no name has."""
    if isinstance(value, Mapping):
        return any(_is_random(inside) for key, inside in value.items() if key != "_target_")
    if isinstance(value, (list, tuple)):
        return any(_is_random(inside) for inside in value)
    return any(len(_SWITCH.findall(part)) >= 3 for part in _LONG.findall(value)) if isinstance(value, str) else False
