"""`cronlock secret`."""

import secrets
from typing import Annotated

import typer


def secret(
    size: Annotated[
        int, typer.Option("--bytes", metavar="N", min=16, max=256, help="How many random bytes it is made of.")
    ] = 32,
) -> None:
    """Print a new secret for CRON_SECRET, safe in a URL, a header and a shell.

    Example: `export CRON_SECRET=$(cronlock secret)`
    """
    print(secrets.token_urlsafe(size))
