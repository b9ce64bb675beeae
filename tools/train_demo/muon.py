"""Muon (Keller Jordan et al., 2024, https://kellerjordan.github.io/posts/muon): momentum whose update is made
orthogonal.

For a matrix G = U S V^T the update is about U V^T, found by five Newton-Schulz steps X <- aX + (bA + cA^2)X
with A = X X^T.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
STEPS = 5


class Muon:
    """Muon for weight matrices [out, in]; embeddings and norms belong to AdamW.

    With several processes the work is dealt out by turns: `share` of `shares` orthogonalises every shares-th
    matrix, and the caller sums the updates over the processes.
    """

    def __init__(
        self, matrices: Iterable[Tensor], momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        self.matrices = list(matrices)
        self.momentum = momentum
        self.weight_decay = weight_decay
        self._buffers = [torch.zeros_like(matrix) for matrix in self.matrices]

    @torch.no_grad()
    def updates(self, share: int, shares: int) -> list[Tensor]:
        """This share's updates; zeros stand for the matrices of the others."""
        updates = []
        for index, (matrix, buffer) in enumerate(zip(self.matrices, self._buffers, strict=True)):
            assert matrix.grad is not None
            buffer.lerp_(matrix.grad, 1 - self.momentum)
            mine = index % shares == share
            updates.append(
                orthogonal(matrix.grad.lerp(buffer, self.momentum)) if mine else torch.zeros_like(matrix)
            )
        return updates

    @torch.no_grad()
    def apply(self, updates: list[Tensor], learning_rate: float) -> None:
        for matrix, update in zip(self.matrices, updates, strict=True):
            matrix.mul_(1 - learning_rate * self.weight_decay)
            matrix.add_(update, alpha=-learning_rate * max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5)


def orthogonal(gradient: Tensor) -> Tensor:
    """[out, in] to the nearest matrix, about, whose singular values are all 1; 10 m^2 n + 5 m^3 multiply-adds
    for sides m <= n."""
    a, b, c = NEWTON_SCHULZ
    tall = gradient.shape[0] > gradient.shape[1]
    x: Tensor = gradient.T if tall else gradient
    x = x / (x.norm() + 1e-7)
    for _ in range(STEPS):
        gram = x @ x.T
        polynomial: Tensor = b * gram + c * gram @ gram
        x = a * x + polynomial @ x
    return x.T if tall else x
