"""A connection of the server: uvicorn's, with time limits for receiving a request and delivering an answer."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 35.0  # for all of a request to arrive; a little more than the application waits for the body
ANSWER_SECONDS = 35.0  # for the client to take the rest of the last answer of a connection


class Connection(H11Protocol):
    """A connection that is closed if a request does not arrive in time, even if it was answered already, or if the last
    answer is not taken in time."""

    _late: asyncio.TimerHandle | None = None
    _untaken: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        self._wait()
        super().data_received(data)
        if not self._comes():
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._untaken is not None:
            self._untaken.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() and self._untaken is None:
            self._untaken = self.loop.call_later(ANSWER_SECONDS, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Refuse malformed bytes and close. An answer to an earlier request, begun or not, has nobody to go to."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # an answer has begun, or the request was a HEAD, whose answer has no text
            self.transport.close()

    def _comes(self) -> bool:
        """Return whether a request is still arriving."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def _wait(self) -> None:
        if self._late is None and self._comes():
            self._late = self.loop.call_later(REQUEST_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
