"""Reports on request: a route of your own enqueues a job in its own transaction, a worker makes the report, once.

python -m examples.reports                   # its table
uvicorn --factory examples.reports:app
cronlock worker examples.reports:cron
"""

import asyncio
from typing import Annotated, Any

import psycopg
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from cronlock import Cronlock, IdempotencyKeyInUse, IdempotencyKeyReused, Retry, Run, VersionTable

TABLE = """
CREATE TABLE IF NOT EXISTS report (
    id bigint PRIMARY KEY,
    user_id bigint NOT NULL,
    requested_at timestamptz NOT NULL DEFAULT now(),
    external_request_id text UNIQUE,
    body text,
    made_at timestamptz)
"""
REQUEST = text("INSERT INTO report (id, user_id) VALUES (:reportId, :userId) ON CONFLICT (id) DO NOTHING")
MAKE = text("""
UPDATE report SET body = :body, external_request_id = :external_request_id, made_at = now()
 WHERE id = :reportId AND external_request_id IS NULL
""")
SHOW = text("SELECT id, user_id, body, made_at FROM report WHERE id = :id")

cron = Cronlock()
cron.target("pages", VersionTable())  # a reader puts the version of "report:7" into the key of its cache
engine = create_async_engine(
    "postgresql+psycopg://", async_creator=lambda: psycopg.AsyncConnection.connect(cron.settings.database_url)
)


Number = Annotated[int, Field(ge=1, le=2**63 - 1)]  # what a column of type bigint holds


class ReportRequest(BaseModel):
    """Who wants which report."""

    model_config = ConfigDict(extra="forbid")

    userId: Number
    reportId: Number


@cron.task("generate-report", max_attempts=5, timeout="60s")
async def generate_report(run: Run, request: ReportRequest) -> dict[str, Any]:
    """Make one report. Whatever dies on the way, it is made once, and what shows it is told afterwards."""
    # The renderer is elsewhere: told twice, it renders once, because the request's id is the same in every attempt.
    external_request_id = run.effect_key("render")
    body = await render(request, idempotency_key=external_request_id)
    run.progress(1, 2)
    # The marker of the business itself: a report has one external request, and that is no other report's.
    made = await run.connection.execute(
        MAKE, {**request.model_dump(), "body": body, "external_request_id": external_request_id}
    )
    run.invalidate(f"report:{request.reportId}")
    run.progress(2, 2)
    return {"reportId": request.reportId, "isNew": made.rowcount == 1}


async def render(request: ReportRequest, idempotency_key: str) -> str:
    """Stands for a call of a rendering service, which takes a moment, and an `Idempotency-Key`."""
    if request.reportId % 1000 == 999:
        raise Retry("the renderer is busy", after=5)
    await asyncio.sleep(0.2)
    return f"report {request.reportId} for user {request.userId}, rendered as {idempotency_key}"


async def request_report(request: Request) -> JSONResponse:
    """POST /reports: the order and its job are one commit, so that neither is there without the other."""
    try:
        wanted = ReportRequest.model_validate_json(await request.body())
    except ValidationError as error:
        return JSONResponse({"errors": error.errors(include_url=False, include_input=False)}, 422)
    try:
        async with engine.begin() as connection:
            await connection.execute(REQUEST, wanted.model_dump())
            job = await cron.enqueue(connection, "generate-report", wanted, idempotency_key=f"report:{wanted.reportId}")
    except IdempotencyKeyReused as error:
        reason = f"report {wanted.reportId} has been ordered for another user"
        return JSONResponse({"reason": reason, "jobId": error.job_id}, 409)
    except IdempotencyKeyInUse as error:
        return JSONResponse({"reason": str(error)}, 409, {"retry-after": str(error.retry_after)})
    return JSONResponse({"jobId": job.job_id, "duplicate": job.is_duplicate}, 202)


async def show_report(request: Request) -> JSONResponse:
    """GET /reports/{id}."""
    async with engine.connect() as connection:
        row = (await connection.execute(SHOW, {"id": request.path_params["id"]})).one_or_none()
    if row is None:
        return JSONResponse({"status": "not_found"}, 404)
    made_at = None if row.made_at is None else row.made_at.isoformat()
    return JSONResponse({"id": row.id, "userId": row.user_id, "body": row.body, "madeAt": made_at})


def app() -> Starlette:
    """cronlock's routes, and all else to an application of our own."""
    routes = [Route("/reports", request_report, methods=["POST"]), Route("/reports/{id:int}", show_report)]
    return cron.app(fallback=Starlette(routes=routes))


def main() -> None:
    """Make the table."""
    with psycopg.connect(cron.settings.database_url) as connection:
        connection.execute(TABLE)


if __name__ == "__main__":
    main()
