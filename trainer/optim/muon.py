"""optimizer=muon: orthogonal steps for the matrices of hidden layers, AdamW for all other parameters.

Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon) steps by the momentum of a matrix with all its
singular values brought near 1, by five products of matrices (Newton-Schulz). What its authors leave to AdamW is left to
AdamW here: the input and the output layer, embeddings, and what is no matrix. A kernel of a convolution is the matrix
(outputs, inputs * height * width). The whole matrix is needed, so no shard of it will do.

torch.optim.Muon takes matrices alone, no kernels, and always computes in bf16, so that runs that are equal in exact
arithmetic would part. Here 16 bits are used for single precision on a GPU, and else the precision of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trainer.optim.groups import MATRIX

BUFFER = "momentum_buffer"
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NORM_EPS = 1e-7
SCALES: Mapping[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
    "original": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
}
"""Factor on the step of a matrix: Liu et al., 2025, arXiv:2502.16982, with the rate and decay of AdamW; Jordan's."""


class Muon(torch.optim.AdamW):
    """Muon for groups with ``matrix=True``, AdamW for the others, and its lazy counterpart for tables.

    Args:
        momentum: share of the momentum that is kept. nesterov: Nesterov's momentum.
        ns_steps: products by which singular values are brought near 1.
        scale: key of ``SCALES``.
        lr, weight_decay: of all parameters. betas, eps: of AdamW.
    """

    of_tables = "adam"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        scale: str = "match_rms_adamw",
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay)
        self.momentum, self.nesterov, self.ns_steps, self.scale = momentum, nesterov, ns_steps, SCALES[scale]

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's asks every parameter for a state of AdamW

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        groups = self.param_groups
        for group in groups:
            for matrix in group.get("params", ()) if group.get(MATRIX) else ():
                if matrix.grad is not None:
                    self._orthogonal_step(matrix, group.get("lr"), group.get("weight_decay", 0.0))
        self.param_groups = [group for group in groups if not group.get(MATRIX)]
        try:
            super().step()
        finally:
            self.param_groups = groups
        return loss

    def _orthogonal_step(self, matrix: torch.Tensor, lr: Any, weight_decay: float) -> None:
        assert matrix.grad is not None
        state = self.state[matrix]
        if not state:
            state[BUFFER] = torch.zeros_like(matrix)
        buffer = state[BUFFER]
        buffer.mul_(self.momentum).add_(matrix.grad)
        direction = matrix.grad.add(buffer, alpha=self.momentum) if self.nesterov else buffer
        rows = direction.flatten(1)
        step = orthogonal(rows, self.ns_steps).to(matrix.dtype).mul_(self.scale(*rows.shape))
        matrix.mul_(1 - lr * weight_decay).sub_(lr * step.view(matrix.shape))


def orthogonal(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """Bring the singular values of a matrix near 1 (0.7 to 1.2 after five steps), by Newton-Schulz."""
    a, b, c = COEFFICIENTS
    x: torch.Tensor = matrix.bfloat16() if matrix.is_cuda and matrix.dtype == torch.float32 else matrix
    x = x / (x.norm() + NORM_EPS)
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).contiguous()
