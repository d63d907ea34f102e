"""Who may ask: every request passes here before anything of it is looked at. What a header may say: sites.py."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from wgrad.train.serve.errors import ApiError
from wgrad.train.serve.sites import is_loopback, name_of, refusal
from wgrad.train.terminal.ending import one_line
from wgrad.train.terminal.output import say


class Guard:
    """ASGI middleware. host: that the server listens on; names: further ones by which it may be called; key: None where
    none is asked for."""

    def __init__(self, app: ASGIApp, host: str, names: Collection[str], key: str | None) -> None:
        self.app, self._key = app, key
        self._local = is_loopback(host)
        self._names = {name_of(name) or name.lower() for name in (host, *names)}

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
        site = headers.get("sec-fetch-site", "none")
        header, wrong = refusal(headers.get("host", ""), headers.getlist("origin"), site, self._is_ours)
        if header == "Host":
            raise ApiError(403, f"Host: {wrong}: name it with --allow-host", code="host")
        if header:
            raise ApiError(403, f"{header}: {wrong}", code="origin")
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
