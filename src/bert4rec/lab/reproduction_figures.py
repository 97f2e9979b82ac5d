"""The figures of a reproduction: curves over a setting, and where the heads attend (Figure 2).

Attention is averaged over many histories. They have different lengths, so positions are counted
from the end: the last one is `[MASK]`, the one before it the most recent item. Every matrix is
computed over the whole history that the model reads, where its rows sum to 1, and only then cut to
the last positions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from bert4rec.data.splits import Spans
from bert4rec.durable import new_file, write_file
from bert4rec.explanation import attention_weights
from bert4rec.lab.lab_result import MeanEstimate
from bert4rec.models import Model
from bert4rec.models.bert4rec import BERT4Rec
from bert4rec.threads import WorkerThreads

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AT_ONCE = 64  # histories
N_USERS = 2000  # at most; more change the averages by less than a picture shows


@dataclass(frozen=True)
class AttentionMaps:
    """`weights` (layers, heads, n, n): row i is how much position i attends to each position."""

    weights: NDArray[np.float64]
    n_users: int

    def to_the_left(self) -> NDArray[np.float64]:
        """(layers, heads): of the attention to other positions, the share to older ones."""
        older = np.tril(self.weights, -1).sum((2, 3))
        newer = np.triu(self.weights, 1).sum((2, 3))
        share: NDArray[np.float64] = older / (older + newer)
        return share

    def to_recent(self) -> NDArray[np.float64]:
        """(layers, heads): of the attention of `[MASK]` to items, the share of the newer half."""
        to_items = self.weights[:, :, -1, :-1]
        n = to_items.shape[2]
        is_newer = np.clip(np.arange(n) - n / 2 + 1, 0, 1)  # of an odd number the middle one counts half
        share: NDArray[np.float64] = to_items @ is_newer / to_items.sum(2)
        return share

    def claims(self) -> dict[str, bool]:
        """What the paper reads out of its figure, and whether it holds."""
        left, recent = self.to_the_left()[0], self.to_recent()[-1]
        return {
            "in the first layer, some heads attend to the left and others to the right": bool(
                left.min() < 0.5 < left.max()
            ),
            "in the last layer, [MASK] attends to recent items more than to older ones": bool(recent.mean() > 0.5),
        }


def average_attention(
    model: Model, histories: Spans, n_positions: int, *, n_users: int = N_USERS, seed: int = 0
) -> AttentionMaps:
    """Averages over `n_users` random ones of the histories that fill all positions."""
    if not isinstance(model, BERT4Rec):
        raise ValueError(f"attention maps need a BERT4Rec model, this is {type(model).__name__}")
    if not 3 <= n_positions <= model.max_len:
        raise ValueError(f"{n_positions} positions: choose from 3 to the model's max_len = {model.max_len}")
    long_enough = np.flatnonzero(histories.lengths >= n_positions - 1)
    if not len(long_enough):
        raise ValueError(f"no history has {n_positions - 1} items or more: choose fewer positions than {n_positions}")
    n = min(n_users, len(long_enough))
    rows = np.random.default_rng(seed).choice(long_enough, n, replace=False)
    n_read = np.minimum(histories.lengths, model.max_len - 1)
    parts: list[NDArray[np.int64]] = []  # histories of one length: no padding among them
    for length in np.unique(n_read[rows]).tolist():
        alike = rows[n_read[rows] == length]
        parts += np.array_split(alike, -(-len(alike) // AT_ONCE))

    def summed(part: NDArray[np.int64]) -> NDArray[np.float64]:
        length = int(n_read[part[0]])
        read = np.stack([histories[row][-length:] for row in part.tolist()]).astype(np.int64)
        weights = attention_weights(model, torch.from_numpy(read))[..., -n_positions:, -n_positions:]
        total: NDArray[np.float64] = weights.double().sum(1).cpu().numpy()
        return total

    with WorkerThreads() as workers:
        return AttentionMaps(np.sum(workers.map(summed, parts), axis=0) / n, n)


@dataclass(frozen=True)
class CurvePoint:
    """NDCG@10 of a contender at an x-value of a curve."""

    at: float
    ours: MeanEstimate
    published: float | None


def write_curve(points: Sequence[CurvePoint], x_label: str, y_label: str, out: Path) -> None:
    """NDCG@10 with its interval over the setting that was varied, as `curve.svg` and `.png`."""
    picture = _new_picture(6, 3.6)
    axes = picture.subplots()
    at, ours = [point.at for point in points], [point.ours for point in points]
    axes.plot(at, [each.value for each in ours], marker="o", label="ours, with 95 % interval")
    axes.vlines(at, np.array([each.low for each in ours]), np.array([each.high for each in ours]))
    if known := [(point.at, point.published) for point in points if point.published is not None]:
        axes.plot(*zip(*known, strict=True), "x", color="black", label="published")
    if max(at) >= 8 * min(at):
        axes.set_xscale("log", base=2)
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.set_xticks(at, [f"{each:g}" for each in at])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    _save(picture, out, "curve")


def write_maps(maps: AttentionMaps, out: Path) -> None:
    """`attention.json`, `attention.svg` and `attention.png`."""
    layers, heads, n, _ = maps.weights.shape
    names = [*(str(i - n + 1) for i in range(n - 1)), "[MASK]"]
    size = 1.4 + 0.16 * n
    picture = _new_picture(heads * size + 0.8, layers * size)
    grid = picture.subplots(layers, heads, squeeze=False)
    for layer in range(layers):
        for head in range(heads):
            axes, weights = grid[layer, head], maps.weights[layer, head]
            image = axes.imshow(weights, cmap="viridis", vmin=0, vmax=float(weights.max()))
            axes.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=9)
            axes.set_xticks(range(n), names, rotation=90, fontsize=6)
            axes.set_yticks(range(n), names, fontsize=6)
            picture.colorbar(image, ax=axes, shrink=0.8).ax.tick_params(labelsize=6)
    picture.supxlabel("attended position (items counted back from [MASK])", fontsize=8)
    picture.supylabel("query position", fontsize=8)
    out.mkdir(parents=True, exist_ok=True)
    facts = {
        "n_users": maps.n_users,
        "n_positions": n,
        "weights": np.round(maps.weights, 6).tolist(),
        "share_to_the_left": np.round(maps.to_the_left(), 4).tolist(),
        "share_of_the_newer_half": np.round(maps.to_recent(), 4).tolist(),
        "claims": maps.claims(),
    }
    write_file(out / "attention.json", json.dumps(facts, indent=1) + "\n")
    _save(picture, out, "attention")


def _new_picture(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("matplotlib is needed: pip install 'bert4rec[lab]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def _save(picture: Figure, out: Path, name: str) -> None:
    for kind in ("svg", "png"):
        with new_file(out / f"{name}.{kind}") as path:
            picture.savefig(path, format=kind, dpi=150)
