"""Who may ask: every request passes here before anything of it is looked at. What a header may say: sites.py."""

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

_ANY = "*"  # in the place of origins
_OPEN = "/health"  # says nothing but that the server lives: probes have no key


class Guard:
    """ASGI middleware. host: that the server listens on; names: further ones by which it may be called; key: None where
    none is asked for; origins: of pages that may ask; open_paths: that need no key; ollama: errors of
    /api are in the form of Ollama's."""

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
        except Exception as error:  # a fault of ours; starlette has answered with status 500
            say(f"wgrad: internal error: {type(error).__name__}: {one_line(error)}", "stderr")

    def _allows(self, headers: Headers) -> bool:
        """Return whether it is a page of another site that may ask."""
        origins = headers.getlist("origin")
        return len(origins) == 1 and (_ANY in self._origins or origins[0].lower() in self._origins)

    def check(self, headers: Headers, path: str = "") -> None:
        """ApiError: the request is not to be answered."""
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
        try:  # a page cannot be loaded from an address that is not its own, so no rebinding comes by one
            ipaddress.ip_address(name)
            return True
        except ValueError:
            return name == "localhost"


# What a browser asks before it sends a page's request: methods and headers that clients of this API use.
_PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST",
    "Access-Control-Allow-Headers": "Authorization, Content-Type, X-Requested-With, OpenAI-Organization, OpenAI-Beta",
    "Access-Control-Max-Age": "600",
}


def _with_origin(send: Send, origin: str) -> Send:
    """Let the page of an origin read what is sent."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            named = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]
            message = {**message, "headers": [*message.get("headers", []), *named]}
        await send(message)

    return sending
