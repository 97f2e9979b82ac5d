"""Attention of many queries in one pass, each of which sees its own prefix and itself.

Query i stands right after item i. It sees the items 0..i, which all queries share, and itself,
which no other query sees. A mask over items and queries together would compute mostly what it
hides. Here a fused causal kernel attends to the items; the query's own key and value are then
added to its softmax through the kernel's logsumexp. The kernel's backward pass is exact for the
joint softmax when it is given the joint output and the joint logsumexp.

Shapes: B batch, H heads, L length, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
