"""The verb `recommend`: for one history on the screen, for many users into files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bert4rec.cli.console import (
    Delimiter,
    Encoding,
    Header,
    ItemColumn,
    OnBadRows,
    TimeColumn,
    UserColumn,
    output,
    progress_bar,
    say,
    shown,
    stopped,
)
from bert4rec.cli.models import training_data

if TYPE_CHECKING:
    from bert4rec.data.sequences import Sequences
    from bert4rec.data.sources import Reading
    from bert4rec.recommender import Recommendation, Recommender

ModelDirectory = Annotated[Path, typer.Argument(help="Directory of a trained model.")]
History = Annotated[str | None, typer.Option(help="Item ids, oldest first, separated by commas.")]
Count = Annotated[int, typer.Option("--k", "-k", help="How many items.")]
PARTS = "A directory of parts"


def recommend(
    context: typer.Context,
    model: ModelDirectory,
    history: History = None,
    users: Annotated[
        str | None,
        typer.Option(help="`all` users of the training data, or a table of their interactions."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="With --users: a .parquet, .csv or .jsonl file, or a directory (no suffix, or / "
            "at the end) of Parquet files; started again, it goes on where it stopped."
        ),
    ] = None,
    k: Count = 10,
    keep_seen: Annotated[
        bool, typer.Option("--keep-seen", help="Items of the history may be recommended again.")
    ] = False,
    allow: Annotated[
        str | None, typer.Option(help="Only these items, separated by commas.")
    ] = None,
    block: Annotated[
        str | None, typer.Option(help="Never these items, separated by commas.")
    ] = None,
    retrieval: Annotated[
        Literal["auto", "exact"],
        typer.Option(help="auto uses the model's index, if it has one; exact looks at all items."),
    ] = "auto",
    data: Annotated[
        str | None, typer.Option(help="Prepared data folder, if it was moved since training.")
    ] = None,
    parts: Annotated[
        int | None,
        typer.Option(help="How many files; by default as suits the users.", rich_help_panel=PARTS),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes that share the cores (one alone uses all of them, too); with "
            "--launcher ray, actors of a CPU each, by default one for each CPU.",
            rich_help_panel=PARTS,
        ),
    ] = None,
    launcher: Annotated[
        Literal["local", "ray"],
        typer.Option(help="Where the workers run.", rich_help_panel=PARTS),
    ] = "local",
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of a Ray cluster, or auto for that of this machine; without it "
            "RAY_ADDRESS counts, or else Ray is started here for this run.",
            rich_help_panel=PARTS,
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Delete the parts of before.", rich_help_panel=PARTS),
    ] = False,
    user: UserColumn = None,
    item: ItemColumn = None,
    time: TimeColumn = None,
    delimiter: Delimiter = None,
    header: Header = None,
    encoding: Encoding = None,
    on_bad_rows: OnBadRows = "error",
) -> None:
    """Recommend the next items for one history, or for many users into a file or a directory."""
    from bert4rec.data.sources import Reading
    from bert4rec.recommender import Recommender

    if (history is None) == (users is None):
        raise ValueError("say for whom: either --history a,b,c or --users all|FILE")
    if users is not None and out is None:
        raise ValueError(
            "--users needs --out: a file that ends in .parquet, .csv or .jsonl, or a directory"
        )
    allowed, blocked = split_ids(allow), split_ids(block)
    is_directory = out is not None and _is_directory(out)
    if not is_directory:
        _refuse_for_parts(context, "--history" if history is not None else f"the file {out}")
    if ray_address is not None and launcher != "ray":
        raise ValueError("--ray-address does nothing without --launcher ray: add it")
    if history is not None:
        recommender = Recommender.load(model, retrieval)
        _recommend_one(recommender, split_ids(history) or [], k, not keep_seen, allowed, blocked)
        return
    assert users is not None
    assert out is not None
    reading = Reading(user, item, time, None, delimiter, header, encoding, on_bad_rows)
    if not is_directory:
        _recommend_to_file(
            Recommender.load(model, retrieval),
            users,
            data,
            reading,
            Path(out),
            k,
            not keep_seen,
            allowed,
            blocked,
        )
        return
    from bert4rec.batch import Stopped, recommend_in_parts

    def sequences(place: Path, about: dict[str, Any]) -> Sequences:
        return _sequences(about, users, data, reading, place)

    try:
        with progress_bar("recommending") as update:
            done = recommend_in_parts(
                model,
                sequences,
                out,
                k=k,
                exclude_seen=not keep_seen,
                allow=allowed,
                block=blocked,
                retrieval=retrieval,
                n_parts=parts,
                n_workers=workers,
                launcher=launcher,
                ray_address=ray_address,
                overwrite=overwrite,
                on_progress=update,
                say=say,
            )
    except Stopped:
        raise stopped(Path(out)) from None
    before = f" ({done.n_parts_before:,} were there)" if done.n_parts_before else ""
    output.print(
        f"{done.n_rows:,} recommendations for {done.n_users:,} users are in {out}, in "
        f"{done.n_parts:,} part{'s' * (done.n_parts > 1)}{before}",
        markup=False,
    )


def _recommend_one(
    recommender: Recommender,
    history: list[str],
    k: int,
    exclude_seen: bool,
    allowed: list[str] | None,
    blocked: list[str] | None,
) -> None:
    found = recommender.recommend(history, k, exclude_seen, allowed, blocked)
    if found.unknown:
        say(f"unknown to the model, skipped: {', '.join(map(str, found.unknown))}")
    if found.is_fallback:
        say("nothing known in this history: these are the most popular items")
    print_items(found.items, "score", has_probability=True)


def _recommend_to_file(
    recommender: Recommender,
    users: str,
    data: str | None,
    reading: Reading,
    out: Path,
    k: int,
    exclude_seen: bool,
    allowed: list[str] | None,
    blocked: list[str] | None,
) -> None:
    import tempfile

    from bert4rec.batch import recommend_users

    with tempfile.TemporaryDirectory() as folder, progress_bar("recommending") as update:
        sequences = _sequences(recommender.about, users, data, reading, Path(folder) / "users")
        n_rows = recommend_users(
            recommender,
            sequences,
            out,
            k=k,
            exclude_seen=exclude_seen,
            allow=allowed,
            block=blocked,
            on_progress=update,
        )
    output.print(f"{n_rows:,} recommendations for {sequences.n_users:,} users are in {out}")


def _sequences(
    about: dict[str, Any], users: str, data: str | None, reading: Reading, place: Path
) -> Sequences:
    """The users of the training data, or those of a table, which is prepared at `place`."""
    from bert4rec.data.prepare import prepare
    from bert4rec.data.sources import interactions_of

    if users == "all":
        return training_data(about, data)
    interactions = interactions_of(users, reading)
    return prepare(interactions, out=place, for_training=False, progress=say)


def _is_directory(out: str) -> bool:
    return out.endswith("/") or Path(out).suffix == "" or Path(out).is_dir()


def _refuse_for_parts(context: typer.Context, because: str) -> None:
    """An option that would do nothing is a mistake."""
    for name in ("parts", "workers", "launcher", "ray_address", "overwrite"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "--" + name.replace("_", "-")
            raise ValueError(
                f"{option} is for a directory of parts, and does nothing with {because}"
            )


def split_ids(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def print_items(found: list[Recommendation], score_name: str, has_probability: bool) -> None:
    from rich.table import Table

    table = Table()
    for column in ("", "item", "title", score_name, *(["probability"] if has_probability else [])):
        table.add_column(column)
    for place, each in enumerate(found, 1):
        cells = [str(place), shown(each.item), shown(each.title or ""), f"{each.score:.3f}"]
        # An index does not know the probability: that takes the scores of all items.
        chance = "–" if math.isnan(each.probability) else f"{each.probability:.2%}"
        table.add_row(*cells, *([chance] if has_probability else []))
    output.print(table)
