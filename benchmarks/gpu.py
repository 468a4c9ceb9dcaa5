"""How fast we train on one GPU, against a loop tuned by hand and against the GPU alone. Under 8 minutes.

    python benchmarks/gpu.py [--only resident,rival] [--out FOLDER]

Each part runs in a process of its own with a time limit, and prints its rows at once; a part that fails says so, and
the others go on. The last lines are the table in Markdown and the verdict: at least 1.00 of the strong rival, and 0.97
of the resident one. With ``--out`` the rows are also in FOLDER/gpu.json and FOLDER/gpu.md.

    versions   the GPUs by our rules and by torch's
    resident   ResNet-50 on one batch that stays on the GPU: bf16, fp16, fused, without cuDNN; kernels of the norms
    rival      ours, ``strong`` and ``plain`` (gpu_rivals.py) in one process
    compile    compiled, a captured update of 32 samples, and LeNet
    jpeg       2,000 photographs: reading processes, the decoded cache, decoding on the GPU, the cache on the GPU
    waits      what the host waits for, counted by torch, against the gate of tests/null_gpu
    tests      tests/gpu: deterministic resume, a kill, memory that is not enough

Rows are of one card and one run; rates are medians of rounds that alternate.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
WHOLE_S = 480.0
STRONG, RESIDENT = 1.0, 0.97
"""Aims: our rate as a share of the strong rival's, and of the resident one's."""
MARK = "ROW "
FAILED = "failed"


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        part, case: what was measured. rate: images/s; None: the row is no rate. strong, plain, resident: our rate as a
        share of theirs. peak: GiB. waited: share of the time that the loop waited for data. note: the rest in words.
    """

    part: str
    case: str
    rate: float | None = None
    strong: float | None = None
    plain: float | None = None
    resident: float | None = None
    peak: float | None = None
    waited: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Size:
    """How much is measured: as on a GPU, or as in a rehearsal.

    Attributes:
        model: of the image cases. batch: samples of a batch; small: of a batch where kernels are short. batches: of a
        round. rounds: that alternate. image: height and width. photographs: files.
    """

    model: str = "resnet50"
    batch: int = 256
    small: int = 32
    batches: int = 15
    rounds: int = 5
    image: int = 224
    photographs: int = 2000


Worker = Callable[[str, list[str], int, dict[str, Any]], dict[str, Any]]
"""Runs a function of gpu_ours in a worker with these overrides, and so many rounds, and returns what it found."""


@dataclass(frozen=True)
class Bench:
    """What a part measures with."""

    size: Size
    worker: Worker

    def images(self, *overrides: str, batch: int | None = None) -> list[str]:
        """The overrides of a run on bytes of noise."""
        size = self.size
        return [
            "+recipe=resnet50_random",
            f"model={size.model}",
            "data._target_=gpu_ours.ByteNoise",
            f"data.image_size={size.image}",
            f"data.batch_size={batch or size.batch}",
            f"data.batches={size.batches}",
            "data.val_batches=1",
            "execution.log_every=20",
            "strategy=single",
            *overrides,
        ]

    def compared(self, part: str, case: str, rivals: list[str], overrides: list[str]) -> Row:
        """Our loop beside these rivals in one process."""
        import gpu_ours

        try:
            found = self.worker("measure", overrides, self.size.rounds, {"rivals": rivals})
        except Exception as error:  # the other cases are measured all the same
            return Row(part, case, note=f"{FAILED}: {' '.join(str(error).split())[:300]}")
        middle = {name: gpu_ours.median(rates) for name, rates in found["rates"].items()}
        shares = {
            name: gpu_ours.median([a / b for a, b in zip(found["rates"]["ours"], rates, strict=True)])
            for name, rates in found["rates"].items()
        }
        others = ", ".join(f"{name} {middle[name]:,.0f}" for name in rivals)
        note = f"{found['precision']}{', ' if others else ''}{others}"
        to = {name: shares.get(name) for name in ("strong", "plain", "resident")}
        return Row(part, case, middle["ours"], peak=found["peaks"]["ours"], waited=found["waited"], note=note, **to)


def versions(bench: Bench) -> Iterator[Row]:
    """The GPUs by our rules and by torch's, and the versions that matter."""
    import os

    import torch

    from trainer.host import nvml, visible_gpus
    from trainer.host.torch_gpus import Question

    yield Row("versions", f"Python {sys.version.split()[0]}, torch {torch.__version__}, {os.cpu_count()} cores")
    yield Row("versions", f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    ours = visible_gpus.visible(nvml.read().cards, os.environ).gpus
    theirs = Question().answer().gpus
    same = [(gpu.name, gpu.capability) for gpu in ours] == [(gpu.name, gpu.capability) for gpu in theirs]
    for gpu in ours:
        yield Row("versions", f"{gpu.name}, compute capability {'.'.join(map(str, gpu.capability))}")
    yield Row("versions", "our list of GPUs", note="is torch's" if same else f"is not torch's: {ours} and {theirs}")


def resident(bench: Bench) -> Iterator[Row]:
    """What the GPU gives on one batch, by precision, and the kernels of the norms."""
    from functools import partial

    import gpu_ours
    import gpu_rivals
    import torch

    size = bench.size
    whole = gpu_rivals.Training(
        partial(_model, size.model), torch.device("cuda:0"), "bf16", size.batch, size.batches, size.image, 102
    )

    for case, training in {
        "bf16": whole,
        "fp16": replace(whole, precision="fp16"),
        "fp16, optimizer not fused": replace(whole, precision="fp16", fused=False),
        "bf16 without cuDNN": replace(whole, cudnn=False),
        "fp32 with TF32": replace(whole, precision="fp32", batch=size.batch // 2),
    }.items():
        loop = gpu_rivals.resident(training)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        found = gpu_ours.alternate({"alone": loop}, max(1, size.rounds // 2))
        note = ""
        if case in ("bf16", "fp16"):
            note = kernels_of_norms(loop)
        yield Row("resident", case, gpu_ours.median(found["rates"]["alone"]), peak=found["peaks"]["alone"], note=note)
        del loop
        torch.cuda.empty_cache()


def kernels_of_norms(loop: Callable[[], int]) -> str:
    """The share of the GPU's time that kernels of norms take, and the longest of them by name."""
    times = kernel_times(loop)
    norms = {name: taken for name, taken in times.items() if "norm" in name.lower() or "bn_" in name.lower()}
    if not norms:
        return "no kernel of a norm was seen"
    longest = max(norms, key=lambda name: norms[name])
    return f"norms {sum(norms.values()) / sum(times.values()):.0%} of the GPU's time, most of it {longest[:40]}"


def kernel_times(loop: Callable[[], int]) -> dict[str, float]:
    """The GPU's time in each kernel, in microseconds."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        loop()
    return {event.key: event.self_device_time_total for event in profiler.key_averages()}


def rival(bench: Bench) -> Iterator[Row]:
    """Ours, the strong and the plain loop, and the resident one, alone and under NCCL."""
    everybody = ["strong", "plain", "resident"]
    name = f"{bench.size.model}, batch {bench.size.batch}"
    yield bench.compared("rival", name, everybody, bench.images())
    yield bench.compared("rival", f"{name}, NCCL", ["strong"], bench.images("strategy=collective"))


def compiled(bench: Bench) -> Iterator[Row]:
    """Compiled models, a captured update, and a small model."""
    size = bench.size
    small = f"{size.model}, batch {size.small}"
    yield bench.compared("compile", f"{size.model}, compiled", ["strong"], bench.images("compile=true"))
    yield bench.compared("compile", small, ["strong"], bench.images(batch=size.small))
    yield bench.compared(
        "compile", f"{small}, captured", [], bench.images("execution.cuda_graph=true", batch=size.small)
    )
    lenet = ["+recipe=digits_lenet", "data.batch_size=128", "execution.log_every=20", "strategy=single"]
    for precision in ("fp32", "bf16"):
        yield bench.compared("compile", f"LeNet, {precision}", ["strong"], [*lenet, f"precision={precision}"])


def jpeg(bench: Bench) -> Iterator[Row]:
    """Photographs in files: how many the GPU gets."""
    with tempfile.TemporaryDirectory() as folder:
        photographs(Path(folder), bench.size.photographs)
        files = [
            "+recipe=resnet50_flowers",
            "data=imagefolder",
            f"data.root={folder}",
            f"model={bench.size.model}",
            "data.batch_size=" + str(min(bench.size.batch, bench.size.photographs // 4)),
            f"data.image_size={bench.size.image}",
            "strategy=single",
            "execution.log_every=20",
        ]
        for case, overrides in {
            "reading processes": ["data.cache=none", "data.decode=cpu"],
            "decoded cache": ["data.decode=cpu"],
            "decoded on the GPU": ["data.cache=none", "data.decode=gpu"],
            "cache on the GPU": ["data.cache=device"],
        }.items():
            yield bench.compared(
                "jpeg", case, ["resident"] if case == "reading processes" else [], [*files, *overrides]
            )


def photographs(folder: Path, number: int) -> None:
    """Write JPEGs of 500 to 750 pixels in two class folders, with the detail of photographs; a tenth are drawn."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    drawn: list[bytes] = []
    for split in ("train", "val"):
        for one in range(number if split == "train" else 8):
            target = folder / split / str(one % 2)
            target.mkdir(parents=True, exist_ok=True)
            if len(drawn) < max(1, number // 10):
                width, height = (int(side) for side in random.integers(500, 751, 2))
                coarse = Image.fromarray(random.integers(0, 256, (height // 24, width // 24, 3), dtype=np.uint8))
                fine = random.normal(0, 8, (height, width, 3))
                pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)) + fine
                file = target / f"{one}.jpg"
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, quality=85)
                drawn.append(file.read_bytes())
            else:
                (target / f"{one}.jpg").write_bytes(drawn[one % len(drawn)])


GATE = {"update": 0, "line": 1, "validation": 1, "checkpoint": 2}
"""Most waits of each, as tests/null_gpu/test_gate.py has it."""


def waits(bench: Bench) -> Iterator[Row]:
    """What the host waits for, against the gate."""
    for case, overrides in {
        "strategy=single": [],
        "strategy=collective": ["strategy=collective"],
        "fp16, clipped, averaged": ["precision=fp16", "strategy.clip_norm=1.0", "ema.decay=0.99"],
    }.items():
        found = bench.worker("count_waits", bench.images(*overrides, batch=bench.size.small), 1, {"updates": 10})
        over = {name: (often, n) for name, (often, n) in found.items() if n > GATE[name] * often}
        counts = ", ".join(f"{name} {n} in {often}" for name, (often, n) in found.items())
        yield Row("waits", case, note=f"{counts}: {'more than the gate' if over else 'as the gate has it'}")


def tests(bench: Bench) -> Iterator[Row]:
    """The tests that only a GPU can run, within the part's time."""
    chosen = "resumed_run_is_bit_identical or killed_worker or memory_that or taken_unasked"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not long", "tests/gpu", "-k", chosen],
        cwd=HERE.parent,
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    yield Row("tests", chosen, note=lines[-1] if lines else done.stderr[-200:])


def _model(name: str) -> Any:
    from torchvision import models

    return getattr(models, name)(num_classes=102)


class Part(NamedTuple):
    """A part of the benchmark: what measures, and its limit in seconds."""

    measure: Callable[[Bench], Iterator[Row]]
    limit_s: float


PARTS = {
    "versions": Part(versions, 25),
    "resident": Part(resident, 90),
    "rival": Part(rival, 100),
    "compile": Part(compiled, 130),
    "jpeg": Part(jpeg, 100),
    "waits": Part(waits, 60),
    "tests": Part(tests, 60),
}


ON_ONE_GPU = "device=cuda", "launch.nproc=1", "tracking=none"


def in_a_worker(function: str, overrides: list[str], rounds: int, question: dict[str, Any]) -> dict[str, Any]:
    """Run a function of gpu_ours as worker 0 of a run on ``cuda:0``."""
    from one_run import measured

    return measured("gpu_ours", [*overrides, *ON_ONE_GPU], ["cuda:0"], rounds, function, question)


def part(name: str) -> None:
    """Measure a part in this process; each row is a line of JSON."""
    for row in PARTS[name].measure(Bench(Size(), in_a_worker)):
        print(MARK + json.dumps(row._asdict()), flush=True)


def measured_part(name: str, limit_s: float) -> Iterator[Row]:
    """Measure a part in a process of its own; what it lacks is a row, too."""
    command = [sys.executable, str(Path(__file__)), "--part", name]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
        ended = _ends_at(process, limit_s)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                yield Row(**json.loads(line.removeprefix(MARK)))
        code = process.wait()
        if ended():
            yield Row(name, "not all of it", note=f"was cut off after {limit_s:.0f} s")
        elif code:
            errors.seek(0)
            last = [line.strip() for line in errors if line.strip()]
            yield Row(name, "not all of it", note=f"exit code {code}: {last[-1] if last else ''}"[:200])


def _ends_at(process: subprocess.Popen[str], limit_s: float) -> Callable[[], bool]:
    """End a process and its children when its time is over; returns whether that was so."""
    import os
    import signal
    import threading

    late = threading.Event()

    def end() -> None:
        if process.poll() is None:
            late.set()
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    return late.is_set


COLUMNS = "case", "images/s", "of strong", "of plain", "of resident", "peak GiB", "data wait", ""


def cells(row: Row) -> list[str]:
    """A row of the table, by column."""
    numbers = (
        (row.rate, ",.0f"),
        (row.strong, ".3f"),
        (row.plain, ".3f"),
        (row.resident, ".3f"),
        (row.peak, ".2f"),
        (row.waited, ".1%"),
    )
    return [f"{row.part}: {row.case}", *("" if n is None else format(n, form) for n, form in numbers), row.note]


def markdown(rows: list[Row]) -> str:
    """The table of the rows."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def verdict(rows: list[Row]) -> str:
    """Whether the aims are reached by the rows of ``rival``."""
    found = [row for row in rows if row.part == "rival" and row.strong is not None]
    if not found:
        return "no verdict: the part `rival` gave no rate"
    strong = min(row.strong for row in found if row.strong is not None)
    alone = [row.resident for row in found if row.resident is not None]
    parts = [f"{strong:.3f} of the strong rival (aim {STRONG:.2f}): {'reached' if strong >= STRONG else 'missed'}"]
    if alone:
        parts.append(f"{alone[0]:.3f} of resident (aim {RESIDENT}): {'reached' if alone[0] >= RESIDENT else 'missed'}")
    return "; ".join(parts)


def main() -> None:
    """Run the parts one after the other, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--out", type=Path, help="folder for gpu.json and gpu.md")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        part(arguments.part)
        return
    start, rows = time.monotonic(), list[Row]()
    for name in arguments.only.split(","):
        left = WHOLE_S - (time.monotonic() - start)
        if left < 10:
            rows.append(Row(name, "not measured", note="no time was left"))
            continue
        for row in measured_part(name, min(PARTS[name].limit_s, left)):
            rows.append(row)
            print(f"{time.monotonic() - start:5.0f} s  {markdown([row]).splitlines()[-1]}", flush=True)
            if arguments.out:  # what is measured is kept whatever comes
                arguments.out.mkdir(parents=True, exist_ok=True)
                (arguments.out / "gpu.json").write_text(json.dumps([one._asdict() for one in rows], indent=1))
                (arguments.out / "gpu.md").write_text(f"{markdown(rows)}\n\n{verdict(rows)}\n")
    print(f"\n{markdown(rows)}\n\n{verdict(rows)}\n{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
