"""Where the commands print, and the options that several of them share."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

EXIT_INTERRUPTED = 130

output = Console()
errors = Console(stderr=True)

TABLE = "How to read the table"
UserColumn = Annotated[str | None, typer.Option(help="Column of user ids.", rich_help_panel=TABLE)]
ItemColumn = Annotated[str | None, typer.Option(help="Column of item ids.", rich_help_panel=TABLE)]
TimeColumn = Annotated[
    str | None,
    typer.Option(help="Column of times; without one, file order counts.", rich_help_panel=TABLE),
]
RatingColumn = Annotated[
    str | None, typer.Option(help="Column of ratings or weights.", rich_help_panel=TABLE)
]
Delimiter = Annotated[
    str | None, typer.Option(help="What separates the columns.", rich_help_panel=TABLE)
]
Header = Annotated[
    bool | None,
    typer.Option(
        "--header/--no-header", help="Is the first line column names?", rich_help_panel=TABLE
    ),
]
Encoding = Annotated[
    str | None, typer.Option(help="Text encoding, utf-8 by default.", rich_help_panel=TABLE)
]
OnBadRows = Annotated[
    Literal["error", "skip"],
    typer.Option(help="Rows without a readable id or time.", rich_help_panel=TABLE),
]
Items = Annotated[
    str | None,
    typer.Option(
        "--items", help="Table with a title (and more) for each item.", rich_help_panel=TABLE
    ),
]
SortMemory = Annotated[
    str, typer.Option("--memory", help="Memory for sorting the table; the rest goes to disk.")
]
Recipe = Annotated[str, typer.Option(help="Settings to start from; see `bert4rec recipes`.")]
ConfigFile = Annotated[
    str | None, typer.Option("--config", help="TOML file with settings, on top of the recipe.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="One setting, as in training.epochs=20; may be repeated."),
]

Latex = Annotated[bool, typer.Option("--latex", help="Print the table as LaTeX.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")]


def text_format(latex: bool, markdown: bool) -> Literal["latex", "markdown"] | None:
    """How to print a table instead of drawing it in the terminal."""
    if latex and markdown:
        raise ValueError("--latex and --markdown: choose one")
    return "latex" if latex else "markdown" if markdown else None


@contextlib.contextmanager
def progress_bar(description: str) -> Iterator[Callable[[int, int | None], None]]:
    """A bar on standard error that is fed (done, total) and leaves nothing behind."""
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(description), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=errors, transient=True, disable=not errors.is_terminal
    ) as progress:
        task = progress.add_task(description, total=None)

        def update(done: int, total: int | None) -> None:
            progress.update(task, completed=done, total=total)

        yield update


def stopped(out: Path, again: list[str] | None = None) -> typer.Exit:
    """Tell how to go on (the same command if not given), and what to end the program with."""
    words = again or ["bert4rec", *(word for word in sys.argv[1:] if word != "--overwrite")]
    said = f"Stopped; everything so far is saved in {out}. To go on:"
    errors.print(said, markup=False, soft_wrap=True)
    errors.print("  " + shlex.join(words), markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(EXIT_INTERRUPTED)


def refuse_given(context: typer.Context, because: str, *, but: tuple[str, ...]) -> None:
    """An option that would do nothing is a mistake: name the first that is not among `but`."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE" and parameter.name not in but:
            name = parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.name
            raise ValueError(f"{name} does nothing with {because}: leave it out")


def shown(text: object) -> str:
    """An id or a title as text: neither markup nor the terminal's own codes have an effect."""
    from rich.markup import escape

    letters = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))
    return escape("".join(letters))


def say(message: str) -> None:
    """A line about what is going on, on standard error, so that results can be piped."""
    errors.print(message, style="dim", highlight=False, markup=False, soft_wrap=True)
