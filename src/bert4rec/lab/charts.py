"""The charts of a report, drawn by matplotlib; `report.html` has their titles and says how to read them.

Up to twenty models are too many colours: the best seven and popularity have one, the same in every
chart; all others are grey, and their numbers are in the tables.
"""

from __future__ import annotations

import base64
import warnings
from collections.abc import Sequence
from io import BytesIO
from itertools import accumulate
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from bert4rec.evaluation.report import figure as number
from bert4rec.evaluation.text_tables import one_line
from bert4rec.lab.lab_result import FULL, RANKED_BY, LabResult
from bert4rec.lab.report_text import is_significantly_worse, short

BASELINE = "popularity"  # always in colour: what every model has to beat
MARKERS = "osD^vPX*"
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#b8578f", "#c98a00", "#3a9fd8", "#5d4a9c", "#1c1e21"]
GREY = "#b3bac3"
WIDE, HALF = 10.5, 6.4  # inches; two half charts fit side by side on a laptop
Y_LABEL = "NDCG@10 over all items"
BIN_LABELS = {"history": "items in the history", "popularity": "occurrences of the held-out item in training"}
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
Curve = tuple[Sequence[float], Sequence[float], Any]  # x, y and where to mark it: matplotlib's `markevery`


class Chart(NamedTuple):
    image: str  # a data URI
    alt: str  # for those who cannot see it


def all_charts(result: LabResult) -> dict[str, Chart]:
    """Those that the result has numbers for, by their name in the page, which says how to read them."""
    if not result.models:
        return {}
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        # The browser's fonts draw the text, so a glyph that the measuring font lacks is no loss.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        charts = {"quality": quality(result), "time": quality_and_time(result)}
        if any(curve for model in result.models for curve in model.curves):
            charts["curves"] = learning_curves(result)
        charts["hits"] = hit_rates(result)
        charts |= {name: by_bin(result, name) for name in BIN_LABELS}
        return {name: Chart(_data_uri(picture, name), alt) for name, (picture, alt) in charts.items()}


def quality(result: LabResult) -> tuple[Figure, str]:
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
    axes.set_xlabel("NDCG@10 of the held-out item, ranked among all items")
    scores = "; ".join(f"{one_line(m.title)} {number(m.score.value)}" for m in result.models)
    return picture, f"Models by NDCG@10, best first: {scores}."


def quality_and_time(result: LabResult) -> tuple[Figure, str]:
    minutes = {
        model.name: max(seconds / 60, SHORTEST_MINUTES)
        for model in result.models
        if (seconds := model.mean_cost("training_seconds")) is not None
    }
    timed = [model for model in result.models if model.name in minutes]
    picture = _lines(result, {m.name: [([minutes[m.name]], [m.score.value], None)] for m in timed})
    axes = picture.axes[0]
    points = sorted((minutes[model.name], model.score.value) for model in timed)
    best = list(accumulate((value for _, value in points), max))
    axes.step([x for x, _ in points], best, where="post", color=GREY, zorder=0)
    axes.set(xlabel="training time in minutes, validation included (logarithmic)", ylabel=Y_LABEL)
    _make_logarithmic(axes)
    scores = "; ".join(f"{one_line(m.title)} {number(m.score.value)} in {minutes[m.name]:.2f} minutes" for m in timed)
    return picture, f"NDCG@10 against minutes of training: {scores}."


def learning_curves(result: LabResult) -> tuple[Figure, str]:
    curves: dict[str, list[Curve]] = {}
    reached = []
    for model in result.models:
        for curve in filter(None, model.curves):
            x, y = [max(point.minutes, SHORTEST_MINUTES) for point in curve], [point.ndcg_10 for point in curve]
            # The weights of the best validation were kept.
            curves.setdefault(model.name, []).append((x, y, [y.index(max(y))]))
        if model.name in curves:
            best = max(max(y) for _, y, _ in curves[model.name])
            reached.append(f"{one_line(model.title)} reaches {number(best)}")
    picture = _lines(result, curves)
    x_label = "minutes of training, validation included (logarithmic)"
    picture.axes[0].set(xlabel=x_label, ylabel="validation NDCG@10")
    _make_logarithmic(picture.axes[0])
    return picture, f"Validation NDCG@10 over minutes of training: {'; '.join(reached)}."


def hit_rates(result: LabResult) -> tuple[Figure, str]:
    best = result.models[0]
    k = range(1, len(best.hit_rates) + 1)
    picture = _lines(result, {model.name: [(k, model.hit_rates, (9, 10))] for model in result.models})
    picture.axes[0].set(xlabel="k, the length of the list", ylabel="HR@k over all items")
    return picture, (
        "Share of users whose held-out item is in the top k. The best model by NDCG@10, "
        f"{one_line(best.title)}, has {number(best.hit_rates[0])} at 1, "
        f"{number(best.hit_rates[9])} at 10 and {number(best.hit_rates[-1])} at {len(k)}."
    )


def by_bin(result: LabResult, name: str) -> tuple[Figure, str]:
    bins, label, best = result.bins[name], BIN_LABELS[name], result.models[0]
    places = range(len(bins))
    picture = _lines(result, {model.name: [(places, model.by_bin[name], None)] for model in result.models}, HALF)
    axes = picture.axes[0]
    axes.set_xticks(places, [f"{each}\n{each.n_users:,} users" for each in bins])
    axes.set(xlabel=label, ylabel=Y_LABEL)
    found = ", ".join(f"{number(value)} for {each}" for each, value in zip(bins, best.by_bin[name], strict=True))
    return picture, f"NDCG@10 by {label}. {one_line(best.title)}: {found}"


def coloured(result: LabResult) -> dict[str, int]:
    """Model name -> its place in the palette, best first."""
    names = [model.name for model in result.models]
    chosen = names[: len(COLOURS)]
    if BASELINE in names[len(COLOURS) :]:
        chosen = [*names[: len(COLOURS) - 1], BASELINE]
    return {name: place for place, name in enumerate(chosen)}


def _lines(result: LabResult, curves: dict[str, list[Curve]], width: float = WIDE) -> Figure:
    """The curves of models in their style, the best last and on top, and a legend best first."""
    picture = Figure(figsize=(width, 5), layout="constrained")
    axes, places = picture.add_subplot(), coloured(result)
    handles: list[Line2D] = []
    n_grey = 0
    models = [model for model in result.models if model.name in curves]
    for model in sorted(models, key=lambda m: -places.get(m.name, len(COLOURS))):
        place = places.get(model.name)
        style: dict[str, Any] = {"color": GREY, "linewidth": 1, "marker": "."}
        if place is None:
            n_grey += 1
        else:
            style = {"color": COLOURS[place], "linewidth": 1.8, "marker": MARKERS[place]}
            handles.insert(0, Line2D([], [], label=short(model.title), **style))
        for x, y, marks in curves[model.name]:
            axes.plot(x, y, markevery=marks, **style)
    if n_grey:
        handles.append(Line2D([], [], color=GREY, label=f"{n_grey} other models"))
    axes.set_ylim(bottom=0)
    if width == HALF:
        picture.legend(handles=handles, loc="outside lower center", ncols=2)
    else:
        picture.legend(handles=handles, loc="outside right center")
    return picture


def _data_uri(picture: Figure, name: str) -> str:
    """The picture as SVG; the same numbers give the same bytes."""
    file = BytesIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        picture.savefig(file, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def _make_logarithmic(axes: Axes) -> None:
    """With plain numbers: powers of ten would be written as TeX, which is not read here."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
