"""`/cron/cronlock.work`: work off the queue for a while, for places with no long-lived process."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from starlette.types import Scope

from cronlock import documents, jsontext
from cronlock.errors import PayloadError
from cronlock.tasks import queue_name
from cronlock.web.answers import Answer, plain

if TYPE_CHECKING:
    from cronlock.app import Cronlock

WORK = "cronlock.work"
"""The reserved name by which it is called, as a task is."""
PARAMETERS = ("max", "seconds", "queue")
MOST = 10_000
LONGEST = 900
USUAL_MOST = 1000
USUAL_SECONDS = 20


async def work(cron: "Cronlock", scope: Scope) -> Answer:
    """Take jobs that are due until there is none, `max` were taken or `seconds` are over; say what became of them.

    Raises `Unavailable` if nothing can be taken.
    """
    try:
        query = jsontext.parse_query(scope["query_string"])
        for name in query:
            if name not in PARAMETERS:
                raise PayloadError(f"the query has {ascii(name)[:60]}; it may have {', '.join(PARAMETERS)}")
        most = number(query, "max", USUAL_MOST, MOST)
        seconds = number(query, "seconds", USUAL_SECONDS, LONGEST)
        queues = [queue_name(name) for name in query.get("queue", "default").split(",")]
    except (PayloadError, ValueError) as error:
        return plain(400, "bad_request", reason=str(error))
    done = await cron.start_work(most, seconds, list(dict.fromkeys(queues)))
    return Answer(200, "completed", documents.dump({"status": "completed", "task": WORK, **asdict(done)}).encode())


def number(query: Mapping[str, str], name: str, usual: int, largest: int) -> int:
    """A whole number of the query; raises `PayloadError`."""
    text = query.get(name, str(usual))
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and 1 <= int(text) <= largest):
        raise PayloadError(f"{name} must be a whole number from 1 to {largest}")
    return int(text)
