"""`cronlock serve`."""

from typing import Annotated

import typer

from cronlock.cli.options import App, require_app


def serve(
    app: App = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="The address to listen on; 0.0.0.0 or :: for all.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", min=0, max=65535, help="The port; 0 for any free one.")] = 8000,
) -> None:
    """Serve the cron routes of APP, for production.

    Answers `/cron/{task}`, `/healthz`, `/readyz` and, if CRONLOCK_ADMIN_SECRET or CRONLOCK_ADMIN_READ_SECRET is set,
    `/admin/..` and `/metrics`. On SIGTERM or Ctrl-C it answers 503 to new calls, gives what runs
    CRONLOCK_DRAIN_TIMEOUT (25s) to finish, cancels and records the rest, and exits with 0; a second signal cancels at
    once. Log lines go to stderr, in JSON unless CRONLOCK_LOG_FORMAT=text.

    APP must be a Cronlock. An application of yours that mounts one is served by its own server, such as uvicorn.

    Example: `cronlock serve main:cron --host 0.0.0.0 --port 8080`
    """
    reference = require_app(app)
    from cronlock import serving

    serving.serve(reference, host, port, ended=serving.end_process)
