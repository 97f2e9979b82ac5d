"""What a person sees while settings are tried: a line a trial, and a bar below them."""

from __future__ import annotations

import io
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from bert4rec.lab.search_space import Space
from bert4rec.lab.study import best_of, finished
from bert4rec.lab.tuned import settings_of_trial
from bert4rec.training.progress import TrainingDisplay

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial


class Watched(Protocol):
    """The curve of a trial, which has to hear of every stage and validation."""

    stage: int
    epochs: list[int]

    def percent_of(self, epochs_of_stage: float) -> float: ...
    def validated(self, event: dict[str, Any]) -> None: ...


class TuningView:
    """Lines and bar of a whole study."""

    def __init__(
        self, console: Console, space: Space, n_trials: int, minutes: float | None, ends_at: float
    ) -> None:
        self.console, self.space, self.n_trials = console, space, n_trials
        self.minutes, self.ends_at = minutes, ends_at
        self.n_done, self.best, self.seconds = 0, "", [60 * (minutes or 0.0)]
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[facts]}"),
            console=console,
            disable=not console.is_terminal,
            refresh_per_second=4,
            transient=True,
        )
        self._task = self._bar.add_task("", total=n_trials, facts="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def begin(self, study: Study) -> None:
        self._count(study)
        if not self.n_done:
            self.say(f"tuning {', '.join(self.space)}")
            length = "" if self.minutes is None else f" of about {60 * self.minutes:g} s each"
            self.say(f"{self.n_trials} trials{length}; the first is the recipe itself")
        elif self.n_done < self.n_trials:
            self.say(f"going on after {self.n_done} of {self.n_trials} trials")
        else:
            self.say(f"all {self.n_trials} trials are done: pass more --trials to search on")

    def begin_trial(self) -> None:
        self.update(0.0)

    def end_trial(self, study: Study, number: int) -> None:
        trial = study.get_trials(deepcopy=False)[number]
        best = best_of(study)
        self._count(study)
        mark = ", best so far" if best is not None and best.number == number else ""
        seconds = trial.user_attrs["seconds"]
        self.say(
            f"trial {self.n_done} of {self.n_trials}  {outcome(trial)}{mark}  ({seconds:.0f} s)  "
            f"{brief(settings_of_trial(trial, self.space))}"
        )

    def trial_view(self, run: Path) -> TrialView:
        run.mkdir(parents=True, exist_ok=True)
        return TrialView(run, self)

    def update(self, share: float) -> None:
        """`share` of the trial at work is done."""
        left = (self.n_trials - self.n_done - share) * sum(self.seconds) / len(self.seconds)
        left = max(0.0, min(left, self.ends_at - time.monotonic()))
        best = f"best {self.best}" if self.best else ""
        facts = f"about {f'{left:.0f} s' if left < 120 else f'{left / 60:.0f} min'} left  {best}"
        at_work = min(self.n_done + 1, self.n_trials)
        self._bar.update(
            self._task,
            completed=self.n_done + share,
            description=f"trial {at_work} of {self.n_trials}",
            facts=facts,
        )

    def say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _count(self, study: Study) -> None:
        trials, best = finished(study), best_of(study)
        self.n_done = len(trials)
        self.seconds = [t.user_attrs.get("seconds", 0.0) for t in trials] or self.seconds
        if best is not None:
            self.best = f"{best.value:.4f} ({brief(settings_of_trial(best, self.space))})"


class TrialView(TrainingDisplay):
    """Stands where the view of a single training stands, and moves the bar of the study."""

    def __init__(self, run: Path, tuning: TuningView) -> None:
        super().__init__(run, Console(file=io.StringIO()))
        self.run, self.tuning = run, tuning
        self.stages_begun, self.total = 0, 0

    def watch(self, curve: Watched) -> None:
        self.curve = curve

    def stage(self, name: str, done: int, total: int) -> None:
        self.curve.stage, self.total = self.stages_begun, total
        self.stages_begun += 1

    def step(self, done: int, epoch: int, loss: float, n_sequences: int) -> None:
        epochs = self.curve.epochs[self.curve.stage] * done / self.total
        self.tuning.update(self.curve.percent_of(epochs) / 100)

    def validated(self, event: dict[str, Any], is_best: bool) -> None:
        self.curve.validated(event)


def outcome(trial: FrozenTrial) -> str:
    if trial.value is not None and trial.state.name == "COMPLETE":
        return f"NDCG@10 {trial.value:.4f}"
    if "error" in trial.user_attrs:
        return f"could not be trained ({trial.user_attrs['error']})"
    if trial.intermediate_values:
        percent, value = max(trial.intermediate_values.items())
        return f"given up at {percent} % with NDCG@10 {value:.4f}, below the median"
    return "given up"


def brief(settings: dict[str, Any]) -> str:
    """Settings without their sections, as long as that is clear."""
    keys = [name.split(".")[1] for name in settings]
    return ", ".join(
        f"{name if keys.count(key) > 1 else key} {value:g}"
        if isinstance(value, float)
        else f"{name if keys.count(key) > 1 else key} {value}"
        for key, (name, value) in zip(keys, settings.items(), strict=True)
    )
