"""What the verbs print, and where."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

if TYPE_CHECKING:
    from rich.table import Table

    from bert4rec.data.sequences import Sequences
    from bert4rec.pipeline import Outcome

EXIT_INTERRUPTED = 130

output = Console()
errors = Console(stderr=True)


@contextlib.contextmanager
def progress_bar(description: str) -> Iterator[Callable[[int, int | None], None]]:
    """A function to be called with (done, total), which shows progress on standard error."""
    from bert4rec.progress import ProgressView

    with ProgressView(description, console=errors) as view:
        yield view.update


def say(message: str) -> None:
    """A line about the progress of the work, on standard error: results can be piped."""
    errors.print(message, style="dim", highlight=False, markup=False, soft_wrap=True)


def printable(text: object) -> str:
    """An id or a title as text: neither markup nor the terminal's own codes have an effect."""
    from rich.markup import escape

    letters = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))
    return escape("".join(letters))


def exit_interrupted(out: Path, again: list[str] | None = None) -> typer.Exit:
    """Print the command that resumes (this one if not given); what to end the program with."""
    words = again or ["bert4rec", *(word for word in sys.argv[1:] if word != "--overwrite")]
    message = f"Interrupted; everything so far is saved in {out}. To resume:"
    errors.print(message, markup=False, soft_wrap=True)
    errors.print("  " + shlex.join(words), markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(EXIT_INTERRUPTED)


def print_next(*commands: list[object]) -> None:
    """Commands that are worth trying next."""
    output.print("Next:")
    for command in commands:
        words = shlex.join(["bert4rec", *map(str, command)])
        output.print(f"  {words}", highlight=False, markup=False, soft_wrap=True)


def describe(sequences: Sequences) -> None:
    say(f"{sequences.n_users:,} users, {sequences.n_items:,} items, {sequences.n_interactions:,} interactions")


def print_outcome(outcome: Outcome, out: Path) -> None:
    """The test metrics of a training, beside those of the baselines."""
    from bert4rec.evaluation.report import metric_table

    output.print(metric_table(outcome.evaluation, "Test items"))
    if outcome.baselines:
        output.print(_baseline_table(outcome))
    output.print(f"The model, its metrics and per-user results are in {out}\n", markup=False)


def _baseline_table(outcome: Outcome) -> Table:
    from rich.table import Table

    from bert4rec.evaluation.report import column_title, figure

    table = Table(title="Compared with baselines", title_justify="left")
    table.add_column("model", no_wrap=True)
    models = {outcome.recommender.config.model.name: outcome.evaluation} | outcome.baselines
    ks = outcome.recommender.config.evaluation.ks
    k = 10 if 10 in ks else max(ks)
    columns = [("full", f"HR@{k}"), *((p, f"NDCG@{k}") for p in outcome.evaluation.metrics)]
    for protocol, metric in columns:
        title = column_title(protocol, outcome.evaluation)
        table.add_column(f"{metric}\n{title}", justify="right")
    for name, evaluation in models.items():
        table.add_row(name, *(figure(evaluation.value(m, p)) for p, m in columns))
    return table
