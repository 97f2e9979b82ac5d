"""The command line. A verb parses, calls one library function and prints.

Nothing heavy is imported at the top of these files: `--help` must not wait for torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from bert4rec import __version__
from bert4rec.cli import (
    artifact_commands,
    data_commands,
    histories_commands,
    lab_command,
    model_commands,
    recommend_commands,
    reproduce_command,
    serve_command,
    train_command,
    tune_command,
)
from bert4rec.cli.console import EXIT_INTERRUPTED, errors, output, printable

app = typer.Typer(
    name="bert4rec",
    help="Recommend the next item from what a person did so far.\n\n"
    "Start with [bold]bert4rec demo[/bold], or with your own table of clicks: "
    "[bold]bert4rec train clicks.csv[/bold]",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        output.print(f"bert4rec {__version__}", highlight=False)
        raise typer.Exit


PANELS: dict[str, tuple[Callable[..., None], ...]] = {  # of --help
    "Train and recommend": (
        *(model_commands.demo, train_command.train),
        *(recommend_commands.recommend, recommend_commands.similar, recommend_commands.explain),
    ),
    "Evaluate and compare": (
        *(model_commands.evaluate, model_commands.compare),
        *(lab_command.lab, reproduce_command.reproduce, tune_command.tune),
    ),
    "Serve": (serve_command.serve, artifact_commands.index, artifact_commands.compress),
    "Look up": (model_commands.recipes, model_commands.models, model_commands.settings),
}
for panel, verbs in PANELS.items():
    for verb in verbs:
        app.command(rich_help_panel=panel)(verb)
app.add_typer(data_commands.app, name="data", rich_help_panel="Train and recommend")
app.add_typer(histories_commands.app, name="histories", rich_help_panel="Serve")


def main() -> None:
    try:
        app()
    except (ValueError, OSError) as error:  # a mistake in the input: the message says what to do
        from bert4rec.environment import Environment

        if Environment().debug:
            raise
        message = f"[bold red]error:[/bold red] {printable(error)}"
        errors.print(message, highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        errors.print("interrupted")
        sys.exit(EXIT_INTERRUPTED)
