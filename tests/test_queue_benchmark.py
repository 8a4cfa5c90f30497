"""What the queue's benchmark makes of its readings; that it measures is shown by its short form."""

import argparse
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from benchmarks.arms import Reading
from benchmarks.comparison import Round
from benchmarks.queue import command
from benchmarks.queue.rows import FASTEST, Row, rows
from benchmarks.queue.stages import FULL, SHORT
from benchmarks.queue.systems import GRAPHILE, PEERS, PGBOSS, PGQUEUER, PYTHON_PEERS, System
from benchmarks.queue.workers import as_url


def rounds(*found: dict[str, float], unit: str = "/s") -> list[Round]:
    return [{name: Reading(value, unit) for name, value in one.items()} for one in found]


def test_the_best_peer_is_the_one_with_the_best_median_and_the_ratio_is_taken_in_each_round() -> None:
    row = Row("process", "", "mine", FASTEST, ("process, slow", "process, fast"), 2.0)
    found = row.compare(
        rounds(
            {"mine": 30, "process, slow": 60, "process, fast": 20},
            {"mine": 50, "process, slow": 5, "process, fast": 20},
            {"mine": 80, "process, slow": 5, "process, fast": 20},
        )
    )
    assert found is not None
    assert (found.best, found.against) == ("process, fast", "the fastest peer: fast")
    assert found.ratios == [1.5, 2.5, 4.0]
    assert (found.mine, found.theirs, found.ratio, found.is_reached) == (50, 20, 2.5, True)


def test_where_less_is_better_the_fastest_peer_is_the_lowest() -> None:
    row = Row("latency", "", "mine", FASTEST, ("latency, a p50", "latency, b p50"), 1.0, "ms")
    found = row.compare(rounds({"mine": 3.0, "latency, a p50": 2.0, "latency, b p50": 6.0}, unit="ms"))
    assert found is not None
    assert (found.against, found.ratio, found.is_reached) == ("the fastest peer: a", 1.5, False)


def test_a_row_without_its_peers_is_left_out() -> None:
    row = Row("process", "", "mine", FASTEST, ("process, other",))
    assert row.compare(rounds({"mine": 1.0})) is None
    assert row.compare(rounds({"process, other": 1.0})) is None


def test_only_peers_that_are_there_are_compared() -> None:
    def compared(*peers: System) -> set[str]:
        return {name for row in rows(FULL, peers) if row.what.endswith("guard mode") for name in row.others}

    assert {f"process, {peer.name}" for peer in PEERS if peer is not PGBOSS} <= compared(*PEERS)
    assert not {f"process, {peer.name}" for peer in PYTHON_PEERS if peer is not PGQUEUER} & compared(PGQUEUER, GRAPHILE)


def test_a_conninfo_becomes_a_url_that_means_the_same() -> None:
    conninfo = "host=127.0.0.1 port=5433 user=u password='a b/c@d' dbname=x sslmode=disable"
    url = as_url(conninfo)
    assert url.startswith("postgresql://u:a%20b%2Fc%40d@127.0.0.1:5433/x?")
    assert conninfo_to_dict(url) == conninfo_to_dict(conninfo)


def test_the_half_hour_is_only_measured_by_its_name() -> None:
    def reports(*words: str) -> list[str]:
        return command.wanted(command.arguments(words))

    assert reports() == [command.TABLE, command.FAULTS]
    assert reports("--only", "churn") == [command.CHURN]
    assert reports("--only", "http") == [command.TABLE]
    assert reports("--short") == [command.TABLE, command.CHURN, command.FAULTS]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--short", "--write", "page.md"], "the short form is none"),
        (["--only", "http", "--write", "page.md"], "--write is for the whole table"),
        (["--rounds", "2", "--write", "page.md"], "at least 5 rounds"),
        (["--seconds", "0"], "there is no time"),
        (["--peers", "Sidekiq"], "there is no 'Sidekiq', only graphile-worker; pg-boss"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        command.arguments(words)
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_peers_can_be_chosen() -> None:
    given: argparse.Namespace = command.arguments(["--peers", "PgQueuer, asyncpg; graphile-worker"])
    assert given.peers == [PGQUEUER, GRAPHILE]
    assert command.arguments(["--short"]).peers == list(command.SHORT_PEERS)
    assert SHORT.is_short
