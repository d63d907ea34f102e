"""Who may ask: every request passes here before anything of it is looked at.

A server on localhost is reached by every page that the user's browser shows. A page of another site sends its own
Origin, or says in Sec-Fetch-Site that it is of another; one whose name was made to lead here (DNS rebinding) sends that
name as Host. All three are refused, and there are no CORS headers, so that no page could read an answer.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from wgrad.train.serve.errors import ApiError
from wgrad.train.terminal.ending import one_line
from wgrad.train.terminal.output import say

_HOST = re.compile(r"(?:\[(?P<address>[0-9a-fA-F:.]+)\]|(?P<name>[\w.-]+))(?::\d+)?", re.ASCII)


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone. host: an address, or a name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Guard:
    """ASGI middleware. host: that the server listens on; names: further ones by which it may be called; key: None where
    none is asked for."""

    def __init__(self, app: ASGIApp, host: str, names: Collection[str], key: str | None) -> None:
        self.app, self._key = app, key
        self._local = is_loopback(host)
        self._names = {name.lower() for name in (host, *names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self.check(Headers(scope=scope))
        except ApiError as error:
            headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
            await JSONResponse(error.body(), error.status, headers)(scope, receive, send)
            return
        try:
            await self.app(scope, receive, send)
        except Exception as error:  # a fault of ours; starlette has answered with status 500
            say(f"wgrad: internal error: {type(error).__name__}: {one_line(error)}", "stderr")

    def check(self, headers: Headers) -> None:
        """ApiError: the request is not to be answered."""
        host = headers.get("host", "")
        if not self._is_ours(_name_of(host)):
            raise ApiError(
                403,
                f"Host: must be an address of this server; got {host[:100]!r}: name it with --allow-host",
                code="host",
            )
        for origin in headers.getlist("origin"):
            if _site(origin) != host.lower():
                raise ApiError(403, "Origin: pages of other sites may not ask this server", code="origin")
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise ApiError(403, "Sec-Fetch-Site: pages of other sites may not ask this server", code="origin")
        if self._key is not None:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(given.strip().encode("latin-1", "replace"), self._key.encode())
            if scheme.lower() != "bearer" or not right:
                got = "another one" if given else "none"
                message = f"the key of this server is wanted as 'Authorization: Bearer KEY'; got {got}"
                raise ApiError(401, message, code="invalid_api_key")

    def _is_ours(self, name: str) -> bool:
        if name in self._names:
            return True
        if self._local:
            return is_loopback(name)
        try:  # a page cannot be loaded from an address that is not its own, so no rebinding comes by one
            ipaddress.ip_address(name)
            return True
        except ValueError:
            return name == "localhost"


def _name_of(host: str) -> str:
    """The name in a Host header, without its port; "" where it is none."""
    found = _HOST.fullmatch(host)
    return (found["address"] or found["name"]).lower() if found else ""


def _site(origin: str) -> str:
    """HOST or HOST:PORT of an Origin header, as a Host header has it; "" of any that is no page's of the web."""
    scheme, _, host = origin.partition("://")
    return host.lower() if scheme in ("http", "https") else ""
