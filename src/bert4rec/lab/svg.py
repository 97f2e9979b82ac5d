"""A matplotlib figure as SVG that lives inside a page and takes its colours from it.

Figures are drawn with the stand-in colours below; in the page each becomes a CSS variable, so the
same picture is legible on light and on dark ground. Text stays text: it can be searched, copied
and read aloud, and a title can hold anything without becoming markup.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, GRID, MUTED, PAPER, FAINT = "#010101", "#020202", "#030303", "#040404", "#040405"
N_SERIES = 8
SERIES = tuple(f"#0500{i:02x}" for i in range(1, N_SERIES + 1))
_VARIABLES = {
    INK: "--ink",
    GRID: "--grid",
    MUTED: "--muted",
    PAPER: "--paper",
    FAINT: "--faint",
} | {colour: f"--series-{i}" for i, colour in enumerate(SERIES, 1)}
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
_POINTS_AN_INCH = 72


@contextmanager
def drawing(salt: str) -> Iterator[None]:
    """Settings to draw under: no TeX in titles, and the same bytes for the same numbers."""
    import matplotlib as mpl

    with (
        mpl.rc_context(
            {
                "svg.fonttype": "none",
                "svg.hashsalt": salt,
                "text.parse_math": False,  # a "$" in a title is a dollar
                "font.size": 9,
                "axes.labelsize": 9.5,
                "axes.edgecolor": MUTED,
                "axes.labelcolor": INK,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.facecolor": "none",
                "axes.axisbelow": True,
                "axes.grid": True,
                "grid.color": GRID,
                "grid.linewidth": 0.6,
                "xtick.color": MUTED,
                "ytick.color": MUTED,
                "xtick.labelcolor": INK,
                "ytick.labelcolor": INK,
                "text.color": INK,
                "legend.frameon": False,
                "figure.facecolor": "none",
            }
        ),
        warnings.catch_warnings(),
    ):
        # The page's fonts draw the text, so what the measuring font lacks is no loss.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def new_figure(width: float, height: float) -> Figure:
    """In inches. One pixel is one point, so that measured labels fit the SVG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=_POINTS_AN_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def inline_svg(figure: Figure, name: str, alt: str) -> str:
    """An `<svg>` element; `name` keeps its ids apart from those of other figures of the page."""
    buffer = BytesIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=nothing, facecolor="none")
    root = ElementTree.fromstring(buffer.getvalue())
    _remove(root, f"{{{_SVG}}}metadata")
    _remove(root, f"{{{_SVG}}}style")
    for element in root.iter():
        _adapt(element, name)
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.attrib |= {"class": "plot", "role": "img", "aria-label": alt}
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    return ElementTree.tostring(root, encoding="unicode")


def _remove(parent: ElementTree.Element, tag: str) -> None:
    for child in list(parent):
        if child.tag == tag:
            parent.remove(child)
        else:
            _remove(child, tag)


def _adapt(element: ElementTree.Element, name: str) -> None:
    """Ids of its own, colours and fonts of the page."""
    for attribute, value in list(element.attrib.items()):
        if attribute == "id":
            value = f"{name}-{value}"
        elif attribute == f"{{{_XLINK}}}href":
            value = value.replace("#", f"#{name}-", 1)
        elif attribute == "clip-path":
            value = value.replace("url(#", f"url(#{name}-")
        elif attribute == "style":
            for colour, variable in _VARIABLES.items():
                value = value.replace(colour, f"var({variable})")
            value = re.sub(r"(font: [^;]*?px) [^;]*", rf"\1 {_FONTS}", value)
            value = re.sub(r"font-family: [^;]*", f"font-family: {_FONTS}", value)
        element.set(attribute, value)
