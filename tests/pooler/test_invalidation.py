"""What tasks invalidate is delivered through a real PgBouncer in transaction mode, with and without a way past it."""

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from tests import Db, Make, until
from tests.observing import is_quiet
from tests.pooler.bouncer import Bouncer
from tests.telling import tell_all

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("is_direct", [True, False], ids=["direct url", "pooler only"])
async def test_every_kind_of_target_is_told_through_a_pooler_in_order_and_nothing_is_left_on_its_sessions(
    bouncer: Bouncer, make_cron: Make, database_url: str, db: Db, is_direct: bool
) -> None:
    pooled = bouncer.url(str(conninfo_to_dict(database_url)["dbname"]))
    cron = make_cron(database_url=pooled, pooler="transaction", direct_url=database_url if is_direct else None)
    async with await psycopg.AsyncConnection.connect(database_url, application_name="observer") as listener:
        await tell_all(cron, db, listener, "report:")
    await until(lambda: is_quiet(db), "no transaction and no lock is left")
