"""The verb `serve`: recommendations over HTTP, and a web page."""

from __future__ import annotations

from typing import Annotated

import typer

from bert4rec.cli.console import errors
from bert4rec.cli.options import takes
from bert4rec.serving.serve_settings import ServeSettings


@takes(ServeSettings, "settings")
def serve(
    *,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    settings: ServeSettings,
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

    def on_ready() -> None:
        message = f"Serving {settings.model} at {settings.url}  (API: {settings.url}docs, Ctrl-C to stop)"
        errors.print(message, markup=False, soft_wrap=True)
        if show:
            import webbrowser

            webbrowser.open(settings.url)

    check_before_start(settings)
    run(settings, on_ready=on_ready)
