"""Reads columns of a CSV or Parquet file, and says in a sentence what is wrong with the file."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.data.regular_files import open_regular
from trainer.errors import UserError, first_line, why
from trainer.visible import one_line
from trainer.wording import some

PARQUET = b"PAR1"
DELIMITERS = ",;\t"
BOM = b"\xef\xbb\xbf"
HEAD = 1 << 20
"""Bytes in which the header of a CSV file must end."""


def read_columns(path: str, names: Sequence[str], key: str) -> dict[str, list[Any]]:
    """Read columns of a table: name -> its values from the first row on; text for all values of a CSV file.

    A CSV file has a header; commas, semicolons or tabs between the values; quotes where a value needs them; UTF-8.

    Args:
        key: the config key that names the file, such as ``data.path``.

    Raises:
        UserError: there is no such file or column, it is no table, or it has no rows.
    """
    what = f"{key}={one_line(path)}"
    try:
        with open_regular(path) as file:
            head = file.read(HEAD)
    except OSError as error:
        raise UserError(what, f"cannot be read: {why(error)}", f"{key}=FILE.csv or FILE.parquet") from error
    read = _parquet if head.startswith(PARQUET) else _csv
    found = read(Path(path), head, list(dict.fromkeys(names)), what)
    if not len(next(iter(found.values()))):
        raise UserError(what, "has no rows")
    return found


def _parquet(path: Path, head: bytes, names: list[str], what: str) -> dict[str, list[Any]]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            _check_columns(file.schema_arrow.names, names, what)
            table = file.read(columns=names)
    except (pa.ArrowException, OSError) as error:
        raise UserError(what, f"is no whole Parquet file: {first_line(error)}") from error
    return {name: table.column(name).to_pylist() for name in names}


def _csv(path: Path, head: bytes, names: list[str], what: str) -> dict[str, list[Any]]:
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    if not head.strip():
        raise UserError(what, "is empty")
    header, delimiter = _header(head, what)
    _check_columns(header, names, what)
    try:
        table = arrow_csv.read_csv(
            path,
            parse_options=arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=arrow_csv.ConvertOptions(
                include_columns=names, column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
            ),
        )
    except pa.ArrowException as error:
        if bad := _not_utf8(path):
            raise UserError(what, f"is not UTF-8: line {bad}", "the file saved as UTF-8") from error
        raise UserError(what, f"is no CSV file: {first_line(error)}") from error
    return {name: table.column(name).to_pylist() for name in names}


def _header(head: bytes, what: str) -> tuple[list[str], str]:
    """The names of the columns, and the character between them."""
    try:
        line = next(iter(head.removeprefix(BOM).splitlines())).decode()
    except UnicodeDecodeError as error:
        raise UserError(what, "is not UTF-8: its first line", "the file saved as UTF-8") from error
    if "\0" in line:
        raise UserError(what, "is no table: its first line holds zero bytes", "a CSV file in UTF-8, or a Parquet file")
    rows = {delimiter: next(csv.reader(io.StringIO(line), delimiter=delimiter), [""]) for delimiter in DELIMITERS}
    delimiter = max(rows, key=lambda one: len(rows[one]))
    return rows[delimiter], delimiter


def _check_columns(header: Sequence[str], names: Sequence[str], what: str) -> None:
    """Refuse a table without one of these columns, or with two of its name."""
    for name in names:
        if (there := list(header).count(name)) != 1:
            columns = some([repr(one_line(column)) for column in header])
            found = "has no column" if not there else f"has {there} columns called"
            raise UserError(what, f"{found} {name!r}; its columns are {columns}", "data.image=COLUMN data.label=COLUMN")


def _not_utf8(path: Path) -> int:
    """The number of the first line that is not UTF-8; 0: there is none."""
    with open_regular(path) as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 0
