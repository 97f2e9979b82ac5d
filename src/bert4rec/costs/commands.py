"""What to type: the commands of a plan, in order."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Any

from bert4rec.config import Config
from bert4rec.costs.advice import Advice

TABLE, PREPARED, MODEL, ANSWERS = "clicks.parquet", "data/prepared", "runs/model", "recs"
RENDEZVOUS = "--rdzv-backend c10d --rdzv-endpoint FIRST_MACHINE:29500 --rdzv-id one-run"
RESTARTS = 3
COMPARED = 10_000  # users who are asked what compressing loses
ON_RAY = ("--launcher", "ray", "--ray-address", "auto")


@dataclass(frozen=True)
class Command:
    what: str
    words: str


def commands(advice: Advice, recipe: str, original: Config) -> list[Command]:
    """`original` are the settings of the recipe: only what differs from them is typed."""
    run = advice.run
    settings = [each for pair in _differences(original, run.config) for each in ("--set", pair)]
    if run.layout.world > 1:
        settings += ["--set", f"training.shards={run.layout.world}"]
    if run.is_sharded:
        settings += ["--set", "training.shard_items=true"]
    settings += [] if run.has_baselines else ["--no-baselines"]
    train = ["train", PREPARED, "--out", MODEL]
    train += ["--recipe", recipe] if recipe != "default" else []
    served = f"{MODEL}-int8" if advice.serving.compresses else MODEL
    answers = ["recommend", served, "--users", "all", "--out", f"{ANSWERS}/"]
    n_scoring = run.layout.machines * advice.scoring.processes
    if n_scoring > 1:
        answers += ["--workers", str(n_scoring)]
    if run.layout.machines > 1:
        answers += ON_RAY
    preparing = ["data", "prepare", TABLE, "--out", PREPARED]
    preparing += ["--memory", f"{max(1, round(advice.sorting / 1e9))}GB"]
    if advice.drops_rare:
        preparing += ["--set", "data.min_item_actions=5"]
    found = [
        Command("prepare the table once", _bert4rec(preparing)),
        Command("train", _launched(advice, [*train, *settings])),
    ]
    if run.layout.machines > 1:
        found[1] = Command("train: the same on every machine", found[1].words)
        ray = [*train, *settings, "--processes", str(run.layout.world)]
        ray += ["--threads", str(run.layout.workers), *ON_RAY]
        found.append(Command("or, instead, on a Ray cluster", _bert4rec(ray)))
    if advice.serving.compresses:
        compress = ["compress", MODEL, "--out", served, "--item-vectors", "int8"]
        compress += ["--users", str(COMPARED)]
        found.append(Command("make the item vectors smaller", _bert4rec(compress)))
    return [
        *found,
        Command("score all users", _bert4rec(answers)),
        Command("answer requests", _bert4rec(["serve", served])),
    ]


def _launched(advice: Advice, words: list[str]) -> str:
    """Only several machines need torchrun itself, which gives a process one thread unless told."""
    layout = advice.run.layout
    if layout.world == 1:
        return _bert4rec(words)
    if layout.machines == 1:
        return _bert4rec([*words, "--processes", str(layout.processes)])
    start = f"torchrun --nnodes {layout.machines} --nproc-per-node {layout.processes}"
    threads = ["--threads", str(layout.workers)]
    return f"{start} --max-restarts {RESTARTS} {RENDEZVOUS} -m {_bert4rec([*words, *threads])}"


def _bert4rec(words: list[str]) -> str:
    return shlex.join(["bert4rec", *words])


def _differences(original: Config, chosen: Config) -> list[str]:
    before, after = original.model_dump(), chosen.model_dump()
    return [
        f"{section}.{name}={_written(value)}"
        for section, values in after.items()
        for name, value in values.items()
        if value != before[section][name] and (section, name) != ("training", "workers")
    ]


def _written(value: Any) -> str:
    """As --set reads it: JSON, or a bare word."""
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)
