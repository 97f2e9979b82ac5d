"""What verbs print of data and of trained models."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from bert4rec.cli.console import output, say

if TYPE_CHECKING:
    from rich.table import Table

    from bert4rec.data.sequences import Sequences
    from bert4rec.pipeline import Outcome


def describe(sequences: Sequences) -> None:
    say(
        f"{sequences.n_users:,} users, {sequences.n_items:,} items, "
        f"{sequences.n_interactions:,} interactions"
    )


def show_outcome(outcome: Outcome, out: Path) -> None:
    from bert4rec.evaluation.report import metric_table

    output.print(metric_table(outcome.evaluation, "Test items"))
    if outcome.baselines:
        output.print(_against(outcome))
    output.print(f"The model, its metrics and per-user results are in {out}\n", markup=False)


def _against(outcome: Outcome) -> Table:
    from rich.table import Table

    from bert4rec.evaluation.report import column_title, figure

    table = Table(title="Against simple rivals", title_justify="left")
    table.add_column("model", no_wrap=True)
    rivals = {outcome.recommender.config.model.name: outcome.evaluation} | outcome.baselines
    ks = outcome.recommender.config.evaluation.ks
    k = 10 if 10 in ks else max(ks)
    columns = [("full", f"HR@{k}"), *((p, f"NDCG@{k}") for p in outcome.evaluation.metrics)]
    for protocol, metric in columns:
        title = column_title(protocol, outcome.evaluation)
        table.add_column(f"{metric}\n{title}", justify="right")
    for name, evaluation in rivals.items():
        table.add_row(name, *(figure(evaluation.value(m, p)) for p, m in columns))
    return table


def next_commands(*commands: list[object]) -> None:
    output.print("Next:")
    for command in commands:
        words = shlex.join(["bert4rec", *map(str, command)])
        output.print(f"  {words}", highlight=False, markup=False, soft_wrap=True)
