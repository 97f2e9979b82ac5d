"""An index of item vectors: lists of items that lie in one direction, of which a few are searched.

It is faiss's IVF by inner product. The output's bias is one more number of an item's vector, and
the query's is 1, so that their product is the whole score. What is stored is plain tables, of which
the index is put together on loading: faiss's own files are not made to be read from strangers.

Shapes: B queries, D width, V items, N lists, K candidates.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bert4rec.models.output import InBlocks

RECALL_AT = 10  # what is measured; for more the searched lists grow with k
AT_ONCE = 2**17  # items that are copied at a time
log = logging.getLogger("bert4rec.retrieval")


@dataclass(frozen=True)
class Measured:
    """How good an index is: recall@10 against exact search, seen items left out."""

    n_lists: int
    n_searched: int  # lists that are searched for 10 items
    target: float  # that `n_searched` was raised for
    recall: float  # on other histories than those that it was raised for
    n_tuned: int
    n_measured: int
    seconds: float  # that building took
    depth: float = RECALL_AT  # on average: 10, and the seen items in front of the last of these


@dataclass(frozen=True)
class Tables:
    """All that has to be stored to get the same index back, for the same output layer."""

    centroids: Tensor  # (N, D + 1) float32
    lists: Tensor  # (V,) int32: whose list an item is in

    def check(self, output: InBlocks) -> None:
        n_lists, width = self.centroids.shape if self.centroids.dim() == 2 else (0, 0)
        is_right = (
            self.lists.shape == (output.n_items,)
            and width == output.block(0, 1)[0].shape[1] + 1
            and (self.centroids.dtype, self.lists.dtype) == (torch.float32, torch.int32)
            and n_lists > 0
            and bool(self.centroids.isfinite().all())
            and int(self.lists.min()) >= 0
            and int(self.lists.max()) < n_lists
        )
        if not is_right:
            raise ValueError("the index does not fit the model: run `bert4rec index` again")


class ItemIndex:
    """Several threads may search at once."""

    def __init__(self, tables: Tables, output: InBlocks, measured: Measured) -> None:
        faiss = faiss_or_error()
        tables.check(output)
        self.tables, self.measured = tables, measured
        centroids = np.ascontiguousarray(tables.centroids.numpy())
        n_lists, width = centroids.shape
        self._quantizer = faiss.IndexFlatIP(width)  # kept: faiss only has a pointer to it
        self._quantizer.add(centroids)
        self._lists = faiss.IndexIVFFlat(
            self._quantizer, width, n_lists, faiss.METRIC_INNER_PRODUCT
        )
        self._lists.is_trained = True
        pointer = faiss.swig_ptr
        for first in range(0, output.n_items, AT_ONCE):
            vectors = with_bias(output, first)
            ids = np.arange(first, first + len(vectors))
            lists = tables.lists[first : first + len(vectors)].numpy().astype(np.int64)
            self._lists.add_core(len(ids), pointer(vectors), pointer(ids), pointer(lists))
        assert self._lists.ntotal == output.n_items

    def n_searched_for(self, k: int) -> int:
        return min(self.measured.n_lists, -(-self.measured.n_searched * k // RECALL_AT))

    def candidates(self, h: Tensor, n: int, n_searched: int) -> Tensor:
        """(B, D) → (B, n) items, best first, -1 where the lists hold no more."""
        faiss = faiss_or_error()
        # Of the calling thread: faiss has threads of its own, which know nothing of torch's share.
        faiss.omp_set_num_threads(torch.get_num_threads())
        parameters = faiss.SearchParametersIVF(nprobe=n_searched)
        queries = torch.nn.functional.pad(h.detach().float().cpu(), (0, 1), value=1.0)
        _, items = self._lists.search(queries.numpy(), n, params=parameters)
        return torch.from_numpy(items)


def with_bias(output: InBlocks, first: int, n: int = AT_ONCE) -> NDArray[np.float32]:
    """(n, D + 1): the vectors of some items, each with its bias as the last number."""
    weight, bias = output.block(first, min(first + n, output.n_items))
    columns = weight.detach(), bias.detach()[:, None]
    made: NDArray[np.float32] = torch.cat(columns, 1).float().cpu().contiguous().numpy()
    return made


def faiss_or_error() -> Any:
    try:
        import faiss
    except ModuleNotFoundError:
        raise ValueError("an index of items needs faiss: pip install 'bert4rec[scale]'") from None
    return faiss


def has_faiss() -> bool:
    try:
        faiss_or_error()
    except ValueError:
        return False
    return True


@functools.cache
def note_missing_faiss() -> None:
    log.warning(
        "this model has an index of its items, and faiss is not installed: answers are searched "
        "for exactly, which takes longer (pip install 'bert4rec[scale]')"
    )
