"""Finds what is wrong with files that are not in Criteo's format, and the command that repairs them."""

from __future__ import annotations

import re
import shlex
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from trainer.data.regular_files import is_packed, open_unpacked

HEAD = 1 << 18
"""Bytes at the beginning of a file that are looked at."""
MOST_LINES = 1000
COLUMNS, DENSE = 40, 13
EMPTY_WORDS = {b"nan", b"null", b"none", b"na", b"n/a", b"<na>", b"\\n", b"nil"}
"""Words for a missing value, in lower case. In Criteo's format such a field is empty."""
LABEL_WORDS = {b"true", b"false", b"yes", b"no"}
PACKED = {
    b"PK\x03\x04": ("a zip archive", "unzip -p"),
    b"BZh": ("packed by bzip2", "bunzip2"),
    b"\xfd7zXZ": ("packed by xz", "xz -d"),
    b"\x28\xb5\x2f\xfd": ("packed by zstd", "zstd -d"),
}
SEPARATORS = {b",": "commas", b";": "semicolons", b"|": "vertical bars", b" ": "spaces"}
NUMBER = re.compile(rb"-?[0-9]+")
WHOLE = re.compile(rb"-?[0-9]+\.0*")
DECIMAL = re.compile(rb"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
NEW = "fixed.tsv"


def _each(change: str) -> str:
    """A command that changes each of the 13 integers."""
    return f"awk -F'\\t' -v OFS='\\t' '{{for(i=2;i<=14;i++){{{change}}}}}1'"


def _label(change: str) -> str:
    return f"awk -F'\\t' -v OFS='\\t' '{{{change}}}1'"


MENDS = {
    **{
        f"separator {name}": (
            f"fields are separated by {name}, and Criteo's by tabs",
            f"tr {shlex.quote(sign.decode())} '\\t'",
        )
        for sign, name in SEPARATORS.items()
    },
    **{
        f"quoted {name}": (
            f"fields are quoted and separated by {name}",
            f"sed 's/\"//g' | tr {shlex.quote(sign.decode())} '\\t'",
        )
        for sign, name in SEPARATORS.items()
    },
    "quoted": ("fields are in quotes", "sed 's/\"//g'"),
    "last tab": ("rows end with a tab, which makes a field too many", "sed 's/\\t\\r*$//'"),
    "first column": ("rows begin with a column before the label", "cut -f2-"),
    "label -1": ("labels are -1 and 1, and a row needs 0 or 1", _label('if($1=="-1")$1=0')),
    "label float": ("labels are written as floats such as 1.0, and a row needs 0 or 1", _label('sub(/\\.0*$/,"",$1)')),
    "label word": ("labels are words, and a row needs 0 or 1", _label('$1=tolower($1);$1=($1=="true"||$1=="yes")')),
    "label count": ("labels are other numbers than 0 and 1", _label("$1=($1>0)")),
    "float": ("integers are written as floats such as 5.0", _each('sub(/\\.0*$/,"",$i)')),
    "decimal": ("numbers have decimals, and a row has integers", _each('if($i!="")$i=sprintf("%.0f",$i)')),
    "empty word": (
        "missing numbers are written as words such as nan, and a row has nothing there",
        _each('if($i!~/^[-0-9. ]*$/)$i=""'),
    ),
    "spaces": ("numbers have spaces around them", _each('gsub(/ /,"",$i)')),
}
"""Kind of bad lines -> what is wrong, as a clause, and the commands that repair it."""
NO_LABEL = "rows have 39 fields: is it the label that they lack? mode=predict takes rows without one"


@dataclass(frozen=True)
class Diagnosis:
    """What a file holds instead of click rows, as a clause, and what to type so that it can be read ('': nothing)."""

    what: str
    remedy: str = ""


def diagnose(path: Path) -> Diagnosis | None:
    """Say what most bad lines at the beginning of a file have in common; None if nothing is known."""
    try:
        packed = is_packed(path)
        with open_unpacked(path) as file:
            head = file.read(HEAD)
    except (OSError, EOFError, zlib.error):
        return None
    what, command = _of_file(head) or _of_lines(head)
    if not command:
        return Diagnosis(what) if what else None
    name, first, _ = shlex.quote(str(path)), *command.partition(" | ")[::2]
    rest = command[len(first) :]
    read = (
        f"gzip -dc < {name} | {command}"
        if packed
        else f"{first} {name}{rest}"
        if first == "unzip -p"
        else f"{first} < {name}{rest}"
    )
    return Diagnosis(what, f"{read} > {NEW}, and then data.path={NEW}")


def _of_file(head: bytes) -> tuple[str, str] | None:
    """The format of a whole file (packed, of another encoding, without ends of line), and the command; None: text."""
    for magic, (what, command) in PACKED.items():
        if head.startswith(magic):
            return f"the file is {what}", command
    if head.startswith(b"PAR1"):
        return (
            "the file is in Parquet's format; to_csv(FILE, sep='\\t', header=False, index=False) of pandas writes rows",
            "",
        )
    even, odd = head[::2].count(0), head[1::2].count(0)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or max(even, odd) > len(head) // 8:
        marked = head[:1] in (b"\xff", b"\xfe")
        return (
            "the text is in UTF-16",
            f"iconv -f {'UTF-16' if marked else 'UTF-16LE' if odd > even else 'UTF-16BE'} -t UTF-8",
        )
    if b"\n" not in head and head.count(b"\r") > 1:
        return "lines end with carriage returns alone, as on old Macs", "tr '\\r' '\\n'"
    return None


def _of_lines(head: bytes) -> tuple[str, str]:
    lines = head[: head.rfind(b"\n") + 1].split(b"\n")[:MOST_LINES]
    kinds = Counter(kind for line in lines if line.strip() and (kind := _of_line(line.removesuffix(b"\r"))) != "row")
    kind, count = kinds.most_common(1)[0] if kinds else ("", 0)
    if 2 * count < sum(kinds.values()):
        return "", ""
    return (NO_LABEL, "") if kind == "39 fields" else MENDS.get(kind, ("", ""))


def _of_line(line: bytes) -> str:
    """The kind of a line: ``row`` if it is one, else a key of ``MENDS``, ``39 fields``, or ''."""
    fields = line.split(b"\t")
    quoted = b'"' in fields[0] or b'"' in fields[-1]
    if len(fields) == 1:
        signs = [sign for sign in SEPARATORS if line.count(sign) == COLUMNS - 1]
        return f"{'quoted' if quoted else 'separator'} {SEPARATORS[signs[0]]}" if signs else ""
    if quoted:
        return "quoted"
    if len(fields) == COLUMNS + 1:
        is_label = fields[1] in (b"0", b"1") and fields[0] not in (b"0", b"1")
        return "last tab" if not fields[-1] else "first column" if is_label else ""
    if len(fields) != COLUMNS:
        return "39 fields" if len(fields) == COLUMNS - 1 else ""
    return _of_label(fields[0]) or next(filter(None, map(_of_number, fields[1 : 1 + DENSE])), "row")


def _of_label(label: bytes) -> str:
    if label in (b"0", b"1"):
        return ""
    if WHOLE.fullmatch(label):
        return "label float"
    if label.lower() in LABEL_WORDS:
        return "label word"
    return "label -1" if label == b"-1" else "label count" if NUMBER.fullmatch(label) else "label"


def _of_number(field: bytes) -> str:
    if not field or NUMBER.fullmatch(field):
        return ""
    if field != field.strip(b" "):
        return "spaces"
    if field.lower() in EMPTY_WORDS:
        return "empty word"
    return "float" if WHOLE.fullmatch(field) else "decimal" if DECIMAL.fullmatch(field) else "number"
