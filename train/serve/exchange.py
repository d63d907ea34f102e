"""Passing the events of a request from the device's thread to the web's, as long as the client waits."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager

from starlette.requests import Request

from wgrad.train.serve.answers import Choice
from wgrad.train.serve.errors import ApiError
from wgrad.train.serve.jobs import Event, Failed, Job, Piece

CLIENT_GONE = Failed(499, "the client has gone")  # never read by a client

Pieces = AsyncGenerator[tuple[Choice, Piece], None]


class Outbox:
    """Events on their way from other threads to the web's event loop. The loop is woken once for all events that come
    together, since it then takes the interpreter lock from the device's thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._items: deque[tuple[asyncio.Queue[tuple[int, Event]], tuple[int, Event]]] = deque()
        self._held = False

    def open(self) -> asyncio.Queue[tuple[int, Event]]:
        """Return a queue of the running loop."""
        self._loop = asyncio.get_running_loop()
        return asyncio.Queue()

    def put(self, queue: asyncio.Queue[tuple[int, Event]], item: tuple[int, Event]) -> None:
        """Send an event to a queue. May be called on any thread."""
        self._items.append((queue, item))
        if not self._held:
            self._wake()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Hold events back within the block, and send them together at its end."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
            if self._items:
                self._wake()

    def _wake(self) -> None:
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed: the server has ended
            pass

    def _deliver(self) -> None:
        while self._items:
            queue, item = self._items.popleft()
            queue.put_nowait(item)


class Events:
    """Events of the prompts of a request. `put` may be called on any thread."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox, self._queue = outbox, outbox.open()

    def put(self, number: int, event: Event) -> None:
        """Add an event. number: of the prompt in its request."""
        self._outbox.put(self._queue, (number, event))

    async def get(self) -> tuple[int, Event]:
        return await self._queue.get()


async def pieces(request: Request, jobs: Sequence[Job], choices: Sequence[Choice], events: Events) -> Pieces:
    """Yield each piece after adding it to its choice. Afterwards, in any case, all jobs are cancelled.

    Raises:
        ApiError: a job failed.
    """
    watch = asyncio.create_task(_until_gone(request, events))
    left = len(jobs)
    try:
        while left:
            number, event = await events.get()
            if isinstance(event, Failed):
                raise ApiError(event.status, event.message)
            choices[number].cached = jobs[number].cached
            choices[number].add(event)
            left -= bool(event.finish)
            yield choices[number], event
    finally:
        watch.cancel()
        for job in jobs:
            job.cancelled = True


async def _until_gone(request: Request, events: Events) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    events.put(0, CLIENT_GONE)
