"""Histories as questions: the last items from position 0 on, and the position that is asked."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def last_items(
    history: Tensor, *, pad: int, n: int, then: int | None = None
) -> tuple[Tensor, Tensor]:
    """(B, L) histories, padded anywhere → tokens, and the flat position of each row's last.

    The last `n` real items of each row stand from position 0 on, and `then`, such as `[MASK]`,
    follows them if given. A row without any holds padding, and is asked at position 0.
    """
    extra = [] if then is None else [then]
    if len(history) == 1:  # the shortest way for one request
        items = [token for token in history[0].tolist() if token != pad]
        row = [*items[max(0, len(items) - n) :], *extra] or [pad]
        tokens = torch.from_numpy(np.array([row]))
        at = torch.tensor([len(row) - 1], device=history.device)
        return tokens.to(history.device), at
    real = history != pad
    lengths = real.sum(1)
    columns = torch.arange(history.shape[1], device=history.device)
    if not bool((real == (columns < lengths[:, None])).all()):  # real items first, in order
        history = history.gather(1, (~real).to(torch.int8).argsort(dim=1, stable=True))
    kept = lengths.clamp(max=n)
    width = max(1, int(kept.max()) + len(extra)) if len(kept) else 1
    columns = torch.arange(width, device=history.device)
    tokens = torch.full((len(history), width), pad, device=history.device)
    if history.shape[1]:
        source = (columns + (lengths - kept)[:, None]).clamp_(max=history.shape[1] - 1)
        tokens = torch.where(columns < kept[:, None], history.gather(1, source), tokens)
    if then is not None:
        tokens.scatter_(1, kept[:, None], then)
    last = (kept + len(extra) - 1).clamp(min=0)
    return tokens, torch.arange(len(history), device=history.device) * width + last
