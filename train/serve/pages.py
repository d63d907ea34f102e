"""The web pages that servers show: files of the folder pages/, sent as they are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).with_name("pages")
_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
# Nothing but the server's own files, and texts are never taken for markup.
_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
}


def page_routes(index: str, *files: str) -> list[Route]:
    """Return the routes of a page: `/`, and /pages/NAME for the files that it loads."""
    return [Route("/", _sender(index)), *(Route(f"/pages/{name}", _sender(name)) for name in files)]


def _sender(name: str) -> Callable[[Request], Awaitable[Response]]:
    path = _FOLDER / name
    content, kind = path.read_bytes(), f"{_KINDS[path.suffix]}; charset=utf-8"

    async def send(request: Request) -> Response:
        return Response(content, headers={**_HEADERS, "Content-Type": kind})

    return send
