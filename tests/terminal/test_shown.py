"""What others wrote (names, paths, a user's own prints) is shown as text: no markup, no control character, no
formula."""

from __future__ import annotations

import contextlib
import csv
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.table import Table

from trainer.config.redact import HERE, values
from trainer.config.secret_parts import HIDDEN
from trainer.data.picture_preprocessing import Preprocessing
from trainer.data.source import Facts
from trainer.run_folder import csv_files
from trainer.run_folder.csv_files import cell
from trainer.tasks.classification import Classification
from trainer.terminal import streams
from trainer.terminal.screen import Screen
from trainer.visible import one_line, visible
from trainer.worker.predict import Pictures, write

CONTROLS = [chr(c) for c in (*range(0x20), *range(0x7F, 0xA0)) if chr(c) not in "\t\n"]
BIDI = ["\u202a", "\u202e", "\u2066", "\u2069", "\u200e", "\u200f", "\u061c", "\u2028"]


def test_no_control_character_stays_as_it_is() -> None:
    shown = visible("a" + "".join([*CONTROLS, *BIDI]) + "\udcff\ud800z\t\n")
    assert [c for c in shown if c in (*CONTROLS, *BIDI)] == []
    shown.encode("utf-8")
    assert shown.startswith("a\\x00\\x01") and shown.endswith("\\xff\\ud800z\t\n")
    assert visible("\x1b[31m\r\x07\u202e") == "\\x1b[31m\\x0d\\x07\\u202e"
    assert visible("Zoë 花 \U0001f338 naïve") == "Zoë 花 \U0001f338 naïve", "letters of any writing are text"
    assert one_line("a\nb\tc\r\n") == "a\\nb\\tc\\x0d\\n"


@pytest.mark.parametrize(
    "text", ["=1+1", "+1+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", "=HYPERLINK(0)", "-x", "--5", "1e5=", "-1.5e"]
)
def test_a_cell_that_a_spreadsheet_would_compute_is_quoted(text: str) -> None:
    assert (cell(text) == text) == (text[0] not in "=+-@\t\r")
    assert cell(text)[0] in ("'", "1")


@pytest.mark.parametrize("value", ["-1.5", "+2", "-.5e-3", "-inf", "nan", "0.25", "a-b", "x=y", "", -1.5, 3, "-0"])
def test_numbers_and_plain_texts_stay(value: object) -> None:
    assert cell(value) == value


def test_rows_of_any_names_are_read_back_as_so_many_rows(tmp_path: Path) -> None:
    names = ["a\nb", "c\r\nd", 'quote"d', "comma,ed", "\udcff.png", "=cmd|' /C calc'!A0", "\x1b[2J", "\u202egnp.exe"]
    csv_files.write(tmp_path / "t.csv", [["name", "n"], *([name, i] for i, name in enumerate(names))])
    content = (tmp_path / "t.csv").read_bytes().decode("utf-8")
    assert len(content.split("\r\n")) == len(names) + 2 and "\x1b" not in content
    rows = list(csv.reader(io.StringIO(content, newline="")))
    assert [row[0] for row in rows[1:]] == [
        "a\\nb",
        "c\\x0d\\nd",
        'quote"d',
        "comma,ed",
        "\\xff.png",
        "'=cmd|' /C calc'!A0",
        "\\x1b[2J",
        "\\u202egnp.exe",
    ]
    assert [row[1] for row in rows[1:]] == [str(i) for i in range(len(names))]
    assert not list(tmp_path.glob(".*")), "no part of it is left"


def test_user_text_is_no_markup_anywhere_on_the_console(capsys: pytest.CaptureFixture[str]) -> None:
    evil = ["[/red]x", "[red]y", "['/a', '/b']", "[link=http://x]z[/link]", ":smile:", "\x1b[31mq", "\\[red]"]
    table = Table(title="T " + evil[0])
    table.add_column(evil[1])
    for text in evil:
        table.add_row(text)
        Screen().print(f"line {text}", style="bold red")
    Screen().print(table)
    shown = capsys.readouterr().out
    for text in evil[:5]:
        assert shown.count(text) >= 2, text
    assert "\x1b" not in shown and "\\x1b[31mq" in shown


def test_what_anybody_prints_is_cleaned_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    with streams.guarded():
        HERE.learn({"s3cret-value"})
        print("key", "s3cret", end="")
        print("-value", "\x1b[2J\a", flush=True)
        print("half s3cret-va", end="")
        sys.stdout.flush()
        print(" 10%\r 20%\r\nwindows\r\n\udcff", file=sys.stderr)
        Screen().print("s3cret-value", style="bold")
    shown = capsys.readouterr()
    assert shown.out == f"key {HIDDEN} \\x1b[2J\\x07\nhalf s3cret-va{HIDDEN}\n"
    assert shown.err == " 10%\n 20%\nwindows\n\\xff\n"
    assert "s3cret-value" not in HERE.values, "what one run knows is forgotten after it"


ROADS = {
    "the interpreter's own": lambda what: print(what, file=sys.__stderr__),
    "bytes": lambda what: sys.stderr.buffer.write(what.encode() + b"\n"),
    "own bytes": lambda what: sys.__stderr__.buffer.write(what.encode() + b"\n"),  # type: ignore[union-attr]
    "two halves": lambda what: [print(half, end="", flush=True, file=sys.stderr) for half in (what[:5], what[5:])],
    "letter by letter": lambda what: [print(letter, end="", flush=True, file=sys.stderr) for letter in what],
    "no newline": lambda what: sys.stderr.write(what),
}


@pytest.mark.parametrize("teed", [False, True], ids=["guarded", "one worker in place"])
@pytest.mark.parametrize("secret", ["s3cret-value", "tiger-7\nlion-9x\nbear-22"], ids=["line", "lines"])
@pytest.mark.parametrize("road", ROADS.values(), ids=ROADS.keys())
def test_a_secret_is_hidden_on_every_road(road: Any, secret: str, teed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, log = io.BytesIO(), io.StringIO()
    own = io.TextIOWrapper(raw, encoding="utf-8", newline="\n")
    monkeypatch.setattr(sys, "stderr", own)
    monkeypatch.setattr(sys, "__stderr__", own)
    with streams.guarded():
        HERE.learn(values({"password": secret}))
        with streams.teed(log) if teed else contextlib.nullcontext():
            print("before, s3", file=sys.stderr)
            road(secret)
            print(" after, tig", file=sys.stderr, end="", flush=True)
    assert sys.stderr is own and sys.__stderr__ is own
    for shown in (raw.getvalue().decode(), *([log.getvalue()] if teed else [])):
        assert not any(line in shown for line in secret.splitlines()), shown
        assert shown.startswith("before, s3\n(hidden)") and shown.endswith(" after, tig"), "nothing else is lost"


def test_a_narrow_encoding_is_no_reason_to_break() -> None:
    raw = io.BytesIO()
    guard = streams.Guard(io.TextIOWrapper(raw, encoding="ascii", newline="\n"))
    guard.write("Zoë\n")
    guard.flush()
    assert raw.getvalue() == b"Zo\\xeb\n"


def test_predictions_of_files_with_any_name_are_one_row_each(tmp_path: Path) -> None:
    names = ["=1+1.png", "a\nb.png", "\udcff\x1b[2J.png", "plain.png", "-2.png"]

    def refuse(path: Path) -> torch.Tensor:
        raise ValueError(f"cannot identify {path.name!r}\nmore")

    pictures = Pictures(tmp_path, names, Preprocessing(refuse, None, None))
    rows = torch.tensor([[0.0] * 11, [0.0] * 11, [0.0] * 11, [1.0, *range(5), *[0.2] * 5], [0.0] * 11])
    names_of_classes = ["@evil", "+1", "-1.5", "b\rc", "[red]"]
    facts = Facts("pictures", "real", 5, 0, (3, 8, 8), 5)
    unreadable = write(tmp_path / "p.csv", iter([rows]), pictures, Classification(), names_of_classes, facts)
    assert len(unreadable) == 4
    with (tmp_path / "p.csv").open(newline="") as file:
        table = list(csv.reader(file))
    assert [row[0] for row in table] == ["file", "'=1+1.png", "a\\nb.png", "\\xff\\x1b[2J.png", "plain.png", "'-2.png"]
    assert table[4][1:10:2] == ["'@evil", "+1", "-1.5", "b\\x0dc", "[red]"]
    assert all(len(row) == 12 for row in table)


def test_files_whose_names_look_like_secrets_are_told_apart(tmp_path: Path) -> None:
    file = io.StringIO()
    with HERE.for_now():
        HERE.learn({"s3cret-value"})
        csv_files.CsvTable(file).row(["token=abc123XYZ", 1], name="token=abc123XYZ.png")
        csv_files.CsvTable(file).row([], name="s3cret-value.png")
    assert file.getvalue().split() == [f"token=abc123XYZ.png,token={HIDDEN},1", f"{HIDDEN}.png"]
