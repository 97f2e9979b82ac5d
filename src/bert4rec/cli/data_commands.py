"""The data commands: audit, prepare, list, get, install-httpfs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from bert4rec.cli.console import output, progress_bar
from bert4rec.cli.options import ConfigFile, Overrides, Recipe, TableOptions, reads_a_table

app = typer.Typer(help="Audit, prepare and download data.", no_args_is_help=True)


@app.command()
@reads_a_table
def audit(
    data: Annotated[str, typer.Argument(help="A table of interactions, as for `train`.")],
    recipe: Recipe = "default",
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    *,
    table: TableOptions,
) -> None:
    """Check a table for problems: ties in time, duplicates, cold items, leakage, …"""
    from bert4rec.config import load_config
    from bert4rec.data.audit import audit as audit_sequences

    settings = load_config(recipe, config, overrides or ())
    report = audit_sequences(table.open(data, settings.data))
    if as_json:
        output.print_json(json.dumps(asdict(report)))
    else:
        output.print(report.render())


@app.command()
@reads_a_table
def prepare(
    data: Annotated[str, typer.Argument(help="A table of interactions, as for `train`.")],
    out: Annotated[Path, typer.Option(help="Directory for the prepared data.")],
    recipe: Recipe = "default",
    config: ConfigFile = None,
    overrides: Overrides = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; defaults to all cores.")] = None,
    launcher: Annotated[
        Literal["local", "ray"], typer.Option(help="Run on this machine, or on the workers of a Ray cluster.")
    ] = "local",
    ray_address: Annotated[
        str | None, typer.Option(help="HOST:PORT or auto; defaults to RAY_ADDRESS, else Ray starts here.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Workers of the cluster, one CPU each; defaults to all.")] = None,
    *,
    table: TableOptions,
) -> None:
    """Read, filter and sort a table once; other commands then open the result directly."""
    from bert4rec.config import load_config

    settings = load_config(recipe, config, overrides or ()).data
    if launcher == "ray":
        from bert4rec.distributed.cluster import RayWorkers, connect

        if threads is not None:
            raise ValueError("--threads does nothing with --launcher ray: leave it out")
        with connect(ray_address, n_workers=workers) as cluster:
            sequences = table.open(data, settings, out, workers=RayWorkers(workers or cluster.n_cpus))
    else:
        for name, value in (("--ray-address", ray_address), ("--workers", workers)):
            if value is not None:
                raise ValueError(f"{name} does nothing without --launcher ray: add it")
        if threads is not None and threads < 1:
            raise ValueError(f"--threads is {threads}: use one or more")
        sequences = table.open(data, settings, out, threads=threads)
    output.print(
        f"{sequences.n_users:,} users, {sequences.n_items:,} items, "
        f"{sequences.n_interactions:,} interactions are in {out}"
    )


@app.command("install-httpfs")
def install_httpfs() -> None:
    """Download the DuckDB extension that reads object storage, from DuckDB's site."""
    from bert4rec.data.remote import install_httpfs as install

    install()
    output.print("httpfs is installed; now: bert4rec data prepare s3://… --allow-remote --out …")


@app.command("list")
def list_datasets() -> None:
    """List the public data sets that `get` and `train` know by name."""
    from rich.table import Table

    from bert4rec.data.public import DATASETS
    from bert4rec.environment import Environment

    table = Table()
    for column in ("name", "description", "interactions", "download", "terms"):
        table.add_column(column)
    table.add_row("demo", "invented films; comes with bert4rec", "71,862", "–", "free")
    for each in DATASETS.values():
        size = f"{each.size / 2**20:,.0f} MB"
        table.add_row(each.name, each.description, f"{each.n_interactions:,}", size, each.licence)
    output.print(table)
    output.print(f"Downloads go to {Environment().downloads}; set BERT4REC_DATA to change it.")


@app.command()
def get(name: Annotated[str, typer.Argument(help="A name from `bert4rec data list`.")]) -> None:
    """Download a public data set from its publisher."""
    from bert4rec.data.public import get as get_dataset

    with progress_bar(f"downloading {name}") as update:
        folder = get_dataset(name, progress=update)
    output.print(f"{name} is in {folder}; now: bert4rec train {name}")
