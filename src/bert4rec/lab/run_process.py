"""One run as a process of its own: `python -m bert4rec.lab.run_process LAB NAME SEED`.

With one process per run, the measured memory is that of the model alone, and a run that dies does
not take the others with it. A trial of `bert4rec tune` is such a run too; its plan says that the
validation items judge it, and the test items are removed from its split.
"""

from __future__ import annotations

import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bert4rec.config import Config, RunConfig, resolve
from bert4rec.data.sequences import Sequences
from bert4rec.data.splits import SPLITS, Spans, Split
from bert4rec.durable import MANIFEST
from bert4rec.evaluation.metrics import per_user
from bert4rec.interrupts import Interrupted, StopRequest
from bert4rec.lab.budget import HARD_STOP, fit_budget
from bert4rec.lab.contenders import settings_of
from bert4rec.lab.lab_directory import LAB_FILE, STUDY_FILE, LabRun, read_json, write_json
from bert4rec.lab.lab_result import RunCost
from bert4rec.models import MODELS, FittedModel
from bert4rec.pipeline import RunOptions, split_of, train, train_recommender
from bert4rec.recommender import Recommender
from bert4rec.scoring import rank_held_out
from bert4rec.training.checkpoint import RunDirectory, has_checkpoint
from bert4rec.training.run_log import RunLog
from bert4rec.training.setup import stage_names, validation_users, without_test

EXIT_INTERRUPTED = 130
POLL_SECONDS = 0.1
SCORED_USERS = 2000  # at most, in the measurement of speed
SCORING_SECONDS = 2.0
MOST_PASSES = 50  # over those users, where they are few


def run_in_process(run: LabRun, lock: int, is_stopped: StopRequest, on_poll: Callable[[], None]) -> str | None:
    """Start the run, wait for it, and pass a request to stop on to it; `on_poll` is called often.

    Why it failed, which its cost.json says too; None when it succeeded. Raises `Interrupted` when
    the run was stopped before its end.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "cost.json").unlink(missing_ok=True)  # of a failure before
    output = run.folder / "output.txt"
    with output.open("ab") as file:
        begins_at = file.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "bert4rec.lab.run_process", str(run.lab), run.name, str(run.seed)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only us, and we pass it on
            pass_fds=[lock],
        )
    n_passed_on = 0
    try:
        while process.poll() is None:
            if is_stopped.count > n_passed_on:
                n_passed_on += 1  # the first asks for a checkpoint, the second is impatient
                process.terminate()
            on_poll()
            time.sleep(POLL_SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
            process.wait()
    if run.is_done():
        return None
    if is_stopped():
        raise Interrupted
    error = _reason(process.returncode, output, begins_at)
    write_json(run.folder / "cost.json", {"status": "failed", "error": error})
    return error


def _reason(code: int, output: Path, begins_at: int) -> str:
    """The last line of an error, which says what went wrong, or the signal that ended it."""
    if code == -signal.SIGKILL:
        return "killed (SIGKILL), probably because the machine ran out of memory"
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    text = output.read_bytes()[begins_at:].decode("utf-8", "replace")
    last = (text.strip().splitlines() or ["no output"])[-1].strip()
    return last.removeprefix("ValueError: ") if code != EXIT_INTERRUPTED else "interrupted"


def run_one(run: LabRun) -> None:
    """Train (or resume), evaluate, measure, and write cost.json."""
    lab, plan = read_json(run.lab / LAB_FILE) or read_json(run.lab / STUDY_FILE), run.plan()
    assert lab is not None
    assert plan is not None
    sequences = Sequences.load(lab["data"]["directory"])
    if sequences.fingerprint != lab["data"]["fingerprint"]:
        raise ValueError(f"the data in {lab['data']['directory']} changed since the first run")
    config = resolve(Config.parse(plan["config"], "plan.json"), sequences.n_items)
    split = without_test(SPLITS[config.data.split](sequences))
    minutes = plan["budget_minutes"]
    config = _fitted_config(run, config, split, minutes)
    content: dict[str, Any] = {"status": "done", "settings": settings_of(config)}
    if plan.get("held_out") == "validation":
        content["ndcg@10"] = _validation_ndcg(run, sequences.n_users, split, config, minutes)
    else:
        content["cost"] = asdict(_run(run, sequences, config, minutes))
    write_json(run.folder / "cost.json", content)


def _fitted_config(run: LabRun, config: RunConfig, split: Split, minutes: float) -> RunConfig:
    """The settings with the epochs that fit the budget: computed once, for all seeds."""
    fitted = run.fitted()
    if fitted is None:
        budgeted, seconds = fit_budget(split, config, minutes)
        fitted = {"config": budgeted.model_dump(mode="json"), "expected_seconds": round(seconds, 1)}
        write_json(run.contender / "epochs.json", fitted)
    config = RunConfig.parse(fitted["config"], "epochs.json")
    seeded = config.training.model_copy(update={"seed": run.seed})
    return config.model_copy(update={"training": seeded})


def _run(run: LabRun, sequences: Sequences, config: RunConfig, minutes: float) -> RunCost:
    """A trained, evaluated and saved model, and what it took."""
    if (run.folder / MANIFEST).exists():  # only the measurement is missing
        recommender = Recommender.load(run.folder)
    else:
        options = RunOptions(resume=has_checkpoint(run.folder), baselines=False, minutes=HARD_STOP * minutes)
        recommender = train_recommender(sequences, config, run.folder, options).recommender
    histories = split_of(recommender, sequences).test.histories
    training = recommender.about["training"]
    epochs = {event["stage"]: int(event["epoch"]) for event in run.events()}  # the last of each stage
    return RunCost(
        training_seconds=training["seconds"],
        epochs=sum(epochs.values()) if config.stages else None,
        budget_minutes=minutes,
        n_parameters=training["n_parameters"],
        peak_memory_mb=peak_memory_mb(),
        scoring_users_per_second=round(scoring_speed(recommender, histories), 1),
        stopped_by_clock=is_stopped_by_clock(config, epochs, training["seconds"], minutes),
    )


def _validation_ndcg(run: LabRun, n_users: int, split: Split, config: RunConfig, minutes: float) -> float:
    """The best validation NDCG@10 of a trial, which leaves no model behind."""
    for what, size in (("train", len(split.train)), ("validate", len(split.validation))):
        if not size:
            raise ValueError(f"nothing is left to {what} on: use more data or weaker filters")
    model = MODELS[config.model.name]
    if issubclass(model, FittedModel):
        fitted = model.fit(split.train, split.n_items, config.model, config.training.seed)
        users = validation_users(split, config)
        assert users is not None
        ranks = rank_held_out(
            fitted, users, exclude_seen=config.evaluation.exclude_seen, n_workers=config.training.workers
        )
        return float(per_user(ranks, "NDCG@10").mean())
    with RunLog(run.folder) as log:
        directory = RunDirectory(run.folder, {"config": config.model_dump(mode="json")})
        options = RunOptions(minutes=HARD_STOP * minutes)
        _, progress = train(config, split, n_users, directory, log, options)
    return progress.best_ndcg


def is_stopped_by_clock(config: RunConfig, epochs: dict[str, int], seconds: float, minutes: float) -> bool:
    """Whether the time limit ended a run before the last epoch of its last stage."""
    names, stages = stage_names(config), [stage for stage in config.stages if stage.epochs]
    # The time is rounded to a tenth of a second.
    is_out_of_time = seconds + 0.05 >= 60 * HARD_STOP * minutes
    return is_out_of_time and bool(stages) and epochs.get(names[-1], 0) < stages[-1].epochs


def scoring_speed(recommender: Recommender, histories: Spans) -> float:
    """Users per second, warm, on all cores: ten items each, seen ones excluded."""
    n = min(SCORED_USERS, len(histories))
    sample = histories.take(np.sort(np.random.default_rng(0).choice(len(histories), n, replace=False)))

    def one_pass() -> None:
        for _ in recommender.top_k(sample):
            pass

    one_pass()
    n_passes, started = 0, time.monotonic()
    while (spent := time.monotonic() - started) < SCORING_SECONDS and n_passes < MOST_PASSES:
        one_pass()
        n_passes += 1
    return n * n_passes / spent


def peak_memory_mb() -> float:
    """The most memory that this process ever used.

    Not `ru_maxrss` where there is something better: on Linux it begins with the parent's size.
    """
    status = Path("/proc/self/status")
    if not status.is_file():
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return round(peak_bytes / 2**20, 1)
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
    assert peak is not None
    return round(int(peak[1]) / 1024, 1)


def main() -> None:
    lab, name, seed = sys.argv[1:]
    try:
        run_one(LabRun(Path(lab), name, int(seed)))
    except (Interrupted, KeyboardInterrupt):
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
