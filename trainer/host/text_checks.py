"""Refuses texts that are not UTF-8, as a run writes its paths and values into YAML, JSON and MLflow."""

from __future__ import annotations

import os
import re
import sys

from trainer.errors import UserError
from trainer.visible import spelled

NO_TEXT = re.compile("[\ud800-\udfff]")
"""Lone surrogates, by which Python represents bytes that it cannot decode."""


def check_text(what: str, text: str, instead: str) -> None:
    """Refuse a text that holds bytes which are not UTF-8.

    Args:
        what: the text's name in the error. instead: what to type, unless the locale is wrong.

    Raises:
        UserError: it holds such bytes, or the locale of this process has only ASCII.
    """
    if (found := NO_TEXT.search(text)) is None:
        return
    if _is_utf8(text):
        why = f"it is UTF-8, and the locale of this command has {sys.getfilesystemencoding()} alone"
        raise UserError(what, why, "PYTHONUTF8=1 python -m trainer ...")
    why = f"holds {spelled(found[0])}, which is not UTF-8, and what a run writes about it is"
    raise UserError(what, why, instead)


def _is_utf8(text: str) -> bool:
    try:
        os.fsencode(text).decode()
    except UnicodeError:
        return False
    return True
