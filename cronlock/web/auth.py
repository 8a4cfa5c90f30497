"""The bearer secret: compared on bytes, in constant time, against every configured one.

Status and header follow RFC 6750, section 3: `error="invalid_token"` only where a token was sent.
"""

import hmac
import logging
from collections.abc import Sequence

from starlette.types import Scope

log = logging.getLogger("cronlock.auth")

MISSING = "missing"
MISMATCH = "mismatch"
CHALLENGE = {MISSING: b"Bearer", MISMATCH: b'Bearer error="invalid_token"'}


class Bearer:
    """Decides whether the `Authorization` headers of a request name one of the secrets."""

    def __init__(self, secrets: Sequence[str]) -> None:
        self._secrets = [secret.encode("ascii") for secret in secrets]

    def refusal(self, authorization: Sequence[bytes]) -> str | None:
        """None if the secret is right, else `missing` or `mismatch` (for the log, never for the caller)."""
        if not authorization:
            return MISSING
        if len(authorization) > 1:
            return MISMATCH
        scheme, _, token = authorization[0].partition(b" ")
        if scheme.lower() != b"bearer":
            return MISMATCH
        token = token.strip(b" ")
        is_right = False
        for secret in self._secrets:
            is_right |= hmac.compare_digest(token, secret)
        return None if is_right and token else MISMATCH


def authorization(scope: Scope) -> list[bytes]:
    """The `Authorization` headers of a request, of which there must be one."""
    return [value for name, value in scope["headers"] if name == b"authorization"]


def report(reason: str, scope: Scope) -> None:
    """One log line per refused call; no header and no path, which a caller could fill with anything."""
    client = scope.get("client")
    facts = {"event": "auth.refused", "reason": reason, "client": client[0] if client else None}
    log.warning("a call was refused", extra=facts)
