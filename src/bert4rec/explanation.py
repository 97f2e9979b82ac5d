"""Why an item is recommended: what each item of the history adds, and where attention went."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bert4rec.data.sequences import Vocabulary
from bert4rec.models import Model
from bert4rec.models.bert4rec import BERT4Rec
from bert4rec.models.transformer import Block, causal_mask
from bert4rec.scoring import log_probabilities_of, part_read


@dataclass(frozen=True)
class Influence:
    item: str | int
    title: str | None
    influence: float  # log-probability of the explained item with this one, minus without it


@dataclass(frozen=True)
class Explanation:
    item: str | int
    title: str | None
    probability: float
    influences: list[Influence]  # in the order of the history
    attention: Tensor | None  # (layers, heads, n, n) over the influences' items and [MASK], if any


def explain_items(
    model: Model,
    fallback: Model,
    vocabulary: Vocabulary,
    history: Sequence[int],
    items: list[int],
    *,
    with_attention: bool,
) -> list[Explanation]:
    """What each history item adds to each of `items`, by leaving it out; all are tokens."""
    read = part_read(list(history), model)
    without_each = [read[:i] + read[i + 1 :] for i in range(len(read))]
    log_p = log_probabilities_of(model, fallback, [read, *without_each], items)
    gained = (log_p[:1] - log_p[1:]).T.tolist()  # (items, read)
    attention = None
    if with_attention and isinstance(model, BERT4Rec):
        attention = attention_weights(model, torch.tensor([read]))[:, 0]
    named = [(vocabulary.raw(token), vocabulary.title(token)) for token in read]
    return [
        Explanation(
            vocabulary.raw(token),
            vocabulary.title(token),
            math.exp(log_probability),
            [Influence(*name, gain) for name, gain in zip(named, gains, strict=True)],
            attention,
        )
        for token, log_probability, gains in zip(items, log_p[0].tolist(), gained, strict=True)
    ]


@torch.inference_mode()
def attention_weights(model: BERT4Rec, histories: Tensor) -> Tensor:
    """(B, L) histories without padding → (layers, B, heads, L + 1, L + 1), `[MASK]` last."""
    model.end_training()
    tokens, _ = model.next_item_query(histories)
    visible = causal_mask(tokens) if model.is_causal else None
    x, weights = model.embed(tokens), []
    for block in model.blocks:
        assert isinstance(block, Block)
        weights.append(block.attention.weights(x, visible))
        x = block(x, visible)
    return torch.stack(weights)
