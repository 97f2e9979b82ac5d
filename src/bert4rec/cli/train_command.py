"""The verb `train`: in one process, in several of this machine, or on a Ray cluster."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bert4rec.cli.console import (
    EXIT_INTERRUPTED,
    describe,
    errors,
    exit_interrupted,
    output,
    print_next,
    print_outcome,
    progress_bar,
    say,
)
from bert4rec.cli.options import DATA_HELP, RAY_ADDRESS_HELP, ConfigFile, Overrides, Recipe, TableOptions, reads_a_table

if TYPE_CHECKING:
    from bert4rec.config import Config
    from bert4rec.data.sequences import Sequences
    from bert4rec.pipeline import Outcome, RunOptions
    from bert4rec.training.process_group import ProcessGroup


@reads_a_table
def train(
    data: Annotated[str, typer.Argument(help=DATA_HELP)],
    out: Annotated[Path, typer.Option(help="Directory of the model.")] = Path("runs/model"),
    recipe: Recipe = "default",
    config: ConfigFile = None,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the last checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the model at --out.")] = False,
    baselines: Annotated[bool, typer.Option(help="Evaluate popularity and a Markov chain too, for comparison.")] = True,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard logs too.")] = False,
    threads: Annotated[
        int | None,
        typer.Option(help="CPU threads; all cores by default, with Ray one per process. Not with --processes."),
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop after the epoch that reaches this many minutes.")] = None,
    keep_stages: Annotated[
        bool, typer.Option("--keep-stages", help="Also write the best weights of each stage.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Estimate memory and minutes from a few timed steps; train nothing.")
    ] = False,
    processes: Annotated[int, typer.Option(help="Train in this many processes (on this machine, by torchrun).")] = 1,
    launcher: Annotated[
        Literal["torchrun", "ray"] | None,
        typer.Option(help="How to start the processes: torchrun on this machine, or Ray on a cluster."),
    ] = None,
    ray_address: Annotated[str | None, typer.Option(help=RAY_ADDRESS_HELP)] = None,
    *,
    table: TableOptions,
) -> None:
    """Train a model on a table of interactions, evaluate it and save it.

    Filters are settings too: --set data.min_item_actions=5 --set data.min_rating=4

    On several machines start it with torchrun on each (see docs/how-to/several-machines.md):
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400
    --rdzv-id NAME --max-restarts 3 -m bert4rec train …
    """
    from bert4rec.config import load_config

    _check_options(processes, launcher, ray_address, threads)
    settings = load_config(recipe, config, overrides or ())
    import torch

    from bert4rec.distributed.launch import was_launched
    from bert4rec.distributed.torchrun import ProcessFailed, open_on_first, run_as_rank, start_processes
    from bert4rec.interrupts import Interrupted
    from bert4rec.pipeline import RunOptions, saved_outcome, train_in_group
    from bert4rec.run_checks import check_directory, check_training
    from bert4rec.training.process_group import SINGLE_PROCESS

    options = RunOptions(resume, overwrite, baselines, tensorboard, keep_stages, minutes)
    work = partial(train_in_group, config=settings, out=out, options=options)
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        if was_launched():
            if processes > 1 or launcher is not None:
                raise ValueError("--processes and --launcher do nothing under torchrun: leave them out")

            def train_as_rank(group: ProcessGroup) -> None:
                _train(work, open_on_first(data, lambda: table.open(data, settings.data), group), group, out)

            run_as_rank(out, train_as_rank)
        sequences = table.open(data, settings.data)
        if dry_run:
            _print_dry_run(sequences, settings)
        elif launcher != "ray" and processes == 1:
            _train(work, sequences, SINGLE_PROCESS, out)
        else:
            check_training(sequences, settings, processes, keep_stages=keep_stages)
            check_directory(out, resume, overwrite)
            assert sequences.directory is not None
            if launcher == "ray":
                from bert4rec.distributed.train_on_ray import RayProcesses, run_on_ray

                describe(sequences)
                workers = RayProcesses(processes, threads or 1, settings.training.device == "cuda", ray_address)
                run_on_ray(sequences.directory, out, work, workers, say)
                _print_result(sequences, saved_outcome(out), out)
            else:  # the first of them describes the data, and prints the result
                words = ["train", str(sequences.directory), "--out", str(out)]
                start_processes([*words, *_words(recipe, config, overrides, options)], processes)
    except ProcessFailed:
        raise typer.Exit(1) from None
    except Interrupted:
        raise _interrupted(out, resume) from None


def _check_options(processes: int, launcher: str | None, ray_address: str | None, threads: int | None) -> None:
    if processes < 1:
        raise ValueError(f"--processes is {processes}: use one or more")
    if threads is not None and threads < 1:
        raise ValueError(f"--threads is {threads}: use one or more")
    if threads is not None and processes > 1 and launcher != "ray":
        raise ValueError("--threads does nothing with several processes, which share the cores: leave it out")
    if ray_address is not None and launcher != "ray":
        raise ValueError("--ray-address does nothing without --launcher ray: add it")
    if launcher == "ray":
        from bert4rec.distributed.cluster import check_has_ray

        check_has_ray()


def _words(recipe: str, config: str | None, overrides: list[str] | None, options: RunOptions) -> list[str]:
    """The same settings and options for each of several processes."""
    flags = {
        "--resume": options.resume,
        "--overwrite": options.overwrite,
        "--no-baselines": not options.baselines,
        "--tensorboard": options.tensorboard,
        "--keep-stages": options.keep_stages,
    }
    values = [("--recipe", recipe), ("--config", config), ("--minutes", options.minutes)]
    values += [("--set", each) for each in overrides or ()]
    words = [word for name, value in values if value is not None for word in (name, str(value))]
    return words + [flag for flag, is_given in flags.items() if is_given]


def _train(work: Callable[..., Outcome | None], sequences: Sequences, group: ProcessGroup, out: Path) -> None:
    """The part of one process; the first of them gets the outcome."""
    if group.is_first:
        describe(sequences)
    with progress_bar("evaluating") as on_evaluation:
        outcome = work(sequences, group, errors, on_evaluation=on_evaluation)
    if outcome is not None:
        _print_result(sequences, outcome, out)


def _print_dry_run(sequences: Sequences, settings: Config) -> None:
    from bert4rec.pipeline import dry_run

    describe(sequences)
    with progress_bar("timing some steps"):
        found = dry_run(sequences, settings)
    if found.memory is None:
        output.print(f"{settings.model.name} is fitted in one pass: there is nothing to time")
        return
    output.print(str(found.memory), highlight=False)
    total = 0.0
    for name, (epochs, time) in found.stages.items():
        n_validations = -(-epochs // settings.training.validate_every)
        seconds = epochs * time.seconds_per_epoch + n_validations * time.seconds_per_validation
        total += seconds
        output.print(
            f"{name}: {time.seconds_per_epoch / 60:.2f} minutes per epoch, at most "
            f"{seconds / 60:.1f} for {epochs} epochs and {n_validations} validations",
            highlight=False,
        )
    output.print(f"in all at most {total / 60:.1f} minutes of training on this machine")


def _interrupted(out: Path, is_resumed: bool) -> typer.Exit:
    from bert4rec.distributed.torchrun import speaks_for_all
    from bert4rec.training.checkpoint import has_checkpoint

    if not speaks_for_all():
        return typer.Exit(EXIT_INTERRUPTED)
    if not has_checkpoint(out):
        errors.print("Interrupted before the first checkpoint: nothing is lost, begin again")
        return typer.Exit(EXIT_INTERRUPTED)
    again = ["bert4rec", *sys.argv[1:], *([] if is_resumed else ["--resume"])]
    return exit_interrupted(out, again)


def _print_result(sequences: Sequences, outcome: Outcome, out: Path) -> None:
    print_outcome(outcome, out)
    history = ",".join(str(sequences.vocabulary.raw(t)) for t in sequences[0][:3].tolist())
    needs_known_user = outcome.recommender.model.needs_known_user
    print_next(
        *([] if needs_known_user else [["recommend", out, "--history", history]]),
        ["recommend", out, "--users", "all", "--out", "recs.parquet"],
        *([["compare", out / "baselines" / "markov", out]] if outcome.baselines else []),
        *([] if needs_known_user else [["serve", out, "--open"]]),
    )
