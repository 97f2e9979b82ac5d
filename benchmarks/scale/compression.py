"""What quantized item embeddings save and cost, for trained models on their own data.

    python benchmarks/scale/compression.py runs/demo [MORE ...] [--users 2000] [--synthetic 1000000]

compresses each model as int8 and by product quantization with 1, 2, 4 and 8 numbers per byte, and
writes sizes, memory, latency, and HR@10 and NDCG@10 on the validation items with the paired 95 %
interval of the loss. `--synthetic N` adds the sizes and the latency of an untrained SASRec with N
items, where the embedding is most of the model; quality means nothing there. Each latency and
memory is measured in a process of its own, on one thread.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

RESULT = Path(__file__).resolve().parents[2] / "docs/results/scale/compression.json"
CODES = [("int8", 0), ("pq", 1), ("pq", 2), ("pq", 4), ("pq", 8)]
BATCH, LENGTH, REPEATS = 64, 50, 20
SYNTHETIC_DIM = 64


def answers(directory: str) -> None:
    """In a process of its own: load the model, answer alone and in a batch, print as JSON."""
    import numpy as np
    import torch

    torch.set_num_threads(1)
    from bert4rec.recommender import RecommendationRequest, Recommender

    before = _resident()
    started = time.perf_counter()
    recommender = Recommender.load(directory, "exact")
    seconds_to_load = time.perf_counter() - started
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, len(recommender.vocabulary), (BATCH, LENGTH))
    requests = [RecommendationRequest([recommender.vocabulary.raw(int(token)) for token in row]) for row in tokens]
    recommender.answer_requests(requests)
    after = _resident()
    model = recommender.model.state()
    print(
        json.dumps(
            {
                "seconds_to_load": seconds_to_load,
                "mb_of_tensors": sum(tensor.nbytes for tensor in model.values()) / 1e6,
                "mb_resident_more": (after - before) / 1e6,
                "mb_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
                "ms_single": _milliseconds(lambda: recommender.answer_requests(requests[:1])),
                "ms_batch_of_64": _milliseconds(lambda: recommender.answer_requests(requests)),
            }
        )
    )


def _milliseconds(answer: Any) -> float:
    """The median of some; what else runs on the machine makes single ones longer."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        answer()
        times.append(time.perf_counter() - started)
    return 1000 * sorted(times)[REPEATS // 2]


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measured(directory: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--answers", str(directory)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    files = ("model.safetensors", "items.parquet")
    facts |= {f"mb_{name}": (directory / name).stat().st_size / 1e6 for name in files}
    return facts


def of_trained(directory: Path, n_users: int | None, folder: Path) -> dict[str, Any]:
    from bert4rec.compression import compress
    from bert4rec.data.sequences import Sequences
    from bert4rec.recommender import Recommender

    recommender = Recommender.load(directory)
    sequences = Sequences.load(recommender.about["data"]["directory"])
    config = recommender.config.model
    content: dict[str, Any] = {
        "model": config.name,
        "data": recommender.about["data"]["source"],
        "n_items": len(recommender.vocabulary),
        "dim": config.dim,
        "as_trained": measured(directory),
        "compressed": [],
    }
    show(content["model"], content["as_trained"])
    for code, numbers in CODES:
        if code == "pq" and config.dim % numbers:
            continue
        out = folder / f"{code}-{numbers}"
        made = compress(directory, out, sequences, code=code, numbers_per_byte=numbers or 1, n_users=n_users)
        kept = made.recommender.about["compression"]
        row = {"item_vectors": code, "numbers_per_byte": numbers or 1} | measured(out)
        row["mb_item_vectors_before"] = kept["n_bytes_before"] / 1e6
        row["mb_item_vectors"] = kept["n_bytes"] / 1e6
        row["n_users"] = made.validation.n_users
        row["validation"] = [asdict(each) for each in made.validation.differences]
        content["compressed"].append(row)
        show(content["model"], row)
    return content


def of_synthetic(n_items: int, folder: Path) -> dict[str, Any]:
    """Random embeddings: sizes and times are those of a trained model of this shape."""
    import numpy as np
    import torch

    from bert4rec.compression import quantize
    from bert4rec.config import load_config, resolve
    from bert4rec.data.sequences import Vocabulary
    from bert4rec.models.sasrec import SASRec
    from bert4rec.recommender import Recommender

    torch.manual_seed(0)
    config = resolve(load_config("sasrec+", None, [f"model.dim={SYNTHETIC_DIM}"]), n_items)
    names = [f"item-{token}" for token in range(n_items)]
    vocabulary = Vocabulary(names, np.arange(n_items, 0, -1), None)
    model = SASRec(n_items, config.model).eval()
    recommender = Recommender(model, vocabulary, config, {"data": {"fingerprint": "none"}})
    recommender.save(folder / "as-trained")
    content: dict[str, Any] = {
        "model": "sasrec, untrained",
        "n_items": n_items,
        "dim": SYNTHETIC_DIM,
        "as_trained": measured(folder / "as-trained"),
        "compressed": [],
    }
    show(content["model"], content["as_trained"])
    for code, numbers in (("int8", 1), ("pq", 2), ("pq", 4)):
        started = time.perf_counter()
        small = quantize(recommender, code, numbers)  # type: ignore[arg-type]
        row: dict[str, Any] = {"item_vectors": code, "numbers_per_byte": numbers}
        row["seconds_to_compress"] = time.perf_counter() - started
        kept = small.about["compression"]
        row["mb_item_vectors_before"] = kept["n_bytes_before"] / 1e6
        row["mb_item_vectors"] = kept["n_bytes"] / 1e6
        small.save(folder / code)
        row |= measured(folder / code)
        content["compressed"].append(row)
        show(content["model"], row)
    return content


def show(name: str, row: dict[str, Any]) -> None:
    quality = "".join(
        f"  {each['metric']} {each['a']:.4f} → {each['b']:.4f} ({each['low']:+.4f} to {each['high']:+.4f})"
        for each in row.get("validation", [])
    )
    print(
        f"{name:<18} {row.get('item_vectors', 'as trained'):<10} "
        f"{row.get('numbers_per_byte', ''):>2}  {row['mb_model.safetensors']:8.2f} MB on disk, "
        f"{row['mb_peak']:7.0f} MB peak, {row['ms_single']:7.2f} ms alone, "
        f"{row['ms_batch_of_64']:8.2f} ms for 64{quality}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--users", type=int, help="evaluate at most this many")
    parser.add_argument("--synthetic", type=int, help="an untrained model with this many items")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--answers", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.answers is not None:
        answers(arguments.answers)
        return
    content: dict[str, Any] = {"machine": f"{platform.machine()}, one thread", "models": []}
    for model in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            content["models"].append(of_trained(model, arguments.users, Path(folder)))
    if arguments.synthetic is not None:
        with tempfile.TemporaryDirectory() as folder:
            content["models"].append(of_synthetic(arguments.synthetic, Path(folder)))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(content, indent=2) + "\n")
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
