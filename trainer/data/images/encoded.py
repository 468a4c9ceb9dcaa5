"""Training images as they are in their files, and the decoder that makes batches of them on a GPU (data.decode=gpu)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from trainer.data.augment.draws import Draw
from trainer.data.batch_inputs import Inputs
from trainer.data.images.dataset import ImageSet, unreadable
from trainer.data.images.header import GPU_MODES, BadImage, opened, reason
from trainer.errors import RunFailed
from trainer.host.transfers import recorded

if TYPE_CHECKING:
    from trainer.data.augment.mixing import Mixing

AHEAD = 2
"""Batches that are decoded before the training asks for them."""
Sample = tuple[Inputs, torch.Tensor]


class EncodedBatch(NamedTuple):
    """The inputs of an encoded batch by name.

    Attributes:
        content: (B,) uint8, all images one after the other. ends: (N,), where each ends there.
        sizes: (N, 2), height and width of those that are pixels (H, W, 3); 0 of a JPEG.
        addresses: (N,) of the samples. draw: (2,), seed and epoch.
    """

    content: torch.Tensor
    ends: torch.Tensor
    sizes: torch.Tensor
    addresses: torch.Tensor
    draw: torch.Tensor


class EncodedImages(ImageSet):
    """The data set of a split of images whose batches hold encoded images, for :class:`DeviceDecoder`.

    An image that the GPU does not decode, such as a PNG or a JPEG of CMYK, comes as pixels.
    """

    def augmented(self, draw: Draw, addresses: np.ndarray) -> Sample:  # type: ignore[override]
        """Return the encoded batch of the samples at these addresses, and labels (N,)."""
        numbers = addresses % len(self)
        parts, sizes = zip(*(self._encoded(number) for number in numbers.tolist()), strict=True)
        batch = EncodedBatch(
            torch.from_numpy(np.concatenate(parts)),
            torch.from_numpy(np.cumsum([len(part) for part in parts])),
            torch.tensor(sizes),
            torch.from_numpy(addresses.astype(np.int64)),
            torch.tensor(draw, dtype=torch.int64),
        )
        return batch._asdict(), self.labels[torch.from_numpy(numbers)]

    def _encoded(self, number: int) -> tuple[np.ndarray, tuple[int, int]]:
        """The bytes of one image, and its size if they are pixels; else (0, 0).

        Raises:
            RunFailed: it cannot be read, is no image, or has too many pixels; with its name.
        """
        try:
            content = self.listing.read(number)
            with opened(content, self.listing.limits) as image:
                decodable = image.format == "JPEG" and image.mode in GPU_MODES
        except (BadImage, OSError) as error:
            raise unreadable(self.listing, number, error) from error
        if decodable:
            return np.frombuffer(content, np.uint8), (0, 0)
        pixels = self.image(number).permute(1, 2, 0)
        return pixels.reshape(-1).numpy(), (pixels.shape[0], pixels.shape[1])


class DeviceDecoder:
    """Makes training batches (N, 3, S, S) uint8 on a device of encoded ones, some batches ahead of the training.

    NVJPEG's caller waits until a batch is decoded. So a thread calls it, on a stream of its own, and the training's
    thread waits for no GPU.

    Args:
        images: the data set that makes the encoded batches.
        mixing: of batches; None: they are not mixed.
    """

    def __init__(self, images: EncodedImages, mixing: Mixing | None, device: torch.device) -> None:
        self.images, self.mixing, self.device = images, mixing, device
        self.view = images.view.on(device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="decoder")

    def ahead(self, batches: Iterator[Sample]) -> Iterator[Sample]:
        """Yield decoded batches in the order of the encoded ones, which are read ``AHEAD`` batches before.

        Raises:
            RunFailed: an image cannot be decoded; with its name.
        """
        coming: deque[Future[tuple[Sample, Any]]] = deque()
        for batch in batches:
            coming.append(self.thread.submit(self._decode, batch))
            if len(coming) > AHEAD:
                yield self._ready(coming.popleft())
        while coming:
            yield self._ready(coming.popleft())

    def close(self) -> None:
        """End the thread, when it has decoded its last batch."""
        self.thread.shutdown(cancel_futures=True)

    def _ready(self, coming: Future[tuple[Sample, Any]]) -> Sample:
        """The batch. What the GPU computes from now on waits for it."""
        (images, labels), done = coming.result()
        if done is not None and isinstance(images, torch.Tensor):
            computes = torch.cuda.current_stream(self.device)
            computes.wait_event(done)
            images.record_stream(computes)
        return images, labels

    def _decode(self, batch: Sample) -> tuple[Sample, torch.cuda.Event | None]:
        """In the thread: the batch on the device, and the event that its last kernel is done."""
        inputs, labels = batch
        assert isinstance(inputs, dict)
        encoded = EncodedBatch(**inputs)
        (seed, epoch), addresses = encoded.draw.tolist(), encoded.addresses.numpy()
        on_own_stream: AbstractContextManager[Any] = nullcontext()
        if self.stream is not None:
            on_own_stream = torch.cuda.stream(self.stream)
        with on_own_stream:
            decoded = self._decoded(encoded, addresses)
            sizes = np.array([image.shape[-2:] for image in decoded], np.int64)
            images = self.view(iter(decoded), sizes, (seed, epoch), addresses)
            if self.mixing is not None:
                images, labels = self.mixing(images, labels, (seed, epoch), addresses)
            return (images, labels), None if self.stream is None else recorded(self.device)

    def _decoded(self, encoded: EncodedBatch, addresses: np.ndarray) -> list[torch.Tensor]:
        """The images (3, H, W) uint8 on the device."""
        ends, sizes = encoded.ends.tolist(), encoded.sizes.tolist()
        parts = [encoded.content[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        jpegs = [number for number, (height, _) in enumerate(sizes) if not height]
        images: dict[int, torch.Tensor] = dict(zip(jpegs, self._by_nvjpeg(parts, jpegs, addresses), strict=True))
        for number, (height, width) in enumerate(sizes):
            if height:
                images[number] = parts[number].view(height, width, 3).to(self.device).permute(2, 0, 1)
        return [images[number] for number in range(len(parts))]

    def _by_nvjpeg(self, parts: list[torch.Tensor], jpegs: list[int], addresses: np.ndarray) -> list[torch.Tensor]:
        """Decode these parts of a batch in one call. If it fails, one by one, to find the image that is at fault."""
        from torchcodec.decoders import decode_jpeg  # type: ignore[attr-defined]

        if not jpegs:
            return []
        try:
            return list(decode_jpeg([parts[number] for number in jpegs], device=self.device))
        except Exception as error:  # whatever a decoder breaks with: the image is named
            for number in jpegs:
                try:
                    decode_jpeg([parts[number]], device=self.device)
                except Exception as cause:
                    index = int(addresses[number]) % len(self.images)
                    raise unreadable(self.images.listing, index, BadImage(reason(cause))) from cause
            raise RunFailed(
                f"torchcodec cannot decode on {self.device}: {reason(error)}. Type data.decode=cpu"
            ) from error
