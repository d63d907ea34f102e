"""The web pages of the servers: files of the folder pages/, sent unchanged."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).with_name("pages")
_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
# Allow only the server's own files, and never interpret texts as markup.
HEADERS = {
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


def page_files(index: str, *files: str) -> dict[str, Callable[[], Response]]:
    """Return the responses of a page by path: `/`, and /pages/NAME for the files that it loads."""
    return {"/": _response(index), **{f"/pages/{name}": _response(name) for name in files}}


def page_routes(index: str, *files: str) -> list[Route]:
    """Return `page_files` as routes."""
    return [Route(path, _sender(response)) for path, response in page_files(index, *files).items()]


def _response(name: str) -> Callable[[], Response]:
    path = _FOLDER / name
    content, kind = path.read_bytes(), f"{_KINDS[path.suffix]}; charset=utf-8"
    return lambda: Response(content, headers={**HEADERS, "Content-Type": kind})


def _sender(response: Callable[[], Response]) -> Callable[[Request], Awaitable[Response]]:
    async def send(request: Request) -> Response:
        return response()

    return send
