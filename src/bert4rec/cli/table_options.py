"""The options that say how to read a table, given to every verb that reads one.

Typer has no groups of options, so `reads_a_table` puts them into a verb's signature; the verb gets
them as one value.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bert4rec.cli.console import (
    TABLE,
    Delimiter,
    Encoding,
    Header,
    ItemColumn,
    Items,
    OnBadRows,
    RatingColumn,
    SortMemory,
    TimeColumn,
    UserColumn,
    progress_bar,
    say,
)

if TYPE_CHECKING:
    from bert4rec.config import DataConfig
    from bert4rec.data.in_parts import Workers
    from bert4rec.data.sequences import Sequences

AllowRemote = Annotated[
    bool,
    typer.Option(
        "--allow-remote",
        help="The table may be Parquet files at s3://…, gs://… or https://….",
        rich_help_panel=TABLE,
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
        config: DataConfig | None,
        out: Path | None = None,
        *,
        threads: int | None = None,
        workers: Workers | None = None,
    ) -> Sequences:
        """The prepared data, read and downloaded if need be, with progress on standard error."""
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
                workers=workers,
                say=say,
                on_download=on_download,
            )

    def as_words(self) -> list[str]:
        """The options that were given, to be typed again."""
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


def reads_a_table(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb with the options in the place of its parameter `table`."""
    options = inspect.signature(TableOptions, eval_str=True).parameters
    signature = inspect.signature(verb, eval_str=True)
    kept = [each for each in signature.parameters.values() if each.name != "table"]
    added = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in options.values()]

    @functools.wraps(verb)
    def with_options(*args: Any, **given: Any) -> None:
        table = TableOptions(**{name: given.pop(name) for name in options})
        verb(*args, table=table, **given)

    parameters = [*kept, *added]
    with_options.__dict__["__signature__"] = signature.replace(parameters=parameters)
    with_options.__annotations__ = {each.name: each.annotation for each in parameters}
    return with_options
