"""Published tables again: a lab of their contenders, and then a verdict on every claim.

OUT/lab/                 a lab like any other: resumable, with a report of its own
OUT/reproduction.json    claims with verdicts, settings, seeds, budget, machine
OUT/reproduction.md      the same to be read
OUT/curve.svg, .png      of reproductions that are curves
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bert4rec.config import Config, load_config
from bert4rec.data.sequences import Sequences
from bert4rec.durable import write_file
from bert4rec.lab.claims import Published, Reproduction, reproduction_names
from bert4rec.lab.contenders import Contender, check_asked_the_same, lab_config
from bert4rec.lab.judge import Judgement, judge
from bert4rec.lab.reproduction_report import to_markdown, write_curve
from bert4rec.lab.run import run_lab


def contenders_of(
    reproduction: Reproduction, names: Sequence[str] = (), overrides: Sequence[str] = ()
) -> list[Contender]:
    """The contenders of a reproduction, or those that are named, with `overrides` on top."""
    known = {contender.name: contender for contender in reproduction.contenders}
    for name in names:
        if name not in known:
            raise ValueError(
                f"--models {name}: {reproduction.name} has {', '.join(known)}; choose among them"
            )
    chosen = [known[name] for name in known if name in names or not names]
    lab = lab_config([*reproduction.data_set, *overrides])
    contenders = []
    for each in chosen:
        config = _config(reproduction, each, overrides)
        contenders.append(Contender(each.name, each.title, config, each.name, tuple(overrides)))
        check_asked_the_same(contenders[-1], lab)
    return contenders


def run_reproduction(
    reproduction: Reproduction,
    contenders: Sequence[Contender],
    sequences: Sequences,
    out: Path,
    console: Console,
    *,
    data_name: str,
    n_seeds: int = 1,
    minutes: float = 20.0,
    overwrite: bool = False,
) -> None:
    """Run what is not done yet; `judge` says afterwards what came out of it."""
    name = reproduction.name
    run_lab(
        out / "lab",
        sequences,
        contenders,
        console,
        data_name=data_name,
        n_seeds=n_seeds,
        minutes=minutes,
        overwrite=overwrite,
        reproduction=name if name in reproduction_names() else f"{name}.toml",
    )


def write_judgement(reproduction: Reproduction, out: Path) -> Judgement:
    """Judge what is there, and write it down."""
    judgement = judge(reproduction, out)
    write_file(out / "reproduction.json", judgement.to_json())
    if judgement.curve_over is not None and judgement.curve:
        write_curve(judgement, out)
    write_file(out / "reproduction.md", to_markdown(judgement))
    return judgement


def _config(reproduction: Reproduction, each: Published, overrides: Sequence[str]) -> Config:
    base = reproduction.base
    if each.recipe is not None:
        recipe, settings = each.recipe, each.set
    else:
        assert base is not None
        recipe, settings = base.recipe, (*base.set, *each.set)
    return load_config(recipe, None, [*reproduction.data_set, *settings, *overrides])
