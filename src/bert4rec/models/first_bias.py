"""Where the bias of the items' scores starts: `model.bias_init`.

A bias that starts at zero moves by the learning rate a step, and takes thousands of steps to where
popularity would have it. Until then the item vectors tell what is popular: those of popular items
all turn to where every answer points and, being the input's, too, no longer tell items apart. So
training stands still at popularity for long. With `popularity` it begins there.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BiasInit = Literal["popularity", "zero"]
AT_LEAST = 1  # is added to every count: what nobody had is unlikely, not impossible


def first_bias(init: BiasInit, counts: NDArray[np.int64]) -> Tensor:
    """(V,) how often each item occurs in training → (V,)."""
    if init == "zero":
        return torch.zeros(len(counts))
    logarithms = torch.as_tensor(counts, dtype=torch.float32).add(AT_LEAST).log()
    return logarithms - logarithms.mean()
