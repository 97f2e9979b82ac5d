"""What a run prints and logs.

A terminal shows a live progress bar; elsewhere plain lines are printed. `log.jsonl` always gets one
JSON object per event, and TensorBoard the same numbers on request.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from bert4rec.training.checkpoint import Progress as RunProgress

PLAIN_LINE_EVERY = 30.0  # seconds between two lines where there is no terminal


class RunLog:
    """Live view and log of one run.

    Of several processes the first is shown and writes the log; the others keep quiet.
    """

    def __init__(
        self, run: Path, console: Console | None = None, tensorboard: bool = False, *, is_shown: bool = True
    ) -> None:
        self.is_shown = is_shown
        self.console = console or Console(stderr=True, quiet=not is_shown)
        self.log_path = run / "log.jsonl"
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self.console,
            disable=not (self.console.is_terminal and is_shown),
            refresh_per_second=4,
        )
        self._writer = _tensorboard_writer(run / "tensorboard") if tensorboard and is_shown else None
        self._ndcg = "–"  # until the first validation
        self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if self._writer is not None:
            self._writer.close()

    def begin_stage(self, name: str, done: int, total: int) -> None:
        """A stage begins, or is resumed after `done` of its `total` steps."""
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        self._task = self._bar.add_task(name, total=total, completed=done, facts="")
        self._name, self._total = name, total
        self._started, self._done_at_start, self._sequences = time.monotonic(), done, 0

    def step(self, progress: RunProgress, n_sequences: int) -> None:
        """Called once per step: it must cost next to nothing."""
        done = progress.step
        self._sequences += n_sequences
        now = time.monotonic()
        rate = self._sequences / max(now - self._started, 1e-9)
        facts = f"epoch {progress.epoch + 1}  loss {progress.mean_loss:.3f}  NDCG@10 {self._ndcg}  {rate:,.0f} seq/s"
        self._bar.update(self._task, completed=done, facts=facts)
        if not self.console.is_terminal and now - self._last_line > PLAIN_LINE_EVERY:
            steps = done - self._done_at_start
            left = (now - self._started) / max(steps, 1) * (self._total - done)
            self.say(f"{self._name}: {facts}  at most {left / 60:.0f} min left")

    def validated(self, event: dict[str, Any], is_best: bool) -> None:
        self._ndcg = f"{event['ndcg@10']:.4f}"
        mark = "  best so far" if is_best else ""
        self.say(
            f"{event['stage']}: epoch {event['epoch']}  loss {event['loss']:.3f}  validation "
            f"NDCG@10 {event['ndcg@10']:.4f}  HR@10 {event['hr@10']:.4f}  "
            f"{event['sequences_per_second']:,.0f} seq/s  {event['seconds'] / 60:.1f} min{mark}"
        )
        self._write(event)

    def trained(self, event: dict[str, Any]) -> None:
        """As `validated`, for a run that does not validate."""
        self.say(
            f"{event['stage']}: epoch {event['epoch']}  loss {event['loss']:.3f}  "
            f"{event['sequences_per_second']:,.0f} seq/s  {event['seconds'] / 60:.1f} min"
        )
        self._write(event)

    def _write(self, event: dict[str, Any]) -> None:
        if self.is_shown:
            with self.log_path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")
        if self._writer is not None:
            for key in ("loss", "ndcg@10", "hr@10", "learning_rate"):
                if key in event:
                    self._writer.add_scalar(f"{event['stage']}/{key}", event[key], event["step"])

    def say(self, line: str) -> None:
        if not self.is_shown:
            return
        self._last_line = time.monotonic()
        self.console.print(line, highlight=False, soft_wrap=True)

    def rewind(self, events: list[dict[str, Any]]) -> None:
        """Start the log with these events, the history of a checkpoint: the rest is repeated."""
        if not self.is_shown:
            return
        text = "".join(json.dumps(event) + "\n" for event in events)
        self.log_path.write_text(text, encoding="utf-8")


def _tensorboard_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "TensorBoard is not installed: pip install 'bert4rec[lab]', or leave out --tensorboard"
        ) from None
    return SummaryWriter(folder)
