"""What servers and tables would save, as tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trainer.checkpoint.streamed import Streamed


def whole(state: Mapping[str, Streamed]) -> dict[str, torch.Tensor]:
    """All values of a state, copied."""
    return {name: torch.from_numpy(one.whole().copy()) for name, one in state.items()}
