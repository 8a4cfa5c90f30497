"""The fault campaign can fail: each kind of violation is planted and found, and what it starts it ends."""

import asyncio
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cronlock.embedded import Embedded
from cronlock.migrate import migrate
from tests import Db, until
from tests.campaign import checks, scenarios, stage, tables, timelines
from tests.campaign.callers import Callers
from tests.campaign.checks import FALSE_COMPLETED, LOST_RECORDS, OVERLAPS, WRONGLY_LOST
from tests.campaign.observer import Observer
from tests.campaign.report import BEGIN, END, report, write
from tests.campaign.scenarios import Result, Size
from tests.campaign.stage import MOST_CONNECTIONS, POSTGRES, going_on, staged
from tests.commands import Running, descendants, environment, is_alive

pytestmark = pytest.mark.anyio
numbers = count(1)

RUN = """INSERT INTO cronlock.run (id, nonce, task, status, reason, finished_at, trigger, caller, instance, host, pid,
    lock_name, lock_key, lock_classid, lock_objid, mode, error_type)
    OVERRIDING SYSTEM VALUE VALUES (%(id)s, gen_random_uuid(), %(task)s, %(status)s,
    CASE WHEN %(status)s = 'skipped' THEN 'already_running' END,
    CASE WHEN %(status)s <> 'running' THEN clock_timestamp() END, 'http', 'campaign/' || %(id)s, gen_random_uuid(),
    'here', 1, 'stock', 1, 0, 1, %(mode)s, %(error)s)"""
EFFECT = """INSERT INTO campaign.effect (run_id, call, task, lock_name, value_read, ended_at)
    VALUES (%(id)s, %(id)s, 'stock', 'stock', %(value)s, clock_timestamp())"""
ANSWER = "INSERT INTO campaign.answer VALUES (%(id)s, 'one', 200, %(status)s, %(id)s, 1)"
STEP = """INSERT INTO campaign.step (run_id, call, number, is_accepted)
    VALUES (%(id)s, %(id)s, %(number)s, %(is_accepted)s)"""
COUNT = "UPDATE campaign.counter SET value = value + 1 WHERE lock_name = 'stock'"


@pytest.fixture(scope="module")
def machine() -> Iterator[Embedded]:
    """A server that knows when transactions were committed."""
    directory = Path(tempfile.mkdtemp(prefix="cronlock-campaign-test-"))
    directory.chmod(0o755)  # root's server runs as another user, who must get through
    try:
        with Embedded(directory / "server", settings={**POSTGRES, "fsync": "off"}) as server:
            migrate(server.url, "cronlock")
            stage.prepare(server.url, "secret")
            yield server
    finally:
        shutil.rmtree(directory)


@pytest.fixture
def plant(machine: Embedded) -> Iterator["Garden"]:
    """A database in which the promise was kept."""
    name = f"campaign_{next(numbers)}"
    with psycopg.connect(machine.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE postgres STRATEGY file_copy")
    url = make_conninfo(machine.url, dbname=name)
    with psycopg.connect(url, autocommit=True) as db:
        yield Garden(url, db)


class Garden:
    """Rows of a campaign: three committed runs of one lock, and one of every other kind."""

    def __init__(self, url: str, db: Db) -> None:
        self.url = url
        self.db = db
        for number in (1, 2, 3):
            self.run(number, "completed")
            self.effect(number, number - 1)
            self.answer(number, "completed")
            db.execute(COUNT)
        for number, status in ((4, "failed"), (5, "skipped"), (6, "timed_out"), (7, "cancelled"), (8, "lost")):
            self.run(number, status)
            self.answer(number, status)
        self.run(9, "completed", mode="guard")
        for number in range(1, tables.STEPS + 1):
            self.step(9, number)
        db.execute("INSERT INTO campaign.answer VALUES (10, 'one', NULL, NULL, NULL, 1)")

    def run(self, number: int, status: str, *, mode: str | None = None, error: str | None = None) -> None:
        """A run's row, of the call with the same number."""
        self.db.execute(RUN, {"id": number, "task": "stock", "status": status, "mode": mode, "error": error})

    def effect(self, number: int, value: int) -> None:
        """A run's committed work."""
        self.db.execute(EFFECT, {"id": number, "value": value})

    def answer(self, number: int, status: str) -> None:
        """What the call was told."""
        self.db.execute(ANSWER, {"id": number, "status": status})

    def step(self, run: int, number: int, *, is_accepted: bool = True) -> None:
        """What a guard run did."""
        self.db.execute(STEP, {"id": run, "number": number, "is_accepted": is_accepted})

    def found(self) -> list[tuple[str, str]]:
        """What the checker says."""
        return [(broken.promise, broken.what) for broken in checks.find_broken(self.db)]

    def promises(self) -> set[str]:
        """Which promises the checker says are broken."""
        return {promise for promise, _ in self.found()}


def test_nothing_is_found_where_the_promise_was_kept(plant: Garden) -> None:
    assert plant.found() == []
    assert checks.count_runs(plant.db) == checks.Counts(started=8, completed=4, lost=1, ended_otherwise=3, skipped=1)


def test_two_committed_runs_that_read_the_same_value_are_found(plant: Garden) -> None:
    plant.run(20, "completed")
    plant.effect(20, 2)
    assert (OVERLAPS, "runs 3 and 20 of lock stock both read 2 and were committed") in plant.found()
    assert (OVERLAPS, "the counter of lock stock says 3, but 4 runs were committed") in plant.found()


def test_a_value_that_was_overwritten_is_found(plant: Garden) -> None:
    plant.db.execute("UPDATE campaign.counter SET value = 2 WHERE lock_name = 'stock'")
    assert plant.found() == [(OVERLAPS, "the counter of lock stock says 2, but 3 runs were committed")]


def test_work_that_began_before_its_predecessor_was_committed_is_found(plant: Garden) -> None:
    plant.run(20, "completed")
    plant.run(21, "completed")
    with psycopg.connect(plant.url) as first:
        first.execute(EFFECT, {"id": 20, "value": 3})
        with psycopg.connect(plant.url) as second:
            second.execute(EFFECT, {"id": 21, "value": 4})
            first.commit()
    plant.db.execute("UPDATE campaign.counter SET value = 5 WHERE lock_name = 'stock'")
    ((promise, what),) = plant.found()
    assert promise == OVERLAPS
    assert re.fullmatch(r"run 21 of lock stock began at .*, before its predecessor 20 was committed at .*", what)


def test_a_chain_whose_ids_do_not_grow_is_found(plant: Garden) -> None:
    for number, value in ((21, 3), (20, 4)):
        plant.run(number, "completed")
        plant.effect(number, value)
        plant.db.execute(COUNT)
    assert plant.found() == [(OVERLAPS, "run 20 of lock stock follows run 21, whose id is not lower")]


def test_a_completed_run_without_its_work_is_found(plant: Garden) -> None:
    plant.run(20, "completed")
    assert plant.found() == [(FALSE_COMPLETED, "run 20 of stock is completed, but its work is not there")]


@pytest.mark.parametrize("status", ["failed", "timed_out", "cancelled", "running"])
def test_committed_work_of_a_run_that_is_not_completed_is_found(plant: Garden, status: str) -> None:
    plant.run(20, status)
    plant.effect(20, 3)
    plant.db.execute(COUNT)
    assert (FALSE_COMPLETED, f"the work of run 20 of stock was committed, but the run is {status}") in plant.found()


def test_work_that_was_committed_twice_or_half_is_found(plant: Garden) -> None:
    plant.run(20, "completed")
    for value in (3, 4):
        plant.effect(20, value)
        plant.db.execute(COUNT)
    plant.db.execute("UPDATE campaign.effect SET ended_at = NULL WHERE value_read = 4")
    assert (FALSE_COMPLETED, "run 20 committed 2 begin markers") in plant.found()
    assert (FALSE_COMPLETED, "run 20 was committed half done") in plant.found()


@pytest.mark.parametrize(("answered", "status"), [("completed", "failed"), ("failed", "completed")])
def test_an_answer_that_the_row_contradicts_is_found(plant: Garden, answered: str, status: str) -> None:
    plant.run(20, status, mode="guard")
    for number in range(1, tables.STEPS + 1):
        plant.step(20, number)
    plant.answer(20, answered)
    what = f"call 20 was answered {answered} for run 20, whose row says {status}"
    assert plant.found() == [(FALSE_COMPLETED, what)]


def test_an_answer_without_a_row_is_found(plant: Garden) -> None:
    plant.answer(20, "skipped")
    assert plant.found() == [(LOST_RECORDS, "call 20 was answered skipped for run 20, which has no row")]


def test_an_answer_that_names_the_run_of_another_call_is_found(plant: Garden) -> None:
    plant.db.execute("INSERT INTO campaign.answer VALUES (20, 'one', 200, 'failed', 4, 1)")
    assert plant.found() == [(LOST_RECORDS, "call 20 was answered failed for run 4, which has no row")]


def test_a_skip_that_the_row_does_not_know_is_found(plant: Garden) -> None:
    plant.run(20, "failed")
    plant.answer(20, "skipped")
    assert plant.found() == [(LOST_RECORDS, "call 20 was answered skipped for run 20, whose row says failed")]


def test_work_without_a_row_is_found(plant: Garden) -> None:
    plant.effect(20, 3)
    plant.db.execute(COUNT)
    assert plant.found() == [(LOST_RECORDS, "run 20 committed work of call 20, and has no row")]


def test_a_run_that_is_still_running_is_found(plant: Garden) -> None:
    plant.run(20, "running")
    assert plant.found() == [(LOST_RECORDS, "run 20 of stock is still running after the recovery")]


def test_two_rows_of_one_call_are_found(plant: Garden) -> None:
    plant.run(20, "skipped")
    plant.db.execute("UPDATE cronlock.run SET caller = 'campaign/4' WHERE id = 20")
    assert plant.found() == [(LOST_RECORDS, "campaign/4 has 2 rows: runs 4, 20")]


def test_a_lost_run_whose_work_was_committed_is_found(plant: Garden) -> None:
    plant.run(20, "lost")
    plant.effect(20, 3)
    plant.db.execute(COUNT)
    assert plant.found() == [(WRONGLY_LOST, "run 20 of stock is lost, but its work was committed")]


def test_a_lost_run_that_was_answered_completed_is_found(plant: Garden) -> None:
    plant.run(20, "lost")
    plant.answer(20, "completed")
    assert plant.found() == [(WRONGLY_LOST, "run 20 of stock is lost, but call 20 was answered completed")]


def test_a_completed_guard_run_that_did_not_do_all_is_found(plant: Garden) -> None:
    plant.run(20, "completed", mode="guard")
    plant.step(20, 1)
    plant.step(20, 2, is_accepted=False)
    what = f"guard run 20 is completed, but did 1 of {tables.STEPS} steps while the fence was its own"
    assert (FALSE_COMPLETED, what) in plant.found()


def test_a_refused_step_of_a_guard_run_that_lost_no_lock_is_found(plant: Garden) -> None:
    plant.run(20, "failed", mode="guard", error="RuntimeError")
    plant.step(20, 1, is_accepted=False)
    what = "guard run 20 ended failed, but a step of it was refused because a younger run had begun"
    assert plant.found() == [(OVERLAPS, what)]
    plant.db.execute("UPDATE cronlock.run SET status = 'lost' WHERE id = 20")
    assert plant.found() == []
    assert checks.count_refused(plant.db) == 1


def test_a_step_of_another_run_within_a_completed_guard_run_is_found(plant: Garden) -> None:
    plant.run(20, "completed", mode="guard")
    plant.run(21, "lost", mode="guard")
    for number in range(1, tables.STEPS + 1):
        plant.step(20, number)
        if number == 2:
            plant.step(21, 1)
    assert plant.found() == [(OVERLAPS, "guard run 20 is completed, but run 21 did something while it held the lock")]


def test_a_time_that_is_not_the_databases_is_found(plant: Garden) -> None:
    began = plant.db.execute("SELECT extract(epoch FROM now())::float8").fetchone()
    assert began is not None
    strays = checks.STRAYS.replace("{began}", str(began[0])).encode()
    assert plant.db.execute(strays).fetchall() == []
    plant.db.execute("UPDATE cronlock.run SET started_at = started_at + interval '3 hours' WHERE id = 1")
    ((what,),) = plant.db.execute(strays).fetchall()
    assert what.startswith("run 1: ")


def test_a_run_that_is_lost_though_nothing_happened_is_found(plant: Garden) -> None:
    plant.run(20, "lost", mode="guard")
    assert plant.db.execute(checks.LOST_IN_PEACE).fetchall() == [
        ("run 8 of stock is lost, though nothing took its lock: no word",)
    ]
    assert plant.db.execute(checks.LOST_GUARDS).fetchall() == [("guard run 20 of stock lost its lock: no word",)]


def test_answers_are_held_against_their_own_timeline_and_open_ones_against_both(plant: Garden) -> None:
    plant.db.execute("INSERT INTO campaign.answer VALUES (20, 'one', 200, 'completed', 20, 2)")
    assert plant.found() == []
    assert {broken.promise for broken in checks.find_broken(plant.db, timeline=2)} == {LOST_RECORDS}
    plant.db.execute("INSERT INTO campaign.answer VALUES (1, 'one', 200, 'completed', 1, NULL)")
    assert timelines.find_unknown(plant.db, plant.db) == []
    plant.db.execute("INSERT INTO campaign.answer VALUES (21, 'one', 200, 'completed', 1, NULL)")
    plant.db.execute("INSERT INTO campaign.answer VALUES (4, 'one', 200, 'completed', 4, NULL)")
    found = timelines.find_unknown(plant.db, plant.db)
    assert [(broken.promise, broken.what.split(",")[0]) for broken in found] == [
        (LOST_RECORDS, "call 21 was answered completed for run 1"),
        (FALSE_COMPLETED, "call 4 was answered completed for run 4"),
    ]


# -- limits -------------------------------------------------------------------------------------


@pytest.fixture
def observer(machine: Embedded) -> Observer:
    """One that watches no process yet."""
    return Observer(machine.url, [], set())


async def test_a_lock_that_outlives_its_holder_is_seen_by_the_databases_clock(
    machine: Embedded, observer: Observer
) -> None:
    login = make_conninfo(machine.url, user="campaign_one", password="secret")
    async with going_on(observer.watch()), await psycopg.AsyncConnection.connect(login) as holder:
        await holder.execute("SELECT pg_advisory_xact_lock(1)")
        at = await observer.clock()
        dead, other = observer.died(at, role="campaign_one"), observer.died(at, role="campaign_two")
        dead.before = await observer.clock()
        await until(lambda: dead.held > 0.5, "the lock is seen")
        await holder.rollback()
        await until(lambda: dead.is_over, "its end is seen")
        seen = dead.held
        await holder.execute("SELECT pg_advisory_xact_lock(1)")  # the next process's
        await asyncio.sleep(0.3)
    assert 0.5 < dead.held == seen < 2
    assert other.held == 0
    result = Result("kills", "", held_limit=0.0)
    result.take(Callers([], "", 0, 0), observer)
    assert any(re.fullmatch(r"a lock was held for .* s after its holder's death", fault) for fault in result.faults)


def test_limits_that_were_passed_are_faults(observer: Observer) -> None:
    observer.most_connections = {"one": MOST_CONNECTIONS, "two": MOST_CONNECTIONS + 1}
    observer.resident = {("one", 1): [(float(second), 1000 + second) for second in range(300)]}
    result = Result("soak", "", counts=checks.Counts(completed=1), is_growth_sure=True)
    result.growth = observer.growth(100.0)
    result.take(Callers([], "", 0, 0), observer)
    assert result.faults == [
        f"a server had {MOST_CONNECTIONS + 1} connections; {MOST_CONNECTIONS} are allowed",
        "a server's memory grew by 16.2%",
    ]
    assert observer.growth(200.0) is None  # it did not live long enough
    idle = Result("soak", "")
    idle.take(Callers([], "", 0, 0), Observer("", [], set()))
    assert idle.faults == ["nothing was completed: this shows nothing"]


# -- the report ------------------------------------------------------------------------------------------------


def test_the_report_names_what_was_not_as_promised_and_has_its_place_in_a_page(tmp_path: Path) -> None:
    result = Result("kills", "3 SIGKILLs", broken=[checks.Broken(OVERLAPS, "runs 3 and 20")], faults=["it fell over"])
    text = report([result], command="./run campaign", seed="7", is_short=True)
    assert "| **1** | 0 | 0 | 0 |" in text
    assert "- kills: overlaps of commits: runs 3 and 20\n- kills: it fell over" in text
    assert not result.is_kept
    page = tmp_path / "page.md"
    page.write_text(f"# Before\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    write(page, text)
    assert page.read_text() == f"# Before\n\n{BEGIN}\n\n{text}\n\n{END}\n\nafter\n"


def test_the_page_tells_every_scenario_and_its_size_and_has_its_place_for_the_report(project: Path) -> None:
    text = (project / "docs" / "reliability.md").read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    told = dict(re.findall(r"^\| `([a-z]+)` \| (.+) \|$", text.split(BEGIN)[0], re.MULTILINE))
    assert list(told) == list(scenarios.SCENARIOS) == list(scenarios.LONG) == list(scenarios.SHORT)
    for name, size in scenarios.LONG.items():
        assert not size.events or f"{size.events} times" in told[name]


# -- real servers ----------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
async def test_a_short_scenario_keeps_the_promise() -> None:
    told: list[str] = []
    result = await scenarios.play("kills", "a test", Size(events=2), told.append)
    assert 3 < result.connections <= MOST_CONNECTIONS
    assert (result.broken, result.faults) == ([], [])
    assert [line.split(":")[0] for line in told] == ["kill 1 of 2", "kill 2 of 2"]
    assert result.counts.completed > 20
    assert result.held is not None
    assert result.calls > result.counts.started


@pytest.mark.timeout(300)
async def test_servers_that_do_not_share_their_locks_are_found_to_overlap(tmp_path: Path) -> None:
    place = Path(tempfile.mkdtemp(prefix="cronlock-campaign-test-"))
    apart = {"one": {"CRONLOCK_NAMESPACE": "another"}}
    try:
        async with staged(place, "a test", settings=apart) as world:
            await world.play(4.0)
            result = await scenarios.finish(Result("apart", ""), world)
    finally:
        shutil.rmtree(place)
    assert result.number(OVERLAPS) > 0
    assert not result.is_kept


@pytest.mark.timeout(300)
async def test_ctrl_c_ends_everything_that_was_started(tmp_path: Path) -> None:
    place = Path(tempfile.mkdtemp(prefix="cronlock-campaign-test-"))
    place.chmod(0o755)
    command = (sys.executable, "-m", "tests.campaign", "--only", "kills")
    with Running(cwd=tmp_path, env={**environment(), "TMPDIR": str(place)}, command=command) as campaign:
        campaign.until_says("kill 1 of 100", 120)
        begun = descendants(campaign.process.pid)
        assert len(begun) > 5
        campaign.send(signal.SIGINT)
        assert campaign.ends(120) == 2
    assert "interrupted" in campaign.said
    await until(lambda: not any(map(is_alive, begun)), "everything has ended", 10)
    place.rmdir()  # nothing is left in it
