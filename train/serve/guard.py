"""Access control: checks every request before it is processed. sites.py has the rules for headers."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wgrad.train.serve.errors import ApiError
from wgrad.train.serve.sites import is_loopback, name_of, refusal
from wgrad.train.terminal.ending import one_line
from wgrad.train.terminal.output import say

_ANY = "*"  # any origin
_OPEN = "/health"  # needs no key, since probes have none; tells only that the server lives


class Guard:
    """ASGI middleware that refuses requests.

    host: that on which the server listens; names: further names by which it may be called.
    key: the key that clients must have, or None.
    origins: of pages that may send requests. open_paths: paths that need no key.
    ollama: whether errors of /api have Ollama's form.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        names: Collection[str],
        key: str | None,
        origins: Collection[str] = (),
        open_paths: Collection[str] = (),
        ollama: bool = False,
    ) -> None:
        self.app, self._key, self._origins = app, key, frozenset(origin.lower() for origin in origins)
        self._open, self._ollama = {_OPEN, *open_paths}, ollama
        self._local = is_loopback(host)
        self._names = {name_of(name) or name.lower() for name in (host, *names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if self._allows(headers):
            send = _with_origin(send, headers["origin"])
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                await Response(status_code=204, headers=_PREFLIGHT)(scope, receive, send)
                return
        try:
            self.check(headers, scope["path"])
        except ApiError as error:
            wanted = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
            await JSONResponse(error.body(scope["path"] if self._ollama else ""), error.status, wanted)(
                scope, receive, send
            )
            return
        try:
            await self.app(scope, receive, send)
        except Exception as error:  # a fault of wgrad; starlette has answered with status 500
            say(f"wgrad: internal error: {type(error).__name__}: {one_line(error)}", "stderr")

    def _allows(self, headers: Headers) -> bool:
        """Return whether the request is from a page of another site that is allowed."""
        origins = headers.getlist("origin")
        return len(origins) == 1 and (_ANY in self._origins or origins[0].lower() in self._origins)

    def check(self, headers: Headers, path: str = "") -> None:
        """Raise ApiError if the request must not be answered."""
        site, origins = headers.get("sec-fetch-site", "none"), headers.getlist("origin")
        if self._allows(headers):
            site, origins = "none", []
        header, wrong = refusal(headers.get("host", ""), origins, site, self._is_ours)
        if header == "Host":
            raise ApiError(403, f"Host: {wrong}: name it with --allow-host", code="host")
        if header:
            raise ApiError(403, f"{header}: {wrong}: name them with --allow-origin", code="origin")
        if self._key is not None and path not in self._open:
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
        try:  # DNS rebinding needs a name: a page from an IP address comes from that address
            ipaddress.ip_address(name)
            return True
        except ValueError:
            return name == "localhost"


# The answer to a browser's preflight: methods and headers that clients of this API use.
_PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST",
    "Access-Control-Allow-Headers": "Authorization, Content-Type, X-Requested-With, OpenAI-Organization, OpenAI-Beta",
    "Access-Control-Max-Age": "600",
}


def _with_origin(send: Send, origin: str) -> Send:
    """Return a `send` that lets pages of an origin read the response."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            named = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]
            message = {**message, "headers": [*message.get("headers", []), *named]}
        await send(message)

    return sending
