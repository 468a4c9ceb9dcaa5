"""Click rows as people have them are read, or refused with the field, the line and a command that mends them."""

from __future__ import annotations

import gzip
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trainer.data.criteo.blocks import Block, RowCounts, rows_of
from trainer.data.criteo.rows import CriteoRowReader
from trainer.data.criteo.source import Criteo
from trainer.data.source import Facts, reader_of
from trainer.errors import UserError

ROWS = 60


def table(number: Callable[[int], str] = str, label: Callable[[int], str] = str) -> list[list[str]]:
    generator = np.random.default_rng(0)
    return [
        [
            label(n % 2),
            *(number(int(v)) for v in generator.integers(0, 20, 13)),
            *(f"{n * k:08x}" for k in range(1, 27)),
        ]
        for n in range(ROWS)
    ]


def text(rows: list[list[str]], separator: str = "\t", end: str = "\n", head: str = "") -> bytes:
    return (head + "".join(separator.join(row) + end for row in rows)).encode()


def source(path: Path, **options: object) -> Criteo:
    return Criteo(path=str(path), cache_dir=str(path.parent / "cache"), val_fraction=0.25, hash_size=1000, **options)


def prepared(made: Criteo, facts: Facts | None = None) -> Facts:
    return made.prepare(facts or made.facts(8), lambda *_: None)


PLAIN = text(table())
HEADER = "\t".join(["label", *(f"I{n}" for n in range(13)), *(f"C{n}" for n in range(26))]) + "\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("crlf.tsv", PLAIN.replace(b"\n", b"\r\n")),
        ("mark.tsv", b"\xef\xbb\xbf" + PLAIN),
        ("header.tsv", HEADER.encode() + PLAIN),
        ("mark_and_header.tsv", b"\xef\xbb\xbf" + HEADER.encode() + PLAIN),
        ("packed.tsv", gzip.compress(PLAIN)),
        ("packed_header.gz", gzip.compress(HEADER.encode() + PLAIN)),
        ("blank.tsv", PLAIN.replace(b"\n", b"\n\n")),
        ("blank_crlf.tsv", PLAIN.replace(b"\n", b"\r\n\r\n")),
    ],
)
def test_the_same_rows_are_read(name: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_bytes(content)
    tally = RowCounts()
    found = [parsed for parsed, _ in rows_of(Block(tmp_path / name, 0, 0, None), 1000, tally)]
    (tmp_path / "plain").write_bytes(PLAIN)
    plain = [parsed for parsed, _ in rows_of(Block(tmp_path / "plain", 0, 0, None), 1000, RowCounts())]
    for array in ("labels", "dense", "sparse"):
        np.testing.assert_array_equal(
            np.concatenate([getattr(p, array) for p in found]), np.concatenate([getattr(p, array) for p in plain])
        )
    assert tally.bad == 0
    facts = prepared(source(tmp_path / name))
    assert facts.train_samples + facts.val_samples == ROWS
    assert ("a header is left out" in capsys.readouterr().out) == ("header" in name)


@pytest.mark.parametrize(
    ("content", "said", "shown"),
    [
        (text(table(), ","), "separated by commas", ":1: 1 field"),
        (text(table(), ";"), "separated by semicolons", ""),
        (text(table(), "|"), "separated by vertical bars", ""),
        (text(table(), " "), "separated by spaces", ""),
        (text([[f'"{v}"' for v in row] for row in table()]), "in quotes", """:1: the label is '"0"'"""),
        (text([[f'"{v}"' for v in row] for row in table()], ","), "quoted and separated by commas", ""),
        (text(table(label=lambda y: str(2 * y - 1))), "labels are -1 and 1", ":1: the label is '-1', not 0 or 1"),
        (text(table(label=lambda y: f"{y}.0")), "labels are written as floats", ":1: the label is '0.0'"),
        (text(table(label=lambda y: str(bool(y)))), "labels are words", ":1: the label is 'False'"),
        (text(table(label=lambda y: str(5 * y + 3))), "labels are other numbers", ":1: the label is '3'"),
        (text(table(lambda v: f"{v}.0")), "floats such as 5.0", "integer feature 1 is '17.0', not an integer"),
        (text(table(lambda v: f"{v}.75")), "numbers have decimals", "'17.75'"),
        (text(table(lambda v: str(v) if v % 3 else "nan")), "words such as nan", "'nan'"),
        (text(table(lambda v: str(v) if v % 3 else "\\N")), "words such as nan", "'\\N'"),
        (text(table(lambda v: f" {v}")), "spaces around them", "' 17'"),
        (text([[*row, ""] for row in table()]), "a field too many", ":1: 41 fields instead of 40"),
        (text([["id7", *row] for row in table()]), "a column before the label", ":1: 41 fields"),
        (PLAIN.decode().encode("utf-16"), "UTF-16", ""),
        (PLAIN.decode().encode("utf-16-be"), "UTF-16", ""),
        (text(table(), end="\r"), "carriage returns alone", ""),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_the_advice_mends_the_file(content: bytes, said: str, shown: str, packed: bool, tmp_path: Path) -> None:
    path = tmp_path / "it's rows.tsv"
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(UserError) as error:
        source(path).facts(8)
    assert said in str(error.value) and shown in str(error.value)
    command, then, value = error.value.instead.partition(", and then data.path=")
    assert then and value == "fixed.tsv"
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    facts = prepared(source(tmp_path / value))
    assert facts.train_samples + facts.val_samples == ROWS


def test_advice_for_a_minority_of_bad_lines_comes_with_the_conversion(tmp_path: Path) -> None:
    rows = table(label=lambda y: str(y) if y == 0 else "-1")
    (tmp_path / "a").write_bytes(text(rows[::2] + rows[1:5:2]))
    made = source(tmp_path / "a")
    with pytest.raises(UserError, match=r"labels are -1 and 1.*2 of 32 lines.*the label is '-1'.*Type instead: awk"):
        prepared(made, made.facts(8))


def test_other_archives_and_missing_labels_are_named(tmp_path: Path) -> None:
    for content, said in (
        (b"PK\x03\x04" + b"x" * 99, "unzip -p"),
        (b"PAR1" + b"x" * 99, "Parquet"),
        (text([row[1:] for row in table()]), "mode=predict takes rows without one"),
    ):
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(UserError, match=said):
            source(tmp_path / "a").facts(8)


def scaled(n: int) -> str:
    return str(1_600_000_000 + 1000 * n)


def test_numbers_that_leave_their_span_are_said_and_auto_measures_them(tmp_path: Path) -> None:
    rows = [[row[0], scaled(n), "7", "", *row[4:]] for n, row in enumerate(table())]
    (tmp_path / "a").write_bytes(text(rows))
    said = source(tmp_path / "a").facts(8).attention
    assert "integer 1 is 1600000000 to 1600059000 with the span 0 to 20" in said
    assert "data.dense_min=auto data.dense_max=auto" in said and "integer 2" not in said
    (tmp_path / "plain").write_bytes(PLAIN)
    assert source(tmp_path / "plain").facts(8).attention == ""
    made = source(tmp_path / "a", dense_min="auto", dense_max="auto")
    assert made.facts(8).attention == "" and made.facts(8).measured == {}
    facts = prepared(made)
    arrays = made.open(facts).train
    numbers = [n for n in range(ROWS) if not source_holds_out(made, n, rows)]
    assert facts.measured["dense_min"][:3] == [float(scaled(numbers[0])), 7.0, 0.0]
    assert facts.measured["dense_max"][:3] == [float(scaled(numbers[-1])), 8.0, 1.0]
    assert (arrays.dense.min(), arrays.dense.max()) == (0.0, 1.0)
    assert made.facts(8).measured == facts.measured, "the next command knows them before the start"


def source_holds_out(made: Criteo, number: int, rows: list[list[str]]) -> bool:
    """Whether a row is one of the validation's, by its place in the file."""
    return bool(made._splits()["val"].rows.chosen(np.array([len(text(rows[:number]))]), 0)[0])


def test_other_rows_are_seen_with_the_spans_of_the_run(tmp_path: Path) -> None:
    """Evaluation and a resumed run take the numbers that were measured, whatever their own rows hold."""
    (tmp_path / "a").write_bytes(PLAIN)
    made = source(tmp_path / "a", dense_min="auto", dense_max="auto")
    facts = made.facts(8)
    settings = {"dense_min": [0.0] * 13, "dense_max": [1000.0] * 13}
    facts = prepared(made, Facts.of({**facts.__dict__, "measured": settings}))
    assert facts.measured == settings
    first = made.open(facts).train.dense
    assert 0 < first.max() <= 0.019 + 1e-6
    node = reader_of(made, facts)
    assert node is not None and node["dense_max"] == settings["dense_max"]
    reader = CriteoRowReader(node["hash_size"], node["dense_min"], node["dense_max"])
    row = "\t".join(["500"] * 13 + ["a"] * 26) + "\n"
    assert reader.read(row.encode(), False).inputs["dense"].tolist() == [[0.5] * 13]


@pytest.mark.parametrize("value", [[1, 2], "max", [None] * 13, [0] * 12 + [float("nan")]])
def test_wrong_spans_are_refused(value: object, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(PLAIN)
    with pytest.raises(UserError, match=r"data.dense_min=.* must be a list of 13 numbers, auto or null"):
        source(tmp_path / "a", dense_min=value).facts(8)
    with pytest.raises(UserError, match=r"data.dense_max is not more than data.dense_min: integer 1 from 0 to 0"):
        source(tmp_path / "a", dense_min=[0] * 13, dense_max=[0] * 13).facts(8)


@pytest.mark.parametrize(
    ("options", "number", "said"),
    [
        (
            {"dense_min": "auto"},
            1_600_000_000,
            r"data.dense_min=auto: .*null: the reference's.* integer 2 from 1,600,000,000 to 600",
        ),
        ({"dense_min": "auto"}, 600, "integer 2 from 600 to 600"),
        ({"dense_max": "auto"}, -5, r"data.dense_max=auto: .* integer 2 from -3 to -4"),
        ({"dense_min": [50] * 13, "dense_max": "auto"}, 7, "integer 2 from 50 to 8"),
    ],
)
def test_a_measured_end_below_the_other_one_is_refused(
    options: dict[str, object], number: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / "a").write_bytes(text([[row[0], row[1], str(number), *row[3:]] for row in table()]))
    for _ in ("measured", "known"):
        with pytest.raises(UserError, match=said):
            prepared(source(tmp_path / "a", **options))


def test_a_large_number_that_is_always_the_same_becomes_0(tmp_path: Path) -> None:
    """Beyond 2^53 a float64 and the same plus 1 are equal."""
    (tmp_path / "a").write_bytes(text([[row[0], "123456789012345678", *row[2:]] for row in table()]))
    made = source(tmp_path / "a", dense_min="auto", dense_max="auto")
    assert made.open(prepared(made)).train.dense[:, 0].tolist() == [0.0] * len(made.open(prepared(made)).train)


def test_an_empty_line_is_no_row_to_predict() -> None:
    row = "\t".join(["1"] * 13 + ["a"] * 26) + "\n"
    found = CriteoRowReader(10).read((row + "\n" + row).encode(), False)
    assert found.good.tolist() == [True, False, True] and found.bad == [(1, "an empty line")]
    assert len(found.inputs["dense"]) == 2
