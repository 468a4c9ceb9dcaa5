"""Which config keys have names that suggest a secret value, such as ``password`` or ``token``."""

from __future__ import annotations

import re

ALWAYS = (
    r"passw(?:or)?ds?|passphrases?|passcodes?|pwd|secrets?|credentials?|creds|api_?keys?|access_?keys?|private_?keys?|"
    r"secret_?keys?|account_?keys?|connection_?strings?|webhooks?|session_?ids?|jwts?"
)
"""Keys with these words in them mean nothing else."""
AT_THE_END = r"token|key|auth|authorization|signature|sig|sas|pass|pat|bearer|cookies?|otp"
SEVERAL = r"(?:(?:api|auth|access|hub|hf|bearer|refresh|bot|user|id)_)?tokens"
"""Keys that end in these mean a secret if their value is a text or holds texts."""
OPEN = (
    r"(?:pad|cls|class|mask|eos|bos|unk|sep|start|end|stop|image|special|next)_token|"
    r"(?:sort|cache|share|foreign|primary|dict|image|label|input|output|target|metric|state|data|batch|monitor|num|full)_key"
)
"""And these do not, though they end so: they name tokens of a text, and entries of a mapping."""
STRONG_KEY = re.compile(rf"(?:.*(?:^|[_.-])(?:{ALWAYS})\d*(?:[_.-].*)?)$")
NAMES_A_FILE = "secret_file"
"""A key whose value is a path."""
WEAK_KEY = re.compile(rf"(?!(?:.*[_.-])?(?:{OPEN})$)(?:(?:.*[_.-])?(?:{AT_THE_END})|{SEVERAL})\d*$")
PLAIN = re.compile(r"[A-Z]?[a-z]*(?:[_./-][a-z]+)*\d?")
"""A word or two, as ``image`` or ``val/acc1``: nothing that protects anything."""
WORDS = (
    "", "none", "null", "true", "false", "auto", "default", "yes", "no", "on", "off", "ok", "env", "value", "name", "path",
    "text", "option", "folder", "file", "another",
)  # fmt: skip
"""Values that tell nothing, whatever their key is."""


def sounds_secret(key: str) -> bool:
    """Whether a key (the last part of its path) has a name that suggests a secret value."""
    return means_secret(key) or WEAK_KEY.match(_words(key)) is not None


def means_secret(key: str) -> bool:
    """Whether a key's name can mean nothing but a secret, so that even a number is hidden."""
    return _words(key) != NAMES_A_FILE and STRONG_KEY.match(_words(key)) is not None


def _words(key: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(key)).lower().replace(" ", "_")
