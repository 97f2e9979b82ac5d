"""The verb `train`: alone, in several processes of this machine, or on a Ray cluster."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bert4rec.cli.console import (
    EXIT_INTERRUPTED,
    ConfigFile,
    Overrides,
    Recipe,
    errors,
    progress_bar,
    say,
    stopped,
)
from bert4rec.cli.shown import describe, next_commands, show_outcome
from bert4rec.cli.table_options import TableOptions, reads_a_table

if TYPE_CHECKING:
    from bert4rec.config import Config
    from bert4rec.data.sequences import Sequences
    from bert4rec.pipeline import Outcome
    from bert4rec.training.distributed import Ranks

DATA_HELP = (
    "A table of interactions (CSV, TSV, Parquet, JSONL, .dat, `user item` lines; gzip too), "
    "a prepared folder, `demo`, or a name from `bert4rec data list`."
)


@reads_a_table
def train(
    data: Annotated[str, typer.Argument(help=DATA_HELP)],
    out: Annotated[Path, typer.Option(help="Directory of the model.")] = Path("runs/model"),
    recipe: Recipe = "default",
    config: ConfigFile = None,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model that is there already.")
    ] = False,
    baselines: Annotated[
        bool,
        typer.Option(help="Evaluate popularity and a Markov chain beside it, for comparison."),
    ] = True,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write TensorBoard logs too.")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(help="CPU threads of a process; by default all cores, with Ray one."),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Use torch.compile, as --set compile=true does.")
    ] = False,
    processes: Annotated[
        int, typer.Option(help="Train in this many processes at once (on one machine, torchrun).")
    ] = 1,
    launcher: Annotated[
        Literal["torchrun", "ray"] | None,
        typer.Option(help="Who starts the processes: torchrun here, or Ray on its cluster."),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of a Ray cluster, or auto; else RAY_ADDRESS, or one here."),
    ] = None,
    *,
    table: TableOptions,
) -> None:
    """Train a model on a table of interactions, evaluate it and save it.

    Filters are settings too: --set data.min_item_actions=5 --set data.min_rating=4

    On several machines start it with torchrun on each of them (see docs/scaling.md):
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400
    --rdzv-id NAME --max-restarts 3 -m bert4rec train …
    """
    from bert4rec.config import load_config

    _check_options(processes, launcher, ray_address, threads)
    compiling = ["training.compile=true"] if compiled else []
    settings = load_config(recipe, config, [*(overrides or ()), *compiling])
    asked = _Asked(settings, out, resume, overwrite, tensorboard, baselines)
    from bert4rec.training.distributed import ALONE, was_launched

    _use_threads(threads)
    if was_launched():
        if processes > 1 or launcher is not None:
            raise ValueError("--processes and --launcher do nothing under torchrun: leave them out")
        _train_together(asked, table, data)
        return
    sequences = table.open(data, settings.data)
    if launcher == "ray":
        describe(sequences)
        _train_on_ray(asked, sequences, processes, threads or 1, ray_address)
    elif processes > 1:  # the first of them describes the data
        words = ["--recipe", recipe, *([] if config is None else ["--config", str(config)])]
        words += [word for each in overrides or () for word in ("--set", each)]
        words += ["--compile"] if compiled else []
        _train_in_processes(asked, sequences, words, processes)
    else:
        describe(sequences)
        _train(asked, sequences, ALONE)


@dataclass(frozen=True)
class _Asked:
    settings: Config
    out: Path
    resume: bool
    overwrite: bool
    tensorboard: bool
    baselines: bool

    def as_flags(self) -> list[str]:
        flags = {"--resume": self.resume, "--overwrite": self.overwrite}
        flags |= {"--tensorboard": self.tensorboard, "--no-baselines": not self.baselines}
        return [flag for flag, is_given in flags.items() if is_given]

    def again(self) -> list[str]:
        """How to go on with it."""
        return ["bert4rec", *sys.argv[1:], *([] if self.resume else ["--resume"])]


def _check_options(
    processes: int, launcher: str | None, ray_address: str | None, threads: int | None
) -> None:
    if processes < 1:
        raise ValueError(f"--processes is {processes}: use one or more")
    if threads is not None and threads < 1:
        raise ValueError(f"--threads is {threads}: use one or more")
    if threads is not None and processes > 1 and launcher != "ray":
        raise ValueError(
            "--threads does nothing with several processes, which share the cores: leave it out"
        )
    if ray_address is not None and launcher != "ray":
        raise ValueError("--ray-address does nothing without --launcher ray: add it")
    if launcher == "ray":
        from bert4rec.cluster import check_has_ray

        check_has_ray()


def _use_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _train_together(asked: _Asked, table: TableOptions, data: str) -> None:
    """As one of several processes that torchrun started."""
    from bert4rec.launch.failure import failure_of, forget_failure, remember_failure
    from bert4rec.training.distributed import is_restart, joined, launch_id

    if is_restart() and failure_of(asked.out, launch_id()) is not None:
        raise typer.Exit(1)  # it was said, and would be so again
    if os.environ.get("RANK") == "0":
        forget_failure(asked.out)
    try:
        with joined() as ranks:
            sequences = _opened_by_first(table, data, asked.settings, ranks)
            (_train if ranks.is_first else _train_beside)(asked, sequences, ranks)
            ranks.wait_for_first()
    except ValueError as error:
        if failure_of(asked.out, launch_id()) == str(error):
            raise typer.Exit(1) from None  # another process has just said it
        remember_failure(asked.out, error)
        raise
    # All is saved. Threads of torch's connections that still run while Python ends can abort the
    # process, and torchrun would start a finished training again.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _opened_by_first(table: TableOptions, data: str, settings: Config, ranks: Ranks) -> Sequences:
    """The data, prepared by one process for all, which find it at the same place."""
    from bert4rec.data.sequences import Sequences

    if ranks.is_first:
        sequences = table.open(data, settings.data)
        describe(sequences)
        ranks.of_first(str(sequences.directory))
        return sequences
    place = Path(ranks.of_first(None))
    if (Path(data) / "meta.json").is_file():  # a copy of its own, perhaps: they are compared later
        return table.open(data, settings.data)
    if not (place / "meta.json").is_file():
        raise ValueError(
            f"the data that the first process prepared is not at {place} here: prepare it with "
            "`bert4rec data prepare --out` into a folder that all machines share"
        )
    return Sequences.load(place)


def _train(asked: _Asked, sequences: Sequences, ranks: Ranks) -> None:
    from bert4rec.launch.torchrun import STARTED_BY_US
    from bert4rec.pipeline import train_recommender
    from bert4rec.training.loop import Interrupted

    try:
        with progress_bar("evaluating") as on_evaluation:
            outcome = train_recommender(
                sequences,
                asked.settings,
                asked.out,
                resume=asked.resume,
                overwrite=asked.overwrite,
                tensorboard=asked.tensorboard,
                baselines=asked.baselines,
                console=errors,
                on_evaluation=on_evaluation,
                ranks=ranks,
            )
    except Interrupted:
        if STARTED_BY_US in os.environ:
            raise typer.Exit(EXIT_INTERRUPTED) from None
        raise stopped(asked.out, asked.again()) from None
    _show(sequences, outcome, asked.out)


def _train_beside(asked: _Asked, sequences: Sequences, ranks: Ranks) -> None:
    from bert4rec.pipeline import train_beside
    from bert4rec.training.loop import Interrupted

    try:
        train_beside(sequences, asked.settings, asked.out, ranks)
    except Interrupted:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _train_in_processes(asked: _Asked, sequences: Sequences, words: list[str], n: int) -> None:
    from bert4rec.launch.torchrun import Failed, Stopped, start_processes
    from bert4rec.pipeline import check_directory, check_training
    from bert4rec.training.checkpoint import has_checkpoint

    check_training(sequences, asked.settings, n)
    check_directory(asked.out, asked.resume, asked.overwrite)
    place = ["train", str(sequences.directory), "--out", str(asked.out)]
    try:
        start_processes([*place, *words, *asked.as_flags()], n)
    except Failed:
        raise typer.Exit(1) from None
    except Stopped:
        if not has_checkpoint(asked.out):
            errors.print("Stopped before the first checkpoint: nothing is lost, begin again")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        raise stopped(asked.out, asked.again()) from None


def _train_on_ray(
    asked: _Asked, sequences: Sequences, n: int, n_threads: int, address: str | None
) -> None:
    from bert4rec.launch.on_ray import train_on_ray
    from bert4rec.pipeline import check_directory, check_training, saved_outcome

    check_training(sequences, asked.settings, n)
    check_directory(asked.out, asked.resume, asked.overwrite)
    assert sequences.directory is not None
    train_on_ray(
        sequences.directory,
        asked.settings,
        asked.out,
        n_processes=n,
        n_threads=n_threads,
        address=address,
        resume=asked.resume,
        overwrite=asked.overwrite,
        baselines=asked.baselines,
        say=say,
    )
    _show(sequences, saved_outcome(asked.out), asked.out)


def _show(sequences: Sequences, outcome: Outcome, out: Path) -> None:
    show_outcome(outcome, out)
    history = ",".join(str(sequences.vocabulary.raw(t)) for t in sequences[0][:3].tolist())
    needs_known_user = outcome.recommender.model.needs_known_user
    next_commands(
        *([] if needs_known_user else [["recommend", out, "--history", history]]),
        ["recommend", out, "--users", "all", "--out", "recs.parquet"],
        *([["compare", out / "baselines" / "markov", out]] if outcome.baselines else []),
        *([] if needs_known_user else [["serve", out, "--open"]]),
    )


def add_to(app: typer.Typer) -> None:
    app.command()(train)
