"""docs/cases.md names tests that exist, and all those of tests/cases."""

import ast
import re
from pathlib import Path

import pytest

ROW = re.compile(r"^\| ([A-Z]\d\d) \| (.+?) \| (.+) \|$", re.MULTILINE)
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@pytest.fixture
def rows(project: Path) -> list[tuple[str, str, str]]:
    """Case, where it was seen, and what is held."""
    found = ROW.findall((project / "docs" / "cases.md").read_text())
    assert len(found) > 40
    return found


def functions_of(path: Path) -> set[str]:
    """The names of the test functions in a file."""
    functions = (
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return {function.name for function in functions if function.name.startswith("test_")}


def test_every_test_that_the_page_of_cases_names_exists(project: Path, rows: list[tuple[str, str, str]]) -> None:
    for case, _, held in rows:
        named = NAMED.findall(held)
        assert named, f"{case} names no test"
        assert held.count("::") == len(named), f"{case}: not every test is written as `file::test`"
        for file, test in named:
            assert test in functions_of(project / file), f"{case}: {file}::{test}"


def test_every_whole_scenario_is_on_the_page(project: Path, rows: list[tuple[str, str, str]]) -> None:
    named = {name for _, _, held in rows for name in NAMED.findall(held)}
    for path in (project / "tests" / "cases").glob("test_*.py"):
        file = path.relative_to(project).as_posix()
        assert {(file, test) for test in functions_of(path)} <= named


def test_no_case_is_there_twice_and_each_says_where_it_was_seen(rows: list[tuple[str, str, str]]) -> None:
    cases = [case for case, _, _ in rows]
    assert len(cases) == len(set(cases))
    assert [seen for _, seen, _ in rows if not re.search(r"\w/[\w.-]+#\d+", seen)] == []
