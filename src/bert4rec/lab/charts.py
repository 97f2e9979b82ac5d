"""The charts of a report, drawn by matplotlib, each with a title and a sentence on how to read it.

Up to twenty models are too many colours: the best seven and popularity have one, the same in every
chart; all others are grey, and their numbers are in the tables.
"""

from __future__ import annotations

import base64
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import accumulate
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bert4rec.evaluation.report import figure as number
from bert4rec.evaluation.text_tables import one_line
from bert4rec.lab.lab_result import FULL, RANKED_BY, LabResult, ModelResult
from bert4rec.lab.report_text import is_significantly_worse, short

BASELINE = "popularity"  # always in colour: what every model has to beat
MARKERS = "osD^vPX*"
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#b8578f", "#c98a00", "#3a9fd8", "#5d4a9c", "#1c1e21"]
GREY = "#b3bac3"
WIDE, HALF = 10.5, 6.4  # inches
SHORTEST_MINUTES = 0.01  # a logarithmic axis has no 0
STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a "$" in a title is a dollar
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}
Draw = Callable[[Axes, ModelResult, dict[str, Any]], None]


@dataclass(frozen=True)
class Chart:
    name: str
    title: str
    how_to_read: str
    alt: str  # for those who cannot see it
    image: str  # a data URI
    is_half: bool  # two of them fit side by side on a laptop


def all_charts(result: LabResult) -> list[Chart]:
    """Those that the result has numbers for."""
    if not result.models:
        return []
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        # The browser's fonts draw the text, so a glyph that the measuring font lacks is no loss.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        charts = [quality(result), quality_and_time(result)]
        if any(curve for model in result.models for curve in model.curves):
            charts.append(learning_curves(result))
        label = "occurrences of the held-out item in training"
        return [
            *charts,
            hit_rates(result),
            by_bin(result, "history", "Short and long histories", "items in the history"),
            by_bin(result, "popularity", "Rare and popular items", label),
        ]


def quality(result: LabResult) -> Chart:
    models = result.models[::-1]  # the first is drawn at the bottom
    picture = Figure(figsize=(WIDE, 0.9 + 0.27 * len(models)), layout="constrained")
    axes = picture.add_subplot()
    for y, model in enumerate(models):
        score, is_worse = model.score, is_significantly_worse(model)
        colour = COLOURS[-1 if is_worse else 0]
        if score.low is not None and score.high is not None:
            axes.plot([score.low, score.high], [y, y], color=colour, linewidth=1.6)
        if len(model.seeds) > 1:
            of_seeds = [f.value for f in model.seed_figures[FULL][RANKED_BY]]
            axes.plot(of_seeds, [y] * len(of_seeds), "|", color="grey", markersize=10)
        filling = "white" if is_worse else colour
        axes.plot(score.value, y, "o", color=colour, markerfacecolor=filling)
    axes.set_yticks(range(len(models)), [short(model.title) for model in models])
    axes.set(xlim=(0, None), ylim=(-0.6, len(models) - 0.4))
    scores = "; ".join(f"{one_line(m.title)} {number(m.score.value)}" for m in result.models)
    return _finished(
        picture,
        "quality",
        "Which model ranks best",
        "Each dot is a model's mean over users, further right is better; the line is the 95 % "
        "interval over users, and thin strokes are single seeds. Filled dots are the best "
        "model and those that are not significantly worse in the paired test.",
        "NDCG@10 of the held-out item, ranked among all items",
        "",
        f"Models by NDCG@10, best first: {scores}.",
    )


def quality_and_time(result: LabResult) -> Chart:
    known = {
        model.name: max(seconds / 60, SHORTEST_MINUTES)
        for model in result.models
        if (seconds := model.mean_cost("training_seconds")) is not None
    }
    timed = [model for model in result.models if model.name in known]

    def draw(axes: Axes, model: ModelResult, style: dict[str, Any]) -> None:
        axes.plot(known[model.name], model.score.value, **(style | {"linestyle": "none"}))

    picture = _lines(result, timed, draw)
    axes = picture.axes[0]
    points = sorted((known[model.name], model.score.value) for model in timed)
    best = list(accumulate((value for _, value in points), max))
    axes.step([x for x, _ in points], best, where="post", color=GREY, zorder=0)
    axes.set_xscale("log")
    scores = "; ".join(f"{one_line(m.title)} {number(m.score.value)} in {known[m.name]:.2f} minutes" for m in timed)
    return _finished(
        picture,
        "time",
        "Quality against training time",
        "Up is better, left is cheaper; the grey steps show the best model up to each time. "
        f"Training of less than {SHORTEST_MINUTES} minutes is drawn at {SHORTEST_MINUTES}.",
        "training time in minutes, validation included (logarithmic)",
        "NDCG@10 over all items",
        f"NDCG@10 against minutes of training: {scores}.",
    )


def learning_curves(result: LabResult) -> Chart:
    trained = [model for model in result.models if any(model.curves)]

    def draw(axes: Axes, model: ModelResult, style: dict[str, Any]) -> None:
        for curve in filter(None, model.curves):
            x = [max(point.minutes, SHORTEST_MINUTES) for point in curve]
            y = [point.ndcg_10 for point in curve]
            # The weights of the best validation were kept.
            axes.plot(x, y, markevery=[y.index(max(y))], **style)

    picture = _lines(result, trained, draw)
    picture.axes[0].set_xscale("log")
    best = {one_line(m.title): max((p.ndcg_10 for curve in m.curves for p in curve), default=0.0) for m in trained}
    reached = "; ".join(f"{title} reaches {number(value)}" for title, value in best.items())
    return _finished(
        picture,
        "curves",
        "Learning curves",
        "One line per seed; the mark is the best validation, whose weights were kept. A line "
        "that still rises at its end had too little time. Counted models have no curve.",
        "minutes of training, validation included (logarithmic)",
        "validation NDCG@10",
        f"Validation NDCG@10 over minutes of training: {reached}.",
    )


def hit_rates(result: LabResult) -> Chart:
    def draw(axes: Axes, model: ModelResult, style: dict[str, Any]) -> None:
        k = range(1, len(model.hit_rates) + 1)
        axes.plot(k, model.hit_rates, markevery=(9, 10), **style)

    best = result.models[0]
    return _finished(
        _lines(result, result.models, draw),
        "hits",
        "Hits in lists of every length",
        "The share of users whose held-out item is among the top k. Where lines cross, the "
        "better model depends on how many items you show.",
        "k, the length of the list",
        "HR@k over all items",
        "Share of users whose held-out item is in the top k. The best model by NDCG@10, "
        f"{one_line(best.title)}, has {number(best.hit_rates[0])} at 1, "
        f"{number(best.hit_rates[9])} at 10 and {number(best.hit_rates[-1])} at "
        f"{len(best.hit_rates)}.",
    )


def by_bin(result: LabResult, name: str, title: str, label: str) -> Chart:
    bins = result.history_bins if name == "history" else result.popularity_bins

    def values(model: ModelResult) -> Sequence[float]:
        return model.by_history_length if name == "history" else model.by_popularity

    def draw(axes: Axes, model: ModelResult, style: dict[str, Any]) -> None:
        axes.plot(values(model), **style)

    picture = _lines(result, result.models, draw, is_half=True)
    picture.axes[0].set_xticks(range(len(bins)), [f"{each}\n{each.n_users:,} users" for each in bins])
    best = result.models[0]
    found = zip(bins, values(best), strict=True)
    return _finished(
        picture,
        name,
        title,
        "Each point is a group of users of about the same size; the table has all models.",
        label,
        "NDCG@10 over all items",
        f"NDCG@10 by {label}. {one_line(best.title)}: "
        + ", ".join(f"{number(value)} for {each}" for each, value in found),
    )


def coloured(result: LabResult) -> dict[str, int]:
    """Model name -> its place in the palette, best first."""
    names = [model.name for model in result.models]
    chosen = names[: len(COLOURS)]
    if BASELINE in names[len(COLOURS) :]:
        chosen = [*names[: len(COLOURS) - 1], BASELINE]
    return {name: place for place, name in enumerate(chosen)}


def _lines(result: LabResult, models: Sequence[ModelResult], draw: Draw, *, is_half: bool = False) -> Figure:
    """All models drawn in their style, the best last and on top, and a legend best first."""
    picture = Figure(figsize=(HALF if is_half else WIDE, 5), layout="constrained")
    axes, places = picture.add_subplot(), coloured(result)
    handles: list[Line2D] = []
    n_grey = 0
    for model in sorted(models, key=lambda m: -places.get(m.name, len(COLOURS))):
        place = places.get(model.name)
        if place is None:
            draw(axes, model, {"color": GREY, "linewidth": 1, "marker": "."})
            n_grey += 1
        else:
            style: dict[str, Any] = {"color": COLOURS[place], "linewidth": 1.8, "marker": MARKERS[place]}
            draw(axes, model, style)
            handles.insert(0, Line2D([], [], label=short(model.title), **style))
    if n_grey:
        handles.append(Line2D([], [], color=GREY, label=f"{n_grey} other models"))
    axes.set_ylim(bottom=0)
    if is_half:
        picture.legend(handles=handles, loc="outside lower center", ncols=2)
    else:
        picture.legend(handles=handles, loc="outside right center")
    return picture


def _finished(picture: Figure, name: str, title: str, how_to_read: str, x: str, y: str, alt: str) -> Chart:
    """With the picture as SVG; the same numbers give the same bytes."""
    picture.axes[0].set(xlabel=x, ylabel=y)
    file = BytesIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        picture.savefig(file, format="svg", metadata={"Date": None})
    code = base64.b64encode(file.getvalue()).decode("ascii")
    is_half = picture.get_figwidth() == HALF
    return Chart(name, title, how_to_read, alt, f"data:image/svg+xml;base64,{code}", is_half)
