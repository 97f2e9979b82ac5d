"""Options that several commands share, among them those that say how to read a table.

Typer has no groups of options. So `takes` adds them to a command's signature, and the command gets
them as one value.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_origin

import typer

from bert4rec.cli.console import progress_bar, say

if TYPE_CHECKING:
    from bert4rec.data.filters import DataSettings
    from bert4rec.data.sequences import Sequences
    from bert4rec.data.staging import PrepareWorkers
    from bert4rec.data.table_file import Reading

DATA_HELP = (
    "A table of interactions (CSV, TSV, Parquet, JSONL, .dat, `user item` lines; gzip too), "
    "a prepared folder, `demo`, or a name from `bert4rec data list`."
)
ModelDirectory = Annotated[Path, typer.Argument(help="Directory of a trained model.")]
PreparedData = Annotated[str | None, typer.Option(help="Prepared data folder, if it was moved since training.")]
Count = Annotated[int, typer.Option("--k", "-k", help="How many items.")]
Recipe = Annotated[str, typer.Option(help="Settings to start from; see `bert4rec recipes`.")]
ConfigFile = Annotated[str | None, typer.Option("--config", help="TOML file with settings, on top of the recipe.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="One setting, as in model.dim=128; may be repeated.")
]
RAY_ADDRESS_HELP = (
    "HOST:PORT of a Ray cluster, or `auto` for the one of this machine. Defaults to RAY_ADDRESS; "
    "without either, Ray is started on this machine."
)


def training_data(about: dict[str, object], named: str | None) -> Sequences:
    """The prepared data of a model: where it was when the model was trained, or `named`."""
    from bert4rec.data.sequences import Sequences

    facts = about["data"]
    assert isinstance(facts, dict)
    place = named or facts["directory"]
    if place is None or not (Path(place) / "meta.json").is_file():
        raise ValueError(
            f"the prepared data of this model is not at {place}: run `bert4rec data prepare` on "
            f"{facts['source']} with the same filters and pass its folder with --data"
        )
    return Sequences.load(place)


def refuse_given(context: typer.Context, because: str, *, but: tuple[str, ...]) -> None:
    """A ValueError for the first option that was given and does nothing, except those in `but`."""
    for parameter in context.command.params:
        name = parameter.name or ""
        if name not in but and is_given(context, name):
            option = parameter.opts[0] if parameter.opts[0].startswith("-") else name
            raise ValueError(f"{option} does nothing with {because}: leave it out")


def is_given(context: typer.Context, name: str) -> bool:
    """Whether the option was typed."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def split_ids(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


OverwriteRuns = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Train these models again. If the data, or the settings of data or evaluation, changed: "
        "start a new lab and move the old runs to runs.old.",
    ),
]
Latex = Annotated[bool, typer.Option("--latex", help="Print the table as LaTeX.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")]


def text_format(latex: bool, markdown: bool) -> Literal["latex", "markdown"] | None:
    """How to print a table instead of drawing it in the terminal."""
    if latex and markdown:
        raise ValueError("--latex and --markdown: choose one")
    return "latex" if latex else "markdown" if markdown else None


def _table(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="How to read the table")


@dataclass(frozen=True)
class HistoryTableOptions:
    """How to read a table of histories, for a model that is trained already."""

    memory: Annotated[str, typer.Option(help="Memory for sorting the table; the rest goes to disk.")] = "512MB"
    user: Annotated[str | None, _table(help="Column of user ids.")] = None
    item: Annotated[str | None, _table(help="Column of item ids.")] = None
    time: Annotated[str | None, _table(help="Column of times. Without it, rows must be in time order.")] = None
    delimiter: Annotated[str | None, _table(help="What separates the columns.")] = None
    header: Annotated[
        bool | None, _table("--header/--no-header", help="Whether the first line holds column names.")
    ] = None
    encoding: Annotated[str | None, _table(help="Text encoding, utf-8 by default.")] = None
    on_bad_rows: Annotated[
        Literal["error", "skip"],
        _table(help="Rows without a readable id or time: stop at the first, or skip and count them."),
    ] = "error"
    allow_remote: Annotated[
        bool, _table("--allow-remote", help="The table may be Parquet files at s3://…, gs://… or https://….")
    ] = False

    def reading(self) -> Reading:
        from bert4rec.data.table_file import Reading

        return Reading(**{name: value for name, value in asdict(self).items() if name != "memory"})

    def prepare(self, data: str, out: Path) -> Sequences:
        """The whole histories, in `out`."""
        from bert4rec.data.prepare import prepare
        from bert4rec.data.sources import interactions_of

        with progress_bar("downloading") as on_download:
            interactions = interactions_of(data, self.reading(), on_download)
        return prepare(interactions, out=out, memory_limit=self.memory, for_training=False, progress=say)

    def as_words(self) -> list[str]:
        """The given options, as typed on a command line."""
        words: list[str] = []
        for field in fields(self):
            value, name = getattr(self, field.name), field.name.replace("_", "-")
            if value == field.default:
                continue
            if isinstance(value, bool):
                words.append(f"--{name}" if value else f"--no-{name}")
            else:
                words += [f"--{name}", str(value)]
        return words


@dataclass(frozen=True)
class TableOptions(HistoryTableOptions):
    """How to read a table to train on."""

    rating: Annotated[str | None, _table(help="Column of ratings or weights.")] = None
    items: Annotated[str | None, _table(help="Table with a title (and more) for each item.")] = None

    def open(
        self,
        data: str,
        config: DataSettings | None,
        out: Path | None = None,
        *,
        threads: int | None = None,
        workers: PrepareWorkers | None = None,
    ) -> Sequences:
        """The prepared data, downloaded and prepared if needed, with progress on standard error."""
        from bert4rec.data.sources import open_data

        with progress_bar("downloading") as on_download:
            return open_data(
                data,
                config,
                self.reading(),
                out=out,
                memory_limit=self.memory,
                threads=threads,
                workers=workers,
                say=say,
                on_download=on_download,
            )


def takes(group: type, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: the options in the fields of a dataclass in place of the command's parameter `name`."""
    fields_of_group = inspect.signature(group, eval_str=True).parameters.values()
    options = {each.name: each for each in fields_of_group if get_origin(each.annotation) is Annotated}

    def with_group(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        kept = [each for each in signature.parameters.values() if each.name != name]
        added = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in options.values()]

        @functools.wraps(command)
        def with_options(*args: Any, **given: Any) -> None:
            grouped = group(**{option: given.pop(option) for option in options})
            command(*args, **{name: grouped}, **given)

        parameters = [*kept, *added]
        with_options.__dict__["__signature__"] = signature.replace(parameters=parameters)
        with_options.__annotations__ = {each.name: each.annotation for each in parameters}
        return with_options

    return with_group


reads_a_table = takes(TableOptions, "table")
reads_histories = takes(HistoryTableOptions, "table")
