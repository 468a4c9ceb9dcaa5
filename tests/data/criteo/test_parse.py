"""The block parser gives what a plain reading line by line gives, whatever the bytes."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.criteo.parse import parse

LEAST = [0, -3, *[0] * 11]
SPAN = [20, 603, 100, 50, 64000, 500, 100, 50, 500, 10, 10, 10, 50]
ALL = (1 << 64) - 1
IDS = [192233, 12743, 516370]


def mix(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & ALL
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & ALL
    return value ^ (value >> 31)


def identity(slot: int, token: bytes, size: int | None) -> int:
    state = mix((mix((slot + 1) * 0x9E3779B97F4A7C15 & ALL) + len(token)) & ALL)
    for start in range(0, max(1, len(token)), 8):
        state = mix(state ^ int.from_bytes(token[start : start + 8], "little"))
    return state >> 1 if size is None else state % size


def plainly(block: bytes, size: int | None) -> tuple[list[int], list[list[float]], list[list[int]], list[int]]:
    """Labels, dense, sparse, and the numbers of the bad lines."""
    labels, dense, sparse, bad = [], [], [], []
    for number, line in enumerate(block.split(b"\n")[:-1]):
        if line in (b"", b"\r"):
            continue
        fields = line.split(b"\t")
        if len(fields) == 40:
            fields[39] = fields[39].removesuffix(b"\r")
        right = len(fields) == 40 and fields[0] in (b"0", b"1")
        if not right or any(f and not re.fullmatch(rb"-?[0-9]{1,18}", f) for f in fields[1:14]):
            bad.append(number)
            continue
        labels.append(int(fields[0]))
        values = zip(fields[1:14], LEAST, SPAN, strict=True)
        dense.append([(int(f) - least) / span if f else 0.0 for f, least, span in values])
        sparse.append([identity(slot, f, size) for slot, f in enumerate(fields[14:])])
    return labels, dense, sparse, bad


def assert_same(block: bytes, size: int | None) -> None:
    found = parse(block, size)
    labels, dense, sparse, bad = plainly(block, size)
    assert found.labels.tolist() == labels
    assert [line for line, _ in found.bad] == bad
    np.testing.assert_array_equal(found.dense, np.array(dense, np.float32).reshape(-1, 13))
    np.testing.assert_array_equal(found.sparse, np.array(sparse, np.int64).reshape(-1, 26))
    assert found.lines == block.count(b"\n")
    starts = [m.end() for m in re.finditer(rb"\A|\n", block)][: found.lines]
    assert found.offsets.tolist() == [s for n, s in enumerate(starts) if n not in (*bad, *found.blank)]
    assert found.blank == [n for n, line in enumerate(block.split(b"\n")[:-1]) if line in (b"", b"\r")]


INTEGERS = st.one_of(
    st.just(b""),
    st.integers(-(10**18), 10**18).map(lambda n: str(n).encode()),
    st.integers(-99, 99).map(lambda n: str(n).encode()),
    st.sampled_from([b"007", b"-0", b"99999999", b"-9999999"]),
)
TOKENS = st.one_of(
    st.just(b""),
    st.integers(0, 2**32 - 1).map(lambda n: b"%08x" % n),
    st.binary(max_size=40).map(lambda b: b.translate(None, b"\t\n\r")),
)
BROKEN = st.sampled_from(
    [b"x", b"-", b"--1", b"+1", b"1.5", b" 1", b"1" * 19, b"12a4567", b"1234567:", b"\xb1\xb2", b"-1234567x"]
)


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    fields = [draw(st.sampled_from([b"0", b"1"]))]
    fields += [draw(INTEGERS) for _ in range(13)]
    fields += [draw(TOKENS) for _ in range(26)]
    mistake = draw(st.sampled_from(["", "", "", "integer", "label", "short", "long", "blank"]))
    if mistake == "integer":
        fields[draw(st.integers(1, 13))] = draw(BROKEN)
    elif mistake == "label":
        fields[0] = draw(st.sampled_from([b"", b"2", b"01", b"1.0", b"-1"]))
    elif mistake == "short":
        fields.pop()
    elif mistake == "long":
        fields.append(b"")
    return b"" if mistake == "blank" else b"\t".join(fields) + draw(st.sampled_from([b"", b"", b"\r"]))


@settings(max_examples=30, deadline=None)
@given(st.lists(lines(), max_size=5), st.sampled_from([None, 2, 1000001, 2**62]))
def test_a_block_is_what_its_lines_are(rows: list[bytes], size: int | None) -> None:
    assert_same(b"".join(row + b"\n" for row in rows), size)


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_read_without_an_error(block: bytes) -> None:
    assert_same(block + b"\n", 1000001)


@settings(max_examples=15, deadline=None)
@given(st.lists(lines(), min_size=1, max_size=3), st.data())
def test_one_changed_byte_is_read_as_it_is(rows: list[bytes], data: st.DataObject) -> None:
    block = bytearray(b"".join(row + b"\n" for row in rows))
    place = data.draw(st.integers(0, len(block) - 2)) if len(block) > 1 else 0
    if place < len(block) - 1:
        block[place] = data.draw(st.sampled_from(b"\t\n\r-0a\x00\xff"))
    assert_same(bytes(block), 1000001)


def test_ids_do_not_depend_on_process_or_machine() -> None:
    row = b"1" + b"\t" * 13 + b"".join(b"\t68fd1e64" for _ in range(26)) + b"\n"
    ids = parse(row, 1000001).sparse[0]
    assert ids[:3].tolist() == IDS
    assert len(set(ids.tolist())) == 26, "the same token of another slot is another id"


def test_unbounded_ids_use_63_bits() -> None:
    row = b"1" + b"\t" * 13 + b"".join(b"\t%x" % n for n in range(26)) + b"\n"
    ids = parse(row * 3, None).sparse
    assert ids.min() >= 0 and ids.max() > 2**61


def test_what_is_wrong_is_said() -> None:
    good = b"\t".join([b"1", *[b"3"] * 13, *[b"a"] * 26])
    block = b"\n".join([good, b"2" + good[1:], good + b"\t", b"1\tx" + good[3:], b"", good, b""])
    assert parse(block, 10).bad == [
        (1, "the label is '2', not 0 or 1"),
        (2, "41 fields instead of 40"),
        (3, "integer feature 1 is 'x', not an integer"),
    ]
    assert parse(block, 10).blank == [4]


@pytest.mark.parametrize("feature", range(13))
def test_dense_features_are_normalised_by_the_tables(feature: int) -> None:
    fields = [b"0", *[b""] * 39]
    fields[1 + feature] = str(LEAST[feature] + SPAN[feature]).encode()
    assert parse(b"\t".join(fields) + b"\n", 7).dense[0].tolist() == [float(n == feature) for n in range(13)]
