"""Dropout that draws one random byte per element instead of one random float."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ByteDropout(nn.Module):
    """A CPU spends much of a training step on `bernoulli_`; here one 64-bit draw serves eight
    elements. The probability is rounded to 1/256, and the scale is exact for the rounded one.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.dropped_of_256 = min(round(probability * 256), 255)
        self._generator: torch.Generator | None = None
        self._reused: Tensor | None = None  # the mask drawn from it

    def reuse_masks(self, generator: torch.Generator | None) -> None:
        """Draw one mask from `generator` and use it for every input until this is called again.

        With None every input gets a fresh mask from torch's default generator. A step that is
        computed in microbatches draws its masks once: each sequence still sees a mask of the right
        distribution, so the expected gradient is the same, and sequences of different microbatches
        share theirs. Masks differ between layers.
        """
        self._generator, self._reused = generator, None

    def forward(self, x: Tensor) -> Tensor:
        return x if self.is_identity else x * self._mask(x)

    def add(self, x: Tensor, change: Tensor) -> Tensor:
        """x + Dropout(change), in one pass."""
        return x + change if self.is_identity else torch.addcmul(x, change, self._mask(change))

    @property
    def is_identity(self) -> bool:
        return not self.training or self.dropped_of_256 == 0

    def _mask(self, x: Tensor) -> Tensor:
        """0, or the scale that makes up for the zeros, in the shape of `x`."""
        if self._generator is None:
            return self._draw(x.numel(), x.device, None).view(x.shape)
        if self._reused is None or self._reused.numel() < x.numel():
            self._reused = self._draw(x.numel(), x.device, self._generator)
        return self._reused[: x.numel()].view(x.shape)

    def _draw(self, n: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
        draws = torch.empty((n + 7) // 8, dtype=torch.int64, device=device)
        draws.random_(-(2**63), None, generator=generator)  # all 64 bits, the sign too
        kept = draws.view(torch.uint8)[:n] >= self.dropped_of_256
        return kept.float().mul_(256 / (256 - self.dropped_of_256))
