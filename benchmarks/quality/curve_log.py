"""The learning curve of one tool as JSON lines, written point by point: a killed run keeps its own.

RecTools' environment uses this file too, so it needs nothing but the standard library.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

AIM_REACHED, MINUTES_OVER, OWN_END = "aim reached", "minutes over", "its own end"


def curve_arguments(description: str | None) -> argparse.ArgumentParser:
    """What every tool's script is told."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("log", type=Path, help="JSON lines to write")
    parser.add_argument("--aim", type=float, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    return parser


@dataclass(frozen=True)
class CurveLog:
    path: Path
    aim: float
    minutes: float
    stops_at_aim: bool = True

    def begin(self, about: dict[str, Any]) -> None:
        """What the tool is and how it was set; a log of an earlier run is replaced."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"about": about}) + "\n", encoding="utf-8")

    def point(
        self,
        epoch: int,
        ndcg: float,
        hit_rate: float,
        *,
        training_seconds: float,
        wall_seconds: float,
        stage: str,
        loss: float | None,
    ) -> str | None:
        """Keep a validation; the answer says why the run is over, or is None."""
        self._append(
            {
                "stage": stage,
                "epoch": epoch,
                "ndcg@10": round(ndcg, 6),
                "hr@10": round(hit_rate, 6),
                "loss": None if loss is None else round(loss, 5),
                "training_seconds": round(training_seconds, 2),
                "wall_seconds": round(wall_seconds, 2),
            }
        )
        if training_seconds >= 60 * self.minutes:
            return MINUTES_OVER
        return AIM_REACHED if self.stops_at_aim and ndcg >= self.aim else None

    def end(self, why: str) -> None:
        self._append({"ended": why})

    def _append(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_curve(path: Path) -> dict[str, Any]:
    """`about` and `curve`, and why it `ended`: a run that was killed did not say."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if not lines:
        raise ValueError(f"{path} is empty: run that tool again")
    ended = [line["ended"] for line in lines if "ended" in line]
    return {
        "about": lines[0]["about"],
        "ended": ended[0] if ended else "stopped from outside",
        "curve": [line for line in lines if "ndcg@10" in line],
    }


def minutes_to(curve: list[dict[str, Any]], aim: float, minutes: float) -> float | None:
    """Minutes of training up to the first validation at `aim`, if that is within `minutes`."""
    for point in curve:
        if point["ndcg@10"] >= aim and point["training_seconds"] <= 60 * minutes:
            return float(point["training_seconds"]) / 60
    return None
