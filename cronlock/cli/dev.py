"""`cronlock dev`."""

from typing import Annotated

import typer

from cronlock.cli.options import App, app_of


def dev(
    app: App = None,
    port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT", min=1, max=65535, help="The port on 127.0.0.1; without it 8000, or the next that is free."
        ),
    ] = None,
) -> None:
    """Try it: a server with everything it needs, and lines to paste.

    Without DATABASE_URL a PostgreSQL of its own is started, whose data stays in your home directory; without
    CRON_SECRET a secret is made up. With APP the server restarts when your code changes; without, an example is served.
    Ctrl-C ends all that was started.

    Examples: `cronlock dev` · `cronlock dev main:cron --port 9000`
    """
    reference = app_of(app)
    from cronlock import development, serving

    development.develop(reference, port)
    serving.end_process()
