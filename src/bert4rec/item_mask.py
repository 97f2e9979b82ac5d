"""Which items may not be recommended to each history of a batch: seen, blocked, not allowed.

Shapes: B histories, V items, C items of a block, P places to hide, K candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from bert4rec.data.splits import Spans


class _PlacesByItem(NamedTuple):
    """Places in the order of their items: those of a block lie together."""

    rows: Tensor
    items: Tensor

    def in_block(self, first: int, n: int) -> Tensor:
        """Flat places in the (B, n) scores of the items from `first` on."""
        low, high = torch.searchsorted(self.items, torch.tensor([first, first + n])).tolist()
        return self.rows[low:high] * n + (self.items[low:high] - first)


@dataclass(frozen=True)
class ExcludedItems:
    """Items that nobody gets; one object for all batches, so that the rest is listed once."""

    mask: Tensor  # (V,) true for these

    @cached_property
    def remaining(self) -> Tensor:
        return (~self.mask).nonzero()[:, 0]

    @property
    def n(self) -> int:
        return len(self.mask) - len(self.remaining)


@dataclass(frozen=True)
class ItemMask:
    """The same for exact scoring and for an index, so that both hide the same items."""

    n_items: int
    hidden: Tensor  # (P,) flat places `row * n_items + item`
    excluded: ExcludedItems | None = None
    allowed: Mapping[int, Tensor] = field(default_factory=dict)  # row → the only items for it

    @classmethod
    def of_histories(
        cls, histories: Spans, n_items: int, *, exclude_seen: bool, excluded: ExcludedItems | None = None
    ) -> Self:
        """Of whole histories, one per row: all that was seen is hidden, or nothing."""
        if not exclude_seen:
            return cls(n_items, torch.empty(0, dtype=torch.int64), excluded)
        rows = np.repeat(np.arange(len(histories)), histories.lengths)
        return cls(n_items, torch.from_numpy(rows * n_items + histories.items()), excluded)

    def hide(self, scores: Tensor, first: int = 0) -> None:
        """Write -inf over what is masked in (B, C) scores of the items from `first` on."""
        n, flat = scores.shape[1], scores.view(-1)
        if self.allowed:
            places = self._allowed_by_item.in_block(first, n)
            kept = flat[places]
            scores[list(self.allowed)] = -torch.inf
            flat[places] = kept
        if self.excluded is not None:
            scores.masked_fill_(self.excluded.mask[first : first + n], -torch.inf)
        is_whole = n == self.n_items
        places = self.hidden if is_whole else self._hidden_by_item.in_block(first, n)
        flat.index_fill_(0, places, -torch.inf)

    def keeps(self, items: Tensor) -> Tensor:
        """(B, K) candidates, -1 for none → true for those that may be recommended.

        For rows without a list of allowed items.
        """
        rows = torch.arange(len(items))[:, None]
        kept = (items >= 0) & ~torch.isin(rows * self.n_items + items, self.hidden)
        return kept if self.excluded is None else kept & ~self.excluded.mask[items.clamp(min=0)]

    def n_hidden(self, n_rows: int) -> Tensor:
        """(B,) hidden places of each row, without the items that nobody gets."""
        return torch.bincount(self.hidden // self.n_items, minlength=n_rows)

    def of_rows(self, rows: Tensor) -> ItemMask:
        """The mask of some rows, which are renumbered."""
        owners = self.hidden // self.n_items
        new = torch.full((max(int(t.max()) for t in (rows, owners) if len(t)) + 1,), -1)
        new[rows] = torch.arange(len(rows))
        kept = new[owners] >= 0
        hidden = new[owners[kept]] * self.n_items + self.hidden[kept] % self.n_items
        places = {row: place for place, row in enumerate(rows.tolist())}
        allowed = {places[row]: items for row, items in self.allowed.items() if row in places}
        return ItemMask(self.n_items, hidden, self.excluded, allowed)

    def among(self, items: Tensor) -> ItemMask:
        """For a catalogue of `items` alone, ascending, which are renumbered."""
        found = self.hidden % self.n_items
        place = torch.searchsorted(items, found)
        is_there = items[place.clamp(max=len(items) - 1)] == found if len(items) else found < 0
        rows = self.hidden[is_there] // self.n_items
        excluded = None if self.excluded is None else ExcludedItems(self.excluded.mask[items])
        return ItemMask(len(items), rows * len(items) + place[is_there], excluded)

    @cached_property
    def _hidden_by_item(self) -> _PlacesByItem:
        return self._by_item(self.hidden // self.n_items, self.hidden % self.n_items)

    @cached_property
    def _allowed_by_item(self) -> _PlacesByItem:
        rows = [torch.full_like(items, row) for row, items in self.allowed.items()]
        return self._by_item(torch.cat(rows), torch.cat(list(self.allowed.values())))

    @staticmethod
    def _by_item(rows: Tensor, items: Tensor) -> _PlacesByItem:
        items, order = items.sort()
        return _PlacesByItem(rows[order], items)
