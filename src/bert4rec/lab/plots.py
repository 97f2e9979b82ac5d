"""The pictures of a report, each with a title, a sentence on how to read it, and words for it."""

from __future__ import annotations

from bert4rec.evaluation.report import figure as number
from bert4rec.lab.curve_plots import by_history_length, by_popularity, hit_rates, learning_curves
from bert4rec.lab.labels import label_points
from bert4rec.lab.plot_style import WIDE, Plot, coloured, minutes_axis, style
from bert4rec.lab.result import FULL, RANKED_BY, LabResult, ModelResult
from bert4rec.lab.svg import FAINT, INK, MUTED, PAPER, SERIES, drawing, inline_svg, new_figure
from bert4rec.lab.words import is_told_apart, plain, short

SHORTEST_MINUTES = 0.1  # a logarithmic axis has no 0, and the room is needed further right


def all_plots(result: LabResult) -> list[Plot]:
    """Those that the result has numbers for."""
    if not result.models:
        return []
    plots = [quality(result), quality_and_time(result)]
    if any(curve for model in result.models for curve in model.curves):
        plots.append(learning_curves(result))
    plots.append(hit_rates(result))
    plots.append(by_history_length(result))
    plots.append(by_popularity(result))
    return plots


def quality(result: LabResult) -> Plot:
    models = result.models[::-1]  # the first is drawn at the bottom
    seeds = any(model.seed_range(RANKED_BY) for model in models)
    with drawing("quality"):
        figure = new_figure(WIDE, 0.9 + 0.27 * len(models))
        axes = figure.add_subplot()
        for y, model in enumerate(models):
            score, apart = model.score, is_told_apart(model)
            colour = INK if apart else SERIES[0]
            if score.low is not None and score.high is not None:
                axes.plot([score.low, score.high], [y, y], color=colour, linewidth=1.6)
            if len(model.seeds) > 1:
                of_seeds = [f.value for f in model.seed_figures[FULL][RANKED_BY]]
                axes.plot(of_seeds, [y] * len(of_seeds), "|", color=MUTED, markersize=10)
            filling = PAPER if apart else colour
            axes.plot(score.value, y, "o", color=colour, markersize=6, markerfacecolor=filling)
        axes.set_yticks(range(len(models)), [short(model.title) for model in models])
        axes.set_ylim(-0.6, len(models) - 0.4)
        axes.set_xlim(left=0)
        axes.set_xlabel("NDCG@10 of the held-out item, ranked among all items")
        axes.tick_params(axis="y", length=0)
        alt = "Models by NDCG@10, best first: " + "; ".join(map(_in_words, result.models)) + "."
        svg = inline_svg(figure, "quality", alt)
    return Plot(
        "quality",
        "Who ranks best",
        "Each dot is a model's mean over users, further right is better; the line is the 95 % "
        "interval over users"
        + (", and the thin strokes are the single seeds" if seeds else "")
        + ". Filled dots are the best model and those that the paired test cannot tell from it.",
        alt,
        svg,
    )


def quality_and_time(result: LabResult) -> Plot:
    known = [
        (m, s / 60) for m in result.models if (s := m.mean_cost("training_seconds")) is not None
    ]
    places = coloured(result)
    x = [max(minutes, SHORTEST_MINUTES) for _, minutes in known]
    y = [model.score.value for model, _ in known]
    with drawing("time"):
        figure = new_figure(WIDE, 5.2)
        axes = figure.add_subplot()
        minutes_axis(axes, x)
        best_so_far = 0.0
        front = []
        for minutes, value in sorted(zip(x, y, strict=True), key=lambda p: (p[0], -p[1])):
            if value > best_so_far:
                front += [(minutes, best_so_far or value), (minutes, value)]
                best_so_far = value
        if front:
            front.append((max(x), best_so_far))
            axes.plot(*zip(*front, strict=True), color=FAINT, linewidth=1.2, zorder=1)
        for (model, _), a, b in zip(known, x, y, strict=True):
            colour, marker = style(places.get(model.name))
            axes.plot(a, b, marker, color=colour, markersize=7, linestyle="none")
        axes.set_ylim(0, max(y, default=1) * 1.08 or 1)
        axes.set_xlabel("training time in minutes, validation included (logarithmic)")
        axes.set_ylabel("NDCG@10 over all items")
        label_points(axes, x, y, [short(model.title) for model, _ in known])
        alt = "NDCG@10 against minutes of training: " + "; ".join(
            f"{plain(model.title)} {number(model.score.value)} in {minutes:.2f} minutes"
            for model, minutes in known
        )
        svg = inline_svg(figure, "time", alt)
    return Plot(
        "time",
        "Quality against training time",
        "Up is better, left is cheaper; the grey steps join the models that no quicker model "
        f"beats. Training of less than {SHORTEST_MINUTES} minutes is drawn at {SHORTEST_MINUTES}.",
        alt,
        svg,
    )


def _in_words(model: ModelResult) -> str:
    score = model.score
    text = f"{plain(model.title)} {number(score.value)}"
    if score.low is not None and score.high is not None:
        text += f" ({number(score.low)} to {number(score.high)})"
    return text
