"""One run of a lab as a process of its own: `python -m bert4rec.lab.one LAB NAME SEED`.

A process a run keeps the measured memory that of the model alone, and a model that dies does not
take the others with it.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bert4rec.config import Config, parse_config
from bert4rec.data.sequences import Sequences
from bert4rec.data.splits import SPLITS, Spans
from bert4rec.durable import MANIFEST, write_file
from bert4rec.lab.contenders import settings_of
from bert4rec.lab.machine import peak_memory_mb
from bert4rec.lab.plan import LAB_FILE, Run, read_json
from bert4rec.models import LEARNED
from bert4rec.pipeline import split_of, train_recommender
from bert4rec.recommender import Recommender
from bert4rec.training.checkpoint import has_checkpoint
from bert4rec.training.loop import Interrupted, stage_names
from bert4rec.training.rehearsal import rehearse

EXIT_INTERRUPTED = 130
SCORED_USERS = 2000  # at most, in the test of speed
SCORING_SECONDS = 2.0
MOST_PASSES = 50  # over those users, where they are few


def run_one(run: Run) -> None:
    """Train (or go on with it), evaluate, measure, and write cost.json."""
    lab, plan = read_json(run.lab / LAB_FILE), read_json(run.contender / "plan.json")
    assert lab is not None
    assert plan is not None
    sequences = _data(lab["data"])
    config = _config(run, sequences, plan)
    if (run.folder / MANIFEST).exists():  # only the measurement is missing
        recommender = Recommender.load(run.folder)
    else:
        recommender = train_recommender(
            sequences, config, run.folder, resume=has_checkpoint(run.folder), baselines=False
        ).recommender
    histories = split_of(recommender, sequences).test.histories
    training = recommender.about["training"]
    cost = {
        "status": "done",
        "error": None,
        "training_seconds": training["seconds"],
        "epochs": _epochs(run),  # None for a model that fits itself
        "stopped_by_clock": _is_stopped_by_clock(run, config, training["seconds"]),
        "budget_minutes": plan["budget_minutes"],
        "n_parameters": training["n_parameters"],
        "scoring_users_per_second": round(scoring_speed(recommender, histories), 1),
        "peak_memory_mb": peak_memory_mb(),
        "title": plan["title"],
        "settings": settings_of(recommender.config),
    }
    write_file(run.folder / "cost.json", json.dumps(cost, indent=2) + "\n")


def scoring_speed(recommender: Recommender, histories: Spans) -> float:
    """Users ranked a second, warm, over all cores: ten items each, seen ones left out."""
    n = min(SCORED_USERS, len(histories))
    sample = histories.take(
        np.sort(np.random.default_rng(0).choice(len(histories), n, replace=False))
    )

    def seconds() -> float:
        started = time.monotonic()
        for _ in recommender.rank(sample):
            pass
        return time.monotonic() - started

    seconds()
    times = [seconds()]
    while sum(times) < SCORING_SECONDS and len(times) < MOST_PASSES:
        times.append(seconds())
    return n * len(times) / sum(times)


def _data(facts: dict[str, Any]) -> Sequences:
    sequences = Sequences.load(facts["directory"])
    if sequences.fingerprint != facts["fingerprint"]:
        raise ValueError(f"the data in {facts['directory']} changed since the lab was begun")
    return sequences


def _config(run: Run, sequences: Sequences, plan: dict[str, Any]) -> Config:
    """The contender's settings with what fits its budget: found out once, for all its seeds."""
    path = run.contender / "epochs.json"
    chosen = read_json(path)
    if chosen is None:
        config = parse_config(plan["config"], str(run.contender / "plan.json"))
        split = SPLITS[config.data.split](sequences)
        rehearsed = rehearse(split, config, plan["budget_minutes"])
        chosen = {
            "config": rehearsed.config.model_dump(mode="json"),
            "expected_seconds": round(rehearsed.seconds, 1),
        }
        write_file(path, json.dumps(chosen, indent=2) + "\n")
    config = parse_config(chosen["config"], str(path))
    seeded = config.training.model_copy(update={"seed": run.seed})
    return config.model_copy(update={"training": seeded})


def _epochs(run: Run) -> int | None:
    """Epochs of all stages together, as far as the log of validations goes."""
    by_stage = _epochs_by_stage(run)
    return sum(by_stage.values()) if by_stage else None


def _is_stopped_by_clock(run: Run, config: Config, seconds: float) -> bool:
    """Did `training.minutes` end it before the last epoch of its last stage?"""
    if config.model.name not in LEARNED or config.training.minutes is None:
        return False
    names = stage_names(config, LEARNED[config.model.name].task)
    stage = names[-1]
    epochs = config.training.epochs if len(names) == 1 else config.second_stage.epochs
    # The time is rounded to a tenth of a second.
    is_out_of_time = seconds + 0.05 >= 60 * config.training.minutes
    return is_out_of_time and _epochs_by_stage(run).get(stage, 0) < epochs


def _epochs_by_stage(run: Run) -> dict[str, int]:
    log = run.folder / "log.jsonl"
    if not log.exists():
        return {}
    events = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return {event["stage"]: int(event["epoch"]) for event in events}


def main() -> None:
    lab, name, seed = sys.argv[1:]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leave no temporary files
    try:
        run_one(Run(Path(lab), name, int(seed)))
    except (Interrupted, KeyboardInterrupt):
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
