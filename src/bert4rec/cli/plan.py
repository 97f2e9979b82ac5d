"""The verb that says what a run would take: plan."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from bert4rec.cli.console import ConfigFile, Overrides, Recipe, output

if TYPE_CHECKING:
    from bert4rec.config import Config
    from bert4rec.costs.advice import Advice
    from bert4rec.costs.commands import Command

DATA, MODEL, MACHINES = "Your data", "The model", "The machines"


def plan(
    items: Annotated[int, typer.Option(help="Items in the data.", rich_help_panel=DATA)],
    users: Annotated[int | None, typer.Option(help="Users.", rich_help_panel=DATA)] = None,
    length: Annotated[
        float | None,
        typer.Option(help="Interactions of a user, on average.", rich_help_panel=DATA),
    ] = None,
    interactions: Annotated[
        int | None,
        typer.Option(
            help="Interactions; two of users, length and this are enough.", rich_help_panel=DATA
        ),
    ] = None,
    recipe: Recipe = "default",
    config: ConfigFile = None,
    overrides: Overrides = None,
    dim: Annotated[
        int | None, typer.Option(help="Width; the recipe's by default.", rich_help_panel=MODEL)
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Blocks; the recipe's by default.", rich_help_panel=MODEL)
    ] = None,
    max_len: Annotated[
        int | None,
        typer.Option(help="Longest history read; the recipe's by default.", rich_help_panel=MODEL),
    ] = None,
    epochs: Annotated[
        int, typer.Option(help="Passes over the training data.", rich_help_panel=MODEL)
    ] = 10,
    loss: Annotated[
        str | None,
        typer.Option(help="Instead of the one that fits the catalogue.", rich_help_panel=MODEL),
    ] = None,
    cores: Annotated[int, typer.Option(help="Cores of a machine.", rich_help_panel=MACHINES)] = 16,
    memory: Annotated[
        float, typer.Option(help="Memory of a machine, in GB.", rich_help_panel=MACHINES)
    ] = 64.0,
    network: Annotated[
        float, typer.Option(help="Between machines, in Gbit/s.", rich_help_panel=MACHINES)
    ] = 10.0,
    machines: Annotated[
        int | None,
        typer.Option(help="Instead of as many as it takes.", rich_help_panel=MACHINES),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(help="On each machine; one for 8 cores by default.", rich_help_panel=MACHINES),
    ] = None,
    hours: Annotated[
        float,
        typer.Option(help="In which the training should be done.", rich_help_panel=MACHINES),
    ] = 24.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a page.")] = False,
) -> None:
    """What to run for your numbers: commands, machines, memory, time and disk.

    For example --users 1000000 --items 200000 --length 40
    """
    from bert4rec.config import load_config
    from bert4rec.costs.advice import advise, as_dict
    from bert4rec.costs.assumptions import assumptions
    from bert4rec.costs.commands import commands
    from bert4rec.costs.machines import Machine
    from bert4rec.costs.model import measured_costs
    from bert4rec.costs.workload import workload_of

    workload = workload_of(users=users, items=items, length=length, interactions=interactions)
    settings = _settings(load_config(recipe, config, overrides or ()), epochs, dim, layers, max_len)
    costs = measured_costs()
    advice = advise(
        costs,
        workload,
        settings,
        Machine(cores, memory * 1e9, network),
        machines=machines,
        processes=processes,
        hours=hours,
        loss=loss,
    )
    typed = commands(advice, recipe, load_config(recipe))
    stated = assumptions(costs, advice)
    if as_json:
        facts = as_dict(advice) | {
            "commands": [{"what": each.what, "command": each.words} for each in typed],
            "assumptions": stated,
        }
        output.print_json(json.dumps(facts))
    else:
        _show(advice, typed, stated)


def _settings(
    config: Config, epochs: int, dim: int | None, layers: int | None, max_len: int | None
) -> Config:
    """The second stage keeps its share of the epochs."""
    from bert4rec.config import override_config

    first, second = config.training.epochs, config.second_stage.epochs
    given = {"model.dim": dim, "model.layers": layers, "model.max_len": max_len}
    changes = [f"{name}={value}" for name, value in given.items() if value is not None]
    changes += [f"training.epochs={epochs}"]
    if second:
        changes += [f"second_stage.epochs={max(1, round(second * epochs / first))}"]
    return override_config(config, changes)


def _show(advice: Advice, typed: list[Command], stated: list[str]) -> None:
    from rich.table import Table

    from bert4rec.costs.choices import choices, figures

    workload = advice.workload
    output.print(
        f"{workload.users:,} users, {workload.items:,} items, {workload.length:g} interactions "
        f"a user, {workload.interactions:,} in all\n",
        highlight=False,
    )
    table = Table("", "machines", "memory on each", "time", box=None)
    for row in figures(advice):
        table.add_row(*row)
    output.print(table)
    for title, lines in (("What to do", choices(advice)), ("Note", advice.notes)):
        if lines:
            output.print(f"\n[bold]{title}[/bold]")
        for line in lines:
            output.print(f"- {line}", highlight=False, markup=False)
    output.print("\n[bold]Commands[/bold]")
    for command in typed:
        output.print(f"[dim]# {command.what}[/dim]", highlight=False)
        output.print(command.words, highlight=False, markup=False, soft_wrap=True)
    output.print("\n[bold]These are estimates[/bold]")
    for line in stated:
        output.print(f"- {line}", highlight=False, markup=False)


def add_to(app: typer.Typer) -> None:
    app.command()(plan)
