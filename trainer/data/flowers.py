"""data=flowers102 and data=embedded_flowers: Oxford Flowers-102, or the drawn stand-in, said loudly."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any

from trainer.data.base import DataSource, Facts, Progress, Splits
from trainer.data.drawn_flowers import CLASSES, draw, is_drawn
from trainer.data.drawn_flowers import folder as drawn_folder
from trainer.errors import UserError

SITE = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PER_SPLIT = 1020


class EmbeddedFlowers(DataSource):
    """102 classes of procedurally drawn flowers as JPEG files in the user's cache, the same on every machine."""

    def facts(self, global_batch_size: int) -> Facts:
        return self._embedded(self.config["per_class"], "")

    def _embedded(self, per_class: int, stand_in: str) -> Facts:
        size = self.config["image_size"]
        samples = CLASSES * per_class
        return Facts(
            "embedded drawn flowers", "embedded", samples, samples, (3, size, size), CLASSES, stand_in, slow=True
        )

    def prepare(self, facts: Facts, progress: Progress) -> Facts:
        self._draw(progress)
        return facts

    def _drawing(self) -> dict[str, int]:
        return {"seed": self.config.get("draw_seed", 0), "per_class": self.config.get("per_class", 10)}

    def _draw(self, progress: Progress) -> None:
        if not is_drawn(**self._drawing()):
            draw(
                **self._drawing(), on_progress=lambda done, total: progress("drawing the embedded flowers", done, total)
            )

    def open(self, facts: Facts) -> Splits:
        from torchvision.datasets import ImageFolder

        train, val = self._transforms()
        root = drawn_folder(**self._drawing())
        return Splits(ImageFolder(str(root / "train"), train), ImageFolder(str(root / "val"), val), MEAN, STD)

    def _transforms(self) -> tuple[Any, Any]:
        """uint8 tensors (3, S, S): random crop and flip for training, centre crop for validation."""
        from torchvision.transforms import v2

        size, config = self.config["image_size"], self.config
        resize = config["val_resize"] or round(size * 8 / 7)
        train = v2.Compose(
            [
                v2.RandomResizedCrop(size, (config["min_scale"], 1.0)),
                v2.RandomHorizontalFlip(config["flip"]),
                v2.PILToTensor(),
            ]
        )
        val = v2.Compose([v2.Resize(resize), v2.CenterCrop(size), v2.PILToTensor()])
        return train, val


class Flowers102(EmbeddedFlowers):
    """Oxford Flowers-102 by torchvision's loader; where it cannot be had, the embedded flowers or a refusal."""

    def facts(self, global_batch_size: int) -> Facts:
        size = self.config["image_size"]
        if self._present():
            return Facts(f"Oxford Flowers-102 in {self.config['root']}", "real", PER_SPLIT, PER_SPLIT, (3, size, size), CLASSES, slow=True)  # fmt: skip
        partial = self._folder()
        if partial.is_dir() and not self.config["download"]:
            raise UserError(
                f"data.root={self.config['root']}",
                f"{partial} is there but lacks jpg/, imagelabels.mat or setid.mat",
                "data.download=true, or data=embedded_flowers",
            )
        reason = "data.download=false" if not self.config["download"] else self._unreachable()
        if not reason:
            return Facts(f"Oxford Flowers-102, to be downloaded into {self.config['root']}", "download", PER_SPLIT, PER_SPLIT, (3, size, size), CLASSES, slow=True)  # fmt: skip
        if self.config["on_missing"] == "error":
            raise UserError(
                f"data.root={self.config['root']}",
                f"Oxford Flowers-102 is not in {self._folder()} and cannot be downloaded ({reason})",
                "data.root=FOLDER that holds flowers-102/, or data.on_missing=embedded",
            )
        return self._instead(reason)

    def _instead(self, reason: str) -> Facts:
        return self._embedded(
            10,
            f"this is NOT Oxford Flowers-102: it is not in {self._folder()} and cannot be downloaded ({reason}). "
            "The embedded drawn flowers are used instead; data.on_missing=error refuses, data.root=FOLDER uses yours.",
        )

    def prepare(self, facts: Facts, progress: Progress) -> Facts:
        if facts.kind == "download":
            facts = self._download(facts)
        if facts.kind == "embedded":
            self._draw(progress)
        return facts

    def _download(self, facts: Facts) -> Facts:
        from filelock import FileLock
        from torchvision.datasets import Flowers102 as Real

        root = Path(self.config["root"])
        root.mkdir(parents=True, exist_ok=True)
        print(f"downloading Oxford Flowers-102 into {root} (345 MB)", flush=True)
        try:
            with FileLock(root / ".flowers-102.lock"):
                Real(str(root), split="train", download=True)
        except (OSError, RuntimeError) as error:
            reason = f"the download broke: {error}"
            if self.config["on_missing"] == "error":
                raise UserError(f"data.root={root}", reason, "data.on_missing=embedded") from error
            return self._instead(reason)
        real = self.facts(0)
        return real if real.kind == "real" else self._instead("the download is incomplete")

    def open(self, facts: Facts) -> Splits:
        if facts.kind == "embedded":
            return super().open(facts)
        from torchvision.datasets import Flowers102 as Real

        train, val = self._transforms()
        root = self.config["root"]
        return Splits(Real(root, "train", train), Real(root, "val", val), MEAN, STD)

    def _folder(self) -> Path:
        return Path(self.config["root"]) / "flowers-102"

    def _present(self) -> bool:
        folder = self._folder()
        return all((folder / f).is_file() for f in ("imagelabels.mat", "setid.mat")) and next((folder / "jpg").glob("*.jpg"), None) is not None  # fmt: skip

    def _unreachable(self) -> str:
        """Why the set's site cannot be reached; empty when it answers."""
        try:
            with urllib.request.urlopen(urllib.request.Request(SITE, method="HEAD"), timeout=3):
                return ""
        except OSError as error:
            return f"no answer from its site: {getattr(error, 'reason', error)}"
