"""Names beside points, none on top of another."""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, hypot, pi, sin
from typing import TYPE_CHECKING

from bert4rec.lab.svg import INK, MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Box = tuple[float, float, float, float]  # left, bottom, right, top in points
Point = tuple[float, float]

DISTANCES = (7, 12, 18, 26, 36, 48, 62, 78, 96)  # points from the middle of a mark
N_DIRECTIONS = 16
MARK = 5.0  # half the side of the square that a mark takes
NEEDS_A_LINE = 15  # from this distance on a thin line leads to the mark


def label_points(
    axes: Axes, x: Sequence[float], y: Sequence[float], names: Sequence[str], size: float = 9
) -> None:
    """Name each point at the nearest free place; call it last, when the limits are set.

    Greedy: points in crowded places choose first. Where nothing is free, the place with the
    least overlap is taken.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # constrained layout moves the axes
    at = axes.transData.transform(list(zip(x, y, strict=True))) if len(x) else ()
    points: list[Point] = [(float(a), float(b)) for a, b in at]
    frame = axes.get_window_extent()
    room: Box = (frame.x0, frame.y0, frame.x1 + 4, frame.y1 + 4)
    taken: list[Box] = [(a - MARK, b - MARK, a + MARK, b + MARK) for a, b in points]

    def n_near(i: int) -> int:
        return sum(abs(points[i][0] - a) < 80 and abs(points[i][1] - b) < 30 for a, b in points)

    for i in sorted(range(len(points)), key=n_near, reverse=True):
        probe = axes.text(0, 0, names[i], fontsize=size)
        extent = probe.get_window_extent()
        probe.remove()
        box, distance = _free_place(i, points, extent.width, extent.height, taken, room)
        taken.append(box)
        (a, b), middle = points[i], ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
        line = {"arrowstyle": "-", "color": MUTED, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
        axes.annotate(
            names[i],
            (x[i], y[i]),
            xytext=(middle[0] - a, middle[1] - b),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=size,
            color=INK,
            arrowprops=line if distance >= NEEDS_A_LINE else None,
            annotation_clip=False,
        ).set_in_layout(False)


def _free_place(
    i: int, points: Sequence[Point], width: float, height: float, taken: list[Box], room: Box
) -> tuple[Box, float]:
    """The box of a label for point `i`, and how far it is from it."""
    x, y = points[i]
    best: tuple[float, Box, float] | None = None
    for distance in DISTANCES:
        for direction in range(N_DIRECTIONS):  # the first is to the right
            angle = 2 * pi * direction / N_DIRECTIONS
            # The box touches an oval around the mark, wherever it lies.
            a = x + cos(angle) * (distance + width / 2)
            b = y + sin(angle) * (distance + height / 2)
            box = (a - width / 2, b - height / 2, a + width / 2, b + height / 2)
            if distance < NEEDS_A_LINE and _is_nearer_to_another(box, i, points):
                continue  # it would be read as the other's name
            overlap = sum(_overlap(box, other) for other in taken)
            overlap += width * height - _overlap(box, room)
            if best is None or overlap < best[0] - 1e-6:
                best = (overlap, box, distance)
            if overlap < 1e-6:
                return box, distance
    assert best is not None
    return best[1], best[2]


def _is_nearer_to_another(box: Box, i: int, points: Sequence[Point]) -> bool:
    def gap(point: Point) -> float:
        x = max(box[0] - point[0], 0, point[0] - box[2])
        y = max(box[1] - point[1], 0, point[1] - box[3])
        return hypot(x, y)

    own = gap(points[i])
    return any(gap(other) < 1.3 * own for j, other in enumerate(points) if j != i)


def _overlap(one: Box, other: Box) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(0.0, width) * max(0.0, height)
