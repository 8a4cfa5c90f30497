"""What must not be found in the database afterwards. Why finding nothing means something: see the package.

Each question gives one line of text for every offence, naming the rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tests import Db, value
from tests.campaign.tables import CALLER, STEPS

OVERLAPS = "overlaps of commits"
FALSE_COMPLETED = "false completed"
LOST_RECORDS = "lost records"
WRONGLY_LOST = "wrongly lost"
PROMISES = (OVERLAPS, FALSE_COMPLETED, LOST_RECORDS, WRONGLY_LOST)


@dataclass(frozen=True, slots=True)
class Check:
    """A question, and the promise that its answers break."""

    promise: str
    query: str


@dataclass(frozen=True, slots=True)
class Broken:
    """One offence."""

    promise: str
    what: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.what}"


CHECKS = (
    Check(
        OVERLAPS,
        """SELECT format('runs %s of lock %s both read %s and were committed',
                string_agg(run_id::text, ' and ' ORDER BY run_id), lock_name, value_read)
             FROM campaign.effect GROUP BY lock_name, value_read HAVING count(*) > 1""",
    ),
    Check(
        OVERLAPS,
        """SELECT format('the counter of lock %s says %s, but %s runs were committed', lock_name, value, committed)
             FROM (SELECT c.lock_name, c.value, count(e.lock_name) AS committed
                     FROM campaign.counter c LEFT JOIN campaign.effect e USING (lock_name) GROUP BY 1, 2) AS counted
            WHERE value <> committed""",
    ),
    Check(
        OVERLAPS,
        """SELECT format('run %s of lock %s began at %s, before its predecessor %s was committed at %s',
                run_id, lock_name, began_at, before, committed_at)
             FROM (SELECT run_id, lock_name, began_at, lag(run_id) OVER chain AS before,
                          lag(pg_xact_commit_timestamp(xmin)) OVER chain AS committed_at
                     FROM campaign.effect WINDOW chain AS (PARTITION BY lock_name ORDER BY value_read)) AS chained
            WHERE began_at < committed_at""",
    ),
    Check(
        OVERLAPS,
        """SELECT format('run %s of lock %s follows run %s, whose id is not lower', run_id, lock_name, before)
             FROM (SELECT run_id, lock_name, lag(run_id) OVER chain AS before
                     FROM campaign.effect WINDOW chain AS (PARTITION BY lock_name ORDER BY value_read)) AS chained
            WHERE run_id <= before""",
    ),
    Check(
        FALSE_COMPLETED,
        """SELECT format('run %s of %s is completed, but its work is not there', r.id, r.task)
             FROM cronlock.run r WHERE r.status = 'completed' AND r.mode IS DISTINCT FROM 'guard'
              AND NOT EXISTS (SELECT FROM campaign.effect e
                               WHERE e.run_id = r.id AND '{caller}' || e.call = r.caller)""",
    ),
    Check(
        FALSE_COMPLETED,
        """SELECT format('the work of run %s of %s was committed, but the run is %s', r.id, r.task, r.status)
             FROM cronlock.run r JOIN campaign.effect e ON e.run_id = r.id
            WHERE r.status NOT IN ('completed', 'lost')""",
    ),
    Check(
        FALSE_COMPLETED,
        """SELECT format('run %s committed %s begin markers', run_id, count(*))
             FROM campaign.effect GROUP BY run_id HAVING count(*) > 1""",
    ),
    Check(
        FALSE_COMPLETED,
        "SELECT format('run %s was committed half done', run_id) FROM campaign.effect WHERE ended_at IS NULL",
    ),
    Check(
        FALSE_COMPLETED,
        """SELECT format('call %s was answered %s for run %s, whose row says %s', a.call, a.status, r.id, r.status)
             FROM campaign.answer a JOIN cronlock.run r ON r.id = a.run_id
            WHERE (a.status = 'completed') <> (r.status = 'completed') AND a.status <> 'unavailable'
              AND NOT (a.status = 'completed' AND r.status = 'lost') AND a.timeline = {timeline}""",
    ),
    Check(
        FALSE_COMPLETED,
        """SELECT format('guard run %s is completed, but did %s of {steps} steps while the fence was its own',
                r.id, count(s.run_id))
             FROM cronlock.run r LEFT JOIN campaign.step s ON s.run_id = r.id AND s.is_accepted
            WHERE r.status = 'completed' AND r.mode = 'guard' GROUP BY r.id HAVING count(s.run_id) <> {steps}""",
    ),
    Check(
        OVERLAPS,
        """SELECT format('guard run %s ended %s, but a step of it was refused because a younger run had begun',
                r.id, r.status)
             FROM cronlock.run r JOIN campaign.step s ON s.run_id = r.id AND NOT s.is_accepted
            WHERE r.status <> 'lost' AND r.error_type IS DISTINCT FROM 'LockLost'""",
    ),
    Check(
        OVERLAPS,
        """SELECT format('guard run %s is completed, but run %s did something while it held the lock', r.id, s.run_id)
             FROM (SELECT r.id, min(s.at) AS first, max(s.at) AS last
                     FROM cronlock.run r JOIN campaign.step s ON s.run_id = r.id
                    WHERE r.status = 'completed' AND r.mode = 'guard' GROUP BY r.id) AS r
             JOIN campaign.step s ON s.run_id <> r.id AND s.is_accepted AND s.at BETWEEN r.first AND r.last""",
    ),
    Check(
        LOST_RECORDS,
        """SELECT format('call %s was answered %s for run %s, which has no row', a.call, a.status, a.run_id)
             FROM campaign.answer a WHERE a.run_id IS NOT NULL AND a.timeline = {timeline}
              AND NOT EXISTS (SELECT FROM cronlock.run r WHERE r.id = a.run_id AND r.caller = '{caller}' || a.call)""",
    ),
    Check(
        LOST_RECORDS,
        """SELECT format('call %s was answered %s for run %s, whose row says %s', a.call, a.status, r.id, r.status)
             FROM campaign.answer a JOIN cronlock.run r ON r.id = a.run_id
            WHERE (a.status = 'skipped') <> (r.status = 'skipped') AND a.status <> 'unavailable'
              AND a.timeline = {timeline}""",
    ),
    Check(
        LOST_RECORDS,
        """SELECT format('run %s committed work of call %s, and has no row', e.run_id, e.call) FROM campaign.effect e
            WHERE NOT EXISTS (SELECT FROM cronlock.run r WHERE r.id = e.run_id AND r.caller = '{caller}' || e.call)""",
    ),
    Check(
        LOST_RECORDS,
        """SELECT format('run %s of %s is still running after the recovery', r.id, r.task)
             FROM cronlock.run r WHERE r.status = 'running'""",
    ),
    Check(
        LOST_RECORDS,
        """SELECT format('%s has %s rows: runs %s', caller, count(*), string_agg(id::text, ', ' ORDER BY id))
             FROM cronlock.run WHERE starts_with(caller, '{caller}') GROUP BY caller HAVING count(*) > 1""",
    ),
    Check(
        WRONGLY_LOST,
        """SELECT format('run %s of %s is lost, but its work was committed', r.id, r.task)
             FROM cronlock.run r JOIN campaign.effect e ON e.run_id = r.id WHERE r.status = 'lost'""",
    ),
    Check(
        WRONGLY_LOST,
        """SELECT format('run %s of %s is lost, but call %s was answered completed', r.id, r.task, a.call)
             FROM cronlock.run r JOIN campaign.answer a ON a.run_id = r.id
            WHERE r.status = 'lost' AND a.status = 'completed' AND a.timeline = {timeline}""",
    ),
)

SKEWS = """
SELECT r.release, (extract(epoch FROM avg(e.process_clock - e.began_at)) / 3600)::float8
  FROM campaign.effect e JOIN cronlock.run r ON r.id = e.run_id GROUP BY 1
"""
"""By how many hours each server's own clock was wrong."""

STRAYS = """
WITH seen AS (
    SELECT format('run %s', id) AS what, unnest(ARRAY[started_at, stopping_at, finished_at]) AS at FROM cronlock.run
    UNION ALL SELECT format('task %s', name), unnest(ARRAY[first_seen_at, last_seen_at]) FROM cronlock.task)
SELECT format('%s: %s', what, at) FROM seen
 WHERE NOT at BETWEEN to_timestamp({began}) - interval '1 minute' AND clock_timestamp() + interval '1 minute'
"""
"""Times that are outside the scenario, which began at `began`."""

LOST_IN_PEACE = """
SELECT format('run %s of %s is lost, though nothing took its lock: %s', id, task, coalesce(error_message, 'no word'))
  FROM cronlock.run WHERE status = 'lost' AND mode IS DISTINCT FROM 'guard' ORDER BY id
"""
"""For scenarios in which no process and no connection was harmed."""

LOST_GUARDS = """
SELECT format('guard run %s of %s lost its lock: %s', id, task, coalesce(error_message, 'no word'))
  FROM cronlock.run WHERE status = 'lost' AND mode = 'guard' ORDER BY id
"""
"""A guard that is not pinged in time, as on a machine that is busier than it can be, is lost by right."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How many rows a database has of each kind."""

    started: int = 0
    completed: int = 0
    lost: int = 0
    ended_otherwise: int = 0
    skipped: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.started + other.started,
            self.completed + other.completed,
            self.lost + other.lost,
            self.ended_otherwise + other.ended_otherwise,
            self.skipped + other.skipped,
        )


def find_broken(db: Db, timeline: int = 1) -> list[Broken]:
    """Every offence in this database. `timeline`: that of the answers which it must know."""
    return list(_find(db, timeline))


def _find(db: Db, timeline: int) -> Iterator[Broken]:
    for check in CHECKS:
        query = check.query.replace("{timeline}", str(timeline)).replace("{caller}", CALLER)
        query = query.replace("{steps}", str(STEPS))
        for (what,) in db.execute(query.encode()).fetchall():
            yield Broken(check.promise, what)


def count_refused(db: Db) -> int:
    """How many steps of guard runs were refused, because their lock was gone and they did not know it yet."""
    return int(value(db, "SELECT count(*) FROM campaign.step WHERE NOT is_accepted"))


def count_runs(db: Db) -> Counts:
    """How the runs ended."""
    rows: dict[str, int] = dict(db.execute("SELECT status, count(*) FROM cronlock.run GROUP BY status").fetchall())
    skipped = rows.pop("skipped", 0)
    started = sum(rows.values())
    completed, lost = rows.get("completed", 0), rows.get("lost", 0)
    return Counts(started, completed, lost, started - completed - lost, skipped)
