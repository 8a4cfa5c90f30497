"""Cases of operating (OPS): what may be read where."""

import asyncio
import signal

import httpx2
import pytest

from tests import AUTH, SECRET, Db
from tests.cases.conftest import Start

pytestmark = pytest.mark.anyio

SECRETS = ("sk_test_x51Hx", "hunter22", "abc123", "hunter33", SECRET, "a-local-variable-with-a-password=")


async def test_an_error_full_of_secrets_shows_none_of_them_in_answer_row_and_log_but_what_happened(
    start: Start, db: Db
) -> None:
    """O04: and no local variable of any frame."""
    server, url = start(CRONLOCK_LOG_FORMAT="json")
    async with httpx2.AsyncClient(headers=AUTH) as client:
        answer = await client.get(f"{url}/cron/leaking")
    assert answer.status_code == 500
    server.send(signal.SIGTERM)
    assert await asyncio.to_thread(server.ends) == 0
    query = "SELECT error_type, error_message, error_traceback FROM cronlock.run"
    (kind, message, traceback) = db.execute(query).fetchone() or ("", "", "")
    assert kind == "ConnectionError"
    for text in (answer.text, message, traceback, server.said):
        assert "the supplier refused" in text
        for secret in SECRETS:
            assert secret not in text
    assert "in leaking" in traceback
    assert "Traceback" not in answer.text
    assert "in leaking" not in answer.text


async def test_a_database_that_refuses_at_the_start_is_told_without_its_password(
    start: Start, database_url: str
) -> None:
    """O04: a wrong password, and a port where nobody listens."""
    wrong = database_url.replace("postgresql://", "").partition("@")[2]
    for url in (f"postgresql://postgres:hunter22@{wrong}", "postgresql://anna:hunter22@127.0.0.1:9/shop"):
        server, served = start(DATABASE_URL=url, CRONLOCK_ACQUIRE_TIMEOUT="500ms")
        async with httpx2.AsyncClient(headers=AUTH) as client:
            answer = await client.get(f"{served}/cron/nightly")
        assert (answer.status_code, answer.json()["reason"]) == (503, "database_unavailable")
        assert "hunter22" not in answer.text
        server.send(signal.SIGTERM)
        assert await asyncio.to_thread(server.ends) == 0
        assert "hunter22" not in server.said
        assert "cronlock.database" in server.said or "database" in server.said
