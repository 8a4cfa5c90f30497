"""`cronlock run`."""

import asyncio
import json
import signal
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cronlock.cli import calls, connecting, exits
from cronlock.cli.options import App

if TYPE_CHECKING:
    from cronlock.app import Cronlock
    from cronlock.outcome import Outcome
    from cronlock.tasks import Task

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(
    app: App = None,
    task: calls.Task = None,
    payload: calls.Payload = None,
    idempotency_key: Annotated[
        str | None,
        typer.Option(
            "--idempotency-key",
            metavar="KEY",
            help="Names an occurrence: one that has completed is skipped.",
            show_default=False,
        ),
    ] = None,
    fails_on_skip: Annotated[
        bool, typer.Option("--fail-on-skip", metavar="", help="Exit with 6 if it was skipped (0 otherwise).")
    ] = False,
    is_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print it in one line on a terminal, too.")
    ] = False,
) -> None:
    """Run a task now, in this process, under its lock; prints what a call of its URL would be answered.

    A task that runs elsewhere is not run again: the answer is then `skipped`. Ctrl-C cancels the run and records that.

    Examples: `cronlock run main:cron sync-inventory` ·
    `echo '{"pace": 0}' | cronlock run main:cron sync-inventory --payload -`
    """
    cron, name, given = calls.read(app, task, payload, "cronlock run main:cron sync-inventory")
    from cronlock import logs
    from cronlock.keys import occurrence_fault

    if idempotency_key is not None and (fault := occurrence_fault(idempotency_key)):
        raise typer.BadParameter(f"the key {fault}", param_hint="--idempotency-key")
    logs.configure("text" if sys.stderr.isatty() else cron.settings.log_format, cron.settings.scrub)
    called = cron.tasks.get(name)
    validated = called.validate(given)
    connecting.require(cron.settings)
    with asyncio.Runner() as runner:
        code = runner.run(call(cron, called, validated, idempotency_key, fails_on_skip, is_json))
    raise typer.Exit(code)


async def call(
    cron: "Cronlock",
    task: "Task",
    payload: Any,
    idempotency_key: str | None,
    fails_on_skip: bool,
    is_json: bool,
) -> int:
    """Run the task, print the answer, give the exit code; a signal cancels the run."""
    from cronlock import serving
    from cronlock.execution import Stop

    by = connecting.operator()
    async with serving.unbound_threads():
        process = await cron.open()
        calling = asyncio.ensure_future(
            cron.start_call(task, payload, trigger="manual", caller=by, occurrence=idempotency_key)
        )
        asked: list[signal.Signals] = []

        def stop(sig: signal.Signals) -> None:
            if asked or not process.runner.active:
                calling.cancel()
            for execution in process.runner.active:
                execution.ask_to_stop(Stop("cancelled", f"{sig.name} was sent to it by {by}"))
            asked.append(sig)

        for sig in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(sig, stop, sig)
        try:
            outcome = await calling
            show(outcome, is_json)
            code = code_of(outcome, fails_on_skip, is_interrupted=bool(asked))
            await cron.drain(0)
            serving.end_process(code)
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            await cron.close(0)
    return code


def show(outcome: "Outcome", is_json: bool) -> None:
    """Print what a call of the URL would be answered."""
    from cronlock.web import answers

    body = json.loads(answers.of(outcome, 200).body)
    indent = 2 if sys.stdout.isatty() and not is_json else None
    print(json.dumps(body, ensure_ascii=False, indent=indent), flush=True)


def code_of(outcome: "Outcome", fails_on_skip: bool, is_interrupted: bool) -> int:
    """The exit code of an outcome."""
    match outcome.status:
        case "completed":
            return exits.OK
        case "skipped":
            return exits.SKIPPED if fails_on_skip else exits.OK
        case "cancelled" if is_interrupted:
            return exits.INTERRUPTED
    return exits.FAILED
