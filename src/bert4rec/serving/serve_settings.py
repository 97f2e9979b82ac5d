"""The service's settings, the same for every worker, and the limits of a request."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

MAX_BODY = 2**20  # bytes, chunked bodies too
MAX_HISTORY = 1_000
MAX_K = 1_000
MAX_BATCH = 256  # histories or events per request
MAX_LISTED = 10_000  # ids in `allow` or `block`
MAX_EXPLAINED = 100
MAX_FOUND = 100  # items or users per search
MAX_ID = 1_000  # characters

LOOPBACK = ("127.0.0.1", "localhost", "::1")
limit = functools.partial(typer.Option, rich_help_panel="Limits")


@dataclass(frozen=True)
class ServeSettings:
    """What has a description is an argument or option of `bert4rec serve`. Times are in seconds."""

    model: Annotated[Path, typer.Argument(help="Directory of a trained model.")]
    host: Annotated[str, typer.Option(help="Address to listen on; one that other machines can reach needs --keys.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8000
    workers: Annotated[int, typer.Option(help="Number of processes; they share histories in the store.", min=1)] = 1
    compare: Annotated[
        list[Path] | None, typer.Option(help="Another model to compare with on the page; may be repeated.")
    ] = None
    store: Annotated[
        str | None,
        typer.Option(
            envvar="BERT4REC_STORE",
            help="Where histories are stored: sqlite:FILE or redis://HOST:PORT/DB; default: sqlite:MODEL.histories.db.",
        ),
    ] = None
    keys: Annotated[Path | None, typer.Option(help="File of API keys, with lines `read KEY` or `admin KEY`.")] = None
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Host name to accept besides localhost when there are no keys; may be repeated."),
    ] = None
    watch: Annotated[bool, typer.Option("--watch", help="Load a new model as soon as it is in the directory.")] = False
    max_batch: Annotated[int, limit(help="Histories per batch of the model.", min=1)] = 16
    max_waiting: Annotated[int, limit(help="Histories in the queue; beyond it, 503.", min=1)] = 128
    answer_within: Annotated[float, limit(help="Seconds; a request that would take longer gets 503.", min=1e-6)] = 2.0
    drain: Annotated[
        float, limit(help="Seconds to accept new requests after SIGTERM, while /readyz says 503.", min=0)
    ] = 0.5
    threads: Annotated[int, limit(help="CPU threads per batch.", min=1)] = 1
    retrieval: Annotated[
        Literal["auto", "exact"],
        typer.Option(help="auto: use the model's index if it has one; exact: score all items."),
    ] = "auto"
    access_log: Annotated[bool, typer.Option("--access-log/--no-access-log", help="Log a line per request.")] = True
    watch_every: float = 1.0
    header_within: float = 10.0
    body_within: float = 10.0
    send_within: float = 20.0

    @property
    def models(self) -> tuple[Path, ...]:
        return (self.model, *(self.compare or ()))

    @property
    def store_url(self) -> str:
        return self.store or f"sqlite:{self.model.absolute()}.histories.db"

    @property
    def is_local(self) -> bool:
        return self.host in LOOPBACK

    @property
    def url(self) -> str:
        """Where this machine finds the page."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{'127.0.0.1' if self.host in ('0.0.0.0', '::') else host}:{self.port}/"
