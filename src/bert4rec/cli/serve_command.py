"""The verb `serve`: recommendations over HTTP, and a web page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from bert4rec.cli.console import errors

LIMITS = "Limits"


def serve(
    model: Annotated[Path, typer.Argument(help="Directory of a trained model.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that others can reach needs keys.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8000,
    workers: Annotated[int, typer.Option(help="Number of processes; they share histories in the store.", min=1)] = 1,
    compare: Annotated[
        list[Path] | None, typer.Option(help="Another model to compare with on the page; may be repeated.")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            envvar="BERT4REC_STORE",
            help="Where histories are stored: sqlite:FILE or redis://HOST:PORT/DB; default: sqlite:MODEL.histories.db.",
        ),
    ] = None,
    keys: Annotated[Path | None, typer.Option(help="File of API keys, with lines `read KEY` or `admin KEY`.")] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="Another host name to answer to without keys; may be repeated.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Load a new model as soon as it is in the directory.")] = False,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    max_batch: Annotated[
        int, typer.Option(help="Histories per batch of the model.", min=1, rich_help_panel=LIMITS)
    ] = 16,
    max_waiting: Annotated[
        int, typer.Option(help="Histories in the queue; beyond it, 503.", min=1, rich_help_panel=LIMITS)
    ] = 128,
    answer_within: Annotated[
        float,
        typer.Option(help="Seconds; a request that would take longer gets 503.", min=1e-6, rich_help_panel=LIMITS),
    ] = 2.0,
    drain: Annotated[
        float, typer.Option(help="Seconds to keep answering after SIGTERM.", min=0, rich_help_panel=LIMITS)
    ] = 0.5,
    threads: Annotated[int, typer.Option(help="Cores per batch of the model.", min=1, rich_help_panel=LIMITS)] = 1,
    retrieval: Annotated[
        Literal["auto", "exact"],
        typer.Option(help="auto: use the model's index if it has one; exact: score all items."),
    ] = "auto",
    access_log: Annotated[bool, typer.Option("--access-log/--no-access-log", help="Log a line per request.")] = True,
) -> None:
    """Serve recommendations over HTTP, with a web page at / and the API's description at /docs.

    SIGHUP loads the model that is on disk now. SIGTERM or Ctrl-C finishes all requests, then exits.
    """
    try:
        from bert4rec.serving.server import check_before_start
        from bert4rec.serving.server import serve as run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("bert4rec"):
            raise
        raise ValueError(
            f"serving needs more packages ({error.name} is missing): pip install 'bert4rec[serve]'"
        ) from None
    from bert4rec.serving.serve_settings import ServeSettings

    settings = ServeSettings(
        model=model,
        compare=tuple(compare or ()),
        host=host,
        port=port,
        workers=workers,
        store=store or f"sqlite:{model.absolute()}.histories.db",
        keys=keys,
        allowed_hosts=tuple(allowed_host or ()),
        watch=watch,
        max_batch=max_batch,
        max_waiting=max_waiting,
        answer_within=answer_within,
        drain=drain,
        threads=threads,
        access_log=access_log,
        retrieval=retrieval,
    )
    check_before_start(settings)
    address = f"[{host}]" if ":" in host else host
    url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else address}:{port}/"

    def on_ready() -> None:
        message = f"Serving {model} at {url}  (API: {url}docs, Ctrl-C to stop)"
        errors.print(message, markup=False, soft_wrap=True)
        if show:
            import webbrowser

            webbrowser.open(url)

    run(settings, on_ready=on_ready)


def add_to(app: typer.Typer) -> None:
    app.command()(serve)
