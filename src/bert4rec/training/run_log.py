"""What a run prints and logs.

A terminal shows a live progress bar; elsewhere plain lines are printed. `log.jsonl` always gets one
JSON object per event, and TensorBoard the same numbers on request.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console

from bert4rec.progress import ProgressView

if TYPE_CHECKING:
    from bert4rec.training.checkpoint import Progress


class RunLog:
    """Live view and log of one run.

    Of several processes the first is shown and writes the log; the others keep quiet.
    """

    def __init__(
        self, run: Path, console: Console | None = None, tensorboard: bool = False, *, is_shown: bool = True
    ) -> None:
        self.is_shown = is_shown
        self.log_path = run / "log.jsonl"
        self._view = ProgressView(console=console, is_shown=is_shown)
        self._writer = _tensorboard_writer(run / "tensorboard") if tensorboard and is_shown else None
        self._ndcg = "–"  # until the first validation

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._view.__exit__(*exception)
        if self._writer is not None:
            self._writer.close()

    def begin_stage(self, name: str, progress: Progress, n_steps: int) -> None:
        """A stage begins, or is resumed after some of its steps."""
        self._view.begin(name, progress.step, n_steps)
        self._started, self._n_before = time.monotonic(), progress.sequences

    def step(self, progress: Progress) -> None:
        """Called once per step: it must cost next to nothing."""
        rate = (progress.sequences - self._n_before) / max(time.monotonic() - self._started, 1e-9)
        facts = f"epoch {progress.epoch + 1}  loss {progress.mean_loss:.3f}  NDCG@10 {self._ndcg}  {rate:,.0f} seq/s"
        self._view.update(progress.step, facts=facts)

    def epochs_done(self, event: dict[str, Any], *, is_best: bool) -> None:
        """Some epochs are over, and the model was validated if the run has a validation set."""
        line = f"{event['stage']}: epoch {event['epoch']}  loss {event['loss']:.3f}  "
        if "ndcg@10" in event:
            self._ndcg = f"{event['ndcg@10']:.4f}"
            line += f"validation NDCG@10 {self._ndcg}  HR@10 {event['hr@10']:.4f}  "
        line += f"{event['sequences_per_second']:,.0f} seq/s  {event['seconds'] / 60:.1f} min"
        self.say(line + "  best so far" * ("ndcg@10" in event and is_best))
        if self.is_shown:
            with self.log_path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")
        if self._writer is not None:
            for key in ("loss", "ndcg@10", "hr@10", "learning_rate"):
                if key in event:
                    self._writer.add_scalar(f"{event['stage']}/{key}", event[key], event["step"])

    def say(self, line: str) -> None:
        """A line of its own, above the bar."""
        self._view.say(line)

    def rewind(self, events: list[dict[str, Any]]) -> None:
        """Start the log with these events, the history of a checkpoint: the rest is repeated."""
        if self.is_shown:
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
