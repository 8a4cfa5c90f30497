"""The body of a request, read no further than it may be long."""

from starlette.types import Receive

from cronlock import jsontext
from cronlock.errors import PayloadError


class TooLarge(Exception):
    """The body is longer than `max_body`; `str()` says so."""

    def __init__(self, max_body: int) -> None:
        super().__init__(f"the body is longer than {max_body} bytes")


async def read_object(fields: dict[bytes, bytes], receive: Receive, max_body: int) -> dict[str, object]:
    """The JSON object in the body, or {} for any other content type, whose body is left alone.

    Raises `TooLarge` as soon as that is known, and `PayloadError` for what is not a JSON object.
    """
    length = fields.get(b"content-length", b"0")
    if length.isdigit() and int(length) > max_body:
        raise TooLarge(max_body)
    if not is_json(fields.get(b"content-type", b"")):
        return {}
    chunks, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise PayloadError("the body broke off")
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > max_body:
            raise TooLarge(max_body)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return jsontext.parse_object(b"".join(chunks))


def require_json(fields: dict[bytes, bytes]) -> None:
    """Raise `PayloadError` for a body that is not JSON by its content type."""
    if has_body(fields) and not is_json(fields.get(b"content-type", b"")):
        raise PayloadError("the body is not JSON by its Content-Type; send Content-Type: application/json")


def has_body(fields: dict[bytes, bytes]) -> bool:
    """Whether a request announces a body: by a length, or by sending it in chunks."""
    return fields.get(b"content-length", b"0").strip(b"0") != b"" or b"transfer-encoding" in fields


def is_json(content_type: bytes) -> bool:
    """application/json and its relatives, such as application/cloudevents+json."""
    kind = content_type.partition(b";")[0].strip().lower()
    return kind == b"application/json" or kind.endswith(b"+json")
