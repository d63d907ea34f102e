"""How the hub's client is called: with a limit on how long it waits for answers, and errors on lines of their own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

ANSWER_SECONDS = 30.0
_WAITS = ("connect", "read", "write", "pool")  # names of httpx


@contextmanager
def answers_in_time(seconds: float | None = None) -> Iterator[None]:
    """End requests of the hub's client within the block that get no answer in time, with a TimeoutError.

    seconds: for an answer to begin, and for each part of it; None: ANSWER_SECONDS.

    Requests that have a limit of their own keep it; most have none. Clients before 1.0, which are not of httpx, are
    left as they are. Progress bars that the client leaves open at an error are closed.
    """
    from huggingface_hub.utils import get_session

    client = get_session()
    hooks = getattr(client, "event_hooks", None)
    with _bars_ended():
        if hooks is None:
            yield
            return
        with _limited(client, hooks, ANSWER_SECONDS if seconds is None else seconds):
            yield


@contextmanager
def _bars_ended() -> Iterator[None]:
    """End the lines of progress bars that the client leaves open where a file is not sent: an error follows."""
    from huggingface_hub.utils import tqdm

    try:
        yield
    except BaseException:
        for bar in list(getattr(tqdm, "_instances", ())):
            if isinstance(bar, tqdm):  # the list is of all kinds of tqdm, with those of a caller
                bar.close()
        raise


@contextmanager
def _limited(client: Any, hooks: Mapping[str, list[Any]], longest: float) -> Iterator[None]:
    """End requests of a client within the block that get no answer in `longest` seconds, as above."""
    silence = f"no answer in {longest:g} s"
    unanswered: dict[Any, float] = {}  # requests, and when each was first sent

    def limit(request: Any) -> None:
        own = request.extensions.get("timeout") or {}
        waits = {name: own.get(name) for name in _WAITS}
        request.extensions["timeout"] = {name: longest if wait is None else wait for name, wait in waits.items()}
        key = _key(request)
        # The client sends a request again that was not answered, six times in all.
        if time.monotonic() - unanswered.setdefault(key, time.monotonic()) >= longest:
            raise TimeoutError(silence)

    def answered(response: Any) -> None:
        unanswered.pop(_key(response.request), None)

    client.event_hooks = {"request": [*hooks["request"], limit], "response": [*hooks["response"], answered]}
    try:
        yield
    except Exception as error:
        if _is_silence(error):
            raise TimeoutError(silence) from error
        raise
    finally:
        client.event_hooks = hooks


def _key(request: Any) -> Any:
    """Return what makes a request the same as an earlier one."""
    try:
        return request.method, str(request.url), request.content
    except RuntimeError:  # RequestNotRead: a file that is sent
        return request.method, str(request.url), None


def _is_silence(error: BaseException | None) -> bool:
    """Return whether an error, or one that led to it, says that no answer came."""
    names = ("TimeoutError", "TimeoutException")  # the second is of httpx or httpx2
    while error is not None:
        if any(kind.__name__ in names for kind in type(error).__mro__):
            return True
        error = error.__cause__
    return False
