"""Quantized item embeddings: a large catalogue in a fraction of the memory.

An embedding is decoded a few rows or a block of rows at a time, never as a whole. It is for scoring
only: codes have no gradient. The rows behind those of the items (PAD, MASK) stay exact, since every
history reads them and they cost nothing.

Shapes: V items, S rows behind them, D width, M vectors, C codes per item.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 4096  # rows decoded at a time: they stay in a core's cache until they are multiplied
FEWEST_COLUMNS = 16  # torch sums up narrower rows one number at a time
MANY_VECTORS = 64  # that are multiplied with decoded blocks in less time than with parts
N_CENTROIDS = 256  # what one byte can name


class QuantizedEmbedding(nn.Module):
    """What a model and its output need of quantized item embeddings."""

    codes: Tensor  # (V, D) or (V, C)
    special: Tensor  # (S, D)

    def __init__(self, codes: Tensor, special: Tensor) -> None:
        super().__init__()
        self.register_buffer("codes", codes)
        self.register_buffer("special", special)
        self.training = False

    @property
    def n_items(self) -> int:
        return len(self.codes)

    @property
    def embedding_dim(self) -> int:
        return self.special.shape[1]

    def replaces(self, n_items: int, shape: tuple[int, ...]) -> bool:
        """Whether it is of so many items, and of this shape with the rows behind them."""
        return (len(self.codes), *self.special.shape) == (n_items, shape[0] - n_items, *shape[1:])

    def forward(self, tokens: Tensor) -> Tensor:
        """Any shape of tokens → (…, D)"""
        flat = tokens.flatten()
        vectors = self.decode(flat.clamp(max=self.n_items - 1))
        if len(self.special):
            behind = flat - self.n_items
            special = self.special.index_select(0, behind.clamp(min=0))
            vectors = torch.where((behind >= 0)[:, None], special, vectors)
        return vectors.view(*tokens.shape, self.embedding_dim)

    def block(self, first: int, last: int) -> Tensor:
        """(last - first, D) vectors of successive items."""
        return self.decode(slice(first, last))

    def decode(self, items: Tensor | slice) -> Tensor:
        """(n,) items → (n, D)"""
        raise NotImplementedError

    def products(self, h: Tensor, first: int, last: int) -> Tensor:
        """(M, D) → (M, last - first), in little more memory than that of the result."""
        raise NotImplementedError

    def train(self, mode: bool = True) -> Self:
        if mode:
            raise ValueError(
                "the item embeddings of this model are quantized and cannot be trained: train the "
                "model that it was made of, and compress the result"
            )
        return super().train(mode)


class Int8Embedding(QuantizedEmbedding):
    """One byte per number: row i is scales_i · codes_i, with codes from -127 to 127."""

    scales: Tensor  # (V,)

    def __init__(self, codes: Tensor, scales: Tensor, special: Tensor) -> None:
        super().__init__(codes, special)
        self.register_buffer("scales", scales)

    def replaces(self, n_items: int, shape: tuple[int, ...]) -> bool:
        is_whole = (self.codes.dtype, self.codes.shape) == (torch.int8, (n_items, *shape[1:]))
        return super().replaces(n_items, shape) and is_whole and self.scales.shape == (n_items,)

    def decode(self, items: Tensor | slice) -> Tensor:
        scales = _rows(self.scales, items)
        return _rows(self.codes, items).to(scales.dtype).mul_(scales[:, None])

    def products(self, h: Tensor, first: int, last: int) -> Tensor:
        out = h.new_empty(len(h), last - first)
        memory = h.new_empty(min(BLOCK, last - first), self.embedding_dim)
        for part, codes in zip(torch.split(out, BLOCK, 1), torch.split(self.codes[first:last], BLOCK), strict=True):
            torch.mm(h, memory[: len(codes)].copy_(codes).T, out=part)
        return out.mul_(self.scales[first:last])


class ProductQuantizedEmbedding(QuantizedEmbedding):
    """Product quantisation: a byte for each part of a vector names one of 256 centroids."""

    centroids: Tensor  # (C, 256, D / C)
    first_row: Tensor  # (C,) of each part's centroids, in a list of them all

    def __init__(self, codes: Tensor, centroids: Tensor, special: Tensor) -> None:
        super().__init__(codes, special)
        self.register_buffer("centroids", centroids)
        first_row = torch.arange(0, codes.shape[1] * N_CENTROIDS, N_CENTROIDS, dtype=torch.int32)
        self.register_buffer("first_row", first_row, persistent=False)

    def replaces(self, n_items: int, shape: tuple[int, ...]) -> bool:
        n_parts, n_each, width = self.centroids.shape
        is_whole = (self.codes.dtype, self.codes.shape) == (torch.uint8, (n_items, n_parts))
        fits = (n_each, n_parts * width) == (N_CENTROIDS, *shape[1:])
        return super().replaces(n_items, shape) and is_whole and fits

    def decode(self, items: Tensor | slice) -> Tensor:
        return self._decoded(_rows(self.codes, items))

    def _decoded(self, codes: Tensor) -> Tensor:  # (n, C) → (n, D)
        parts = self.centroids.flatten(0, 1).index_select(0, self._places(codes).flatten())
        return parts.view(len(codes), self.embedding_dim)

    def _places(self, codes: Tensor) -> Tensor:
        return codes.int() + self.first_row

    def products(self, h: Tensor, first: int, last: int) -> Tensor:
        """Each vector is multiplied with the centroids, once; an item's score is C sums of them.

        Many vectors are worth decoding a block for, which is multiplied faster than parts are
        summed up.
        """
        out = h.new_empty(len(h), last - first)
        blocks = zip(torch.split(out, BLOCK, 1), torch.split(self.codes[first:last], BLOCK), strict=True)
        if len(h) >= MANY_VECTORS:
            for part, codes in blocks:
                torch.mm(h, self._decoded(codes).T, out=part)
            return out
        n_parts, _, width = self.centroids.shape
        wide = F.pad(h, (0, 0, 0, max(0, FEWEST_COLUMNS - len(h))))
        parts = wide.view(len(wide), n_parts, width).permute(1, 2, 0)  # (C, D / C, M)
        of_centroids = (self.centroids @ parts).flatten(0, 1)  # (C · 256, M)
        for part, codes in blocks:
            sums = F.embedding_bag(self._places(codes), of_centroids, mode="sum")  # (block, M)
            part.copy_(sums[:, : len(h)].T)
        return out


def _rows(tensor: Tensor, items: Tensor | slice) -> Tensor:
    """Rows by their numbers are copied several times as fast by `index_select`."""
    return tensor[items] if isinstance(items, slice) else tensor.index_select(0, items)


def int8_embedding(weight: Tensor, n_items: int) -> Int8Embedding:
    """(≥V, D) vectors, each divided by its own largest number; the rows behind V stay exact."""
    items = weight[:n_items]
    codes = torch.empty(items.shape, dtype=torch.int8)
    scales = items.new_empty(n_items)
    for first in range(0, n_items, BLOCK):
        block = slice(first, first + BLOCK)
        scales[block] = items[block].abs().amax(1) / 127
        unit = scales[block].clamp(min=torch.finfo(items.dtype).tiny)[:, None]
        codes[block] = (items[block] / unit).round_()
    return Int8Embedding(codes, scales, weight[n_items:].clone())


def quantized_embeddings(tensors: Mapping[str, Tensor]) -> dict[str, QuantizedEmbedding]:
    """The quantized embeddings among saved tensors, by their names in the model."""
    found: dict[str, QuantizedEmbedding] = {}
    for name in (key.removesuffix(".codes") for key in tensors if key.endswith(".codes")):
        codes, special = tensors[f"{name}.codes"], tensors[f"{name}.special"]
        if f"{name}.scales" in tensors:
            found[name] = Int8Embedding(codes, tensors[f"{name}.scales"], special)
        else:
            found[name] = ProductQuantizedEmbedding(codes, tensors[f"{name}.centroids"], special)
    return found
