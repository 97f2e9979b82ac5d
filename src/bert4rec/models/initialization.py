"""What the weights of BERT4Rec are before training.

`paper` draws all of them from a truncated normal of 0.02. At widths such as 64 so little of the
items then passes attention and head that training stays at popularity for a long time.

`identity` starts attention's values, its output and the head as the identity, and `[MASK]` and
positions at zero: the output for a `[MASK]` begins as the mean of the item embeddings that it is
compared with. The network is the paper's in both.

An output bias that starts at zero moves by the learning rate per step, and takes thousands of steps
to where popularity would have it. Until then the item embeddings have to express popularity: those
of popular items all turn in one direction and, being tied to the input, no longer tell items apart.
With `output_bias = "popularity"` the bias begins there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bert4rec.models.transformer import Block

if TYPE_CHECKING:
    from bert4rec.models.bert4rec import BERT4Rec

LINEAR_PART_OF_GELU = 3.0  # GELU(x + 3) is x + 3 to within .05 for all x > -1
SMOOTHING = 1  # is added to every count: an item that nobody had is unlikely, not impossible


def truncated_normal(module: nn.Module) -> None:
    """0.02 for weights, zero for biases, as in the paper of BERT4Rec."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.trunc_normal_(module.weight, std=0.02, a=-0.04, b=0.04)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


@torch.no_grad()
def identity(model: BERT4Rec) -> None:
    dim = model.head.in_features
    for block in model.blocks:
        assert isinstance(block, Block)
        nn.init.eye_(block.attention.query_key_value.weight[2 * dim :])
        nn.init.eye_(block.attention.output.weight)
    nn.init.eye_(model.head.weight)
    nn.init.constant_(model.head.bias, LINEAR_PART_OF_GELU)  # the head's norm takes it off again
    model.items.weight[model.mask].zero_()
    if model.positions is not None:
        nn.init.zeros_(model.positions.weight)


def popularity_bias(train_counts: NDArray[np.int64]) -> Tensor:
    """(V,) how often each item occurs in training → (V,) log popularity around zero."""
    logarithms = torch.as_tensor(train_counts, dtype=torch.float32).add(SMOOTHING).log()
    return logarithms - logarithms.mean()
