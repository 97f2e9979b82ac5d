"""How numbers and names of a lab are written, the same in every format."""

from __future__ import annotations

from bert4rec.evaluation.report import figure
from bert4rec.lab.result import RANKED_BY, Difference, Figure, LabResult, ModelResult

SIGNIFICANT = 0.05
STOPPED_BY_CLOCK = "stopped by the clock before its learning rate had decayed"
LONGEST_TITLE = 32  # characters, in a picture
PROTOCOL_TITLES = {
    "full": "all items",
    "popularity": "{n} negatives by popularity",
    "uniform": "{n} uniform negatives",
}


def plain(text: str) -> str:
    """One line without control characters: a title must not reach into a terminal or a table."""
    return "".join(each if each.isprintable() else " " for each in text).strip()


def short(title: str) -> str:
    """A title that leaves room for the picture it stands in."""
    title = plain(title)
    return title if len(title) <= LONGEST_TITLE else title[: LONGEST_TITLE - 1] + "…"


def is_told_apart(model: ModelResult) -> bool:
    """Does the corrected paired test tell this model from the best one?"""
    difference = model.differences.get(RANKED_BY)
    return difference is not None and difference.holm_p < SIGNIFICANT


def protocol_title(result: LabResult, protocol: str) -> str:
    n = "sampled" if result.n_negatives is None else f"{result.n_negatives:,}"
    return PROTOCOL_TITLES.get(protocol, protocol).format(n=n)


def interval(estimate: Figure | Difference) -> str:
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


def holm_p(result: LabResult, difference: Difference) -> str:
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


def memory(megabytes: float | None) -> str:
    if megabytes is None:
        return "–"
    return f"{megabytes:,.0f} MB" if megabytes < 1000 else f"{megabytes / 1000:.2f} GB"


def minutes(number: float | None) -> str:
    return "no limit" if number is None else f"{number:g} min"


def what_was_run(result: LabResult) -> list[tuple[str, str]]:
    facts, data, machine = result.facts, result.facts.data, result.facts.machine
    sizes = ", ".join(
        f"{data[key]:,} {key.removeprefix('n_')}"
        for key in ("n_users", "n_items", "n_interactions")
        if data.get(key) is not None
    )
    cores, gigabytes = machine.get("cores"), machine.get("memory_gb")
    return [
        ("data", plain(f"{data.get('name')} ({sizes})")),
        ("fingerprint", plain(str(data.get("fingerprint", "")))[:16]),
        ("split", plain(facts.split)),
        ("asked users", f"{result.n_users:,}"),
        ("seeds", ", ".join(map(str, facts.seeds))),
        ("budget of one training", minutes(facts.budget_minutes)),
        ("machine", plain(f"{machine.get('cpu')}, {cores} cores, {gigabytes} GB")),
        ("versions", plain(", ".join(f"{k} {v}" for k, v in facts.versions.items()))),
        ("begun", plain(facts.created)),
        ("settings of all", plain(", ".join(f"{k} = {v}" for k, v in facts.settings.items()))),
    ]


def row_notes(result: LabResult, model: ModelResult) -> list[str]:
    """What makes a row unlike its neighbours."""
    notes = []
    budget, usual = model.budget_minutes, result.facts.budget_minutes
    if budget is not None and budget != usual:
        notes.append(f"budget {minutes(budget)} instead of {minutes(usual)}")
    if any(cost.stopped_by_clock for cost in model.costs):
        notes.append(STOPPED_BY_CLOCK)
    n_seeds, n_usual = len(model.seeds), len(result.facts.seeds)
    if n_seeds != n_usual and not model.is_without_chance:
        notes.append(f"{n_seeds} of {n_usual} seeds")
    return notes


def setting_lines(model: ModelResult) -> list[str]:
    return [plain(f"{name} = {value}") for name, value in sorted(model.settings.items())]


def cautions(result: LabResult) -> list[str]:
    """What a careful reader has to know before quoting a number."""
    lines = [
        "The order of models is taken from the ranking among all items. Metrics over sampled "
        "negatives need not keep it, and need not even be consistent with it (Krichene & Rendle, "
        "On Sampled Metrics for Item Recommendation, KDD 2020); they are here to be set beside "
        "papers that used them.",
        f"The 95 % intervals come from {result.n_resamples:,} bootstrap resamples of the "
        f"{result.n_users:,} users: they cover the choice of users, not the randomness of "
        "training. With several seeds a user's metric is averaged over the seeds first; the "
        "range over seeds stands beside the interval.",
        "Differences to the best model are paired by user. Their p-values are two-sided and "
        "corrected by Holm for the number of models compared under a metric; their intervals "
        "are not corrected. The best was chosen on these same users, which flatters it a little.",
    ]
    if any(len(model.seeds) == 1 and not model.is_without_chance for model in result.models):
        lines.append(
            "Where a model has one seed only, p-values and intervals speak about single trainings: "
            "a difference smaller than that between two seeds of one model may be chance."
        )
    lines += _about_budgets(result)
    if result.missing:
        lines.append(
            f"{len(result.missing)} runs have no result and are listed apart: the best of all "
            "may be among them."
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
            f"Budgets of one training differ, from {minutes(budgets[0])} to "
            f"{minutes(budgets[-1])}: the order between rows of different budgets is no fair race."
        )
    return [
        f"{line} A model that learns slowly may overtake others with more time, see the learning "
        "curves; and times depend on the machine. Models that fit themselves, without epochs, "
        "take the time they need."
    ]
