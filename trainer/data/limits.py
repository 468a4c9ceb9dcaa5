"""Limits on what is read of one data file, so that a small file that claims to be huge is refused by name."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """The most that is read of one data file. The defaults are those of the config keys.

    Attributes:
        pixels: width x height of an image (``data.max_pixels``).
        file_mib: size of a file that is read whole, and of a packed one when it is unpacked (``data.max_file_mib``).
    """

    pixels: int = 150_000_000
    file_mib: int = 256

    @staticmethod
    def of(options: object) -> Limits:
        """The limits set by a data source's options, which need not have these keys."""
        return Limits(getattr(options, "max_pixels", Limits.pixels), getattr(options, "max_file_mib", Limits.file_mib))

    @property
    def file_bytes(self) -> int:
        """The size in bytes of the longest data file that is read."""
        return self.file_mib * MIB


DEFAULTS = Limits()
