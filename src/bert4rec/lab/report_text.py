"""The sentences and numbers of a lab's report, the same in every format."""

from __future__ import annotations

import shlex

from bert4rec.evaluation.report import figure
from bert4rec.evaluation.text_tables import one_line
from bert4rec.lab.lab_result import RANKED_BY, DifferenceToBest, LabResult, MeanEstimate, ModelResult, PlannedModel

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


def interval(estimate: MeanEstimate | DifferenceToBest) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return span(estimate.low, estimate.high)


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
    text = p_value(difference.holm_p)
    return text.replace("=", "≤") if is_bound else text


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def count(number: float | None) -> str:
    """Three digits and a letter: 12.3 k, 3.45 M."""
    if number is None:
        return "–"
    for size, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            digits = number / size
            return f"{digits:.{2 if digits < 10 else 1 if digits < 100 else 0}f}{letter}"
    return f"{number:.0f}"


def epochs(number: float | None) -> str:
    return "–" if number is None else f"{number:.1f}".removesuffix(".0")


def memory(megabytes: float | None) -> str:
    if megabytes is None:
        return "–"
    return f"{megabytes:,.0f} MB" if megabytes < 1000 else f"{megabytes / 1000:.2f} GB"


def minutes(number: float | None) -> str:
    return "no limit" if number is None else f"{number:g} min"


def what_was_run(result: LabResult) -> list[tuple[str, str]]:
    """(name, value) of the data, the split, the machine and so on; empty values are left out."""
    facts, data, machine = result.facts, result.facts.data, result.facts.machine
    sizes = ", ".join(
        f"{data[key]:,} {key.removeprefix('n_')}"
        for key in ("n_users", "n_items", "n_interactions")
        if data.get(key) is not None
    )
    cores, gigabytes = machine.get("cores"), machine.get("memory_gb")
    lines = [
        ("data", f"{data.get('name')} ({sizes})"),
        ("fingerprint", str(data.get("fingerprint", ""))[:16]),
        ("split", facts.split),
        ("held-out users", f"{result.n_users:,}"),
        ("seeds", ", ".join(map(str, facts.seeds))),
        ("budget per training", minutes(facts.budget_minutes)),
        ("machine", f"{machine.get('cpu')}, {cores} cores, {gigabytes} GB"),
        ("versions", ", ".join(f"{k} {v}" for k, v in facts.versions.items())),
        ("begun", facts.created),
        ("shared settings", ", ".join(f"{k} = {v}" for k, v in facts.settings.items())),
    ]
    return [(name, one_line(value)) for name, value in lines if value]


def row_notes(result: LabResult, model: ModelResult) -> list[str]:
    """What makes this row different from the others."""
    notes = []
    budget, usual = model.budget_minutes, result.facts.budget_minutes
    if budget is not None and budget != usual:
        notes.append(f"budget {minutes(budget)} instead of {minutes(usual)}")
    if any(cost.stopped_by_clock for cost in model.costs):
        notes.append(STOPPED_BY_CLOCK)
    n_seeds, n_usual = len(model.seeds), len(result.facts.seeds)
    if n_seeds != n_usual and not model.is_deterministic:
        notes.append(f"{n_seeds} of {n_usual} seeds")
    return notes


def setting_lines(model: ModelResult) -> list[str]:
    return [one_line(f"{name} = {value}") for name, value in sorted(model.settings.items())]


def cautions(result: LabResult) -> list[str]:
    """What a careful reader has to know before quoting a number."""
    lines = [
        "Models are ordered by the ranking among all items. Metrics over sampled negatives need "
        "not keep that order (Krichene & Rendle, On Sampled Metrics for Item Recommendation, KDD "
        "2020); they are here for comparison with papers that used them.",
        f"The 95 % intervals come from {result.n_resamples:,} bootstrap resamples of the "
        f"{result.n_users:,} users: they cover the choice of users, not the randomness of "
        "training. With several seeds, a user's metric is averaged over the seeds first, and the "
        "range over seeds is shown beside the interval.",
        "Differences to the best model are paired by user. Their p-values are two-sided and "
        "corrected by Holm for the number of models compared under a metric; their intervals "
        "are not corrected. The best model was chosen on these same users, which favours it a "
        "little.",
    ]
    if any(len(model.seeds) == 1 and not model.is_deterministic for model in result.models):
        lines.append(
            "Where a model has one seed, p-values and intervals describe single trainings: a "
            "difference smaller than that between two seeds of one model may be chance."
        )
    lines += _about_budgets(result)
    if result.missing:
        lines.append(
            f"{len(result.missing)} runs have no result and are listed separately: the best model may be among them."
        )
    return lines


def _about_budgets(result: LabResult) -> list[str]:
    budgets = sorted({m.budget_minutes for m in result.models if m.budget_minutes is not None})
    if not budgets:
        return []
    if len(budgets) == 1:
        line = f"Every training had the same budget of {minutes(budgets[0])}."
    else:
        line = (
            f"Budgets differ, from {minutes(budgets[0])} to {minutes(budgets[-1])} per training: "
            "rows of different budgets are not a fair comparison."
        )
    return [
        f"{line} A model that learns slowly may overtake others with more time, see the learning "
        "curves; and times depend on the machine. Models that are fitted in one pass take the "
        "time they need."
    ]


def commands(result: LabResult) -> list[str]:
    """What to type to run it again: one command per budget and choice of settings."""
    facts = result.facts
    budgets = {model.name: model.budget_minutes for model in result.models}
    groups: dict[tuple[float | None, tuple[str, ...]], list[str]] = {}
    for name in facts.models:
        plan = facts.plans.get(name, PlannedModel(name, (), None))
        # A budget does not apply to models without epochs, so that of the others will do.
        budget = budgets.get(name, plan.budget_minutes)
        budget = facts.budget_minutes if budget is None else budget
        source = plan.source if facts.reproduction is None else name
        groups.setdefault((budget, plan.overrides), []).append(source)
    data = str(facts.data.get("name", "DATA"))
    verb = ["lab", data] if facts.reproduction is None else ["reproduce", facts.reproduction]
    lines = []
    for (budget, overrides), models in groups.items():
        parts = ["bert4rec", *verb, *([] if verb[0] == "lab" else ["--data", data])]
        parts += ["--models", ",".join(models), "--seeds", str(len(facts.seeds))]
        parts += [] if budget is None else ["--budget", f"{budget:g}m"]
        parts += [part for override in overrides for part in ("--set", override)]
        lines.append(" ".join(shlex.quote(one_line(part)) for part in parts))
    if own := [name for group in groups.values() for name in group if name.endswith(".toml")]:
        lines.append(f"# with your own TOML files: {one_line(', '.join(own))}")
    return lines
