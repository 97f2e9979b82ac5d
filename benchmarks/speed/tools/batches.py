"""Padded batches for the two peers that are only a network: Hugging Face's BERT and plain torch.

Vectorised, so that making them costs the network nothing; every row is padded to the full length.
Item ids are as in the sequences; `n_items` is the padding and `n_items + 1` the mask.
"""

from collections.abc import Iterator

import numpy as np
from measure import Sequences, users_in_random_order

NOT_ASKED = -100  # what torch's cross entropy leaves out


def pad(rows: list[np.ndarray], width: int, padding: int) -> np.ndarray:
    lengths = np.array([len(row) for row in rows])
    table = np.full((len(rows), width), padding, dtype=np.int64)
    table[np.arange(table.shape[1]) < lengths[:, None]] = np.concatenate(rows)
    return table


def training_batches(
    sequences: Sequences, max_len: int, mask_ratio: float, batch: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Masked tokens and targets, epoch after epoch, each in a new random order."""
    rows = [row[-max_len:] for row in sequences.train()]
    generator = np.random.default_rng(0)
    while True:
        order = generator.permutation(len(rows))
        for start in range(0, len(order), batch):
            tokens = pad([rows[i] for i in order[start : start + batch]], max_len, sequences.n_items)
            asked = generator.random(tokens.shape) < mask_ratio
            asked &= tokens != sequences.n_items
            targets = np.where(asked, tokens, NOT_ASKED)
            yield np.where(asked, sequences.n_items + 1, tokens), targets


def scoring_batches(
    sequences: Sequences, max_len: int, batch: int
) -> Iterator[tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]]:
    """Histories with a mask at the end, where that is, and (row, item) of what was seen."""
    histories = sequences.histories()
    order = users_in_random_order(sequences.n_users)
    for start in range(0, len(order), batch):
        full = [histories[i] for i in order[start : start + batch]]
        rows = [np.append(row[1 - max_len :], sequences.n_items + 1) for row in full]
        last = np.array([len(row) - 1 for row in rows])
        lines = np.repeat(np.arange(len(full)), [len(row) for row in full])
        yield pad(rows, max_len, sequences.n_items), last, (lines, np.concatenate(full))
