"""docs/protocol.md gives the numbers that the code has: who writes another client has nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trainer.host import descriptors
from trainer.launch import supervisor
from trainer.strategies.pserver.protocol import compression, messages, shared_memory, snapshot_parts, sockets
from trainer.strategies.pserver.protocol.messages import DTYPES, HEADER, LINE, Kind, Message, Record, Verb, pack
from trainer.strategies.pserver.server import machine, meetings, members, part_writer, server
from trainer.strategies.pserver.worker import client, connections_contract, worker

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "protocol.md").read_text()


def table(head: str) -> Iterator[list[str]]:
    """The rows of the page's table whose heading begins so, as cells."""
    _, _, after = PAGE.partition(f"\n| {head}")
    assert after, f"no table {head}"
    for line in after.splitlines()[2:]:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


def length(cell: str) -> int:
    return sum(int(number) for number in re.findall(r"\d+", cell))


def test_header_and_lines_have_the_bytes_that_the_page_gives() -> None:
    for head, packed in (("header, 44 bytes", HEADER), ("line, 32 bytes", LINE)):
        told = [length(cells[1]) for cells in table(head)]
        assert sum(told) == packed.size == length(head)
    first = bytes(pack(Message(Verb.PULL, 3, 5, 7, 11, -13, 2, [Record(Kind.IDS, np.array([4]), 9)]))[0])
    assert len(first) == 44 + 32 and first[:2] == (0x5054).to_bytes(2, "little") and first[2] == 2
    fields, at = {}, 0
    for name, cell, _ in table("header, 44 bytes"):
        fields[name] = int.from_bytes(first[at : at + length(cell)], "little", signed=name == "clock")
        at += length(cell)
    sent = {"verb": 3, "rank": 3, "flags": 2, "incarnation": 5, "number": 7, "sequence": 11, "clock": -13, "records": 1}
    assert fields.items() >= sent.items()


def test_verbs_kinds_and_dtypes_have_the_numbers_that_the_page_gives() -> None:
    cells = ", ".join(row[0] for row in table("verb | sent to"))
    assert {name: int(number) for number, name in re.findall(r"(\d+) ([A-Z]+)", cells)} == {v.name: v for v in Verb}
    lines = {name: text for name, _, text in table("line, 32 bytes")}
    assert {name: int(number) for number, name in re.findall(r"(\d) ([A-Z]+)", lines["kind"])} == {
        k.name: k for k in Kind
    }
    named = re.findall(r"(\d) (\w+)", lines["dtype"])
    assert [(int(number), np.dtype(name)) for number, name in named] == list(enumerate(DTYPES))


def test_times_and_limits_are_those_of_the_page() -> None:
    told = {row[0]: row[1] for row in table("what | how long")}

    def says(what: str, *numbers: float) -> None:
        how = told[what].replace(",", "")
        assert [float(n) for n in re.findall(r"\d+(?:\.\d+)?", how)][: len(numbers)] == list(numbers), what

    again = client.AGAIN_S
    says("a request without an answer is sent again", again, 2 * again, 4 * again, client.AGAIN_MOST * again)
    waits = told["a worker waits for an answer"]
    assert f"`strategy.timeout_s` + {client.MARGIN_S:g} s," in waits and waits.endswith(f"BYE {client.BYE_S:g} s")
    says("descriptors of a server", descriptors.RESERVE)
    says("a server looks for silent workers, and into the store", machine.CHECK_S)
    says("longest frame", server.SMALLEST_LIMIT >> 20, 24)
    says("records in a message, TEXT", messages.MOST_RECORDS, messages.TEXT_LIMIT >> 20)
    says("messages queued in a socket, each direction", sockets.QUEUE, connections_contract.ROOM_S)
    says("wait for unsent messages when a socket closes", sockets.LINGER_MS / 1000)
    assert messages.SAVE_S == 3600 and all(
        "an hour" in told[what] for what in told if "parts" in what or "part of" in what
    )


def test_numbers_in_the_text_are_those_of_the_code() -> None:
    words = " ".join(PAGE.split())
    for said in (
        f"int8 values come with SCALES: a float32 for each {compression.BLOCK} values",
        f"values of {shared_memory.LEAST >> 10} KiB and more",
        f"at most {snapshot_parts.PIECE >> 20} MiB from there on",
        f"A push more than {members.AHEAD:,} above the watermark is refused",
        f"finishes its pushes and asks again, every {1000 * worker.LEASE_LOOK_S:g} ms",
        f"their launcher ends them after {supervisor.LINGER_S:g} s",
        f"whose turn comes late ({machine.CHECK_S + machine.AWAY_S:g} s or more",
        f"after {part_writer.STILL_S:g} s without processor time",
        f"the last sum of the meetings and the {({2: 'two'})[meetings.KEPT]} before it",
    ):
        assert said in words
