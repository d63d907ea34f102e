"""Bytes of HTTP requests, and a connection of the servers' own protocol over a pair of sockets in this process."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import re
import socket
import struct
import sys
import termios
import time
import traceback
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import h11
from uvicorn.server import ServerState

from tests.fuzz.case import Files
from tests.fuzz.values import mutate_bytes
from wgrad.train.serve import guard
from wgrad.train.serve.connection import Connection
from wgrad.train.serve.http_server import HttpServer

FOLDER = "wire"  # of a case's connections: a file for each, sent in the order of their names
LEFT = ".left"  # ends the name of one whose client leaves before it has read anything
SECONDS = 60.0  # for all answers of a connection: a busy machine gives a case little of its time
_TICKS = 3  # of the loop in a row, after which a connection counts as idle
_STATUS = re.compile(rb"(?:^|\n)HTTP/1\.1 (\d{3}) ")
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "get", "POST" * 90)
_SOUND = "127.0.0.1"
_HOSTS = ("localhost:80", "127.0.0.1:0", "[::1]:8000", "evil.example", "", "[::1", "[.]", "127.0.0.1:x", "a b", "\xe9")
_NAMED: dict[str, tuple[str, ...]] = {
    "Origin": ("http://127.0.0.1", "null", "https://evil.example", "http://[", "://", "\xff", "x" * 5000),
    "Sec-Fetch-Site": ("same-origin", "cross-site", "none", ""),
    "Access-Control-Request-Method": ("POST", ""),
    "Authorization": ("Bearer x", "Bearer", "Basic \xff", "bearer " + "x" * 4000),
    "Content-Type": ("application/json; charset=x", "text/plain", "", "application/json\x00", "multipart/form-data"),
    "Content-Encoding": ("gzip", "br"),
    "Content-Length": ("0", "-1", "9" * 30, "4194305", "1, 1", "\u0661", "1_0", "+3"),
    "Transfer-Encoding": ("chunked", "gzip", "identity", "chunked, chunked"),
    "Connection": ("close", "keep-alive", "Upgrade", "\xe9"),
    "Upgrade": ("websocket", "h2c"),
    "Sec-WebSocket-Key": ("dGhlIHNhbXBsZSBub25jZQ==",),
    "Accept": ("text/event-stream", "*/*;q=x"),
    "Range": ("bytes=0-", "bytes=-9999999999999", "x"),
    "If-None-Match": ("*", '"x'),
    "Expect": ("100-continue", "200-ok"),
    "Last-Event-ID": ("-1",),
    "X-Forwarded-For": ("::",),
    "Cookie": ("a=b; " * 900,),
}
_TAILS = (
    *("/", "//", "/..", "/../..", "/.", "%2e%2e/", "%00", "%ff", "%", "%zz", "%F0%9F%98%80", "x" * 5000, ";a", "*"),
    *("?", "?a=%zz", "?" + "a=1&" * 2000, "?have=", "#x", "?\\ud800", "%0d%0aX:1", "[", "::1", "%5B", "?[]="),
)


def target(rng: Random, path: str) -> str:
    """A request's target: a path, now and then changed."""
    chance = rng.random()
    if chance < 0.85:
        return path
    if chance < 0.88:
        return rng.choice(("*", "http://127.0.0.1" + path, "http://[" + path, "//evil" + path, "", path.upper()))
    at = rng.choice((len(path), rng.randrange(len(path) + 1)))
    return path[:at] + rng.choice(_TAILS) + path[at:] * (rng.random() < 0.5)


def request_bytes(rng: Random, method: str, path: str, body: bytes = b"") -> bytes:
    """A request with a body, most often one that its server reads to the end."""
    if rng.random() < 0.06:
        method = rng.choice(METHODS)
    headers = [("Host", _SOUND if rng.random() < 0.94 else rng.choice(_HOSTS))]
    if method != "GET" or body:
        headers.append(("Content-Type", "application/json"))
    chunked = rng.random() < 0.1
    if chunked:
        headers.append(("Transfer-Encoding", "chunked"))
        body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in _parts(rng, body)) + b"0\r\n\r\n"
    elif body or method != "GET":
        headers.append(("Content-Length", str(len(body) + (rng.choice((-1, 1, 9)) if rng.random() < 0.03 else 0))))
    for _ in range(rng.choice((0, 0, 0, 0, 1, 1, 2, 5))):
        name = rng.choice(sorted(_NAMED))
        headers.insert(rng.randrange(len(headers) + 1), (name, rng.choice(_NAMED[name])))
    if rng.random() < 0.02:
        headers += [("X" * 40, "y" * 900)] * 90
    if rng.random() < 0.02:
        del headers[rng.randrange(len(headers))]
    version = "1.1" if rng.random() < 0.97 else rng.choice(("1.0", "0.9", "2.0", ""))
    lines = [f"{method} {path} HTTP/{version}", *(f"{name}: {value}" for name, value in headers), "", ""]
    whole = "\r\n".join(lines).encode("latin-1", "replace") + body
    return mutate_bytes(rng, whole) if rng.random() < 0.05 else whole


def _parts(rng: Random, body: bytes) -> list[bytes]:
    at = rng.randrange(len(body) + 1)
    return [part for part in (body[:at], body[at:]) if part]


def connections(rng: Random, requests: Sequence[bytes]) -> Files:
    """Files of requests that share a connection, or have one each."""
    joined = [b"".join(requests)] if rng.random() < 0.3 else requests
    return {f"{FOLDER}/{n}{LEFT * (rng.random() < 0.06)}": data for n, data in enumerate(joined)}


def converse(app: Any, last: bytes) -> list[int]:
    """Send what FOLDER holds to an application, and then the request `last`, which must be answered with status 200.

    Returns:
        The status of each answer.

    Raises:
        AssertionError: Something has no end, an exception was left to the loop, or a status is 500.
    """
    server = HttpServer(app, socket.socket(), lambda: None)
    server._socket.close()
    server._server.config.load()
    errors = logging.getLogger("uvicorn.error")
    errors.setLevel(logging.ERROR)
    errors.addHandler(shown := logging.StreamHandler(sys.stderr))
    try:
        with patch.object(guard, "say", lambda *said: traceback.print_exc()):
            found = asyncio.run(_converse(server._server.config, last))
    finally:
        errors.removeHandler(shown)
    assert 500 not in found, f"status 500, of {found}"
    assert found[-1] == 200, f"status {found[-1]} of a sound request after hostile ones"
    return found


async def _converse(config: Any, last: bytes) -> list[int]:
    loop, state, wrong = asyncio.get_running_loop(), ServerState(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda loop, context: wrong.append(context))
    found: list[int] = []
    paths = sorted(path for path in Path(FOLDER).iterdir()) if Path(FOLDER).is_dir() else []
    for data, left in [*((path.read_bytes(), path.name.endswith(LEFT)) for path in paths), (last, False)]:
        said = await _connection(lambda: Connection(config, state, {}, loop), data, left)
        found += [int(status) for status in _STATUS.findall(said)]
        await _until(lambda: not state.tasks, "a request whose client has gone does not end")
    for context in wrong:
        raise AssertionError(f"left to the loop: {context.get('exception')!r} {context.get('message')}")
    return found


async def _connection(make: Any, data: bytes, left: bool) -> bytes:
    """Return the answers to the bytes of a connection."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    _, protocol = await loop.connect_accepted_socket(make, theirs)
    said = bytearray()
    with ours:
        reading = loop.create_task(_read(ours, said))
        try:
            with suppress(OSError):  # closed by the server
                await _limited(loop.sock_sendall(ours, data), "a request is not taken")
            idle = 0

            def is_over() -> bool:
                nonlocal idle
                idle = idle + 1 if _is_idle(protocol, theirs) else 0
                return reading.done() or idle > _TICKS

            if not left:
                await _until(is_over, "a request is not answered")
        finally:
            reading.cancel()
            await asyncio.wait({reading})  # else it would stop watching the next socket of the same number
    return bytes(said)


def _is_idle(protocol: Any, theirs: socket.socket) -> bool:
    """Return whether all that was sent is answered, or the rest of a request is waited for."""
    if theirs.fileno() >= 0 and struct.unpack("i", fcntl.ioctl(theirs, termios.FIONREAD, b"\0" * 4))[0]:
        return False
    answered = protocol.cycle is None or protocol.cycle.response_complete
    return bool(answered or protocol.conn.their_state is h11.SEND_BODY)


async def _read(ours: socket.socket, said: bytearray) -> None:
    with suppress(OSError):
        while part := await asyncio.get_running_loop().sock_recv(ours, 1 << 16):
            said += part


async def _limited(work: Awaitable[None], late: str) -> None:
    try:
        await asyncio.wait_for(work, SECONDS)
    except TimeoutError:
        raise AssertionError(late) from None


async def _until(holds: Any, late: str) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        if time.monotonic() > end:
            raise AssertionError(f"{late}: {_threads()}")
        await asyncio.sleep(0.001)


def _threads() -> str:
    """Return where each thread is."""
    places = [traceback.extract_stack(frame)[-1] for frame in sys._current_frames().values()]
    return ", ".join(f"{Path(place.filename).name}:{place.lineno} in {place.name}" for place in places)
