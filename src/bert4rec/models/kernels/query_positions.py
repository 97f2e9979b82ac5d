"""BERT4Rec at its query positions only: what `forward` computes, without the rest.

Shapes: B batch, L length, D width, M query positions of a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bert4rec.models.kernels.blocks import QueryGrid, run_block, run_block_at, run_block_on_prefixes
from bert4rec.models.transformer import Block, causal_mask

if TYPE_CHECKING:
    from bert4rec.models.bert4rec import BERT4Rec


def encode_queries(model: BERT4Rec, tokens: Tensor, positions: Tensor) -> Tensor:
    """(B, L) tokens, (M,) flat positions in row order → (M, D) output of the head there.

    A causal model is queried at the end of each row.
    """
    x = model.embed(tokens)
    is_real = tokens != model.pad_token
    # Where nothing is padded the mask is left out: attention without one is faster.
    visible = None if bool(is_real.all()) else is_real[:, None, None, :]
    # Padding comes last, so that no item sees it from before.
    between = causal_mask(tokens) if model.is_causal else visible
    *first, last = _blocks(model)
    for block in first:
        x = run_block(block, x, between)
    return model.output_transform(run_block_at(last, x, visible, QueryGrid(positions, *tokens.shape)))


def encode_prefixes(model: BERT4Rec, tokens: Tensor, positions: Tensor) -> Tensor:
    """(M, D) for a `[MASK]` after each of the positions: many prefixes in one pass.

    A `[MASK]` sees the items up to its place and itself. The items of a row up to its first query
    see each other in both directions, as when the model recommends; later ones see those before
    them, or they would tell a query what it is to predict.
    """
    length = tokens.shape[1]
    x, masks = model.item_embedding(tokens), model.item_embedding(torch.full_like(tokens[:1], model.mask_token))
    if model.position_embedding is not None:
        x = x + model.position_embedding.weight[:length]
        masks = masks + model.position_embedding.weight[1 : length + 1]
    x = model.dropout(model.norm(x))
    masks = model.dropout(model.norm(masks).expand_as(x))
    bias = None if model.is_causal else _bidirectional_until(positions, *tokens.shape)
    *first, last = _blocks(model)
    for block in first:
        x, masks = run_block_on_prefixes(block, x, masks, bias, is_last=False)
    _, masks = run_block_on_prefixes(last, x, masks, bias, is_last=True)
    return model.output_transform(masks.flatten(0, 1).index_select(0, positions))


def _bidirectional_until(positions: Tensor, n_rows: int, length: int) -> Tensor | None:
    """(B, 1, L, L) to add to attention scores: up to each row's first query all see all.

    None where every row is queried from its first item on: then nobody sees what comes later.
    """
    first = torch.full((n_rows,), length, device=positions.device)
    first = first.scatter_reduce(0, positions // length, positions % length, "amin")
    if not bool(first.any()):
        return None
    places = torch.arange(length, device=positions.device)
    last_visible = torch.maximum(places, first[:, None])  # (B, L)
    hidden = places > last_visible[:, :, None]
    bias = torch.zeros(hidden.shape, device=positions.device)
    return bias.masked_fill_(hidden, -torch.inf)[:, None]


def _blocks(model: BERT4Rec) -> list[Block]:
    return [block for block in model.blocks if isinstance(block, Block)]
