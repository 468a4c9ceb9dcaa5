"""Loops written by hand for one GPU, which ours is measured against.

A loop is a function that trains some batches of a classifier of images and returns how many samples these were. All
take bytes (uint8) in NHWC, as a decoder gives them, and normalise on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

Loop = Callable[[], int]
Update = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
POOL = 8
"""Batches of a rival, which it takes in turn."""


@dataclass(frozen=True)
class Training:
    """What a loop trains.

    Attributes:
        make: the model. device: its GPU. precision: fp32, bf16 or fp16 (autocast, fp16 with a loss scale).
        batch: samples of a batch. batches: of one call of the loop. image: height and width. classes: of the labels.
        channels_last: memory format. compiled, fused: the model, the optimizer. ddp: the model is in DDP.
        cudnn: False: torch's own kernels of convolutions and norms.
    """

    make: Callable[[], nn.Module]
    device: torch.device
    precision: str
    batch: int
    batches: int
    image: int
    classes: int
    channels_last: bool = True
    compiled: bool = False
    fused: bool = True
    ddp: bool = False
    cudnn: bool = True
    channels: int = 3

    @property
    def dtype(self) -> torch.dtype:
        """Type of the inputs."""
        return TYPES.get(self.precision, torch.float32)

    @property
    def memory(self) -> torch.memory_format:
        """Memory format of the model and the images."""
        return torch.channels_last if self.channels_last else torch.contiguous_format


def update_of(training: Training) -> Update:
    """Return a function that trains one batch of images (N, C, H, W) and labels (N,), and returns its loss ()."""
    device, kind = training.device, training.device.type
    model: nn.Module = training.make().to(device).to(memory_format=training.memory)
    if training.compiled:
        model.compile()
    forward: nn.Module = model
    if training.ddp:
        forward = DistributedDataParallel(model, [device], init_sync=False, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4, fused=training.fused)
    scaler = torch.amp.GradScaler(kind, enabled=training.precision == "fp16")
    loss_function = nn.CrossEntropyLoss()
    forward.train()

    def update(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with (
            torch.backends.cudnn.flags(enabled=training.cudnn, benchmark=True),
            torch.autocast(kind, training.dtype, enabled=training.precision in TYPES),
        ):
            loss: torch.Tensor = loss_function(forward(images), labels)
        with torch.backends.cudnn.flags(enabled=training.cudnn, benchmark=True):
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return update


def drawn(training: Training) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch: bytes (N, H, W, C) and labels (N,)."""
    images = torch.randint(
        0, 256, (training.batch, training.image, training.image, training.channels), dtype=torch.uint8
    )
    return images, torch.randint(training.classes, (training.batch,))


def normalised(images: torch.Tensor, training: Training) -> torch.Tensor:
    """Bytes (N, H, W, C) on the GPU -> inputs (N, C, H, W) of the training's type."""
    inputs = images.permute(0, 3, 1, 2).to(training.dtype)
    return inputs.sub_(127.0).mul_(1 / 58.0).contiguous(memory_format=training.memory)


def resident(training: Training) -> Loop:
    """One batch that stays on the GPU: what the GPU can do at all."""
    update = update_of(training)
    images, labels = (tensor.to(training.device) for tensor in drawn(training))
    inputs = normalised(images, training)

    def loop() -> int:
        for _ in range(training.batches):
            update(inputs, labels)
        return training.batch * training.batches

    return loop


def plain(training: Training, log_every: int = 20) -> Loop:
    """The loop that people write: each batch is pinned and copied, and the loss is read and printed now and then."""
    update = update_of(training)
    pool = [drawn(training) for _ in range(2)]

    def loop() -> int:
        for number in range(training.batches):
            images, labels = (
                tensor.pin_memory().to(training.device, non_blocking=True) for tensor in pool[number % len(pool)]
            )
            loss = update(normalised(images, training), labels)
            if number % log_every == 0:
                print(f"batch {number}: loss {loss.item():.4f}")
        return training.batch * training.batches

    return loop


def strong(training: Training) -> Loop:
    """A loop tuned by hand: a ring of pinned batches, copied on a stream of its own one batch ahead, and a loss that is
    summed on the GPU and never waited for."""
    update = update_of(training)
    pool = [tuple(tensor.pin_memory() for tensor in drawn(training)) for _ in range(POOL)]
    copies, whole = torch.cuda.Stream(training.device), torch.zeros((), device=training.device)

    def copied(number: int) -> tuple[torch.Tensor, ...]:
        with torch.cuda.stream(copies):
            return tuple(tensor.to(training.device, non_blocking=True) for tensor in pool[number % POOL])

    def loop() -> int:
        ahead = copied(0)
        computes = torch.cuda.current_stream(training.device)
        for number in range(training.batches):
            computes.wait_stream(copies)
            images, labels = ahead
            for tensor in ahead:
                tensor.record_stream(computes)
            ahead = copied(number + 1)
            whole.add_(update(normalised(images, training), labels))
        return training.batch * training.batches

    return loop
