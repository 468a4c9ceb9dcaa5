"""The plan weighs what reading processes give against what the GPU takes, and says where JPEGs are decoded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.composed import ready
from tests.pictures import config, image_folder
from trainer.config import schema
from trainer.config.run_config import RunConfig
from trainer.data.images import reading_rate as measured
from trainer.data.images.reading_rate import reading_rate
from trainer.data.sets.image_folder import ImageFolder
from trainer.errors import UserError
from trainer.host import hardware, nvjpeg
from trainer.host.visible_gpus import Gpu
from trainer.job import plan_table
from trainer.planning.plan import Plan
from trainer.planning.reading import READS, choose_decoder, rate_said, rounded, shortage, taken_by

H100 = Gpu("an H100", (9, 0), 80 << 30)
RESNET50_AT_224 = 8.2e9


@pytest.fixture(autouse=True)
def with_nvjpeg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvjpeg, "missing", lambda: "")
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Plan]:
    """A plan of the main model on a machine with one GPU and so many cores, whose reading processes give a rate."""
    root = image_folder(tmp_path / "d", per_class=24)

    def planned(*typed: str, cores: int = 16, reads: float = 300.0, device: str = "cuda") -> Plan:
        monkeypatch.setattr(hardware, "gpus", lambda: (H100,) if device == "cuda" else ())
        monkeypatch.setattr(hardware, "cores", lambda: cores)
        monkeypatch.setattr(measured, "reading_rate", lambda listing, view, kept: reads)
        named = (f"data.root={root}", f"device={device}")
        return ready("+recipe=resnet50_imagefolder", *named, *typed).plan

    return planned


def test_the_gpu_takes_as_many_images_as_its_kind_trains_of_resnet50_scaled_by_operations() -> None:
    assert taken_by([H100], "bf16", RESNET50_AT_224) == 4700
    assert taken_by([H100, Gpu("a V100", (7, 0))], "fp16", RESNET50_AT_224 / 2) == 2 * 1200, "the weakest"
    assert taken_by([Gpu("a newer one", (10, 0))], "bf16", RESNET50_AT_224) == 4700
    for gpus, precision, flops in (
        ([], "bf16", 1e9),
        ([H100], "fp32", 1e9),
        ([H100], "bf16", 0),
        ([Gpu("", (8, 6))], "bf16", 1e9),
    ):
        assert taken_by(gpus, precision, flops) == 0


def test_the_operations_of_resnet50_are_those_of_the_paper(planned: Callable[..., Plan]) -> None:
    """3.8e9 multiply-adds for ResNet-50 (He et al., 2016), 4.1e9 with the stride in the 3x3 convolution, as torchvision
    has it: twice as many operations, at 4,700 images/s."""
    said = planned("data.cache=none").remarks.why["num_workers"]
    assert said == "(16 cores - 1) / 1 GPU; they give about 4,500 images/s of the 4,700 that the GPU takes"


@pytest.mark.all
def test_the_plan_warns_of_readers_that_are_too_slow_and_says_what_to_do(planned: Callable[..., Plan]) -> None:
    assert planned("data.cache=none").remarks.concern == "", "95% are enough"
    short = planned("data.cache=none", "data.decode=cpu", cores=8)
    assert short.chosen.num_workers == 7 and short.remarks.concern == (
        "7 reading processes give about 2,100 images/s, and the GPU takes about 4,700: try data.decode=gpu, "
        "data.cache=ram, data.cache=device, fewer augmentations or more cores per GPU"
    )
    kept = planned(cores=4, reads=1000.0).remarks.concern
    assert kept.endswith("try data.cache=device, fewer augmentations or more cores per GPU")
    assert planned("data.cache=device", cores=2).remarks.concern == ""
    assert planned("data.cache=none", "data.decode=gpu", cores=2).remarks.concern == ""
    assert planned("data.cache=none", cores=2, device="cpu").remarks.concern == ""
    changed = planned("data.cache=none", "data.augment=randaugment", cores=4).remarks.concern
    assert "data.decode=gpu" not in changed and "data.cache=ram" in changed
    assert shortage(ready("+recipe=digits_lenet").plan.data.facts, "", "auto", 9.0, 9.0) == ""


@pytest.mark.all
def test_auto_decodes_on_the_gpu_where_readers_give_less_than_half(planned: Callable[..., Plan]) -> None:
    for cores, where in ((16, "cpu"), (11, "cpu"), (10, "gpu"), (2, "gpu")):
        for reads in (1.0, 1e6):
            plan = planned("data.cache=none", cores=cores, reads=reads)
            assert plan.chosen.decode == where, "a measured rate, which differs each time, does not decide"
        gives = rounded(READS * (cores - 1))
        assert f"about {gives} of the 4,700 images/s that the GPU takes" in plan.remarks.why["decode"]
    assert dict(plan_table.rows(plan))["decode"].startswith("gpu  (auto: 1 reading process decodes about")


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        (["device=cpu"], "no GPU"),
        ([], "decoded images are kept (data.cache)"),
        (["data.cache=none", "data.augment=trivialaugment"], "data.augment=trivialaugment changes images one by one"),
        (["data.cache=none", "precision=fp32"], "how many images/s the GPU takes is not known"),
    ],
)
def test_auto_decodes_on_the_cpu_for_a_reason(planned: Callable[..., Plan], typed: list[str], why: str) -> None:
    device = "cpu" if "device=cpu" in typed else "cuda"
    plan = planned(*typed, cores=2, device=device)
    assert plan.chosen.decode == "cpu" and why in plan.remarks.why["decode"]


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        (["device=cpu"], "no GPU trains"),
        (["data.cache=ram"], "decoded images are kept"),
        (["data.augment=autoaugment"], "data.augment=autoaugment changes images one by one on the CPU"),
        (["data.read=scatter", "launch.nproc=1", "strategy=collective"], "the first worker decodes for all"),
    ],
)
def test_decoding_on_the_gpu_is_refused_with_the_reason(
    planned: Callable[..., Plan], typed: list[str], why: str
) -> None:
    with pytest.raises(UserError, match=rf"^data\.decode=gpu: .*{why}.* Type instead: data\.decode=cpu"):
        planned("data.decode=gpu", *typed, device="cpu" if "device=cpu" in typed else "cuda")


@pytest.mark.all
def test_a_file_that_is_no_jpeg_and_a_torchcodec_without_nvjpeg_are_named(
    planned: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert planned("data.decode=gpu").data.facts.cache == "none: the GPU decodes each image anew (data.decode=gpu)"
    monkeypatch.setattr(nvjpeg, "missing", lambda: "this wheel has none")
    with pytest.raises(UserError, match=r"^data\.decode=gpu: this wheel has none"):
        planned("data.decode=gpu")
    path = tmp_path / "d" / "train" / "iris" / "0.jpg"
    Image.new("RGB", (40, 40)).save(path, "PNG")
    with pytest.raises(UserError, match=r"^data\.decode=gpu: train/iris/0\.jpg is PNG, and a GPU decodes JPEGs of RGB"):
        planned("data.decode=gpu")
    Image.new("CMYK", (40, 40)).save(path, "JPEG")
    with pytest.raises(UserError, match=r"iris/0\.jpg is JPEG of CMYK"):
        planned("data.decode=gpu")
    assert "iris/0.jpg is JPEG of CMYK" in planned("data.cache=none", cores=2).remarks.why["decode"]


def test_an_evaluation_decodes_on_the_cpu_and_other_machines_are_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = RunConfig().replaced("data", {**config(schema.ImageFolderData, root="nowhere"), "decode": "gpu"})
    assert choose_decoder(asked.changed(mode="eval"), "cpu", "kept", 1, 0.0) == ("cpu", "")
    monkeypatch.setattr(nvjpeg, "missing", lambda: "this wheel has none")
    assert choose_decoder(asked, "cuda", "", 1, 0.0, elsewhere=True) == ("gpu", "")


def test_data_without_jpegs_have_no_row() -> None:
    assert choose_decoder(RunConfig(), "cuda", "", 1, 4700.0) == ("", "")
    plan = ready("+recipe=digits_lenet").plan
    assert plan.chosen.decode == "" and "decode" not in dict(plan_table.rows(plan))
    assert rate_said("auto", 1.0, 1.0) == "" == rate_said(3, 0.0, 1.0)
    assert rate_said(3, 104.0, 0.0) == "; they give about 310 images/s"


def test_a_reader_is_measured_with_one_thread_on_the_images_that_are_there(tmp_path: Path) -> None:
    options = config(schema.ImageFolderData, root=str(image_folder(tmp_path / "d")), image_size=32, cache="none")
    source, threads, seen = ImageFolder(**options), torch.get_num_threads(), []
    facts = source.facts(1)
    listing = source.listings(facts)[0]

    class Slow:
        """A view that takes 20 ms of a clock that it moves itself."""

        def __call__(self, images: object, sizes: object, draw: object, addresses: object) -> None:
            seen.append(torch.get_num_threads())
            clock[0] += 0.02

    clock = [5.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured.time, "perf_counter", lambda: clock[0])
        assert reading_rate(listing, Slow(), False) == pytest.approx(50)  # type: ignore[arg-type]
    assert set(seen) == {1} and torch.get_num_threads() == threads
    assert 1 < len(seen) <= 14, "a quarter of a second"
    assert source.reading_rate(facts) > 0
    shutil.rmtree(tmp_path / "d")
    assert ImageFolder(**options).reading_rate(facts) == 0


@pytest.mark.parametrize(
    ("libraries", "cuda", "said"),
    [
        (["libnvjpeg-1a359ba7.so.13.0.1.86"], "'13.2'", ""),
        (["libnvjpeg.4a0b5c81.so.12"], "'12.6'", ""),
        ([], "'13.2'", "this wheel of torchcodec has no NVJPEG"),
        (["libjpeg.so.8"], "'13.2'", "this wheel of torchcodec has no NVJPEG"),
        (["libnvjpeg-1.so.13.0"], "None", "this torch is not built for CUDA"),
        (["libnvjpeg-1.so.13.0"], "'12.6'", "NVJPEG for CUDA 13, and torch is built for CUDA 12"),
    ],
)
def test_nvjpeg_is_that_of_torchs_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, libraries: list[str], cuda: str, said: str
) -> None:
    monkeypatch.undo()
    for folder in ("torch", "torchcodec", "torchcodec.libs"):
        (tmp_path / folder).mkdir()
    for name in libraries:
        (tmp_path / "torchcodec.libs" / name).touch()
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.15'\ncuda: str | None = {cuda}\n")
    monkeypatch.setattr(nvjpeg, "_folder", lambda package: tmp_path / package)
    assert said in nvjpeg.missing() if said else nvjpeg.missing() == ""


def test_this_torch_and_torchcodec_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert (nvjpeg.missing() == "") == bool(torch.version.cuda) or "torchcodec" in nvjpeg.missing()
