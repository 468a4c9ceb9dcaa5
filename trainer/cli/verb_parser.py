"""The parser of the words after a verb, such as ``logs`` or ``serve``."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import NoReturn

from trainer.errors import UserError


class VerbParser(argparse.ArgumentParser):
    """A parser whose refusal is a sentence, with the usage to type."""

    def error(self, message: str) -> NoReturn:
        raise UserError(self.prog, message, self.usage or "")


def within(kind: Callable[[str], float], least: float, most: float = sys.float_info.max) -> Callable[[str], float]:
    """The type of an option that takes a number, both ends included."""

    def read(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            most_of_all = "" if most == sys.float_info.max else f" and at most {most:g}"
            raise argparse.ArgumentTypeError(
                f"{text}: must be {'a whole' if kind is int else 'a'} number of at least {least:g}{most_of_all}"
            )
        return number

    return read
