"""What the weights of BERT4Rec are before training. The network is the paper's in any case.

`paper` draws all weights from a truncated normal of 0.02. At widths such as 64 so little of the
items then passes attention and head that training stays at popularity for a long time.

`local` starts where the output for a `[MASK]` is a mean of the item embeddings that it is compared
with, the item before it having the largest weight:

- Attention's values and output and the head start as the identity.
- The first dimensions of each head are left free by the items and passed on by nobody. Most of them
  hold sinusoidal position encodings (Vaswani et al., 2017). Queries and keys start as the identity
  there, with the keys rotated by one position, so that the product is largest for the position
  before and falls with the distance.
- One more dimension marks `[MASK]`, which starts unseen: without the mark it would attend to itself
  and hardly to any item, as nothing but its position is left of it after LayerNorm.

An output bias that starts at zero moves by the learning rate per step, and takes thousands of steps
to where popularity would have it. Until then the item embeddings have to express popularity: those
of popular items all turn in one direction and, being tied to the input, no longer tell items apart.
With `output_bias = "popularity"` the bias begins there.

Shapes: H heads, W width of a head, D = H·W, N dimensions of the position encoding of a head.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bert4rec.models.transformer import Attention, Block

if TYPE_CHECKING:
    from bert4rec.models.bert4rec import BERT4Rec

SCALE = 0.02  # of item embeddings, and of the position encodings beside them
LINEAR_PART_OF_GELU = 3.0  # GELU(x + 3) is x + 3 to within .05 for all x > -1
LOCALITY = 2.0  # how much attention prefers near positions
MASK_PENALTY = 4.0  # what is taken off the attention score of a `[MASK]`
SMOOTHING = 1  # is added to every count: an item that nobody had is unlikely, not impossible


def init_truncated_normal(module: nn.Module) -> None:
    """0.02 for weights, zero for biases, as in the paper of BERT4Rec."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.trunc_normal_(module.weight, std=SCALE, a=-2 * SCALE, b=2 * SCALE)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


@torch.no_grad()
def init_local(model: BERT4Rec) -> None:
    assert model.position_embedding is not None
    heads, width = model.settings.heads, model.settings.dim // model.settings.heads
    n = encoding_width(width)
    clear_reserved(model.item_embedding.weight, heads)
    mark = math.sqrt(width - n)  # [MASK] is then as long as an item with its position
    mask = torch.zeros(heads, width)
    mask[:, n] = SCALE * mark
    model.item_embedding.weight[model.mask_token] = mask.flatten()
    model.position_embedding.weight.copy_(position_encodings(model.max_len, heads, width))
    for block in model.blocks:
        assert isinstance(block, Block)
        _start_local(block.attention, mark, frequencies(model.max_len, n))
    model.output_projection.weight.copy_(_items_only(heads, width))
    nn.init.constant_(model.output_projection.bias, LINEAR_PART_OF_GELU)  # the head's norm takes it off again


def encoding_width(width: int) -> int:
    """N: about a quarter of a head, in pairs."""
    return max(2, width // 8 * 2)


def clear_reserved(embeddings: Tensor, heads: int) -> None:
    """Zero the dimensions of (n, D) item embeddings that positions and `[MASK]` use."""
    width = embeddings.shape[1] // heads
    embeddings.view(-1, heads, width)[..., : encoding_width(width) + 1] = 0


def frequencies(max_len: int, n: int) -> Tensor:
    """(N / 2,) radians per position: from 1 / max_len to 1."""
    return max_len ** torch.linspace(0, -1, n // 2).flip(0)


def position_encodings(max_len: int, heads: int, width: int) -> Tensor:
    """(max_len, D) sines and cosines, the same in every head."""
    n = encoding_width(width)
    angles = torch.arange(max_len)[:, None] * frequencies(max_len, n)
    encodings = torch.zeros(max_len, heads, width)
    waves = torch.cat([angles.sin(), angles.cos()], 1)
    encodings[..., :n] = SCALE * 2**0.5 * waves[:, None]
    return encodings.flatten(1)


def _items_only(heads: int, width: int) -> Tensor:
    """(D, D) that passes on the dimensions of the items."""
    kept = torch.ones(heads, width)
    kept[:, : encoding_width(width) + 1] = 0
    return kept.flatten().diag()


def _start_local(attention: Attention, mark: float, rotation: Tensor) -> None:
    heads, dim = attention.heads, attention.output.in_features
    width, n = dim // heads, 2 * len(rotation)
    query, key, value = attention.query_key_value.weight.chunk(3)
    value.copy_(_items_only(heads, width))
    nn.init.eye_(attention.output.weight)
    query_bias = attention.query_key_value.bias.chunk(3)[0].view(heads, width)
    query_bias[:, n] = MASK_PENALTY * width**0.5 / mark
    sin, cos = rotation.sin().diag(), rotation.cos().diag()
    next_position = torch.cat([torch.cat([cos, sin], 1), torch.cat([-sin, cos], 1)])  # (N, N)
    for first in range(0, dim, width):
        places = slice(first, first + n)
        query[places, places] += LOCALITY * torch.eye(n)
        key[places, places] += next_position
        key[first + n, first + n] -= 1


def popularity_bias(train_counts: NDArray[np.int64]) -> Tensor:
    """(V,) how often each item occurs in training → (V,) log popularity around zero."""
    logarithms = torch.as_tensor(train_counts, dtype=torch.float32).add(SMOOTHING).log()
    return logarithms - logarithms.mean()
