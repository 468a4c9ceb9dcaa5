"""Moves batches to the device, and normalises uint8 images there."""

from __future__ import annotations

from collections import deque

import torch

from trainer.data.batch_inputs import Inputs, each
from trainer.data.picture_preprocessing import Preprocessing
from trainer.data.source import Splits
from trainer.host.transfers import recorded


class Placement:
    """Moves a batch to the device, and turns uint8 images into normalised floats there.

    A pinned batch is copied to a GPU on a stream of its own, while the GPU still computes the update before it. It is
    held until the copy is done, because its memory may be a slot that a reading process writes to when it is freed.
    Of inputs by name, floating ones take the run's type; ids and other integers stay as they are.

    Args:
        dtype: of the model's inputs. of_bytes: of images that come as bytes, where a forward pass rounds to 16 bits
            anyway: one kernel then reads bytes and writes normalised numbers, rounded once.
    """

    def __init__(
        self,
        splits: Splits | Preprocessing,
        device: torch.device,
        dtype: torch.dtype,
        channels_last: bool,
        of_bytes: torch.dtype | None = None,
    ) -> None:
        self.device = device
        self.dtype, self.of_bytes = dtype, of_bytes
        self.channels_last = channels_last
        self.copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.leaving: deque[tuple[torch.cuda.Event, Inputs, torch.Tensor]] = deque()
        shape = (-1, 1, 1)
        self.mean = torch.tensor(splits.mean, device=device, dtype=dtype).view(shape) if splits.mean else None
        self.std = torch.tensor(splits.std, device=device, dtype=dtype).view(shape) if splits.std else None
        if of_bytes is not None:
            mean, std = splits.mean or [0.0], splits.std or [1.0]
            scale = [1 / (255 * s) for s in std]
            shift = [-m / s for m, s in zip(mean, std, strict=True)]
            self.scale, self.shift = (torch.tensor(n, device=device).view(shape) for n in (scale, shift))

    def __call__(self, inputs: Inputs, labels: torch.Tensor) -> tuple[Inputs, torch.Tensor]:
        if self.copies is not None:
            inputs, labels = self._copied(self.copies, inputs, labels)
        if isinstance(inputs, dict):
            return {k: t.to(self.dtype) if t.is_floating_point() else t for k, t in inputs.items()}, labels
        if self.of_bytes is not None and inputs.dtype == torch.uint8 and inputs.dim() == 4:
            return self._at_once(inputs, self.of_bytes), labels
        original = inputs
        if inputs.dim() == 4:  # before the conversion: a byte is moved faster than a float
            inputs = inputs.contiguous(
                memory_format=torch.channels_last if self.channels_last else torch.contiguous_format
            )
        if inputs.dtype == torch.uint8:
            inputs = inputs.to(self.dtype).div_(255)
        elif inputs.is_floating_point():
            inputs = inputs.to(self.dtype)
        if self.mean is not None and self.std is not None:
            inputs = inputs.clone() if inputs is original else inputs
            self._normalise(inputs, self.mean, self.std)
        return inputs, labels

    def _copied(self, copies: torch.cuda.Stream, inputs: Inputs, labels: torch.Tensor) -> tuple[Inputs, torch.Tensor]:
        """The batch on the GPU; what is computed from now on waits for it."""
        computes = torch.cuda.current_stream(self.device)

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            moved = tensor.to(self.device, non_blocking=True)
            moved.record_stream(computes)
            return moved

        while self.leaving and self.leaving[0][0].query():
            self.leaving.popleft()
        with torch.cuda.stream(copies):
            there = each(copied, inputs), copied(labels)
            self.leaving.append((recorded(self.device), inputs, labels))
        computes.wait_stream(copies)
        return there

    def _at_once(self, images: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Bytes (N, C, H, W) as normalised numbers of 16 bits. On a GPU the kernel computes in 32 bits in registers."""
        memory = torch.channels_last if self.channels_last else torch.contiguous_format
        numbers = torch.empty(images.shape, dtype=dtype, device=images.device, memory_format=memory)
        return torch.addcmul(self.shift, images, self.scale, out=numbers)

    def _normalise(self, images: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> None:
        """Normalise in place; images in channels_last by whole rows of pixels, where channels lie side by side."""
        if self.channels_last and images.dim() == 4:
            samples, channels, height, width = images.shape
            images = images.permute(0, 2, 3, 1).view(samples, height, width * channels)
            mean, std = (numbers.flatten().repeat(width) for numbers in (mean, std))
        images.sub_(mean).div_(std)
