"""The options that say how to read a table, for every command that reads one.

Typer has no groups of options. So `reads_a_table` adds them to a command's signature, and the
command gets them as one value.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bert4rec.cli.console import progress_bar, say
from bert4rec.cli.options import (
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
)

if TYPE_CHECKING:
    from bert4rec.data.filters import DataSettings
    from bert4rec.data.prepare import PrepareEngine
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
