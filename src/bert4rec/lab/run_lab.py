"""The runs of a lab, one process after another; a run that fails does not stop the others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bert4rec.data.sequences import Sequences
from bert4rec.durable import alone_in
from bert4rec.evaluation.report import figure
from bert4rec.evaluation.result import load_metrics
from bert4rec.interrupts import stop_requested
from bert4rec.lab.contenders import Contender
from bert4rec.lab.lab_directory import LabRun, LabTerms, plan_lab, read_lab
from bert4rec.lab.report_text import duration
from bert4rec.lab.run_process import run_in_process
from bert4rec.progress import ProgressView

N_SIGNALS = 2  # the first asks a run for a checkpoint, the second is passed on, the third kills


def run_lab(
    directory: Path, sequences: Sequences, contenders: Sequence[Contender], terms: LabTerms, console: Console
) -> None:
    """Run all that is not done. A run that fails is recorded, and the others continue."""
    read_lab(directory)  # refuses a directory of something else before anything is written
    with (
        alone_in(directory) as lock,
        stop_requested(n_counted=N_SIGNALS) as is_stopped,
        ProgressView(console=console) as view,
    ):
        runs, notes = plan_lab(directory, sequences, contenders, terms)
        for note in notes:
            view.say(note)
        waiting = [run for run in runs if not run.is_done()]
        n_runs, n_done = len(runs), len(runs) - len(waiting)
        if n_done:
            view.say(f"{n_done} of {n_runs} runs are done already")
        view.begin("runs", n_done, n_runs)
        for place, run in enumerate(waiting, n_done):
            is_stopped.raise_if_stopped()
            began = time.monotonic()

            def show(run: LabRun = run, place: int = place, began: float = began) -> None:
                view.update(place, facts=f"{run}: {describe_progress(run, began)}")

            error = run_in_process(run, lock, is_stopped, show)
            spent = duration(time.monotonic() - began)
            if error is not None:
                view.say(f"{run}: failed after {spent}, {error}")
            else:
                ndcg = load_metrics(run.folder)["metrics"]["full"]["NDCG@10"]["value"]
                view.say(f"{run}: done in {spent}, NDCG@10 {figure(ndcg)}")


def describe_progress(run: LabRun, began: float) -> str:
    """`cloze epoch 12 of 40, NDCG@10 .1234, 3.1 min, about 6 min left`; reads what a run writes."""
    fitted, events = run.fitted(), run.events()
    spent = duration(time.monotonic() - began)
    if fitted is None:
        return f"starting, and timing some steps, {spent}"
    if not events:
        return f"begun, {spent}"
    event, stages = events[-1], fitted["config"]["stages"]
    place = len({each["stage"] for each in events}) - 1
    epochs = stages[place]["epochs"]
    if event["epoch"] == epochs and place == len(stages) - 1:
        return f"evaluating, {spent}"
    trained = event["seconds"] + time.time() - (run.folder / "log.jsonl").stat().st_mtime
    left = fitted["expected_seconds"] - trained
    ndcg = f", NDCG@10 {figure(event['ndcg@10'])}" if "ndcg@10" in event else ""
    more = f", about {duration(left)} left" if left > 0 else ""
    return f"{event['stage']} epoch {event['epoch']} of {epochs}{ndcg}, {duration(trained)}{more}"
