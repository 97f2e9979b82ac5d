"""Who had what, as the sparse matrix that the `implicit` library learns from.

Only fitting needs `implicit` and scipy, so they are imported here inside the functions: a fitted
model is saved, loaded and asked without them.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np

from bert4rec.data.splits import Spans


def require_implicit(model: str) -> None:
    """A sentence that helps instead of a ModuleNotFoundError."""
    missing = [name for name in ("implicit", "scipy") if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"model.name is {model!r}: fitting it needs {' and '.join(missing)}; "
            "run pip install 'bert4rec[lab]'"
        )


def user_item_matrix(train: Spans, n_items: int) -> Any:
    """(user rows, V) CSR of ones, float32: an item that a user had twice still counts once.

    A user row without a span is an empty row.
    """
    from scipy.sparse import csr_matrix

    items = np.concatenate([train[i] for i in range(len(train))])
    users = np.repeat(train.users, train.lengths)
    shape = (int(train.users.max()) + 1, n_items)
    matrix = csr_matrix((np.ones(len(items), dtype=np.float32), (users, items)), shape=shape)
    matrix.sum_duplicates()  # also sorts the columns of a row, which `implicit` relies on
    matrix.data[:] = 1
    return matrix
