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


def print_lines(*lines: str) -> None:
    """Plain text as it is, on standard output."""
    for line in lines:
        output.print(line, markup=False, highlight=False, soft_wrap=True)


def printable(text: object) -> str:
    """An id or a title as text: neither markup nor the terminal's own codes have an effect."""
    from rich.markup import escape

    letters = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))
    return escape("".join(letters))


def exit_interrupted(out: Path, again: list[str] | None = None) -> typer.Exit:
    """Print the command that resumes (this one if not given); what to end the program with."""
    words = again or ["bert4rec", *(word for word in sys.argv[1:] if word != "--overwrite")]
    message = f"Interrupted; everything so far is saved in {out}. To resume:\n  {shlex.join(words)}"
    errors.print(message, markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(EXIT_INTERRUPTED)


@contextlib.contextmanager
def resumable(out: Path, again: list[str] | None = None) -> Iterator[None]:
    """Work that ends the program when it is interrupted, with the command that resumes it."""
    from bert4rec.interrupts import Interrupted

    try:
        yield
    except Interrupted:
        raise exit_interrupted(out, again) from None


def print_next(*commands: list[object]) -> None:
    """Commands that are worth trying next."""
    print_lines("Next:", *(f"  {shlex.join(['bert4rec', *map(str, command)])}" for command in commands))


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
    from bert4rec.evaluation.report import column_title, figure
    from bert4rec.evaluation.text_tables import TextTable

    config = outcome.recommender.config
    models = {config.model.name: outcome.evaluation} | outcome.baselines
    k = 10 if 10 in config.evaluation.ks else max(config.evaluation.ks)
    shown = [("full", f"HR@{k}"), *((protocol, f"NDCG@{k}") for protocol in outcome.evaluation.metrics)]
    columns = ["model", *(f"{metric}\n{column_title(protocol, outcome.evaluation)}" for protocol, metric in shown)]
    rows = [
        [name, *(figure(evaluation.value(metric, protocol)) for protocol, metric in shown)]
        for name, evaluation in models.items()
    ]
    return TextTable(columns, rows).to_terminal("Compared with baselines")
