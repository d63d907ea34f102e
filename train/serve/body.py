"""Reading the JSON body of a request, of bounded size and time."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from wgrad.train.serve.errors import ApiError
from wgrad.train.serve.exchange import CLIENT_GONE

MOST_BYTES = 4 << 20  # of a request
BODY_SECONDS = 30.0  # for all of it to arrive


async def read_body(request: Request, any_type: bool = False) -> bytes:
    """Read the body of a request. any_type: accept any content type.

    Raises:
        ApiError: its type is not JSON, it is too large or too slow, or the client has gone.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not any_type:
        raise ApiError(415, f"Content-Type: must be application/json; got {kind[:100] or 'none'}: send it so")
    too_large = ApiError(413, f"the request: must have at most {MOST_BYTES:,} bytes: send less at once")
    if int(request.headers.get("content-length", "0")) > MOST_BYTES:  # h11 has checked that it is a number
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MOST_BYTES:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the request: must come within {BODY_SECONDS:g} s: send it again") from None
    except ClientDisconnect:
        raise ApiError(CLIENT_GONE.status, CLIENT_GONE.message) from None
    return bytes(body)
