"""What the pictures of a report share: which models have a colour, and which colour and mark.

Up to twenty models are too many colours: the best seven and popularity have one, the same in every
picture, and their own mark; all others are drawn in grey and can be read in the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bert4rec.lab.result import LabResult, ModelResult
from bert4rec.lab.svg import FAINT, MUTED, N_SERIES, SERIES
from bert4rec.lab.words import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BASELINE = "popularity"  # always in colour: what every model has to beat
MARKERS = "osD^vPX*"
WIDE, HALF = 10.5, 6.4  # inches


@dataclass(frozen=True)
class Plot:
    name: str
    title: str
    how_to_read: str
    alt: str
    svg: str
    is_half: bool = False  # two of them fit side by side on a laptop


def coloured(result: LabResult) -> dict[str, int]:
    """Model name -> its place in the palette, best first."""
    names = [model.name for model in result.models]
    chosen = names[:N_SERIES]
    if BASELINE in names[N_SERIES:]:
        chosen = [*names[: N_SERIES - 1], BASELINE]
    return {name: place for place, name in enumerate(chosen)}


def style(place: int | None) -> tuple[str, str]:
    return (MUTED, ".") if place is None else (SERIES[place], MARKERS[place])


def draw_models(
    axes: Axes,
    result: LabResult,
    models: Sequence[ModelResult],
    draw: Callable[[ModelResult, str, str, float], None],
    is_legend_below: bool = False,
) -> None:
    """Grey ones first, the best last and on top; a legend that is sorted by quality."""
    from matplotlib.lines import Line2D

    places = coloured(result)
    handles = []
    for model in reversed(models):
        if model.name not in places:
            draw(model, FAINT, "", 1.0)
    for model in reversed(models):
        if model.name in places:
            colour, marker = style(places[model.name])
            draw(model, colour, marker, 1.8)
            title = short(model.title)
            handles.append(Line2D([], [], color=colour, marker=marker, markersize=6, label=title))
    handles.reverse()
    n_grey = sum(model.name not in places for model in models)
    if n_grey:
        label = f"{n_grey} other models" if n_grey > 1 else "1 other model"
        handles.append(Line2D([], [], color=FAINT, linewidth=1.5, label=label))
    figure = axes.get_figure(root=True)
    assert figure is not None
    if is_legend_below:
        figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=9)
    else:
        figure.legend(handles=handles, loc="outside right center", fontsize=9)


def minutes_axis(axes: Axes, minutes: Sequence[float]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    low, high = min(minutes, default=1.0), max(minutes, default=1.0)
    axes.set_xlim(low / 1.5, high * 1.5)
    subs = (1.0, 2.0, 5.0) if high / low < 200 else (1.0,)
    axes.xaxis.set_major_locator(LogLocator(subs=subs))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
