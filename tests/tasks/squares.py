"""Data of bright squares: what of them is the label depends on ``data.labels``."""

from __future__ import annotations

from typing import Any

from trainer.data.source import DataSource, Facts, Splits

TRAIN, VAL = 400, 97
NAMES = {
    "place": ("row", "column"),
    "row": ("row",),
    "traits": ("upper", "left", "bright"),
    "side": ("left", "right"),
    "bright": ("dark", "bright"),
}
TASKS = {
    "place": "regression",
    "row": "regression",
    "traits": "multi_label",
    "side": "classification",
    "bright": "binary",
}


class Squares(DataSource):
    """Noise (1, 8, 8) with a square of 3 x 3 pixels; labels: its place, its row, its traits, or its side."""

    sees_pictures = True

    def preprocessing(self, facts: Facts) -> Any:
        from trainer.data.picture_preprocessing import Centre, Preprocessing

        return Preprocessing(Centre(8, 8, channels=1), None, None)

    def facts(self, global_batch_size: int) -> Facts:
        kind = self.config["labels"]
        return Facts("squares", "drawn", TRAIN, VAL, (1, 8, 8), len(NAMES[kind]), task=TASKS[kind])

    def open(self, facts: Facts) -> Splits:
        return Splits(drawn(TRAIN, 0, self.config["labels"]), drawn(VAL, 1, self.config["labels"]))

    def class_names(self, facts: Facts) -> tuple[str, ...]:
        return NAMES[self.config["labels"]]

    def fingerprint(self, facts: Facts) -> str:
        return f"squares by {self.config['labels']}"


def drawn(samples: int, seed: int, kind: str) -> Any:
    """A data set of so many squares."""
    import numpy as np
    import torch

    random = np.random.default_rng(seed)
    images = random.integers(50, size=(samples, 1, 8, 8), dtype=np.uint8)
    row, column, bright = random.integers(6, size=samples), random.integers(6, size=samples), random.random(samples)
    for image, r, c, b in zip(images, row, column, bright, strict=True):
        image[0, r : r + 3, c : c + 3] += np.uint8(100 + 100 * b)
    labels = {
        "place": np.stack([row / 5, column / 5], 1).astype(np.float32),
        "row": (row / 5).astype(np.float32),
        "traits": np.stack([row < 3, column < 3, bright > 0.5], 1).astype(np.float32),
        "side": (column >= 3).astype(np.int64),
        "bright": (bright > 0.5).astype(np.float32),
    }[kind]
    return torch.utils.data.TensorDataset(torch.from_numpy(images), torch.from_numpy(labels))
