"""Two databases that were one until a replica was promoted: what both must know together, and what only one knows."""

from uuid import UUID

from tests import Db, value
from tests.campaign.checks import FALSE_COMPLETED, LOST_RECORDS, Broken, Counts
from tests.campaign.tables import CALLER

ROWS = "SELECT nonce, status FROM cronlock.run"
OPEN_ANSWERS = """SELECT call, status, run_id FROM campaign.answer
    WHERE timeline IS NULL AND run_id IS NOT NULL AND status <> 'unavailable'"""
ROW = "SELECT status FROM cronlock.run WHERE id = %s AND caller = %s"


def find_unknown(old: Db, new: Db) -> list[Broken]:
    """The answers to calls that were open while their server changed over, and that are true on neither timeline."""
    broken = []
    for call, status, run_id in old.execute(OPEN_ANSWERS).fetchall():
        found = [status for db in (old, new) for (status,) in db.execute(ROW, (run_id, f"{CALLER}{call}")).fetchall()]
        if not found:
            broken.append(Broken(LOST_RECORDS, f"call {call} was answered {status} for run {run_id}, which has no row"))
        elif status == "completed" and "completed" not in found:
            what = f"call {call} was answered completed for run {run_id}, whose rows say {' and '.join(found)}"
            broken.append(Broken(FALSE_COMPLETED, what))
    return broken


def count_together(old: Db, new: Db) -> Counts:
    """How the runs ended, those that both know counted once, as the old timeline has them."""
    rows: dict[UUID, str] = {**dict(new.execute(ROWS).fetchall()), **dict(old.execute(ROWS).fetchall())}
    statuses = list(rows.values())
    skipped, completed, lost = (statuses.count(status) for status in ("skipped", "completed", "lost"))
    started = len(statuses) - skipped
    return Counts(started, completed, lost, started - completed - lost, skipped)


def describe(old: Db, new: Db) -> str:
    """What the failover cost."""
    query = "SELECT array_agg(nonce) FROM cronlock.run WHERE status = 'completed'"
    kept = set(value(new, query) or [])
    gone = set(value(old, query) or []) - kept
    ids = "SELECT array_agg(id || ' ' || nonce) FROM cronlock.run"
    before, after = ({row.split()[0]: row for row in value(db, ids) or []} for db in (old, new))
    twice = sum(before[number] != after[number] for number in before.keys() & after.keys())
    return f"{len(gone)} completed runs exist on the old timeline only; {twice} run ids were given on both"
