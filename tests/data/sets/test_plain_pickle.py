"""CIFAR's pickles by the parser of our own: the layouts that there are, and what crafted or damaged files come to."""

from __future__ import annotations

import contextlib
import pickle
import random
import resource
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tests import pictures
from tests.pictures import config
from trainer.config import schema
from trainer.data.sets.cifar import Cifar10
from trainer.data.sets.plain_pickle import MOST_STEPS, Array, NotPlain, loads
from trainer.errors import UserError

ROWS = 7
PIXELS = np.random.default_rng(3).integers(0, 256, (ROWS, 3072), dtype=np.uint8)
LABELS = [6, 9, 9, 4, 1, 1, 2]
NAMES = [f"leptodactylus_pentadactylus_s_00000{n}.png" for n in range(ROWS)]


def python_2_protocol_2(pixels: np.ndarray = PIXELS) -> bytes:
    """A batch as cPickle of Python 2 wrote CIFAR-10's, byte by byte: str as U and T, one memo entry after the other."""
    memo = iter(range(256))

    def put() -> bytes:
        return b"q" + bytes([next(memo) + 1])

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value + put()

    out = b"\x80\x02}" + put() + b"("
    out += text(b"batch_label") + text(b"training batch 1 of 5")
    out += text(b"labels") + b"]" + put() + b"(" + b"".join(b"K" + bytes([n]) for n in LABELS) + b"e"
    out += text(b"data") + b"cnumpy.core.multiarray\n_reconstruct\n" + put() + b"cnumpy\nndarray\n" + put()
    out += b"K\x00\x85" + put() + b"U\x01b\x87" + put() + b"R" + put()
    out += (
        b"(K\x01K"
        + bytes([ROWS])
        + b"M"
        + struct.pack("<H", pixels.shape[1])
        + b"\x86"
        + put()
        + b"cnumpy\ndtype\n"
        + put()
        + b"U\x02u1K\x00K\x01\x87"
        + put()
        + b"R"
        + put()
    )
    out += (
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + struct.pack("<i", pixels.size)
        + pixels.tobytes()
        + put()
        + b"tb"
    )
    out += (
        text(b"filenames")
        + b"]"
        + put()
        + b"("
        + b"".join(b"U" + bytes([len(n)]) + n.encode() + put() for n in NAMES)
        + b"eu."
    )
    return out


def python_2_repr(value: bytes) -> bytes:
    """As repr of a str of Python 2."""
    return repr(value)[1:].encode()


def python_2_protocol_0(pixels: np.ndarray = PIXELS) -> bytes:
    """As the first pickles of CIFAR-10 and its batches.meta are: in lines of text."""
    out = b"(dp1\nS'data'\np2\ncnumpy.core.multiarray\n_reconstruct\np3\n(cnumpy\nndarray\np4\n(I0\ntS'b'\ntRp5\n(I1\n"
    out += b"(I%d\nI%d\ntcnumpy\ndtype\np6\n(S'u1'\nI0\nI1\ntRp7\n(I3\nS'|'\nNNNI-1\nI-1\nI0\ntbI00\nS" % pixels.shape
    out += python_2_repr(pixels.tobytes()) + b"\ntbsS'labels'\np8\n(lp9\n" + b"".join(b"I%d\na" % n for n in LABELS)
    out += b"sS'batch_label'\np10\nS'testing batch 1 of 1'\np11\nsS'filenames'\np12\n(lp13\n"
    out += b"".join(b"S%s\np%d\na" % (python_2_repr(n.encode()), 14 + i) for i, n in enumerate(NAMES)) + b"s."
    return out


LAYOUTS: dict[str, bytes] = {
    "Python 2, protocol 2": python_2_protocol_2(),
    "Python 2, protocol 0": python_2_protocol_0(),
}
for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
    LAYOUTS[f"Python 3, protocol {protocol}"] = pickle.dumps(
        {"data": PIXELS, "labels": LABELS, "batch_label": "b", "filenames": NAMES}, protocol
    )
    LAYOUTS[f"bytes as keys, protocol {protocol}"] = pickle.dumps(
        {b"data": PIXELS, b"labels": LABELS, b"fine_labels": LABELS}, protocol
    )
LAYOUTS["in Fortran's order"] = pickle.dumps({"data": np.asfortranarray(PIXELS), "labels": LABELS}, 2)
LAYOUTS["labels as an array"] = pickle.dumps({"data": PIXELS, "labels": np.array(LABELS)}, 4)
LAYOUTS["labels as numpy's numbers"] = pickle.dumps({"data": PIXELS, "labels": list(np.array(LABELS))}, 4)
LAYOUTS["labels of the other byte order"] = pickle.dumps({"data": PIXELS, "labels": np.array(LABELS, ">i4")}, 2)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_read_as_by_pickle(tmp_path: Path, name: str) -> None:
    truth = pickle.loads(LAYOUTS[name], encoding="bytes" if "bytes" in name else "latin1")
    truth = {key.decode() if isinstance(key, bytes) else key: value for key, value in truth.items()}
    ours = loads(LAYOUTS[name])
    assert list(ours) == list(truth)
    for key, value in truth.items():
        found = ours[key].made() if isinstance(ours[key], Array) else ours[key]
        assert np.array_equal(found, value), key
    root = pictures.cifar(tmp_path)
    (root / "cifar-10-batches-py" / "data_batch_2").write_bytes(LAYOUTS[name])
    (images, labels), _ = Cifar10(**config(schema.Cifar10Data, root=str(root))).read()
    assert np.array_equal(images[20 : 20 + ROWS].reshape(ROWS, -1), PIXELS)
    assert labels[20 : 20 + ROWS].tolist() == LABELS


def array(state: bytes, kind: bytes = b"cnumpy\ndtype\n(S'u1'\nI0\nI1\ntR(I3\nS'|'\nNNNI-1\nI-1\nI0\ntb") -> bytes:
    head = b"(dS'labels'\n(lsS'data'\ncnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR"
    return head + state.replace(b"TYPE", kind) + b"bs."


CRAFTED: dict[str, tuple[bytes, str]] = {
    "objects": (
        array(b"(I1\n(I1\ntTYPEI00\nS'12345678'\nt", b"cnumpy\ndtype\n(S'O8'\nI0\nI1\ntR"),
        "of a type that is not one of",
    ),
    "objects by state": (
        array(
            b"(I1\n(I1\ntTYPEI00\nS'12345678'\nt", b"cnumpy\ndtype\n(S'u8'\nI0\nI1\ntR(I3\nS'O'\nNNNI-1\nI-1\nI63\ntb"
        ),
        "the type of an array",
    ),
    "fields": (
        array(
            b"(I1\n(I1\ntTYPEI00\nS'12345678'\nt", b"cnumpy\ndtype\n(S'V8'\nI0\nI1\ntR(I3\nS'|'\nN(dNI8\nI1\nI16\ntb"
        ),
        "of a type",
    ),
    "shape beyond bytes": (
        array(b"(I1\n(I1000000\nI3072\ntTYPEI00\nS'abc'\nt"),
        r"an array of \(1000000, 3072\) has 3 bytes",
    ),
    "shape that overflows": (array(b"(I1\n(I4294967296\nI4294967296\ntTYPEI00\nS''\nt"), "has 0 bytes"),
    "negative shape": (array(b"(I1\n(I-1\nI3072\ntTYPEI00\nS''\nt"), "has no shape"),
    "shape of texts": (array(b"(I1\n(S'a'\ntTYPEI00\nS''\nt"), "has no shape"),
    "no bytes": (array(b"(I1\n(I1\nI3072\ntTYPEI00\nNt"), "no type or no bytes"),
    "a call": (b"cos\nsystem\n(S'echo executed'\ntR.", r"it asks for os\.system, which no file of CIFAR-10 does"),
    "a call by attribute": (b"cnumpy\nload\n(S'x'\ntR.", r"it asks for numpy\.load"),
    "an object": (b"(inumpy\nndarray\n.", "no operation that plain data need"),
    "an extension": (b"\x82\x01.", "no operation that plain data need"),
    "a persistent id": (b"Px\n.", "no operation that plain data need"),
    "a huge memo": (b"\x80\x02Nr\xff\xff\xff\xff.", "holds no dict"),
    "a huge text": (b"\x80\x02T\xff\xff\xff\x7fabc.", "it is cut off"),
    "huge bytes": (b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7fabc.", "it is cut off"),
    "a huge number": (b"\x80\x02\x8b\x00\x00\x10\x00" + bytes(1 << 20) + b".", "very many digits"),
    "a million digits": (b"I" + b"1" * 1_000_000 + b"\n.", "very many digits"),
    "a long number": (b"L" + b"9" * 1_000_000 + b"L\n.", "very many digits"),
    "deep lists": (b"(" * 500_000 + b"l" * 500_000 + b".", "holds no dict"),
    "a list in itself": (b"\x80\x02}U\x06labels]q\x01h\x01asU\x04dataNs.", "its images are"),
    "a list of lists of lists": (
        b"\x80\x02}U\x06labels" + b"]" + b"2".join([b""] * 1) + b"sU\x04dataNs.",
        "its images are",
    ),
    "shared lists": (
        b"\x80\x02}U\x04data"
        + pickle.dumps(PIXELS, 2)[2:-1]
        + b"sU\x06labels]q\x00"
        + b"".join(b"](h" + bytes([n]) + b"h" + bytes([n]) + b"eq" + bytes([n + 1]) for n in range(100))
        + b"s.",
        "cut off or damaged|no list of whole numbers|other keys|is not",
    ),
    "endless": (b"N0" * (MOST_STEPS // 2 + 1) + b".", "more than 2,000,000 operations"),
    "cut off": (LAYOUTS["Python 2, protocol 2"][:-100], "cut off|no operation"),
    "nothing": (b"", "cut off"),
}


@pytest.mark.all
@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_files_are_one_sentence_and_nothing_is_called(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    content, says = CRAFTED[name]
    root = pictures.cifar(tmp_path)
    path = root / "cifar-10-batches-py" / "data_batch_4"
    path.write_bytes(content)
    began = time.process_time()
    with pytest.raises(UserError, match=says) as caught:
        Cifar10(**config(schema.Cifar10Data, root=str(root))).facts(1)
    said = str(caught.value)
    assert str(path) in said and "\n" not in said and len(said) < 600
    assert time.process_time() - began < 20 and "executed" not in capsys.readouterr().out


def unicode(value: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value


def amplified(size: int, times: int) -> dict[str, bytes]:
    """Files in which a few bytes name the same long thing again and again, for something that would copy it."""
    long, short = b"a" * size, unicode(b"latin1")
    code = b"cnumpy\ndtype\nq\x010"
    kind = b"cnumpy\ndtype\nU\x02u1\x85Rq\x030"
    return {
        "encoded": b"c_codecs\nencode\nq\x010"
        + unicode(long)
        + b"q\x000"
        + short
        + b"q\x020]"
        + b"h\x01h\x00h\x02\x86Ra" * times
        + b".",
        "encoded and thrown away": b"c_codecs\nencode\nq\x010"
        + unicode(long)
        + b"q\x000"
        + short
        + b"q\x020]"
        + b"h\x01h\x00h\x02\x86R0" * times
        + b".",
        "a type's code": code + unicode(b"<" * size + b"u1") + b"q\x000" + b"h\x01h\x00\x85R0" * times + b"}.",
        "a type's code that ends": code
        + unicode(b"u1" + b"<" * size)
        + b"q\x000"
        + b"h\x01h\x00\x85R0" * times
        + b"}.",
        "a type's flags": code + b"(U\x02u1" + b"N" * size + b"tq\x000" + b"h\x01h\x00R0" * times + b"}.",
        "bytes as a key": b"B" + struct.pack("<I", size) + long + b"q\x000" + b"]" + b"}h\x00Nsa" * times + b".",
        "equal texts as a key": unicode(long)
        + b"q\x000"
        + unicode(long)
        + b"q\x010"
        + b"}"
        + b"h\x00Nsh\x01Ns" * times
        + b".",
        "a number's text": b"cnumpy.core.multiarray\nscalar\nq\x010"
        + kind
        + unicode(long)
        + b"q\x000"
        + b"h\x01h\x03h\x00\x86R0" * times
        + b"}.",
        "keys in many dicts": b"}("
        + b"".join(b"U\x04%04dN" % n for n in range(min(size, 9999) // 7))
        + b"uq\x000"
        + b"]"
        + b"}h\x00sa" * times
        + b".",
        "a list in many lists": b"](" + b"N" * size + b"eq\x000" + b"]" + b"h\x00a" * times + b".",
    }


@pytest.mark.parametrize("name", amplified(1, 1))
def test_memory_and_time_stay_within_a_multiple_of_the_files_size(name: str) -> None:
    content = amplified(100_000, 30_000)[name]
    began = time.process_time()
    tracemalloc.start()
    try:
        with contextlib.suppress(NotPlain):
            loads(content)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 60 * len(content) and time.process_time() - began < 10, (peak, len(content))


def test_labels_as_an_array_that_are_more_than_the_images_make_no_list(tmp_path: Path) -> None:
    root = pictures.cifar(tmp_path)
    path = root / "cifar-10-batches-py" / "data_batch_4"
    path.write_bytes(pickle.dumps({"data": PIXELS, "labels": np.zeros(3_000_000, np.uint8)}, 4))
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="has 7 images and 3000000 labels"):
            Cifar10(**config(schema.Cifar10Data, root=str(root), max_file_mib=4))._one(path)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def mutated(content: bytes, lots: random.Random) -> bytes:
    """A few bytes changed, put in, taken out, doubled, or the end cut off; mostly where the structure is."""
    changed = bytearray(content)
    for _ in range(lots.choice((1, 1, 2, 4, 16))):
        place = lots.randrange(max(1, len(changed)))
        kind = lots.randrange(6)
        if kind == 0:
            changed[place : place + 1] = bytes([lots.randrange(256)])
        elif kind == 1:
            changed[place:place] = bytes(lots.randrange(256) for _ in range(lots.randrange(1, 9)))
        elif kind == 2:
            del changed[place : place + lots.randrange(1, 40)]
        elif kind == 3:
            changed[place:place] = changed[place : place + lots.randrange(1, 60)]
        elif kind == 4:
            changed[place : place + 4] = lots.choice(
                (b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", bytes(4), b"\x00\x00\x00\x80")
            )
        else:
            del changed[lots.randrange(len(changed) + 1) :]
    return bytes(changed)


def fuzz(count: int, seed: int = 0) -> dict[str, int]:
    """Mutate the layouts so often; anything but an answer or NotPlain is raised. Returns how many of each."""
    lots = random.Random(seed)
    few = PIXELS[:, :5]
    whole = {"data": few, "labels": LABELS, "filenames": NAMES, "more": np.array(LABELS), "one": np.int64(3)}
    layouts = [python_2_protocol_2(few), python_2_protocol_0(few), *(pickle.dumps(whole, p) for p in range(6))]
    layouts += [content for content, _ in CRAFTED.values() if len(content) < 30_000]
    layouts += amplified(50, 20).values()
    outcome = {"read": 0, "refused": 0}
    for _ in range(count):
        try:
            content = loads(mutated(lots.choice(layouts), lots))
            for value in content.values() if isinstance(content, dict) else ():
                if isinstance(value, Array):
                    value.made()
            outcome["read"] += 1
        except NotPlain as error:
            assert "\n" not in str(error) and len(str(error)) < 250, error
            outcome["refused"] += 1
    return outcome


def test_some_thousand_mutated_files_are_read_or_refused() -> None:
    outcome = fuzz(4000)
    assert min(outcome.values()) > 100, outcome


@pytest.mark.long
def test_a_hundred_thousand_mutated_files_within_limited_memory() -> None:
    """In a process that may take 256 MiB beyond its start, and 10 minutes."""
    lines = (
        "import resource, time\nfrom tests.data.sets.test_plain_pickle import fuzz\n"
        "fuzz(10)\nsize = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20),) * 2)\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (600, 600))\nprint(fuzz(100_000, seed=1))"
    )
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]
    print(done.stdout, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime)
