"""The command line. Nothing heavy is imported before a command needs it, and never the user's app for help."""

from typing import Annotated

import typer

from cronlock.cli import (
    dev,
    enqueue,
    exits,
    jobs,
    locks,
    migrate,
    output,
    pause,
    prune,
    recover,
    run,
    runs,
    secret,
    serve,
    tasks,
    worker,
)

HELP = """
Cron routes that never overlap, on PostgreSQL alone.

Start with `cronlock dev`: it needs nothing installed, and prints what to try. In production: `cronlock migrate`, then
`cronlock serve main:cron`. DATABASE_URL names the database, CRON_SECRET is what callers send.
"""


def version(is_asked: bool) -> None:
    """Print the version."""
    if is_asked:
        from cronlock import __version__

        print(f"cronlock {__version__}")
        raise typer.Exit


def cronlock(
    _version: Annotated[
        bool, typer.Option("--version", metavar="", callback=version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app = typer.Typer(
    name="cronlock",
    cls=exits.Commands,
    help=HELP,
    epilog=exits.CODES,
    rich_markup_mode="markdown",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.callback()(cronlock)
app.command("dev", rich_help_panel="Run it")(dev.dev)
app.command("serve", rich_help_panel="Run it")(serve.serve)
app.command("worker", rich_help_panel="Run it")(worker.worker)
app.command("run", rich_help_panel="Run it")(run.run)
app.command("enqueue", rich_help_panel="Run it")(enqueue.enqueue)
app.command("migrate", rich_help_panel="Run it")(migrate.migrate)
app.command("secret", rich_help_panel="Run it")(secret.secret)
app.command("tasks", rich_help_panel="Look at it")(tasks.tasks)
app.add_typer(runs.app, name="runs", rich_help_panel="Look at it")
app.add_typer(jobs.app, name="jobs", rich_help_panel="Look at it")
app.command("locks", rich_help_panel="Look at it")(locks.locks)
app.command("pause", rich_help_panel="Steer it")(pause.pause)
app.command("resume", rich_help_panel="Steer it")(pause.resume)
app.command("recover", rich_help_panel="Steer it")(recover.recover)
app.command("prune", rich_help_panel="Steer it")(prune.prune)


def main() -> None:
    """The entry point of `cronlock`."""
    output.survive_any_terminal()
    app(prog_name="cronlock")
