"""The pictures with a line a model: learning curves, hit rates, users and items of every kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bert4rec.evaluation.report import figure as number
from bert4rec.lab.plot_style import HALF, WIDE, Plot, draw_models, minutes_axis
from bert4rec.lab.result import Bin, LabResult, ModelResult
from bert4rec.lab.svg import drawing, inline_svg, new_figure
from bert4rec.lab.words import plain

SHORTEST_MINUTES = 0.01  # a logarithmic axis has no 0


def learning_curves(result: LabResult) -> Plot:
    trained = [model for model in result.models if any(model.curves)]
    minutes = [point.minutes for m in trained for curve in m.curves for point in curve]
    with drawing("curves"):
        figure = new_figure(WIDE, 4.8)
        axes = figure.add_subplot()
        minutes_axis(axes, [max(each, SHORTEST_MINUTES) for each in minutes])

        def draw(model: ModelResult, colour: str, marker: str, width: float) -> None:
            for curve in model.curves:
                x = [max(point.minutes, SHORTEST_MINUTES) for point in curve]
                y = [point.ndcg_10 for point in curve]
                axes.plot(x, y, color=colour, linewidth=width)
                # One mark a curve, at its best validation: that is the model that was kept.
                if curve and width > 1:
                    best = max(range(len(y)), key=y.__getitem__)
                    axes.plot(x[best], y[best], marker, color=colour, markersize=6)

        draw_models(axes, result, trained, draw)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("minutes of training, validation included (logarithmic)")
        axes.set_ylabel("validation NDCG@10")
        alt = (
            f"Validation NDCG@10 over minutes of training for {len(trained)} models. "
            + "; ".join(
                f"{plain(m.title)} reaches "
                f"{number(max((p.ndcg_10 for curve in m.curves for p in curve), default=0))}"
                for m in trained
            )
        )
        svg = inline_svg(figure, "curves", alt)
    return Plot(
        "curves",
        "Learning curves",
        "One line a seed; the mark is the best validation, whose weights were kept. A line that "
        "still rises at its end had too little time. Counted models have no curve.",
        alt,
        svg,
    )


def hit_rates(result: LabResult) -> Plot:
    with drawing("hits"):
        figure = new_figure(WIDE, 4.8)
        axes = figure.add_subplot()

        def draw(model: ModelResult, colour: str, marker: str, width: float) -> None:
            k = range(1, len(model.hit_rates) + 1)
            every = 10 if width > 1 else len(k) + 1
            axes.plot(
                k,
                model.hit_rates,
                color=colour,
                linewidth=width,
                marker=marker if width > 1 else "",
                markevery=(9, every),
                markersize=5.5,
            )

        draw_models(axes, result, result.models, draw)
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, max(len(model.hit_rates) for model in result.models) + 0.5)
        axes.set_xlabel("k, the length of the list")
        axes.set_ylabel("HR@k over all items")
        best = result.models[0]
        alt = (
            "Share of users whose held-out item is among the first k. The best model by NDCG@10, "
            f"{plain(best.title)}, has {number(best.hit_rates[0])} at 1, "
            f"{number(best.hit_rates[9])} at 10 and {number(best.hit_rates[-1])} at "
            f"{len(best.hit_rates)}."
        )
        svg = inline_svg(figure, "hits", alt)
    return Plot(
        "hits",
        "Hits in lists of every length",
        "The share of users whose held-out item is among the first k recommended. Where lines "
        "cross, the better model depends on how many items you show.",
        alt,
        svg,
    )


def by_history_length(result: LabResult) -> Plot:
    return _by_bin(
        result,
        "history",
        "Short and long histories",
        "items in the history before the held-out one",
        "Each point is a group of users of about the same number; the table below has all models.",
        result.history_bins,
        lambda model: model.by_history_length,
    )


def by_popularity(result: LabResult) -> Plot:
    return _by_bin(
        result,
        "popularity",
        "Rare and popular items",
        "times that the held-out item occurs in training",
        "Further right the right answer is a better known item; the table below has all models.",
        result.popularity_bins,
        lambda model: model.by_popularity,
    )


def _by_bin(
    result: LabResult,
    name: str,
    title: str,
    label: str,
    how_to_read: str,
    bins: Sequence[Bin],
    values: Callable[[ModelResult], Sequence[float]],
) -> Plot:
    with drawing(name):
        figure = new_figure(HALF, 5.2)
        axes = figure.add_subplot()

        def draw(model: ModelResult, colour: str, marker: str, width: float) -> None:
            mark = marker if width > 1 else ""
            axes.plot(values(model), color=colour, marker=mark, markersize=5.5, linewidth=width)

        draw_models(axes, result, result.models, draw, is_legend_below=True)
        axes.set_ylim(bottom=0)
        axes.set_xticks(
            range(len(bins)), [f"{bin_label(each)}\n{each.n_users:,} users" for each in bins]
        )
        axes.set_xlim(-0.3, len(bins) - 0.7)
        axes.set_xlabel(label)
        axes.set_ylabel("NDCG@10 over all items")
        best = result.models[0]
        alt = f"NDCG@10 by {label}. {plain(best.title)}: " + ", ".join(
            f"{number(value)} for {bin_label(each)}"
            for each, value in zip(bins, values(best), strict=True)
        )
        svg = inline_svg(figure, name, alt)
    return Plot(name, title, how_to_read, alt, svg, is_half=True)


def bin_label(each: Bin) -> str:
    return f"{each.low:,}" if each.low == each.high else f"{each.low:,}–{each.high:,}"
