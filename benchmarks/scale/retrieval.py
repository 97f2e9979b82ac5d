"""How fast are the ten best of a large catalogue found: exactly, and by an index, at what recall?

    python benchmarks/scale/retrieval.py [MODEL] [--items 1000000] [--out FILE.json]

Embeddings and queries are those of a trained model (its validation histories; --data if its data
was moved). Without a model they are a stated mixture: `--groups` directions, items scattered around
them with embeddings of unlike length and a bias, queries scattered around the same directions. Real
catalogues are more orderly than it: on models of Amazon Beauty fewer lists had to be searched.

The index is tuned on half of the queries; recall@10 and speed are of the other half. Both sides
are the program's own search, on --threads cores: exact in blocks with probabilities, and by the
index with the exact scores of what it found. Whole rows is what came before blocks.
"""

import argparse
import json
import platform
import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from bert4rec.data.sources import open_data
from bert4rec.item_mask import ItemMask
from bert4rec.models.output import DotProduct, DotProductOutput
from bert4rec.pipeline import split_of
from bert4rec.recommender import Recommender
from bert4rec.retrieval.index_builder import MOST_QUERIES, RECALL, SearchSample, build_index, encode_sample
from bert4rec.retrieval.item_index import ItemIndex
from bert4rec.scoring import dot_product_of, score_blocks, top_k

K, BATCH, REPEATS = 10, 64, 3
SPREAD, LENGTHS, BIAS = 0.7, 0.25, 0.5  # of the mixture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--data", help="prepared data of the model, if it was moved")
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--groups", type=int, default=2_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--recall", type=float, default=RECALL)
    parser.add_argument("--single", type=int, default=100, help="queries that are searched one by one")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.model is None:
        output, queries = mixture(options.items, options.dim, options.groups)
        source = (
            f"mixture of {options.groups} directions, spread {SPREAD}, lengths lognormal {LENGTHS}, bias normal {BIAS}"
        )
    else:
        output, queries = of_model(options.model, options.data)
        source = str(options.model)
    started = time.perf_counter()
    index = build_index(output, queries, options.recall)
    build_seconds = time.perf_counter() - started
    if index is None:
        raise SystemExit("no index has this recall and is faster than exact search")
    started = time.perf_counter()
    ItemIndex(index.centroids, index.lists, output, index.quality)
    load_seconds = time.perf_counter() - started
    sample = queries.rows(len(queries) // 2, len(queries))
    ways = {
        "whole rows": whole_rows(output),
        "exact": lambda q: top_k(score_blocks(output, q.h, K), q.mask, K),
        "index": lambda q: index.top_k(q.h, output, q.mask, K),
    }
    result = {
        "source": source,
        "n_items": output.n_items,
        "dim": output.block(0, 1)[0].shape[1],
        "threads": options.threads,
        "machine": platform.machine(),
        "torch": str(torch.__version__),
        "index": vars(index.quality),
        "build_seconds": round(build_seconds, 2),
        "load_seconds": round(load_seconds, 2),
        "stored_megabytes": megabytes(index.centroids) + megabytes(index.lists),
        "in_memory_megabytes": round(output.n_items * (4 * index.centroids.shape[1] + 8) / 1e6),
        "queries_per_second": {
            name: {
                "one at a time": rate(way, sample, 1, options.single),
                f"batches of {BATCH}": rate(way, sample, BATCH, min(len(sample), 4 * BATCH)),
            }
            for name, way in ways.items()
        },
        "peak_megabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }
    speeds = result["queries_per_second"]
    result["times_as_fast"] = {how: round(speeds["index"][how] / speeds["exact"][how], 1) for how in speeds["exact"]}
    text = json.dumps(result, indent=2)
    print(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


def mixture(n_items: int, dim: int, n_groups: int) -> tuple[DotProductOutput, SearchSample]:
    generator = np.random.default_rng(0)
    centres = generator.standard_normal((n_groups, dim), dtype=np.float32)

    def around(n: int) -> np.ndarray:
        noise = generator.standard_normal((n, dim), dtype=np.float32)
        return centres[generator.integers(0, n_groups, n)] + SPREAD * noise

    weight = around(n_items)
    weight *= generator.lognormal(0, LENGTHS, (n_items, 1)).astype(np.float32) * 0.15
    bias = BIAS * generator.standard_normal(n_items, dtype=np.float32)
    mask = ItemMask(n_items, torch.empty(0, dtype=torch.int64))
    queries = SearchSample(torch.from_numpy(around(MOST_QUERIES)), mask)
    return DotProduct(torch.from_numpy(weight), torch.from_numpy(bias)), queries


def of_model(directory: Path, data: str | None) -> tuple[DotProductOutput, SearchSample]:
    recommender = Recommender.load(directory, retrieval="exact")
    output = dot_product_of(recommender.model)
    if output is None:
        raise SystemExit(f"{recommender.config.model.name} has no item embeddings to search in")
    split = split_of(recommender, open_data(data or recommender.about["data"]["directory"]))
    return output, encode_sample(recommender.model, split.validation.histories)


def whole_rows(output: DotProductOutput) -> Callable[[SearchSample], object]:
    def search(queries: SearchSample) -> object:
        with torch.inference_mode():
            scores = output.block_scores(queries.h, 0, output.n_items)
            return top_k([(0, scores)], queries.mask, K)

    return search


def rate(way: Callable[[SearchSample], object], sample: SearchSample, size: int, n: int) -> float:
    """Queries per second, the best of some repeats: others may be at work on the machine."""
    n = min(n, len(sample)) // size * size
    batches = [sample.rows(first, first + size) for first in range(0, n, size)]
    way(batches[0])
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for batch in batches:
            way(batch)
        seconds.append(time.perf_counter() - started)
    return round(n / min(seconds), 1)


def megabytes(tensor: torch.Tensor) -> float:
    return round(tensor.numel() * tensor.element_size() / 1e6, 1)


if __name__ == "__main__":
    main()
