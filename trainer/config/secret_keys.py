"""Which keys hold secrets: those whose name contains one of ten words, or ends in one of a few more, but for a short list."""

from __future__ import annotations

import functools
import re

WORDS = ("pass", "pwd", "secret", "cred", "apikey", "accesskey", "privkey", "privatekey", "token", "auth")
"""A key that contains one of these is a secret's, ``db_pass``, ``myPassword`` and ``oauth2`` too; ``_``, ``-`` and case are no matter."""
STRONG = ("passw", "passphrase", "passcode", *WORDS[1:8])
"""What can mean nothing else: there short numbers and plain words are secret as well."""
ENDS = (
    *("key", "cookie", "cookies", "bearer", "webhook", "signature", "sig", "sas", "otp", "pat", "jwt", "session_id"),
    "connection_string",
)
"""What says the same as the last word of a key."""
INNOCENT = re.compile(
    r"""(?<![a-z])(?:
    (?:de)?tokeni[sz](?:er|ers|ed|e|ation) | authors? | authorship | secretary | credits? | sacred | monkey | secret_file
    | pass(?:es|ing|ed|ages?|engers?|ive|through) | bypass | compass | (?:low|high|band|single)_pass
    | pass_(?:through|rate|band|filter|inputs?) | (?:max|min|num|n|new|bad|extra|added|text|prompt)_tokens?
    | (?:pad|cls|class|mask|eos|bos|unk|sep|start|end|stop|image|special|next|patch|reg|register|visual)_tokens?
    | token_(?:dim|size|dropout|types?|length|embed|embeddings?|ids?|idx|level|pool|pooling|mixers?|merging)
    | (?:sort|cache|share|foreign|primary|dict|image|label|input|output|target)_key
    | (?:metric|state|data|batch|monitor|num|full)_key
    )(?![a-z])""",
    re.VERBOSE,
)
"""Words of a key that mean something else, and are passed over: tokens of a text, entries of a mapping, a path."""
_ENDS = re.compile(rf"(?:(?:^|_)(?:{'|'.join(ENDS)})|key)\d*$")
PLAIN = re.compile(r"[A-Z]?[a-z]*(?:[_./-][a-z]+)*\d?")
"""A word or two, as ``image`` or ``val/acc1``: nothing that protects anything."""
TELLS_NOTHING = (
    "", "none", "null", "true", "false", "auto", "default", "yes", "no", "on", "off", "ok", "env", "value", "name", "path",
    "text", "option", "folder", "file", "another",
)  # fmt: skip
"""Values that are no secret, whatever their key is."""


@functools.lru_cache(maxsize=4096)
def _told_by(key: str) -> tuple[bool, bool]:
    """Whether a key is a secret's, and whether its name can mean nothing else."""
    spelled = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key[:200]).lower().replace(" ", "_").replace("-", "_")
    kept = INNOCENT.sub("", spelled)
    joined = kept.replace("_", "").replace(".", "")
    found = any(word in joined for word in WORDS) or _ENDS.search(kept) is not None
    return found, any(word in joined for word in STRONG)


def sounds_secret(key: str) -> bool:
    """Whether a key (the last part of its path) is a secret's, by its name."""
    return _told_by(key)[0]


def means_secret(key: str) -> bool:
    """Whether a key's name can mean nothing but a secret, so that even a number is hidden."""
    return _told_by(key)[1]
