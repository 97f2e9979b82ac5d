"""An index of the item embeddings, for quick recommendations from a large catalogue.

It is faiss's IVF by inner product: lists of items that lie in one direction, of which a few are
searched. The output bias is one more number of an item's embedding, and the query has a 1 there, so
that their product is the whole score. What is stored is plain tensors, from which the index is put
together on loading: faiss's own files are not safe to read from untrusted sources.

The index only finds candidates. It never returns a masked item, and never fewer than k while k
remain:

- A list of allowed items is scored itself, without the index.
- Otherwise as many more candidates are fetched as are masked. A row with many more masked items in
  front of its recommendations than the index was tuned with is searched once more, in more lists.
- If fewer than k are found, or so many lists would have to be searched that exact search is as
  fast, the row is searched exactly.
- The scores of what was found are the model's own products, not the index's.

On disk an index is `index-….safetensors` with its tensors and `index-….json` with its recall, beside
the model. Their names follow from their content, and the manifest says which of them count: a new
index is there when the new manifest is, all at once, whoever reads the directory meanwhile.

Shapes: B histories, D width, V items, N lists, K candidates.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, FiniteFloat, TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from bert4rec.cpu_tuning import without_onednn
from bert4rec.durable import MANIFEST, write_file
from bert4rec.item_mask import ItemMask
from bert4rec.models.output import DotProductOutput
from bert4rec.scoring import Block, TopK, items_per_block, score_blocks, top_k
from bert4rec.settings import Count, Positive, Share

RECALL_AT = 10  # the k of the measured recall; for a larger k more lists are searched
AT_ONCE = 2**17  # items that are copied at a time
MOST_FETCHED = 2048  # candidates of a row
MOST_SEARCHED = 1 / 8  # of the lists: beyond it exact search is about as fast
FEW_REMAIN = 1 / 4  # of the catalogue: if no more may be recommended, these alone are scored
DEEP = 2  # times the depth that the index was tuned at: recall is noticeably lower from there on
UNKNOWN = torch.tensor(torch.nan)  # the logsumexp over all items, of which only some were scored
log = logging.getLogger("bert4rec.retrieval")


@dataclass(frozen=True)
class IndexQuality:
    """How good an index is: recall@10 against exact search, seen items masked.

    The limits are checked when it is read.
    """

    n_lists: Positive
    n_searched: Positive  # lists that are searched for 10 items
    target: Share  # the recall that `n_searched` was chosen for
    recall: Share  # on other histories than those that it was chosen on
    n_tuned: Count  # histories
    n_measured: Count
    seconds: FiniteFloat  # that building took
    # On average: 10, and the seen items in front of the last of these.
    depth: Annotated[FiniteFloat, Field(ge=RECALL_AT)] = RECALL_AT


class ItemIndex:
    """Several threads may search at once.

    `centroids` and `lists` are all that has to be saved to get the same index back, for the same
    output layer.
    """

    def __init__(self, centroids: Tensor, lists: Tensor, output: DotProductOutput, quality: IndexQuality) -> None:
        faiss = faiss_or_error()
        _check_fit(centroids, lists, output)
        self.centroids = centroids  # (N, D + 1) float32
        self.lists = lists  # (V,) int32: the list that an item is in
        self.quality = quality
        n_lists, width = centroids.shape
        self._quantizer = faiss.IndexFlatIP(width)  # kept: faiss only has a pointer to it
        self._quantizer.add(np.ascontiguousarray(centroids.numpy()))
        self._ivf = faiss.IndexIVFFlat(self._quantizer, width, n_lists, faiss.METRIC_INNER_PRODUCT)
        self._ivf.is_trained = True
        pointer = faiss.swig_ptr
        for first in range(0, output.n_items, AT_ONCE):
            vectors = with_bias(output, first)
            ids = np.arange(first, first + len(vectors))
            numbers = lists[first : first + len(vectors)].numpy().astype(np.int64)
            self._ivf.add_core(len(ids), pointer(vectors), pointer(ids), pointer(numbers))
        assert self._ivf.ntotal == output.n_items

    @without_onednn()
    @torch.inference_mode()
    def top_k(self, h: Tensor, output: DotProductOutput, mask: ItemMask, k: int) -> TopK:
        """(B, D) → the best `k`; `log_total` is known only where the search was exact."""
        n_rows, k = len(h), min(k, output.n_items)
        best = TopK(
            torch.zeros((n_rows, k), dtype=torch.int64),
            torch.full((n_rows, k), -torch.inf),
            torch.full((n_rows, 1), torch.nan),
        )
        for row, items in mask.allowed.items():
            rows = torch.tensor([row])
            _put(best, rows, _best_among(items, h[rows], output, mask.of_rows(rows), k))
        rows = torch.tensor([row for row in range(n_rows) if row not in mask.allowed], dtype=torch.int64)
        if not len(rows):
            return best
        h = h[rows.to(h.device)]
        mask = mask.of_rows(rows) if mask.allowed else mask
        excluded = mask.excluded
        if excluded is not None and len(excluded.remaining) <= FEW_REMAIN * output.n_items:
            _put(best, rows, _best_among(excluded.remaining, h, output, mask, k))
            return best
        is_done = self._search(h, output, mask, best, rows)
        rest = (~is_done).nonzero()[:, 0]
        if len(rest):
            blocks = score_blocks(output, h[rest.to(h.device)], k)
            _put(best, rows[rest], top_k(blocks, mask.of_rows(rest), k))
        return best

    def _search(self, h: Tensor, output: DotProductOutput, mask: ItemMask, best: TopK, rows: Tensor) -> Tensor:
        """Put what the lists hold into `rows` of `best`; (B,) false where it is not good enough."""
        k = best.items.shape[1]
        n_excluded = 0 if mask.excluded is None else mask.excluded.n
        share = 1 - n_excluded / output.n_items
        most = int(MOST_SEARCHED * self.quality.n_lists)
        n_searched = min(self.quality.n_lists, -(-self.quality.n_searched * int(k / share) // RECALL_AT))
        if n_searched > most:
            return torch.zeros(len(h), dtype=torch.bool)
        n_hidden = mask.n_hidden(len(h))
        found, is_enough, depth = self.search_lists(h, output, mask, k, n_searched)
        _put(best, rows, found)
        is_deep = depth > DEEP * self.quality.depth * k / RECALL_AT / share
        is_done = is_enough & ~is_deep
        # Twice the depth, as the first search has missed some of the items in front, too.
        depth = torch.minimum(2 * depth, k + n_hidden + n_excluded)
        n_searched_deep = depth * self.quality.n_searched / RECALL_AT
        deep = (is_enough & is_deep & (n_searched_deep <= most)).nonzero()[:, 0]
        if len(deep):
            n_searched = int(n_searched_deep[deep].max().ceil())
            h, mask = h[deep.to(h.device)], mask.of_rows(deep)
            found, is_done[deep], _ = self.search_lists(h, output, mask, k, n_searched)
            _put(best, rows[deep], found)
        return is_done

    def search_lists(
        self, h: Tensor, output: DotProductOutput, mask: ItemMask, k: int, n_searched: int
    ) -> tuple[TopK, Tensor, Tensor]:
        """The best of some lists; (B,) whether they held k; (B,) how deep the last of these lies.

        The depth is k, and one more for each masked item in front.
        """
        # The masked items may be just the best ones, of this row or of all.
        n_masked = int(mask.n_hidden(len(h)).max()) + (0 if mask.excluded is None else mask.excluded.n)
        n_fetched = min(max(k, MOST_FETCHED), k + n_masked, output.n_items)
        found = self.candidates(h, n_fetched, n_searched)
        kept = mask.keeps(found)
        n_kept = kept.cumsum(1)
        depth = k + (~kept & (n_kept < k)).sum(1)
        first = (~kept).to(torch.int8).argsort(dim=1, stable=True)[:, :k]  # kept ones, best first
        items, is_kept = found.gather(1, first), kept.gather(1, first)
        scores = output.scores(h, items.clamp(min=0).to(h.device)).cpu()
        scores, order = scores.masked_fill(~is_kept, -torch.inf).sort(dim=1, descending=True)
        return TopK(items.gather(1, order), scores, UNKNOWN), n_kept[:, -1] >= k, depth

    def candidates(self, h: Tensor, n: int, n_searched: int) -> Tensor:
        """(B, D) → (B, n) items, best first, -1 where the lists hold no more."""
        faiss = faiss_or_error()
        # faiss has threads of its own: as many as torch has in the calling thread.
        faiss.omp_set_num_threads(torch.get_num_threads())
        parameters = faiss.SearchParametersIVF(nprobe=n_searched)
        queries = torch.nn.functional.pad(h.detach().float().cpu(), (0, 1), value=1.0)
        _, items = self._ivf.search(queries.numpy(), n, params=parameters)
        return torch.from_numpy(items)


def _check_fit(centroids: Tensor, lists: Tensor, output: DotProductOutput) -> None:
    width = output.block(0, 1)[0].shape[1] + 1
    is_right = (
        (centroids.dtype, centroids.shape[1:]) == (torch.float32, (width,))
        and (lists.dtype, lists.shape) == (torch.int32, (output.n_items,))
        and bool(centroids.isfinite().all())
        and 0 <= int(lists.min()) <= int(lists.max()) < len(centroids)
    )
    if not is_right:
        raise ValueError("the index does not fit the model: run `bert4rec index` again")


def with_bias(output: DotProductOutput, first: int, n: int = AT_ONCE) -> NDArray[np.float32]:
    """(n, D + 1): the vectors of some items, each with its bias as the last number."""
    weight, bias = output.block(first, min(first + n, output.n_items))
    columns = weight.detach(), bias.detach()[:, None]
    made: NDArray[np.float32] = torch.cat(columns, 1).float().cpu().contiguous().numpy()
    return made


def has_faiss() -> bool:
    return importlib.util.find_spec("faiss") is not None


def faiss_or_error(purpose: str = "an index of items") -> Any:
    if not has_faiss():
        raise ValueError(f"faiss is not installed, and {purpose} needs it: pip install 'bert4rec[scale]'")
    import faiss

    return faiss


@functools.cache
def note_missing_faiss() -> None:
    log.warning(
        "this model has an index of its items, and faiss is not installed: every search is exact, "
        "which takes longer (pip install 'bert4rec[scale]')"
    )


def _best_among(items: Tensor, h: Tensor, output: DotProductOutput, mask: ItemMask, k: int) -> TopK:
    """The best of these items alone, each scored exactly."""
    items = torch.unique(items)
    if not len(items):
        nothing = torch.empty((len(h), 0))
        return TopK(nothing.long(), nothing, UNKNOWN)
    found = top_k(_blocks_of(items, h, output, k), mask.among(items), k)
    return TopK(items[found.items], found.scores, UNKNOWN)


def _blocks_of(items: Tensor, h: Tensor, output: DotProductOutput, k: int) -> Iterator[Block]:
    """The scores of these items alone."""
    first = 0
    for some in torch.split(items, items_per_block(len(h), k)):
        yield first, output.scores(h, some[None].to(h.device)).cpu()
        first += len(some)


def _put(best: TopK, rows: Tensor, found: TopK) -> None:
    n = found.items.shape[1]
    best.items[rows, :n], best.scores[rows, :n] = found.items, found.scores
    best.log_total[rows] = found.log_total


FORMAT_VERSION = 1


def write_index(directory: Path, index: ItemIndex) -> tuple[str, str]:
    """The names of the two files, for the manifest."""
    tensors = save({"centroids": index.centroids, "lists": index.lists})
    facts = {"format_version": FORMAT_VERSION, "kind": "ivf"} | asdict(index.quality)
    text = json.dumps(facts, indent=2)
    name = f"index-{hashlib.sha256(tensors + text.encode()).hexdigest()[:12]}"
    write_file(directory / f"{name}.safetensors", tensors)
    write_file(directory / f"{name}.json", text)
    return f"{name}.safetensors", f"{name}.json"


def index_name(directory: Path) -> str | None:
    """Of the index that the manifest vouches for, without its endings; None if there is none."""
    manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    names = {Path(name).stem for name in manifest["files"] if name.startswith("index-")}
    return next(iter(names), None)


def read_index(directory: Path, name: str, output: DotProductOutput) -> ItemIndex:
    """From a directory whose manifest was verified."""
    facts_path, tensors_path = directory / f"{name}.json", directory / f"{name}.safetensors"
    facts = json.loads(facts_path.read_text(encoding="utf-8"))
    if (facts.pop("format_version", None), facts.pop("kind", None)) != (FORMAT_VERSION, "ivf"):
        raise ValueError(f"{facts_path} is of another version of bert4rec: run `bert4rec index` again")
    try:
        tensors = load(tensors_path.read_bytes())
    except SafetensorError as error:
        raise ValueError(f"{tensors_path} is damaged: it is not a safetensors file ({error})") from None
    centroids, lists = (tensors.get(name, torch.empty(0)) for name in ("centroids", "lists"))
    try:
        quality = TypeAdapter(IndexQuality).validate_python(facts)
        if not quality.n_searched <= quality.n_lists == len(centroids):
            raise ValueError
    except ValueError:
        raise ValueError(f"{facts_path} is damaged: it says what no index can be; run `bert4rec index` again") from None
    return ItemIndex(centroids, lists, output, quality)


def delete_other_indexes(directory: Path, kept: Iterable[str] = ()) -> None:
    """What an earlier manifest vouched for."""
    for path in directory.glob("index-*"):
        if path.name not in kept and path.suffix in (".json", ".safetensors"):
            path.unlink(missing_ok=True)
