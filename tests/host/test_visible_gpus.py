"""CUDA's rules for visible devices, compared with torch's own reading of CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import pytest
import torch.cuda
from hypothesis import assume, example, given
from hypothesis import strategies as st

from trainer.host.visible_gpus import Card, Gpu, hides_all, ordinals, visible

UUIDS = ["GPU-aa11-0", "GPU-ab12-1", "GPU-aa22-2", "GPU-b-3"]
ENTRIES = ["GPU-aa", "GPU-aa1", "GPU-aa11-0", "GPU-ab", "GPU-", "GPU-zz", " GPU-ab", "gpu-ab", "MIG-x", "", "0"]
NUMBERS = ["0", "1", "3", "4", "63", "-1", "+1", " 2", "2 ", "1gpu2", "2ampere", "01", "x", "NoDevFiles", "", "0x1"]
VALUES = st.one_of(
    st.lists(st.sampled_from(ENTRIES), max_size=5).map(",".join),
    st.lists(st.sampled_from(NUMBERS), max_size=5).map(",".join),
    st.text("0123,,- +xGPU", max_size=8),
)


def torchs(value: str, uuids: list[str]) -> list[int]:
    """What torch.cuda.device_count() counts without CUDA, as the positions of the cards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", value)
        patch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: len(uuids))
        patch.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: uuids)
        parsed = torch.cuda._parse_visible_devices()
        count = torch.cuda._device_count_nvml()
    if parsed and isinstance(parsed[0], str):
        parsed = torch.cuda._transform_uuid_to_ordinals(parsed, uuids)
    assert count == len(parsed[:count])
    return parsed[:count]


@given(VALUES)
@example("0,-1,1")
@example("0,0")
@example("1gpu2,2ampere")
@example("GPU-aa11,GPU-aa11-0")
def test_a_list_of_visible_devices_means_what_torch_reads_in_it(value: str) -> None:
    assume(not value.startswith("MIG-"))  # torch leaves those to CUDA
    try:
        theirs = torchs(value, UUIDS)
    except ValueError:  # a sign without a number: torch fails, and strtoul reads no number
        assert len(ordinals(value, UUIDS)) < len(value)
        return
    assert ordinals(value, UUIDS) == theirs


@pytest.mark.parametrize(
    ("value", "hidden"), [("", 1), ("-1", 1), ("NoDevFiles", 1), ("0,0", 1), ("5", 0), ("GPU-x", 0)]
)
def test_some_values_hide_every_gpu_of_any_machine(value: str, hidden: int) -> None:
    assert hides_all({"CUDA_VISIBLE_DEVICES": value}) == hidden and not hides_all({})


H100, V100 = Card(Gpu("H100", (9, 0)), speed=33), Card(Gpu("V100", (7, 0)), speed=8)
B300, DISPLAY = Card(Gpu("GB300", (10, 3)), speed=40), Card(Gpu("RTX PRO 4000", (12, 0)), speed=23)


@pytest.mark.parametrize(
    ("cards", "variables", "names"),
    [
        ([V100, V100, H100], {}, "H100 V100 V100"),
        ([V100, H100], {"CUDA_VISIBLE_DEVICES": "1"}, "V100"),
        ([V100, H100], {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, "H100"),
        ([V100, H100], {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, "V100"),
        ([DISPLAY, B300], {}, "GB300 RTX PRO 4000"),  # the newer generation is not the faster card
    ],
)
def test_unlike_cards_are_counted_from_the_fastest_unless_by_bus(
    cards: list[Card], variables: dict[str, str], names: str
) -> None:
    shown = visible(cards, variables)
    assert " ".join(gpu.name for gpu in shown.gpus) == names
    assert ("is a guess" in shown.unsure) == ("PCI_BUS_ID" not in variables.values())


def test_like_cards_need_no_guess() -> None:
    assert visible([H100, H100], {"CUDA_VISIBLE_DEVICES": "1"}).unsure == ""
