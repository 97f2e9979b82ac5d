"""Transformer blocks, faster: fused attention, query positions only, prefixes, one request.

Each function computes what `Block.forward` would at the positions that somebody reads.

Attention to prefixes: query i stands right after item i. It sees the items 0..i, which all queries
share, and itself, which no other query sees. A mask over items and queries together would compute
mostly what it hides. Here a fused causal kernel attends to the items; the query's own key and value are
then added to its softmax through the kernel's logsumexp. The kernel's backward pass is exact for the
joint softmax when it is given the joint output and the joint logsumexp.

Shapes: B batch, L length, D width, H heads, M query positions of a batch, Q of a row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert4rec.models.kernels.byte_dropout import ByteDropout
from bert4rec.models.transformer import Attention, Block, probabilities

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _PrefixAttention(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, q: Tensor, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.5
        out, total = FORWARD(q, keys, values, 0.0, True)
        own = (q * key).sum(-1) * scale
        joint = torch.logaddexp(total, own)
        share = (own - joint).exp()  # of the query's own value
        out = torch.lerp(out, value, share[..., None])
        context.save_for_backward(q, keys, values, key, value, out, joint, share)
        return out

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        (grad,) = grads
        q, keys, values, key, value, out, joint, share = context.saved_tensors
        scale = q.shape[-1] ** -0.5
        grad = grad.contiguous()
        to_q, to_keys, to_values = BACKWARD(grad, q, keys, values, out, joint, 0.0, True)
        to_own = share * (grad * (value - out)).sum(-1) * scale
        to_q = torch.addcmul(to_q, to_own[..., None], key)
        return to_q, to_keys, to_values, to_own[..., None] * q, share[..., None] * grad


def attend_to_prefixes(q: Tensor, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """(B, H, L, D) queries, the items' keys and values, and the queries' own → (B, H, L, D)."""
    if q.device.type == "cpu" and q.dtype == torch.float32:
        mixed: Tensor = _PrefixAttention.apply(q, keys, values, key, value)  # type: ignore[no-untyped-call]
        return mixed
    scale, length = q.shape[-1] ** -0.5, q.shape[-2]
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ keys.transpose(-1, -2) * scale).masked_fill(later, float("-inf"))
    own = (q * key).sum(-1, keepdim=True) * scale
    shares = torch.cat([scores, own], -1).softmax(-1)
    return shares[..., :-1] @ values + shares[..., -1:] * value


class QueryGrid:
    """(M,) flat positions in row order ↔ a grid (B, Q), Q being the most that any row has."""

    def __init__(self, positions: Tensor, n_rows: int, length: int) -> None:
        self.positions, self.n_rows = positions, n_rows
        if n_rows == 1:
            self.width, self.is_full = len(positions), True
            return
        rows = positions // length
        counts = torch.bincount(rows, minlength=n_rows)
        columns = torch.arange(len(positions), device=positions.device)
        columns -= (counts.cumsum(0) - counts)[rows]
        self.width = int(counts.max())
        self.is_full = self.width * n_rows == len(positions)
        self.cells = rows * self.width + columns  # (M,) where each stands in the grid

    def to_grid(self, x: Tensor) -> Tensor:  # (M, D) → (B, Q, D)
        if not self.is_full:
            x = x.new_zeros(self.n_rows * self.width, x.shape[1]).index_copy(0, self.cells, x)
        return x.view(self.n_rows, self.width, -1)

    def from_grid(self, grid: Tensor) -> Tensor:  # (B, Q, D) → (M, D)
        x = grid.flatten(0, 1)
        return x if self.is_full else x.index_select(0, self.cells)


def run_block(block: Block, x: Tensor, visible: Tensor | None) -> Tensor:
    """`block(x, visible)` with a fused attention kernel."""
    needs_gradient = block.training or torch.is_grad_enabled()
    if len(x) == 1 and visible is None and _is_standard(block) and not needs_gradient:
        return _run_single(block, x)
    q, k, v = block.attention.split_heads(block.attention.query_key_value(x), 3)
    return _after_attention(block, x, block.attention.output(_mix(block.attention, q, k, v, visible)))


def run_block_at(block: Block, x: Tensor, visible: Tensor | None, queries: QueryGrid) -> Tensor:
    """`block(x, visible)` at the query positions only → (M, D)."""
    read = x.flatten(0, 1).index_select(0, queries.positions)
    attention = block.attention
    if queries.is_full and queries.width == 1 and attention.dropout.is_identity:
        return _after_attention(block, read, _attend_one_per_row(attention, x, read, visible))
    dim = x.shape[-1]
    weight, bias = attention.query_key_value.weight, attention.query_key_value.bias
    (q,) = attention.split_heads(queries.to_grid(F.linear(read, weight[:dim], bias[:dim])), 1)
    k, v = attention.split_heads(F.linear(x, weight[dim:], bias[dim:]), 2)
    mixed = queries.from_grid(_mix(attention, q, k, v, visible))
    return _after_attention(block, read, attention.output(mixed))


def run_block_on_prefixes(
    block: Block, x: Tensor, masks: Tensor, bias: Tensor | None, *, is_last: bool
) -> tuple[Tensor, Tensor]:
    """(B, L, D) items, and a `[MASK]` after each: the i-th sees the items 0..i and itself.

    `bias` is added to the attention scores between items; None hides all later ones. Nobody reads
    the items of the last block.
    """
    attention = block.attention
    q, k, v = attention.split_heads(attention.query_key_value(x), 3)
    mask_q, mask_k, mask_v = attention.split_heads(attention.query_key_value(masks), 3)
    mixed = attend_to_prefixes(mask_q, k, v, mask_k, mask_v).transpose(1, 2).flatten(2)
    if not is_last:
        seen = F.scaled_dot_product_attention(q, k, v, bias, is_causal=bias is None)
        x = _after_attention(block, x, attention.output(seen.transpose(1, 2).flatten(2)))
    return x, _after_attention(block, masks, attention.output(mixed))


def _after_attention(block: Block, x: Tensor, attended: Tensor) -> Tensor:
    a: Tensor = block.norm_1(_add(block, x, attended, block.dropout_1))
    if block.feed_forward is None:
        return a
    out: Tensor = block.norm_2(_add(block, a, block.feed_forward(a), block.dropout_2))
    return out


def _add(block: Block, x: Tensor, change: Tensor, dropout: ByteDropout) -> Tensor:
    return dropout.add(x, change) if block.has_residual else dropout(change)


def _mix(attention: Attention, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    if attention.dropout.is_identity:
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    else:  # torch's fused kernel has no dropout on a CPU
        mixed = attention.dropout(probabilities(q, k, visible)) @ v
    return mixed.transpose(1, 2).flatten(2)


def _attend_one_per_row(attention: Attention, x: Tensor, read: Tensor, visible: Tensor | None) -> Tensor:
    """Attention of one position per row, (B, D), without the keys and values of all the others.

    q·(W x + b) = (Wᵀq)·x + q·b, where q·b is the same for every x and falls out of the softmax;
    and a mixture of W x + b is W times the mixture of x, plus b. So W meets one vector per row and
    head instead of one per position.
    """
    dim = read.shape[1]
    weight, bias = attention.query_key_value.weight, attention.query_key_value.bias
    _, keys, values = weight.view(3, attention.heads, -1, dim).unbind(0)  # (H, D/H, D)
    q = F.linear(read, weight[:dim], bias[:dim])
    q = q.view(len(read), attention.heads, -1).transpose(0, 1)  # (H, B, D/H)
    wanted = torch.bmm(q, keys).transpose(0, 1)  # (B, H, D)
    scores = torch.bmm(wanted, x.transpose(1, 2)) * q.shape[-1] ** -0.5  # (B, H, L)
    if visible is not None:
        scores = scores.masked_fill(~visible[:, 0], float("-inf"))
    mixture = torch.bmm(scores.softmax(-1), x).transpose(0, 1)  # (H, B, D)
    mixed = torch.bmm(mixture, values.transpose(1, 2)).transpose(0, 1).flatten(1)
    out: Tensor = attention.output(mixed + bias[2 * dim :])
    return out


def _is_standard(block: Block) -> bool:
    norms = block.norm_1, block.norm_2
    has_norms = all(isinstance(norm, nn.LayerNorm) for norm in norms)
    return block.feed_forward is not None and has_norms and block.has_residual


def _run_single(block: Block, x: Tensor) -> Tensor:
    """One history in one call: most of its time goes into calling operations."""
    attention, inner = block.attention, block.feed_forward
    norm_1, norm_2 = block.norm_1, block.norm_2
    assert inner is not None
    assert isinstance(norm_1, nn.LayerNorm)
    assert isinstance(norm_2, nn.LayerNorm)
    return torch._transformer_encoder_layer_fwd(  # what nn.TransformerEncoderLayer calls
        x,
        x.shape[-1],
        attention.heads,
        attention.query_key_value.weight,
        attention.query_key_value.bias,
        attention.output.weight,
        attention.output.bias,
        True,  # GELU
        False,  # the norm comes after
        norm_1.eps,
        norm_1.weight,
        norm_1.bias,
        norm_2.weight,
        norm_2.bias,
        inner.inner.weight,
        inner.inner.bias,
        inner.output.weight,
        inner.output.bias,
    )
