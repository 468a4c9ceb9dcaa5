"""Which config keys hold secrets: the declared rule, by the words in a key's name.

A key is secret if it contains one of ``WORDS`` or ends in one of ``ENDS``; words of ``INNOCENT`` are left out before.
Names of models and data (``OF_MODELS``) are secret only with a random value.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

WORDS = ("pass", "pwd", "secret", "cred", "apikey", "accesskey", "privkey", "privatekey", "token", "auth")
"""Words anywhere in a key, also in ``db_pass``, ``myPassword`` and ``oauth2``; case, ``_`` and ``-`` do not count."""
STRONG = ("passw", "passphrase", "passcode", *WORDS[1:8])
"""Words that mean nothing else: short numbers and plain words are secret under them as well."""
ENDS = "key|cookies?|bearer|webhook|signature|sig|sas|otp|pat|jwt|session_id|connection_string"
"""Patterns of a key's last word."""
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
"""Words that contain one of ``WORDS`` by chance, and ``secret_file``, which is a path."""
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
"""Names in models and data (``token_mode``, ``max_tokens``, ``text_key``). Environment variables, in capitals, are not
among them."""
_ENDS = re.compile(rf"(?:(?:^|_)(?:{ENDS})|key)\d*$")
_LONG = re.compile(r"[A-Za-z0-9]{12,}")
_SWITCH = re.compile(r"[A-Za-z](?=\d)|\d(?=[A-Za-z])")


def sounds_secret(key: str, value: Any = "") -> bool:
    """Whether a key (the last part of its path) is a secret's; a name of models and data needs a random value."""
    found, _, by_value = _class_of(key)
    return found or (by_value and _is_random(value))


def means_secret(key: str) -> bool:
    """Whether a key has one of the words ``STRONG``, so that even a number or a plain word is hidden."""
    return _class_of(key)[1]


@functools.lru_cache(maxsize=4096)
def _class_of(key: str) -> tuple[bool, bool, bool]:
    """Whether a key is a secret's, whether it has a strong word, and whether a random value makes it a secret's."""
    spelled = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key[:200]).lower().replace(" ", "_").replace("-", "_")
    whole = INNOCENT.sub("", spelled)
    kept = whole if key.isupper() else OF_MODELS.sub("", whole)
    joined, joined_whole = (name.replace("_", "").replace(".", "") for name in (kept, whole))
    found = any(word in joined for word in WORDS) or _ENDS.search(kept) is not None
    by_value = any(word in joined_whole for word in WORDS) or _ENDS.search(whole) is not None
    return found, any(word in joined for word in STRONG), by_value


def _is_random(value: Any) -> bool:
    """Whether a value, or one inside it, has 12 letters and digits in a row that change places three times."""
    return any(len(_SWITCH.findall(part)) >= 3 for leaf in leaves(value) for part in _LONG.findall(leaf))


def leaves(node: Any) -> Iterator[str]:
    """Yield the texts and numbers inside a config value, but for classes; each as it is, and without blanks around."""
    inside = [value for key, value in node.items() if key != "_target_"] if isinstance(node, Mapping) else node
    if isinstance(inside, (list, tuple, set)):
        for value in inside:
            yield from leaves(value)
    elif node is not None and not isinstance(node, bool):
        yield from {str(node), str(node).strip()}
