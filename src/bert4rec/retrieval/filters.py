"""What may not be answered to each history of a batch: seen, blocked, not allowed.

Shapes: B histories, V items, C items of a block, P places to leave out, K candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class _ByItem(NamedTuple):
    """Places in the order of their items: those of a block lie together."""

    rows: Tensor
    items: Tensor

    def in_block(self, first: int, n: int) -> Tensor:
        """Flat places in the (B, n) scores of the items from `first` on."""
        low, high = torch.searchsorted(self.items, torch.tensor([first, first + n])).tolist()
        return self.rows[low:high] * n + (self.items[low:high] - first)


@dataclass(frozen=True)
class Excluded:
    """Items that nobody gets; one for all batches, so that what remains is listed once."""

    mask: Tensor  # (V,) true for these

    @cached_property
    def remaining(self) -> Tensor:
        return (~self.mask).nonzero()[:, 0]

    @property
    def n(self) -> int:
        return len(self.mask) - len(self.remaining)


@dataclass(frozen=True)
class Filters:
    """The same for an exact search and for an index, so that both exclude the same items."""

    n_items: int
    left_out: Tensor  # (P,) flat places `row * n_items + item`
    excluded: Excluded | None = None
    allowed: Mapping[int, Tensor] = field(default_factory=dict)  # row → items that alone remain

    def hide(self, scores: Tensor, first: int) -> None:
        """Write -inf over what is not to be found in (B, C) scores of the items from `first` on."""
        n, flat = scores.shape[1], scores.view(-1)
        if self.allowed:
            places = self._allowed_by_item.in_block(first, n)
            remaining = flat[places]
            scores[list(self.allowed)] = -torch.inf
            flat[places] = remaining
        if self.excluded is not None:
            scores.masked_fill_(self.excluded.mask[first : first + n], -torch.inf)
        is_whole = n == self.n_items
        places = self.left_out if is_whole else self._left_out_by_item.in_block(first, n)
        flat.index_fill_(0, places, -torch.inf)

    def keeps(self, items: Tensor) -> Tensor:
        """(B, K) candidates, -1 for none → true for those that may be answered.

        For rows without a list of allowed items.
        """
        rows = torch.arange(len(items))[:, None]
        kept = (items >= 0) & ~torch.isin(rows * self.n_items + items, self.left_out)
        return kept if self.excluded is None else kept & ~self.excluded.mask[items.clamp(min=0)]

    def n_left_out(self, n_rows: int) -> Tensor:
        """(B,) places of each row, without the items that nobody gets."""
        return torch.bincount(self.left_out // self.n_items, minlength=n_rows)

    def of_rows(self, rows: Tensor) -> Filters:
        """The filters of some rows, which are numbered anew."""
        owners = self.left_out // self.n_items
        new = torch.full((max(int(t.max()) for t in (rows, owners) if len(t)) + 1,), -1)
        new[rows] = torch.arange(len(rows))
        kept = new[owners] >= 0
        left_out = new[owners[kept]] * self.n_items + self.left_out[kept] % self.n_items
        places = {row: place for place, row in enumerate(rows.tolist())}
        allowed = {places[row]: items for row, items in self.allowed.items() if row in places}
        return Filters(self.n_items, left_out, self.excluded, allowed)

    def among(self, items: Tensor) -> Filters:
        """For a catalogue of `items` alone, ascending, which are numbered anew."""
        found = self.left_out % self.n_items
        place = torch.searchsorted(items, found)
        is_there = items[place.clamp(max=len(items) - 1)] == found if len(items) else found < 0
        rows = self.left_out[is_there] // self.n_items
        excluded = None if self.excluded is None else Excluded(self.excluded.mask[items])
        return Filters(len(items), rows * len(items) + place[is_there], excluded)

    @cached_property
    def _left_out_by_item(self) -> _ByItem:
        return self._by_item(self.left_out // self.n_items, self.left_out % self.n_items)

    @cached_property
    def _allowed_by_item(self) -> _ByItem:
        rows = [torch.full_like(items, row) for row, items in self.allowed.items()]
        return self._by_item(torch.cat(rows), torch.cat(list(self.allowed.values())))

    @staticmethod
    def _by_item(rows: Tensor, items: Tensor) -> _ByItem:
        items, order = items.sort()
        return _ByItem(rows[order], items)
