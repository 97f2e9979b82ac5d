"""The numbers of a lab's report as text, the same in every format."""

from __future__ import annotations

import shlex

from bert4rec.evaluation.report import figure
from bert4rec.evaluation.text_tables import one_line
from bert4rec.lab.lab_result import RANKED_BY, DifferenceToBest, LabResult, MeanEstimate, ModelResult

SIGNIFICANT = 0.05
STOPPED_BY_CLOCK = "stopped by the time limit before its learning rate had decayed"
LONGEST_TITLE = 32  # characters, in a chart
PROTOCOL_TITLES = {"full": "all items", "popularity": "{n} negatives by popularity", "uniform": "{n} uniform negatives"}


def short(title: str) -> str:
    """A title that fits into a chart."""
    title = one_line(title)
    return title if len(title) <= LONGEST_TITLE else title[: LONGEST_TITLE - 1] + "…"


def is_significantly_worse(model: ModelResult) -> bool:
    """By the corrected paired test against the best model."""
    difference = model.differences.get(RANKED_BY)
    return difference is not None and difference.holm_p < SIGNIFICANT


def protocol_title(result: LabResult, protocol: str) -> str:
    n = "sampled" if result.n_negatives is None else f"{result.n_negatives:,}"
    return PROTOCOL_TITLES.get(protocol, protocol).format(n=n)


def interval(estimate: MeanEstimate) -> str:
    return "" if estimate.low is None or estimate.high is None else span(estimate.low, estimate.high)


def span(low: float, high: float) -> str:
    """From low to high; a dash would look like a minus sign between negative numbers."""
    return f"{figure(low)}{' to ' if low < 0 else '–'}{figure(high)}"


def signed(value: float) -> str:
    return ("+" if value > 0 else "") + figure(value)


def p_value(value: float) -> str:
    return "p < .001" if value < 0.001 else f"p = {value:.3f}".replace("0.", ".", 1)


def holm_p(result: LabResult, difference: DifferenceToBest) -> str:
    """A p-value that no resample contradicted is only known to be at most this."""
    is_bound = difference.p_value < 2.5 / (1 + result.n_resamples)
    return p_value(difference.holm_p).replace("=", "≤" if is_bound else "=")


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def count(number: float) -> str:
    """Three digits and a letter: 12.3 k, 3.45 M."""
    for size, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= 0.9995 * size:  # what is rounded to 1.00
            return f"{number / size:#.3g}".removesuffix(".") + letter
    return f"{number:.0f}"


def memory(megabytes: float) -> str:
    return f"{megabytes:,.0f} MB" if megabytes < 1000 else f"{megabytes / 1000:.2f} GB"


def row_notes(result: LabResult, model: ModelResult) -> list[str]:
    """What makes this row different from the others."""
    notes = []
    budget, usual = model.budget_minutes, result.facts.budget_minutes
    if budget is not None and budget != usual:
        notes.append(f"budget {budget:g} min instead of {usual:g} min")
    if any(cost.stopped_by_clock for cost in model.costs):
        notes.append(STOPPED_BY_CLOCK)
    n_seeds, n_usual = len(model.seeds), len(result.facts.seeds)
    if n_seeds != n_usual and not model.is_deterministic:
        notes.append(f"{n_seeds} of {n_usual} seeds")
    return notes


def commands(result: LabResult) -> list[str]:
    """What to type to run it again: one command per budget and choice of settings."""
    facts = result.facts
    budgets = {model.name: model.budget_minutes for model in result.models}
    groups: dict[tuple[float, tuple[str, ...]], list[str]] = {}
    for name in facts.models:
        plan = facts.plans[name]
        # A budget does not apply to models without epochs, so that of the others will do.
        budget = budgets.get(name, plan.budget_minutes)
        source = plan.source if facts.reproduction is None else name
        groups.setdefault((facts.budget_minutes if budget is None else budget, plan.overrides), []).append(source)
    data = str(facts.data["name"])
    verb = ["lab", data] if facts.reproduction is None else ["reproduce", facts.reproduction, "--data", data]
    lines = []
    for (minutes, overrides), models in groups.items():
        parts = ["bert4rec", *verb, "--models", ",".join(models), "--seeds", str(len(facts.seeds))]
        parts += ["--budget", f"{minutes:g}m", *(part for override in overrides for part in ("--set", override))]
        lines.append(" ".join(shlex.quote(one_line(part)) for part in parts))
    if own := [name for group in groups.values() for name in group if name.endswith(".toml")]:
        lines.append(f"# with your own TOML files: {one_line(', '.join(own))}")
    return lines
