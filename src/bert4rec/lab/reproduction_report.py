"""Verdicts as a terminal table, as Markdown and, for curves, as a picture."""

from __future__ import annotations

from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from bert4rec.durable import new_file
from bert4rec.evaluation.report import figure
from bert4rec.lab.claims import FigureClaim, OrderClaim
from bert4rec.lab.judge import Judgement
from bert4rec.lab.markdown import escaped
from bert4rec.lab.words import interval, minutes, signed

COLOURS = {"pass": "green", "miss": "red", "unclear": "yellow", "not run": "dim"}
FIGURES = ("contender", "metric", "published", "ours (95 % interval)", "difference", "tolerance")
ORDERS = ("better", "worse", "metric", "published", "ours (95 % interval)")


def terminal_tables(judgement: Judgement) -> list[Table]:
    """Narrow enough for 80 columns; a star points to the remarks."""
    tables = []
    for title, columns, rows, n_names in (
        (judgement.title, (*FIGURES[:3], "ours, 95 %", "diff", "±"), _figure_rows(judgement), 1),
        ("Who is better", (*ORDERS[:4], "ours, 95 %"), _order_rows(judgement), 2),
    ):
        if not rows:
            continue
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for place, column in enumerate((*columns, "verdict")):
            is_name = place < n_names
            table.add_column(column, justify="left" if is_name else "right", no_wrap=not is_name)
        for cells, verdict, says in rows:
            colour, star = COLOURS[verdict], " *" if says.endswith("*") else ""
            table.add_row(*map(escape, cells), f"[{colour}]{verdict}[/{colour}]{star}")
        tables.append(table)
    return tables


def remarks(judgement: Judgement) -> list[str]:
    """What has to be known beside the tables: other data, short trainings, what is missing."""
    lines = [f"Warning: {warning}." for warning in judgement.warnings]
    told = dict.fromkeys((c.title, note) for c in judgement.figures for note in c.notes)
    said = {f"{title}: {note}" for title, note in told}
    lines += [f"{title}: {note}." for title, note in told]
    others = dict.fromkeys(note for c in judgement.orders for note in c.notes)
    lines += [f"{note}." for note in others if note not in said]
    lines += [f"{name}: {why}." for name, why in judgement.failed.items()]
    not_run = [c.title for c in judgement.figures if c.verdict == "not run"]
    not_run += [t for c in judgement.orders if c.verdict == "not run" for t in (c.better, c.worse)]
    ran = {c.title for c in judgement.figures if c.verdict != "not run"}
    if missing := [title for title in dict.fromkeys(not_run) if title not in ran]:
        lines.append(f"Without a result so far, so that claims are open: {', '.join(missing)}.")
    if len(judgement.seeds) == 1:
        lines.append(
            "One seed: every figure and interval speaks about a single training. A difference "
            "smaller than that between two seeds may be chance; --seeds 3 tells."
        )
    return lines


def summary(judgement: Judgement) -> str:
    verdicts = judgement.verdicts
    counted = [f"{verdicts.count(v)} {v}" for v in COLOURS if v in verdicts]
    return f"Claims ({len(verdicts)}): {', '.join(counted)}" if verdicts else "No claims to judge"


def to_markdown(judgement: Judgement) -> str:
    data, machine = judgement.data, judgement.machine
    lines = [
        f"# {escaped(judgement.title)}",
        "",
        f"Published: {escaped(judgement.source)}.",
        "",
        escaped(judgement.notes),
        "",
        f"Data: {escaped(str(data['name']))}, {data['n_users']:,} users, "
        f"{data['n_items']:,} items, {data['n_interactions']:,} interactions. "
        f"Protocol: {judgement.protocol}. "
        f"Seeds: {len(judgement.seeds)}. Budget: {minutes(judgement.budget_minutes)} a training. "
        f"Machine: {escaped(str(machine.get('cpu')))}, {machine.get('cores')} cores.",
        "",
        f"**{summary(judgement)}.**",
        "",
    ]
    for columns, rows in (
        (FIGURES, _figure_rows(judgement)),
        (ORDERS, _order_rows(judgement)),
    ):
        if rows:
            lines.append("| " + " | ".join((*columns, "verdict")) + " |")
            lines.append("|---|---|" + "---:|" * (len(columns) - 1))
            lines += [_markdown_row((*cells, says)) for cells, _, says in rows] + [""]
    if claims := dict.fromkeys(c.says for c in judgement.orders):
        lines += ["Who is better than whom: " + escaped("; ".join(claims)) + ".", ""]
    if judgement.curve_over is not None and judgement.curve:
        lines += [f"![NDCG@10 over {escaped(judgement.curve_over)}](curve.svg)", ""]
    lines += [f"- {escaped(line)}" for line in remarks(judgement)]
    return "\n".join(lines).rstrip() + "\n"


def write_curve(judgement: Judgement, out: Path) -> None:
    """NDCG@10 with its interval over the setting that was varied, as `curve.svg` and `.png`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "matplotlib is needed to draw a curve: pip install 'bert4rec[lab]'"
        ) from None
    picture = Figure(figsize=(6, 3.6), layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.subplots()
    points = judgement.curve
    places, values = [point.at for point in points], [point.ours.value for point in points]
    lows = [v if p.ours.low is None else p.ours.low for p, v in zip(points, values, strict=True)]
    highs = [v if p.ours.high is None else p.ours.high for p, v in zip(points, values, strict=True)]
    axes.plot(places, values, marker="o", label="ours, with 95 % interval")
    axes.vlines(places, lows, highs)
    if known := [(point.at, point.published) for point in points if point.published is not None]:
        axes.plot(*zip(*known, strict=True), "x", color="black", label="published")
    if max(places) >= 8 * min(places):
        axes.set_xscale("log", base=2)
    axes.set_xlabel(judgement.curve_over or "")
    axes.set_ylabel(f"NDCG@10, {judgement.protocol}")
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    for name in ("curve.svg", "curve.png"):
        with new_file(out / name) as path:
            picture.savefig(path, format=name.rpartition(".")[2], dpi=150)


def _figure_rows(judgement: Judgement) -> list[tuple[tuple[str, ...], str, str]]:
    """(cells, verdict, what to say of it) of all that was run."""
    return [
        (
            (
                claim.title,
                claim.metric,
                figure(claim.published),
                f"{figure(claim.ours.value)} ({interval(claim.ours)})",
                signed(claim.ours.value - claim.published),
                figure(claim.tolerance),
            ),
            claim.verdict,
            _says(claim),
        )
        for claim in judgement.figures
        if claim.ours is not None
    ]


def _order_rows(judgement: Judgement) -> list[tuple[tuple[str, ...], str, str]]:
    return [
        (
            (
                claim.better,
                claim.worse,
                claim.metric,
                "–" if claim.published is None else signed(claim.published),
                f"{signed(claim.difference.value)} ({interval(claim.difference)})",
            ),
            claim.verdict,
            _says(claim),
        )
        for claim in judgement.orders
        if claim.difference is not None
    ]


def _says(claim: FigureClaim | OrderClaim) -> str:
    mark = " *" if claim.notes else ""  # a remark below tells why it may be so
    if isinstance(claim, FigureClaim) and claim.verdict == "miss":
        assert claim.difference is not None
        side = "above" if claim.difference > 0 else "below"
        return f"miss, {figure(abs(claim.difference))} {side}{mark}"
    return claim.verdict + mark


def _markdown_row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(map(escaped, cells)) + " |"
