"""Options that several commands share, among them those that say how to read a table.

Typer has no groups of options. So `reads_a_table` adds them to a command's signature, and the
command gets them as one value.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bert4rec.cli.console import progress_bar, say

if TYPE_CHECKING:
    from bert4rec.data.filters import DataSettings
    from bert4rec.data.prepare import PrepareEngine
    from bert4rec.data.sequences import Sequences

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
    "HOST:PORT of a Ray cluster, or `auto` for the one of this machine. Without it RAY_ADDRESS "
    "counts; without both, Ray is started here."
)

TABLE = "How to read the table"
UserColumn = Annotated[str | None, typer.Option(help="Column of user ids.", rich_help_panel=TABLE)]
ItemColumn = Annotated[str | None, typer.Option(help="Column of item ids.", rich_help_panel=TABLE)]
TimeColumn = Annotated[
    str | None, typer.Option(help="Column of times; without one, file order counts.", rich_help_panel=TABLE)
]
RatingColumn = Annotated[str | None, typer.Option(help="Column of ratings or weights.", rich_help_panel=TABLE)]
Delimiter = Annotated[str | None, typer.Option(help="What separates the columns.", rich_help_panel=TABLE)]
Header = Annotated[
    bool | None, typer.Option("--header/--no-header", help="Is the first line column names?", rich_help_panel=TABLE)
]
Encoding = Annotated[str | None, typer.Option(help="Text encoding, utf-8 by default.", rich_help_panel=TABLE)]
OnBadRows = Annotated[
    Literal["error", "skip"], typer.Option(help="Rows without a readable id or time.", rich_help_panel=TABLE)
]
Items = Annotated[
    str | None, typer.Option("--items", help="Table with a title (and more) for each item.", rich_help_panel=TABLE)
]
SortMemory = Annotated[str, typer.Option("--memory", help="Memory for sorting the table; the rest goes to disk.")]


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


Latex = Annotated[bool, typer.Option("--latex", help="Print the table as LaTeX.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")]


def text_format(latex: bool, markdown: bool) -> Literal["latex", "markdown"] | None:
    """How to print a table instead of drawing it in the terminal."""
    if latex and markdown:
        raise ValueError("--latex and --markdown: choose one")
    return "latex" if latex else "markdown" if markdown else None


AllowRemote = Annotated[
    bool,
    typer.Option(
        "--allow-remote", help="The table may be Parquet files at s3://…, gs://… or https://….", rich_help_panel=TABLE
    ),
]


@dataclass(frozen=True)
class TableOptions:
    memory: SortMemory = "512MB"
    user: UserColumn = None
    item: ItemColumn = None
    time: TimeColumn = None
    rating: RatingColumn = None
    delimiter: Delimiter = None
    header: Header = None
    encoding: Encoding = None
    on_bad_rows: OnBadRows = "error"
    items: Items = None
    allow_remote: AllowRemote = False

    def open(
        self,
        data: str,
        config: DataSettings | None,
        out: Path | None = None,
        *,
        threads: int | None = None,
        engine: PrepareEngine | None = None,
    ) -> Sequences:
        """The prepared data, downloaded and prepared if needed, with progress on standard error."""
        from bert4rec.data.sources import Reading, open_data

        values = asdict(self)
        memory = values.pop("memory")
        with progress_bar("downloading") as on_download:
            return open_data(
                data,
                config,
                Reading(**values),
                out=out,
                memory_limit=memory,
                threads=threads,
                engine=engine,
                say=say,
                on_download=on_download,
            )

    def prepare_histories(self, data: str, out: Path) -> Sequences:
        """The whole histories of a table, for a model that is trained already; in `out`."""
        from bert4rec.data.prepare import prepare
        from bert4rec.data.sources import Reading, interactions_of

        values = asdict(self)
        memory = values.pop("memory")
        with progress_bar("downloading") as on_download:
            interactions = interactions_of(data, Reading(**values), on_download)
        return prepare(interactions, out=out, memory_limit=memory, for_training=False, progress=say)

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


def reads_a_table(command: Callable[..., None]) -> Callable[..., None]:
    """The command with these options in place of its parameter `table`."""
    options = inspect.signature(TableOptions, eval_str=True).parameters
    signature = inspect.signature(command, eval_str=True)
    kept = [each for each in signature.parameters.values() if each.name != "table"]
    added = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in options.values()]

    @functools.wraps(command)
    def with_options(*args: Any, **given: Any) -> None:
        table = TableOptions(**{name: given.pop(name) for name in options})
        command(*args, table=table, **given)

    parameters = [*kept, *added]
    with_options.__dict__["__signature__"] = signature.replace(parameters=parameters)
    with_options.__annotations__ = {each.name: each.annotation for each in parameters}
    return with_options
