"""The web's thread: a listening socket, which is opened early, and uvicorn on it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import uvicorn
from starlette.types import ASGIApp

from wgrad.device.errors import WgradError
from wgrad.train.options.network_options import KEY_VARIABLE
from wgrad.train.serve.connection import Connection
from wgrad.train.serve.sites import is_loopback
from wgrad.train.terminal.output import say

_CONNECTIONS = 1000  # at once; more are answered with status 503
_END_SECONDS = 5  # for unfinished answers when the server ends
_FORCED_SECONDS = 2  # to end without them


class Address(NamedTuple):
    """An address to listen on. local: only this machine can reach it."""

    host: str
    port: int
    family: int
    socket_address: Any
    local: bool


def resolve(host: str, port: int) -> Address:
    """Resolve a host name and a port. Raises WgradError if there is no such address."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:  # UnicodeError: a label of more than 63 characters
        raise WgradError(f"--host: {host!r} is no address of this machine: give one, or 127.0.0.1") from error
    family, _, _, _, address = found[0]
    return Address(host, port, family, address, is_loopback(str(address[0])))


def listen(address: Address, advice: str = "give another --port (0: any that is free) or --host") -> socket.socket:
    """Return a socket that listens on an address; clients wait until the server is ready.

    Raises:
        WgradError: the address is taken or not allowed; the error ends with `advice`.
    """
    opened = None
    try:
        opened = socket.socket(address.family, socket.SOCK_STREAM)
        # Needed to restart a server at once; but on Windows a second server could take the same port.
        if os.name != "nt":
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address.socket_address)
        opened.listen()
    except OSError as error:
        if opened is not None:
            opened.close()
        reason = (error.strerror or str(error)).lower()
        raise WgradError(
            f"--port: cannot listen on {address.host}, port {address.port}: {reason}: end what listens there, or "
            f"{advice}"
        ) from error
    return opened


def open_address(host: str, port: int, key: str | None) -> socket.socket:
    """Return a socket that listens on host and port.

    Raises:
        WgradError: other machines can reach it, and there is no key; or as in `resolve` and `listen`.
    """
    address = resolve(host, port)
    if not address.local:
        if key is None:
            raise WgradError(
                f"--host: {host} is reached from other machines: set {KEY_VARIABLE} to a key that clients must "
                "have (or give --api-key), or use 127.0.0.1"
            )
        say(
            "note: key and texts travel unencrypted: put a proxy with TLS in front, or keep to your own network",
            "stderr",
        )
    return listen(address)


def address_text(listening: socket.socket) -> str:
    """Return the address of a socket as http://HOST:PORT."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class HttpServer:
    """uvicorn in a thread of its own. on_end: called there when it ends, for whatever reason."""

    def __init__(self, app: ASGIApp, listening: socket.socket, on_end: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_CONNECTIONS,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=_END_SECONDS,
        )
        self._server, self._socket, self._on_end = uvicorn.Server(config), listening, on_end
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._on_end()

    def stop(self) -> None:
        """Stop accepting requests, and give unfinished answers some seconds, unless a signal comes meanwhile."""
        self._server.should_exit = True
        try:
            self._thread.join(2 * _END_SECONDS)
        except BaseException:
            self._server.force_exit = True
            self._thread.join(_FORCED_SECONDS)  # with its socket open: it would print a traceback
            raise
        finally:
            self._socket.close()
