"""The points that `costs.py` measures, and how each kind is measured, in a process of its own.

    python benchmarks/scale/cost_points.py POINT SECONDS

prints what was measured at a point, which is JSON as `points()` gives it.
"""

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
THREADS = 2
MILLION = 1_000_000
GROUPS = 1000  # directions of the items that an index is built of
REHEARSED = 1.5  # seconds of steps that the rehearsal times for every minute it believes it has
Point = dict[str, Any]


def points() -> Iterator[Point]:
    def training(shapes: list[tuple[int, ...]], loss: str, negatives: int, model: str) -> None:
        for dim, layers, length, items, batch in shapes:
            wanted.append(
                {
                    "kind": "training",
                    "model": model,
                    "dim": dim,
                    "layers": layers,
                    "length": length,
                    "items": items,
                    "batch": batch,
                    "loss": loss,
                    "negatives": negatives,
                }
            )

    wanted: list[Point] = []
    few, some, many = 3_000, 50_000, MILLION
    of_the_layers = [
        (64, 2, 20, few, 64),
        (64, 2, 20, few, 256),
        (64, 2, 50, few, 256),
        (64, 2, 200, few, 64),
        (64, 2, 200, few, 256),
        (64, 1, 50, few, 256),
        (64, 4, 50, few, 256),
        (128, 2, 20, few, 64),
        (128, 2, 50, few, 256),
        (128, 2, 200, few, 64),
        (256, 2, 50, few, 64),
    ]
    of_the_softmax = [
        (64, 2, 20, some, 64),
        (64, 2, 50, some, 256),
        (128, 2, 20, some, 64),
        (64, 2, 20, many, 16),
        (64, 2, 20, many, 64),
        (128, 2, 20, many, 16),
    ]
    of_samples = [
        (64, 2, 20, few, 256),
        (64, 2, 50, some, 256),
        (64, 2, 20, many, 64),
        (64, 2, 50, many, 256),
        (128, 2, 50, many, 256),
        (64, 2, 200, many, 64),
    ]
    training([*of_the_layers, *of_the_softmax], "cross-entropy", 0, "bert4rec")
    training(of_samples, "sampled-softmax", 1024, "bert4rec")
    training([(64, 2, 20, some, 64), (64, 2, 50, many, 256)], "sampled-softmax", 4096, "bert4rec")
    training([(64, 2, 50, few, 256), (128, 2, 200, few, 32)], "cross-entropy", 0, "sasrec")
    training([(64, 2, 50, some, 256)], "sampled-softmax", 1024, "sasrec")
    yield from wanted
    for dim, length, items in (
        (64, 20, few),
        (64, 200, few),
        (128, 50, few),
        (128, 200, few),
        (64, 50, some),
        (128, 200, some),
        (64, 20, many),
        (128, 20, many),
    ):
        yield {"kind": "answers", "dim": dim, "layers": 2, "length": length, "items": items}
    for items in (100_000, 200_000, 400_000):
        yield {"kind": "index", "dim": 64, "items": items}
    for rows in (MILLION, 3 * MILLION, 10 * MILLION):
        yield {"kind": "preparing", "rows": rows}
    for n_bytes in (2**12, 2**22, 2**24, 2**26):
        yield {"kind": "exchange", "bytes": n_bytes}
    yield {"kind": "vocabulary", "items": MILLION}


def settings_of(point: Point) -> list[str]:
    model = [f"model.name={point.get('model', 'bert4rec')}", f"model.dim={point['dim']}"]
    model += [f"model.layers={point['layers']}", f"model.max_len={max(2, point['length'])}"]
    training = ["training.window_step=none", "training.last_item_share=0", "second_stage.epochs=0"]
    training += ["training.next_item_share=0", "model.sees=both-sides"]  # the Cloze task
    if "loss" in point:
        training += [f"training.loss={point['loss']}", f"training.batch_size={point['batch']}"]
        training += [f"training.n_negatives={point['negatives'] or 1024}"]
        training += [f"training.mask_ratio={point.get('mask_ratio', 0.2)}"]
    return [*model, *training, f"training.workers={THREADS}"]


def skewed_tokens(n: int, items: int) -> Any:
    generator = np.random.default_rng(0)
    return np.floor(items * generator.random(n) ** 3).astype(np.int32)


def measure_training(point: Point, seconds: float) -> Point:
    from bert4rec.config import load_config
    from bert4rec.data.splits import Questions, Spans, Split
    from bert4rec.training.plan import plan_memory
    from bert4rec.training.rehearsal import measure_pace

    config = load_config(overrides=settings_of(point))
    users, length = max(1024, 8 * point["batch"]), point["length"]
    extra = 1 if point["model"] == "sasrec" else 0  # its questions are one shorter than the history
    each = length + extra + 1
    tokens = skewed_tokens(users * each, point["items"])
    starts = np.arange(users, dtype=np.int64) * each
    train = Spans(tokens, starts, starts + length + extra, np.arange(users))
    asked = Questions(train, tokens[starts + length + extra].astype(np.int64))
    counts = np.bincount(tokens, minlength=point["items"])
    split = Split(train, asked, asked, point["items"], counts)
    pace = measure_pace(split, config, seconds / REHEARSED)
    n_validated = min(users, config.training.validation_users or users)
    planned = plan_memory(config, point["items"], length).total
    return {
        "seconds": pace.epoch / -(-users // point["batch"]),
        "validation_seconds": pace.validation / n_validated,  # a user
        "peak_mb": peak_megabytes(),
        "planned_mb": planned / 2**20,
    }


def measure_answers(point: Point, seconds: float) -> Point:
    from bert4rec.allocator import keep_freed_memory
    from bert4rec.config import load_config
    from bert4rec.data.sequences import Vocabulary
    from bert4rec.data.splits import Spans
    from bert4rec.models.bert4rec import BERT4Rec
    from bert4rec.recommender import Recommender

    keep_freed_memory()
    config = load_config(overrides=settings_of(point))
    items, length, users = point["items"], point["length"], 2048 if point["items"] < MILLION else 64
    ids = [f"item-{token}" for token in range(items)]
    model = BERT4Rec(items, config.model).eval()
    recommender = Recommender(model, Vocabulary(ids, np.ones(items, np.int64)), config, {})
    tokens = skewed_tokens(users * length, items)
    starts = np.arange(users, dtype=np.int64) * length
    histories = Spans(tokens, starts, starts + length, np.full(users, -1))

    def score_all() -> None:
        for _ in recommender.rank(histories, 10):
            pass

    raw = [[ids[token] for token in histories[row].tolist()] for row in range(64)]
    requests = itertools.cycle(raw)
    scoring = best_of(score_all, seconds=seconds, least=2) / users
    request = best_of(
        lambda: recommender.recommend(next(requests), 10), seconds=seconds / 2, least=10
    )
    return {"scoring_seconds": scoring, "request_seconds": request, "peak_mb": peak_megabytes()}


def best_of(call: Any, *, seconds: float, least: int) -> float:
    """The median of repeated calls, the first of which does not count."""
    call()
    times: list[float] = []
    while sum(times) < seconds or len(times) < least:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return float(np.median(times))


def measure_preparing(point: Point, seconds: float) -> Point:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from prepare_memory import measure as prepare_rows

    with tempfile.TemporaryDirectory() as name:
        answer = prepare_rows(point["rows"], Path(name))
        prepared = sum(file.stat().st_size for file in (Path(name) / "prepared").rglob("*.*"))
        table = (Path(name) / "events.csv").stat().st_size
    return {
        "seconds": answer["seconds"],
        "peak_mb": answer["peak_megabytes"],
        "prepared_bytes_a_row": prepared / point["rows"],
        "table_bytes_a_row": table / point["rows"],
    }


def measure_index(point: Point, seconds: float) -> Point:
    """Of the stated mixture of `retrieval.py`; tuning and measuring its recall included."""
    from retrieval import mixture

    from bert4rec.retrieval.build import build_index

    output, queries = mixture(point["items"], point["dim"], GROUPS)
    started = time.perf_counter()
    build_index(output, queries)
    return {"seconds": time.perf_counter() - started, "peak_mb": peak_megabytes()}


def measure_exchange(point: Point, seconds: float) -> Point:
    import torch
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        given = (point["bytes"], folder)
        torch.multiprocessing.spawn(exchange, given, nprocs=2)  # type: ignore[no-untyped-call]
        return {"seconds": float((Path(folder) / "seconds").read_text())}


def exchange(rank: int, n_bytes: int, folder: str) -> None:
    import torch
    import torch.distributed as distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    numbers, times = torch.ones(n_bytes // 4), []
    for _ in range(25):
        distributed.barrier()
        started = time.perf_counter()
        distributed.all_reduce(numbers)
        times.append(time.perf_counter() - started)
    if rank == 0:
        (Path(folder) / "seconds").write_text(str(np.median(times[5:])))
    distributed.destroy_process_group()


def measure_vocabulary(point: Point, seconds: float) -> Point:
    """What the ids of the items take in a process, the way back from id to token included."""
    from bert4rec.data.sequences import Vocabulary

    before = status_megabytes("VmRSS")
    ids = [f"item-{token}" for token in range(point["items"])]
    vocabulary = Vocabulary(ids, np.ones(point["items"], np.int64))
    del ids
    vocabulary.token("item-1")
    return {"bytes_an_item": (status_megabytes("VmRSS") - before) * 2**20 / point["items"]}


def peak_megabytes() -> float:
    return status_megabytes("VmHWM")


def status_megabytes(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) / 1024


MEASURES: dict[str, Callable[[Point, float], Point]] = {
    "training": measure_training,
    "answers": measure_answers,
    "index": measure_index,
    "preparing": measure_preparing,
    "exchange": measure_exchange,
    "vocabulary": measure_vocabulary,
}

if __name__ == "__main__":
    asked, seconds = json.loads(sys.argv[1]), float(sys.argv[2])
    print(json.dumps(MEASURES[asked["kind"]](asked, seconds)))
