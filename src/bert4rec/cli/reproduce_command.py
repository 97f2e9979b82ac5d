"""`bert4rec reproduce`: run published tables again and judge them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bert4rec.cli.console import errors, output, print_lines, print_next, resumable
from bert4rec.cli.options import (
    Latex,
    Markdown,
    Overrides,
    OverwriteRuns,
    TableOptions,
    refuse_given,
    text_format,
    training_data,
)

if TYPE_CHECKING:
    from bert4rec.data.sequences import Sequences
    from bert4rec.evaluation.text_tables import TextFormat
    from bert4rec.lab.claims import Reproduction
    from bert4rec.lab.contenders import Contender

EXIT_MISSED = 2


def reproduce(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(help="A reproduction, or a TOML file of your own; without it, list them.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="The data, instead of downloading it by its name.")] = None,
    budget: Annotated[str, typer.Option(help="Training time per run, as in 90s, 20m or 1h30m.")] = "20m",
    seeds: Annotated[int, typer.Option(help="Runs per model, with different seeds.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Directory. \\[default: runs/reproduce/NAME]")] = None,
    models: Annotated[list[str] | None, typer.Option(help="Only these models, separated by commas.")] = None,
    overrides: Overrides = None,
    judge_only: Annotated[
        bool, typer.Option("--judge-only", help="Train nothing; only compare the runs that exist.")
    ] = False,
    overwrite: OverwriteRuns = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 2 if a claim is missed or a run failed.")] = False,
    model: Annotated[
        Path | None, typer.Option(help="For figure-2: a trained BERT4Rec, instead of training one.")
    ] = None,
    latex: Latex = False,
    markdown: Markdown = False,
) -> None:
    """Run a published table again and compare every figure with ours: pass, miss, unclear or not run.

    Repeat the command to resume it. A miss is a result, not an error: the exit code is 0 unless
    --strict is given.
    """
    if name is None:
        refuse_given(context, "no name of a reproduction", but=("budget",))
        _list(budget)
        return
    from bert4rec.lab.claims import load_reproduction

    printed = text_format(latex, markdown)
    reproduction = load_reproduction(name)
    out = out or Path("runs/reproduce") / reproduction.name
    if model is not None:
        if reproduction.attention_positions is None:
            raise ValueError(f"--model: {name} draws no attention maps; figure-2 does")
        refuse_given(context, "--model", but=("name", "model", "data", "out", "strict"))
        is_missed = not _draw_attention(reproduction, model, data, out)
    else:
        if judge_only:
            refuse_given(context, "--judge-only", but=("name", "judge_only", "out", "strict", "latex", "markdown"))
        else:
            from bert4rec.lab.budget import parse_budget
            from bert4rec.lab.claims import contenders_of
            from bert4rec.lab.contenders import split_names
            from bert4rec.lab.lab_directory import LabTerms
            from bert4rec.lab.run_lab import run_lab

            data_name = Path(data or reproduction.data).name
            terms = LabTerms(data_name, seeds, parse_budget(budget), overwrite, Path(name).name)
            contenders = contenders_of(reproduction, split_names(models), overrides or ())
            sequences = _open(reproduction, data, contenders)
            with resumable(out):
                run_lab(out / "lab", sequences, contenders, terms, errors)
        is_missed = _is_missed(reproduction, name, out, printed)
    if is_missed and strict:
        raise typer.Exit(EXIT_MISSED)


def _list(budget: str) -> None:
    from bert4rec.data.public import DATASETS
    from bert4rec.evaluation.text_tables import TextTable
    from bert4rec.lab.budget import parse_budget
    from bert4rec.lab.claims import load_reproduction, reproduction_names
    from bert4rec.lab.report_text import duration

    minutes, rows = parse_budget(budget), []
    for name in reproduction_names():
        each = load_reproduction(name)
        n, megabytes = len(each.contenders), DATASETS[each.data].size / 1e6
        needs = f"{each.data} ({megabytes:.0f} MB), {n} x {budget} = {duration(60 * n * minutes)}"
        rows.append((name, f"{needs}\n{each.title}"))
    output.print(TextTable(("name", "data and time"), rows, n_names=2).to_terminal("Reproductions"))
    print_lines(
        "The data is downloaded from its publisher, or named with --data. Budgets are for "
        "training; a model that has stopped improving ends earlier."
    )
    print_next(["reproduce", "table-3-ml-1m", "--budget", "20m"])


def _open(reproduction: Reproduction, data: str | None, contenders: list[Contender]) -> Sequences:
    try:
        return TableOptions().open(data or reproduction.data, contenders[0].config.data)
    except ValueError as error:
        if data is not None:
            raise
        note = " ".join(reproduction.data_note.split())
        raise ValueError(
            f"{error}\n{reproduction.name} needs the data set {reproduction.data!r}. "
            f"If you have it, name its table with --data. {note}".strip()
        ) from error


def _is_missed(reproduction: Reproduction, name: str, out: Path, printed: TextFormat | None) -> bool:
    """Judge the runs, print the verdicts, and draw the attention maps of figure-2."""
    from bert4rec.lab.judgement import remarks, to_text, verdict_table, write_judgement

    judgement = write_judgement(reproduction, out)
    if printed is not None:
        typer.echo(to_text(judgement, printed), nl=False)
        return judgement.is_missed
    if judgement.claims:
        output.print(verdict_table(judgement).to_terminal(judgement.title))
    print_lines(*(f"* {line}" for line in remarks(judgement)), f"{judgement.summary}.")
    is_missed = judgement.is_missed
    if reproduction.attention_positions is not None:
        run = out / "lab" / "runs" / reproduction.contenders[0].name / "seed-0"
        if (run / "manifest.json").exists():
            is_missed |= not _draw_attention(reproduction, run, None, out)
    print_lines(f"Written to {out / 'reproduction.json'}")
    print_next(
        ["lab", "--report-only", "--out", out / "lab"], ["reproduce", name, "--judge-only", "--out", out, "--markdown"]
    )
    return is_missed


def _draw_attention(reproduction: Reproduction, run: Path, data: str | None, out: Path) -> bool:
    """True if what the paper reads from its figure holds here too."""
    from bert4rec.lab.reproduction_figures import average_attention, write_maps
    from bert4rec.pipeline import split_of
    from bert4rec.recommender import Recommender

    assert reproduction.attention_positions is not None
    recommender = Recommender.load(run)
    split = split_of(recommender, training_data(recommender.about, data))
    maps = average_attention(recommender.model, split.test.histories, reproduction.attention_positions)
    write_maps(maps, out)
    claims = maps.claims()
    print_lines(
        *(f"{'pass' if holds else 'miss'}: {claim}" for claim, holds in claims.items()),
        f"Attention over {maps.n_users:,} histories: {out / 'attention.png'}, .svg and .json",
    )
    return all(claims.values())
