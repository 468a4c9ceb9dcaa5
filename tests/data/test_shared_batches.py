"""Batches through memory that is used again arrive as they were sent, however long somebody holds them."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data import shared_batches
from trainer.data.reader import Addresses, Reader, Reading
from trainer.data.reading_processes import ReaderDataset, as_it_is, reading_process
from trainer.data.sampler import DistributedBatchSampler
from trainer.data.shared_batches import SLOTS, Parcel, SharedBatches

DTYPES = (torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.complex64)


def filled(shape: list[int], dtype: torch.dtype, layout: int) -> torch.Tensor:
    """Random bytes as that type, in one of four ways to lie in memory."""
    wanted = torch.empty(shape, dtype=dtype)
    tensor = torch.randint(0, 2, shape).to(dtype) if dtype == torch.bool else torch.randint(-9, 99, shape).to(dtype)
    if layout == 1 and len(shape) == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    if layout == 2 and len(shape) > 1:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == 3 and shape:
        wide = torch.stack([tensor, wanted.zero_()], -1)
        return wide[..., 0]
    return tensor


tensors = st.builds(filled, st.lists(st.integers(0, 5), max_size=5), st.sampled_from(DTYPES), st.integers(0, 3))
batches = st.tuples(st.one_of(tensors, st.dictionaries(st.text(max_size=3), tensors, max_size=3)), tensors)


def same(got: Any, sent: Any) -> bool:
    if isinstance(sent, dict):
        return isinstance(got, dict) and list(got) == list(sent) and all(same(got[k], sent[k]) for k in sent)
    return bool(got.dtype == sent.dtype and got.shape == sent.shape and torch.equal(got, sent))


@pytest.fixture(scope="module")
def shared() -> SharedBatches:
    return SharedBatches(1)


def arrived(shared: SharedBatches, batch: Any) -> Any:
    sent = shared.put(batch)
    return shared.take(sent) if isinstance(sent, Parcel) else sent


@given(batch=batches)
@settings(deadline=None, max_examples=150)
def test_whatever_tensors_are_sent_arrive(shared: SharedBatches, batch: Any) -> None:
    inputs, labels = arrived(shared, batch)
    assert same(inputs, batch[0]) and same(labels, batch[1])


def test_images_keep_their_memory_format(shared: SharedBatches) -> None:
    images = torch.rand(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    assert arrived(shared, (images, torch.arange(4)))[0].stride() == images.stride()


@pytest.mark.parametrize("seeds", [range(100), pytest.param(range(100, 3000), marks=pytest.mark.long)])
def test_schedules_never_write_over_what_is_held(seeds: range) -> None:
    """Random batches of random sizes, held for random times, whole or in part, by a view or by a copy."""
    for seed in seeds:
        choose = random.Random(seed)
        shared = SharedBatches(1)
        held: list[tuple[torch.Tensor, torch.Tensor]] = []
        plain = 0
        for number in range(choose.randrange(20, 90)):
            content = torch.full((choose.randrange(1, 5000),), number % 251, dtype=torch.uint8)
            sent = shared.put((content, torch.tensor([number])))
            plain += not isinstance(sent, Parcel)
            inputs, labels = shared.take(sent) if isinstance(sent, Parcel) else sent
            kept = choose.choice([inputs, inputs[:1], inputs.view(-1, 1), labels, inputs.clone()])
            held.append((kept, kept.clone()))
            del inputs, labels, sent, kept
            while held and (choose.random() < 0.4 or len(held) > choose.randrange(1, 2 * SLOTS)):
                held.pop(choose.randrange(len(held)))
            assert all(torch.equal(*pair) for pair in held), f"seed {seed}, batch {number}"
        assert plain == 0 or len(held) > 0
        held.clear()
        assert not any(shared.occupied[:]), f"seed {seed}: a slot is not given back"


def test_when_all_slots_are_held_batches_go_torchs_way_and_come_back_when_one_is_free(shared: SharedBatches) -> None:
    batch = torch.arange(10), torch.arange(10)
    held = [shared.take(shared.put(batch)) for _ in range(SLOTS)]
    assert shared.put(batch) is batch
    held.pop()
    sent = shared.put(batch)
    assert isinstance(sent, Parcel)
    shared.take(sent)


@pytest.mark.parametrize(
    "batch",
    [
        (torch.rand(2), [1, 2]),
        (torch.rand(2, requires_grad=True), torch.rand(2)),
        (torch.rand(2).to_sparse(), torch.rand(2)),
        (torch.nn.Parameter(torch.rand(2), requires_grad=False), torch.rand(2)),
        (torch.rand(2, device="meta"), torch.rand(2)),
        [torch.rand(2), torch.rand(2)],
        (torch.rand(2), torch.rand(2), torch.rand(2)),
        (torch.rand(0), torch.rand(0)),
        "text",
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_what_is_no_batch_of_plain_tensors_goes_torchs_way(shared: SharedBatches, batch: Any) -> None:
    assert shared.put(batch) is batch


def test_a_batch_larger_than_a_slot_goes_torchs_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_batches, "ROOM", 4096)
    shared = SharedBatches(1)
    large, fits = torch.zeros(4097, dtype=torch.uint8), torch.zeros(4000, dtype=torch.uint8)
    assert shared.put((large, fits[:1]))[0] is large
    assert isinstance(shared.put((fits, fits[:1])), Parcel)


def test_a_process_forked_meanwhile_frees_nothing(shared: SharedBatches) -> None:
    batch = shared.take(shared.put((torch.arange(10), torch.arange(10))))
    child = os.fork()
    if not child:
        del batch
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert sum(shared.occupied[:]) == 1
    del batch
    assert not any(shared.occupied[:])


def test_a_slot_that_grows_is_registered_anew_and_no_more_when_it_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[int] = []

    def register(memory: np.ndarray) -> None:
        registered.append(memory.nbytes)
        weakref.finalize(memory, registered.remove, memory.nbytes)

    monkeypatch.setattr(shared_batches, "register", register)
    shared, pinned = SharedBatches(1), SharedBatches(1, pinned=True)
    for size, largest in ((1024, 1024), (512, 1024), (9216, 9216), (1024, 9216)):
        batch = torch.rand(size), torch.arange(1)
        assert same(arrived(shared, batch)[0], batch[0])
        assert same(arrived(pinned, batch)[0], batch[0]) and registered == [4 * largest + 64]
    held = arrived(pinned, batch)
    del pinned
    assert len(registered) == 1
    del held
    assert registered == []


def open_memory() -> set[int]:
    """The files of this process that are such memory."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "memfd:batches" in os.readlink(f"/proc/self/fd/{number}"):
                found.add(int(number))
    return found


def test_memory_and_file_are_given_back() -> None:
    shared = SharedBatches(3)
    assert shared.file in open_memory()
    file = shared.file
    batch = shared.take(shared.put((torch.arange(10), torch.arange(10))))
    del shared
    assert torch.equal(batch[0], torch.arange(10))
    del batch
    gc.collect()
    assert file not in open_memory()


class HidesItsNumber(torch.utils.data.Dataset[Any]):
    """As streams, which the user's code must not share out over reading processes a second time."""

    def __getitems__(self, address: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        torch.utils.data._utils.worker._worker_info = None
        return torch.tensor(address), torch.tensor(address)


def test_each_reading_process_has_slots_of_its_own_also_where_torch_does_not_tell_its_number() -> None:
    loader = torch.utils.data.DataLoader(
        ReaderDataset(HidesItsNumber(), SharedBatches(2)),
        batch_sampler=[[0], [1], [2], [3]],
        num_workers=2,
        collate_fn=as_it_is,
        worker_init_fn=reading_process,
    )
    assert [parcel.slot // SLOTS for parcel in loader] == [0, 1, 0, 1]


class Numbered:
    """Sample n is a picture of n; what is read tells which process has read it."""

    def __len__(self) -> int:
        return 240

    def batch(self, indices: np.ndarray) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        numbers = torch.from_numpy(indices)
        images = numbers.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 5, 7)
        return {"images": images, "pid": torch.full((len(numbers),), os.getpid())}, numbers


EPOCH = Addresses(DistributedBatchSampler(240, 7, shuffle=False))


def reader(num_workers: int) -> Reader:
    return Reader(Numbered(), Reading(num_workers=num_workers))  # type: ignore[arg-type]


@pytest.fixture
def two() -> Iterator[Reader]:
    made = reader(2)
    yield made
    made.close()


def test_reading_processes_send_an_epoch_through_it_and_all_of_it_may_be_held(two: Reader) -> None:
    for _ in range(3):
        held = list(two.read(EPOCH))
        assert two.shared is not None and any(two.shared.occupied[:])
        numbers = torch.cat([labels for _, labels in held])
        assert torch.equal(numbers, torch.arange(240))
        pictures = torch.cat([inputs["images"] for inputs, _ in held])  # type: ignore[index]
        assert torch.equal(pictures, numbers.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 5, 7))
        assert len({int(n) for inputs, _ in held for n in inputs["pid"]} - {os.getpid()}) == 2  # type: ignore[index]
        del held
        assert not any(two.shared.occupied[:])


def test_an_epoch_that_is_left_early_costs_nobody_a_batch(two: Reader) -> None:
    for number, (_, labels) in enumerate(two.read(EPOCH)):
        assert torch.equal(labels, torch.arange(7 * number, 7 * number + 7))
        if number == 3:
            break
    assert torch.equal(torch.cat([labels for _, labels in two.read(EPOCH)]), torch.arange(240))


def test_without_such_memory_batches_come_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    plain = reader(2)
    assert torch.equal(torch.cat([labels for _, labels in plain.read(EPOCH)]), torch.arange(240))
    assert plain.shared is None
    plain.close()
