"""A smaller copy of a trained model, and what the smaller size costs in quality.

The item embeddings are quantized after training (`models/quantized_embedding.py`). Both models are
evaluated on the validation items in the same way, so that the choice between two codes never looks
at the test items.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from bert4rec.data.sequences import Sequences
from bert4rec.data.splits import HeldOut, Split
from bert4rec.durable import MANIFEST, sha256
from bert4rec.evaluation.compare import Comparison, compare
from bert4rec.evaluation.evaluate import evaluate
from bert4rec.models.output import DotProduct, QuantizedDotProduct
from bert4rec.models.quantized_embedding import (
    N_CENTROIDS,
    ProductQuantizedEmbedding,
    QuantizedEmbedding,
    int8_embedding,
)
from bert4rec.models.sequence_model import SequenceModel
from bert4rec.pipeline import evaluate_held_out, save_evaluation, split_of
from bert4rec.recommender import Recommender
from bert4rec.retrieval.item_index import faiss_or_error

Code = Literal["int8", "pq"]
MEASURED = ("HR@10", "NDCG@10", "MRR")
NUMBERS_PER_BYTE = 2  # of product quantization; twice as many lose much more
SAMPLE_SEED = 0


@dataclass(frozen=True)
class Compressed:
    recommender: Recommender
    validation: Comparison  # a is the model as it was, b the compressed one
    n_bytes_before: int  # of model.safetensors
    n_bytes: int


def compress(
    model: str | Path,
    out: str | Path,
    sequences: Sequences,
    *,
    code: Code = "int8",
    numbers_per_byte: int = NUMBERS_PER_BYTE,
    n_users: int | None = None,
    overwrite: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Compressed:
    """Write a whole model directory with quantized item embeddings, and measure what they cost.

    `sequences` are the training data. `n_users` draws so many held-out users at random; by default
    all of them are evaluated.
    """
    model, out = Path(model), Path(out)
    _check_directory(model, out, overwrite)
    if n_users is not None and n_users < 1:
        raise ValueError(f"n_users is {n_users}: evaluate one or more")
    before = Recommender.load(model, retrieval="exact")  # an index is not compared
    split = split_of(before, sequences)
    after = quantize(before, code, numbers_per_byte)
    validation, test_users = (each.sample(n_users or len(each), SAMPLE_SEED) for each in (split.validation, split.test))
    difference = _difference(before, after, validation, split, sequences, on_progress)
    test = evaluate_held_out(after.model, test_users, split, before.config, on_progress)
    facts = asdict(difference)
    after.about["compression"] |= {
        "of": sha256(model / MANIFEST),
        "validation": {name: facts[name] for name in ("n_users", "n_boot", "seed", "differences")},
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / MANIFEST).unlink(missing_ok=True)  # what was here before is replaced from now on
    save_evaluation(test, sequences, out)
    after.save(out)
    sizes = ((each / "model.safetensors").stat().st_size for each in (model, out))
    named = replace(difference, run_a=model, run_b=out)
    return Compressed(after, named, *sizes)


def quantize(recommender: Recommender, code: Code = "int8", numbers_per_byte: int = NUMBERS_PER_BYTE) -> Recommender:
    """The same recommender with quantized item embeddings; the given one stays as it is."""
    if code not in get_args(Code):
        raise ValueError(f"item vectors as {code!r}: choose one of {', '.join(get_args(Code))}")
    model, config = recommender.model, recommender.config
    output = model.output_layer()
    if isinstance(output, QuantizedDotProduct):
        raise ValueError("this model is compressed already: compress the one that it was made of")
    if not isinstance(model, SequenceModel) or not isinstance(output, DotProduct):
        raise ValueError(
            f"{config.model.name} cannot be compressed: its scores are not products with item "
            "embeddings that were trained; bert4rec, sasrec, gru4rec and most other models can"
        )
    tensors = {name: tensor.clone() for name, tensor in model.state().items()}
    facts: dict[str, Any] = {"item_vectors": code, "n_bytes_before": 0, "n_bytes": 0}
    for name, embedding in model.item_embeddings().items():
        weight = embedding.weight.detach().cpu()
        quantized: QuantizedEmbedding
        if code == "int8":
            quantized = int8_embedding(weight, model.n_items)
        else:
            quantized = _product_quantized(weight, model.n_items, numbers_per_byte)
        del tensors[f"{name}.weight"]
        parts = {f"{name}.{part}": tensor for part, tensor in quantized.state_dict().items()}
        tensors |= parts
        facts["n_bytes_before"] += embedding.weight.nbytes
        facts["n_bytes"] += sum(tensor.nbytes for tensor in parts.values())
    if code == "pq":
        facts["numbers_per_byte"] = numbers_per_byte
    small = type(model).restore(tensors, config.model, model.n_items)
    about = recommender.about | {"compression": facts}
    return Recommender(small, recommender.vocabulary, config, about)


def _product_quantized(weight: torch.Tensor, n_items: int, numbers_per_byte: int) -> ProductQuantizedEmbedding:
    """(≥V, D) vectors by faiss's k-means for each part of them; the rows behind V stay exact."""
    dim = weight.shape[1]
    if numbers_per_byte < 1 or dim % numbers_per_byte:
        divisors = [n for n in range(1, dim + 1) if dim % n == 0]
        raise ValueError(
            f"numbers per byte is {numbers_per_byte}, and the item embeddings are {dim} wide: "
            f"choose one of {', '.join(map(str, divisors))}"
        )
    if n_items < N_CENTROIDS:
        raise ValueError(
            f"product quantization needs {N_CENTROIDS} items or more, and the model has {n_items}: use int8"
        )
    faiss = faiss_or_error("product quantization, unlike int8,")
    quantizer = faiss.ProductQuantizer(dim, dim // numbers_per_byte, 8)
    quantizer.cp.min_points_per_centroid = 1  # few items are no reason for a line on stderr
    items = weight[:n_items].contiguous().numpy()
    quantizer.train(items)
    codes = torch.from_numpy(quantizer.compute_codes(items))
    centroids = torch.from_numpy(faiss.vector_to_array(quantizer.centroids))
    shape = dim // numbers_per_byte, N_CENTROIDS, numbers_per_byte
    return ProductQuantizedEmbedding(codes, centroids.view(shape), weight[n_items:].clone())


def _difference(
    before: Recommender,
    after: Recommender,
    held_out: HeldOut,
    split: Split,
    sequences: Sequences,
    on_progress: Callable[[int, int], None] | None,
) -> Comparison:
    """after - before on the same held-out users, paired, over all items."""
    with tempfile.TemporaryDirectory() as folder:
        places = Path(folder) / "before", Path(folder) / "after"
        for recommender, place in zip((before, after), places, strict=True):
            evaluation = evaluate(
                recommender.model,
                held_out,
                train_counts=split.train_counts,
                exclude_seen=before.config.evaluation.exclude_seen,
                protocols=("full",),
                bootstrap=0,
                n_workers=before.config.training.workers,
                progress=on_progress,
            )
            save_evaluation(evaluation, sequences, place)
        return compare(*places, MEASURED)


def _check_directory(model: Path, out: Path, overwrite: bool) -> None:
    if out.resolve() == model.resolve():
        raise ValueError(f"--out is {out}, the model itself: name another directory")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: name a directory")
    if out.exists() and any(out.iterdir()):
        if not (out / MANIFEST).exists():
            raise ValueError(f"{out} holds something else than a model: name another directory")
        if not overwrite:
            raise ValueError(f"{out} holds a model: name another directory, or pass --overwrite")
