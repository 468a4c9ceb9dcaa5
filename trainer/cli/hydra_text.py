"""Spells texts so that Hydra and OmegaConf read them as they are, whatever characters they hold."""

from __future__ import annotations

import re


def literal(text: str) -> str:
    r"""Escape a text as a value of a config: ``${`` would be read as an interpolation, and ``\${`` is not."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def override(key: str, text: str) -> str:
    r"""Return the override ``key=text``; the text is in single quotes where Hydra would read it otherwise.

    In quotes a backslash counts only before a quote and before ``${``, so there it is doubled.
    """
    if re.fullmatch(r"[\w/.:@-]+", text, re.ASCII) and not text.isdecimal():
        return f"{key}={text}"
    inside = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), literal(text))
    return f"{key}='{inside}'"
