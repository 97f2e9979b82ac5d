"""The first weights of `init = "near"`: attention begins with the item before, `[MASK]` unseen.

The first numbers of each head are left free by the items and passed on by nobody. In most of them
positions start as waves (sines and cosines); queries and keys start as the identity there, with the
keys turned on by one place, so that the product is largest for the place before and falls with the
distance. One more number is `[MASK]`'s own: a `[MASK]` tells nothing, and without that number it
would see itself and hardly any item, as nothing but waves is left of it after LayerNorm.

Shapes: H heads, W width of a head, D = H·W, N numbers that positions start with in each head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bert4rec.models.layers import Attention

ITEM_SIZE = 0.02  # what item vectors are drawn with, and what waves are as large as
STRENGTH = 2.0  # of the preference for near places
UNSEEN = 4.0  # what is taken off the score of a `[MASK]`


@dataclass(frozen=True)
class NearStart:
    heads: int
    width: int
    max_len: int

    @property
    def n_of_places(self) -> int:
        """N: about a quarter of a head, in pairs."""
        return max(2, self.width // 8 * 2)

    @property
    def mark(self) -> float:
        """What stands in `[MASK]`'s number, so that it is as long as an item with its waves."""
        return math.sqrt(self.width - self.n_of_places)

    def leave_free(self, vectors: Tensor) -> None:
        """Take from item vectors, (n, D), what is not theirs."""
        vectors.view(-1, self.heads, self.width)[..., : self.n_of_places + 1] = 0

    def mask_vector(self) -> Tensor:
        vector = torch.zeros(self.heads, self.width)
        vector[:, self.n_of_places] = ITEM_SIZE * self.mark
        return vector.flatten()

    def positions(self) -> Tensor:
        """(max_len, D) waves as in Vaswani et al. (2017), the same in every head."""
        turns = torch.arange(self.max_len)[:, None] * self._speeds()
        places = torch.zeros(self.max_len, self.heads, self.width)
        waves = torch.cat([turns.sin(), turns.cos()], 1)
        places[..., : self.n_of_places] = ITEM_SIZE * 2**0.5 * waves[:, None]
        return places.flatten(1)

    def items_only(self) -> Tensor:
        """(D, D) that passes on what is the items'."""
        kept = torch.ones(self.heads, self.width)
        kept[:, : self.n_of_places + 1] = 0
        return kept.flatten().diag()

    def set_attention(self, attention: Attention) -> None:
        n, query_key_value = self.n_of_places, attention.query_key_value
        query, key, value = query_key_value.weight.chunk(3)
        value.copy_(self.items_only())
        asks_for_no_mask = query_key_value.bias.chunk(3)[0].view(self.heads, self.width)
        asks_for_no_mask[:, n] = UNSEEN * self.width**0.5 / self.mark
        for first in range(0, self.heads * self.width, self.width):
            places = slice(first, first + n)
            query[places, places] += STRENGTH * torch.eye(n)
            key[places, places] += self._one_on()
            key[first + n, first + n] -= 1

    def _speeds(self) -> Tensor:
        """(N/2,) by how much each wave turns from place to place: from 1 / max_len to 1."""
        return self.max_len ** torch.linspace(0, -1, self.n_of_places // 2).flip(0)

    def _one_on(self) -> Tensor:
        """(N, N) that makes the waves of the next place out of a place's."""
        sin, cos = self._speeds().sin().diag(), self._speeds().cos().diag()
        return torch.cat([torch.cat([cos, sin], 1), torch.cat([-sin, cos], 1)])
