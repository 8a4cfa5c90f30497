"""What the commands print: data on stdout, as a table or as one JSON document; words on stderr.

On a terminal a table has colours (unless NO_COLOR is set) and relative times; elsewhere neither, but ISO times in UTC.
"""

import codecs
import io
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from cronlock import documents
from cronlock.documents import iso

STYLES = {
    "completed": "green",
    "running": "cyan",
    "processing": "cyan",
    "failed": "red",
    "timed_out": "red",
    "lost": "red",
    "cancelled": "yellow",
    "skipped": "yellow",
}


ESCAPED = "cronlock.escaped"


def escaped(error: UnicodeError) -> tuple[str, int]:
    """What cannot be encoded as a JSON document has it, too: \\u and four digits of each unit of UTF-16."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2)), error.end


def survive_any_terminal() -> None:
    """Have a character that the terminal's encoding does not have written as an escape, on stdout and on stderr."""
    codecs.register_error(ESCAPED, escaped)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ESCAPED)


def note(message: str) -> None:
    """A line on stderr."""
    print(message, file=sys.stderr, flush=True)


TELL_EVERY = 2.0

Tell = Callable[[int, str | None], None]
"""Takes how much is done, and a sentence for those who see no bar."""


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Tell]:
    """Show how far something is: on a terminal as a bar, elsewhere as a line every two seconds, both on stderr."""
    if not sys.stderr.isatty():
        told = time.monotonic()

        def tell(done: int, sentence: str | None) -> None:
            nonlocal told
            if sentence and time.monotonic() - told >= TELL_EVERY:
                told = time.monotonic()
                note(sentence)

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as drawn:
        bar = drawn.add_task(what, total=total)

        def draw(done: int, sentence: str | None) -> None:
            drawn.update(bar, completed=done)

        yield draw


def document(value: Any) -> None:
    """Print one JSON document; names are written in camelCase."""
    print(documents.dump(value, indent=2 if sys.stdout.isatty() else None))


def table(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Print a table; a cell is text, a number, a moment or None."""
    titles = [title.upper() for title in columns]
    if sys.stdout.isatty():
        coloured(titles, rows)
        return
    lines = [titles, *([cell(value) for value in row] for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(titles))]
    for line in lines:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def older(rows: Sequence[Mapping[str, Any]], limit: int, number: str) -> None:
    """Say how a list goes on that may have been cut at `limit`; `number` is the column by which it is."""
    if len(rows) == limit:
        note(f"older ones: add --before {rows[-1][number]}")


def coloured(titles: list[str], rows: Iterable[Iterable[Any]]) -> None:
    """The table for a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(*titles, box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for row in rows:
        drawn.add_row(*(Text(text := cell(value), style=STYLES.get(text, "")) for value in row))
    Console(highlight=False).print(drawn)


def facts(row: Mapping[str, Any]) -> None:
    """Print one row as lines of name and value; what is None is left out, long text goes below its name."""
    known = {name: value for name, value in row.items() if value is not None}
    width = max(map(len, known), default=0)
    for name, value in known.items():
        text = iso(value) if isinstance(value, datetime) else cell(value, is_short=False)
        if "\n" in text:
            text = "\n  " + text.rstrip().replace("\n", "\n  ")
        print(f"{name.ljust(width)}  {text}")


def cell(value: Any, *, is_short: bool = True) -> str:
    """A value as text without control characters, of which a terminal could be a victim; short: in one line."""
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return when(value)
    text = str(value)
    if is_short:
        text = " ".join(text.split())
        text = text if len(text) <= 100 else f"{text[:99]}…"
    return "".join(each if each.isprintable() or each == "\n" else f"\\x{ord(each):02x}" for each in text)


def when(moment: datetime) -> str:
    """How long ago, on a terminal; else ISO 8601, UTC."""
    from cronlock.explain import span

    if not sys.stdout.isatty():
        return iso(moment)
    elapsed = (datetime.now(UTC) - moment).total_seconds()
    return f"{span(max(0.0, elapsed) * 1000)} ago"
