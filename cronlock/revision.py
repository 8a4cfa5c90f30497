"""Which revisions of the schema this code works with: its own, and the one right after it.

Migrations are numbered, 0001, 0002, and so on, and each one only adds (expand). So the code before a migration goes on
working after it, and a release is rolled out by migrating first and replacing the instances then, one by one.
"""

from collections.abc import Sequence

from cronlock.errors import Unavailable

RETRY_AFTER = 30
DIGITS = 4


def number(revision: str) -> int | None:
    """The place of a revision in the row of migrations; None for an id that is not one of ours."""
    is_ours = len(revision) == DIGITS and revision.isascii() and revision.isdigit()
    return int(revision) if is_ours else None


def is_next(found: str, own: str) -> bool:
    """Whether `found` is the revision right after `own`."""
    there, here = number(found), number(own)
    return there is not None and here is not None and there == here + 1


def require(found: Sequence[str], own: str, schema: str) -> bool:
    """Whether a schema at the revisions `found` is the next one rather than that of this code, `own`.

    Raises `Unavailable` for every schema that this code does not work with: `schema_behind`, `schema_ahead`, or
    `schema_unknown` for one that no cronlock has left.
    """
    match found:
        case [one] if one == own:
            return False
        case [one] if is_next(one, own):
            return True
    raise refused(found, own, schema)


def missing(schema: str) -> Unavailable:
    """What a database without the schema is refused with."""
    return Unavailable(
        "schema_missing", f"the schema {schema!r} is not installed in this database; run: cronlock migrate", RETRY_AFTER
    )


def refused(found: Sequence[str], own: str, schema: str) -> Unavailable:
    """Why a schema will not do, and what to do."""
    if len(found) > 1:
        heads = ", ".join(sorted(found))
        return Unavailable(
            "schema_unknown",
            f"the schema {schema!r} is at {len(found)} revisions at once ({heads}); its table alembic_version must have"
            " one row: restore it from a backup, or delete the rows that no migration of this database has written",
            RETRY_AFTER,
        )
    there = number(found[0]) if found else 0
    here = number(own)
    if there is None or here is None:
        return Unavailable(
            "schema_unknown",
            f"the schema {schema!r} is at revision {found[0]!r}, which is none of cronlock's: they are numbers such as"
            f" {own}; check DATABASE_URL and CRONLOCK_SCHEMA",
            RETRY_AFTER,
        )
    if there < here:
        at = found[0] if found else "none"
        return Unavailable(
            "schema_behind",
            f"the schema {schema!r} is behind: at revision {at}, and this cronlock needs {own}; run: cronlock migrate",
            RETRY_AFTER,
        )
    return Unavailable(
        "schema_ahead",
        f"the schema {schema!r} is ahead: at revision {found[0]}, and this cronlock works with {own} and the one after"
        " it; deploy the newer cronlock here",
        RETRY_AFTER,
    )
