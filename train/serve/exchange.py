"""From the device's thread to that of the web: the events of a request, for as long as somebody waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from starlette.requests import Request

from wgrad.train.serve.answers import Choice
from wgrad.train.serve.errors import ApiError
from wgrad.train.serve.jobs import Event, Failed, Job, Piece

CLIENT_GONE = Failed(499, "the client has gone")  # nobody reads it

Pieces = AsyncGenerator[tuple[Choice, Piece], None]


class Events:
    """A queue of the running loop. `put` may be called on any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

    def put(self, number: int, event: Event) -> None:
        """number: of the prompt in its request."""
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (number, event))
        except RuntimeError:  # the loop is closed: the server has ended
            pass

    async def get(self) -> tuple[int, Event]:
        return await self._queue.get()


async def pieces(request: Request, jobs: Sequence[Job], choices: Sequence[Choice], events: Events) -> Pieces:
    """Each piece, once its choice has it. ApiError: a job failed. However it ends, no job goes on."""
    watch = asyncio.create_task(_until_gone(request, events))
    left = len(jobs)
    try:
        while left:
            number, event = await events.get()
            if isinstance(event, Failed):
                raise ApiError(event.status, event.message)
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
