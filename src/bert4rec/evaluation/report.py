"""Evaluations and comparisons as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from bert4rec.evaluation.compare import Comparison
from bert4rec.evaluation.result import Evaluation
from bert4rec.evaluation.text_tables import TextTable

# Recall@k and MAP@k are saved too, but repeat HR@k and MRR@k to the last digit.
SHOWN = ("HR", "NDCG")


def metric_table(evaluation: Evaluation, title: str, metrics: Sequence[str] | None = None) -> Table:
    """Rows are metrics, columns are protocols, each with its 95 % interval."""
    if metrics is None:
        ks = evaluation.extras["settings"]["ks"]
        metrics = [f"{name}@{k}" for name in SHOWN for k in ks] + ["MRR"]
    table = Table(title=title, caption="\n".join(notes(evaluation)), caption_justify="left")
    table.add_column("metric")
    for protocol in evaluation.metrics:
        table.add_column(column_title(protocol, evaluation), justify="right")
    for metric in metrics:
        cells = []
        for protocol in evaluation.metrics:
            estimate = evaluation.metrics[protocol][metric]
            cell = figure(estimate["value"])
            if estimate["low"] is not None and estimate["high"] is not None:
                low, high = figure(estimate["low"]), figure(estimate["high"])
                cell += f" [dim]{low}–{high}[/dim]"
            cells.append(cell)
        table.add_row(metric, *cells)
    return table


def notes(evaluation: Evaluation) -> list[str]:
    """What a reader has to know about the figures, one sentence or two each."""
    extras = evaluation.extras
    settings, bias = extras["settings"], extras["popularity_bias"]
    lines = [f"{extras['n_users']:,} users, {extras['n_items']:,} items, seed {settings['seed']}."]
    lines.append("One right item per user: Recall@k is HR@k, MAP@k is MRR@k (in metrics.json).")
    n_short = extras.get("n_short_of_negatives", 0)
    if n_short:
        lines.append(
            f"For {n_short:,} users fewer than {settings['n_negatives']} negatives could be drawn, "
            "which makes their ranking easier."
        )
    coverage = ", ".join(f"@{k} {share:.1%}" for k, share in extras["coverage"].items())
    lines.append(f"Catalogue coverage: {coverage}.")
    lines.append(
        f"Popularity percentile: top {bias['k']} {bias['recommended_mean_percentile']:.2f}, "
        f"targets {bias['target_mean_percentile']:.2f} (0.5 is the average item)."
    )
    if extras["n_unreachable"]:
        lines.append(
            f"{extras['n_unreachable']:,} targets are in their user's history and count as missed "
            "over all items, since seen items are not recommended. If people repeat items in "
            "your data, evaluate with seen items kept (exclude_seen off)."
        )
    if extras["n_cold_targets"]:
        lines.append(
            f"{extras['n_cold_targets']:,} targets never occur in training: "
            "no model that learns from ids alone can know them."
        )
    return lines


def column_title(protocol: str, evaluation: Evaluation) -> str:
    settings = evaluation.extras["settings"]
    if protocol == "full":
        return "all items" if settings["exclude_seen"] else "all items, seen ones kept"
    return f"{settings['n_negatives']} {protocol} negatives"


def figure(value: float) -> str:
    """Four digits without the leading zero, as the papers print them: .1518"""
    text = f"{value:.4f}"
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def comparison_table(comparison: Comparison) -> Table:
    """For the terminal; see `comparison_text`."""
    title = f"A = {comparison.run_a}, B = {comparison.run_b}, {comparison.protocol}"
    return comparison_text(comparison).to_terminal(title, _comparison_notes(comparison))


def comparison_text(comparison: Comparison) -> TextTable:
    """One row per metric: both runs, the difference b - a with its interval, users won and lost."""
    rows = [
        (
            row.metric,
            figure(row.a),
            figure(row.b),
            _signed(row.difference),
            f"{_signed(row.low)} to {_signed(row.high)}",
            f"{row.p_value:.4f}",
            f"{row.n_better:,} / {row.n_equal:,} / {row.n_worse:,}",
        )
        for row in comparison.differences
    ]
    return TextTable(("metric", "A", "B", "B - A", "95 % interval", "p", "better / equal / worse"), rows)


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + figure(value)


def _comparison_notes(comparison: Comparison) -> list[str]:
    lines = [f"Paired over {comparison.n_users:,} users, {comparison.n_boot:,} resamples."]
    if comparison.n_only_a or comparison.n_only_b:
        lines.append(
            f"Left out: {comparison.n_only_a:,} users that only A has, {comparison.n_only_b:,} that only B has."
        )
    return lines
