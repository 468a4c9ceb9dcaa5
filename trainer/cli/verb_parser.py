"""The parser of the words after a verb, such as ``logs`` or ``serve``."""

from __future__ import annotations

import argparse
from typing import NoReturn

from trainer.errors import UserError


class VerbParser(argparse.ArgumentParser):
    """A parser whose refusal is a sentence, with the usage to type."""

    def error(self, message: str) -> NoReturn:
        raise UserError(self.prog, message, self.usage or "")
