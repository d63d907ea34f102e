"""Trying out a tokenizer.json in the limited process, and encoding with a time limit.

The rules of `tokenizer_growth.py` know the cost of most tokenizers. Others may take any time or memory: a regular
expression may backtrack for hours, a table may ask for so much memory that the tokenizers library ends the process.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from wgrad.train.files.memory_bound import memory_within

T = TypeVar("T")

SECONDS_PER_BYTE = 1e-6  # additional time of a trial per byte of the file
_MEMORY = 256 << 20  # bytes that the trial of a small file may take
_TIMES = 8  # bytes per byte of a larger file
_GRACE = 0.3  # seconds of CPU that any text may take
_SLOWEST = 2e-5  # seconds of CPU for a character; most tokenizers take 1e-6
_RUN, _LONG = 256, 4096  # characters
_LONGEST = 3  # number of the longest tokens to try
_PROSE = "A wise son, na\u00efve in 1867;\n\tx  (\u77e5)\r\n" * 40
_RUNS = [*map(chr, range(32, 127)), "\n", "\t", "\u00e9", "\u2581", "\u77e5", "\ufdfa", "\U0001f600"]
BATCH_SECONDS = 60.0  # for some 16,000 characters


def try_out(path: str) -> str:
    """Load a tokenizer.json, encode texts of many kinds, and describe the fault, or return "".

    Call this in the limited process.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import tokenizers

    data = Path(path).read_bytes()
    with memory_within(max(_MEMORY, _TIMES * len(data))):
        try:
            backend = tokenizers.Tokenizer.from_buffer(data)
        except (KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:
            return _words(error)
        backend.no_padding()
        backend.no_truncation()
        for text in _texts(backend):
            began = time.process_time()
            try:
                backend.decode(backend.encode(text).ids)
            except (KeyboardInterrupt, MemoryError):
                raise
            except Exception:  # it has no tokens for this text; others may be fine
                pass
            except BaseException as error:  # a panic of the library, which prints lines of its own
                return _words(error)
            if (seconds := time.process_time() - began) > _GRACE + _SLOWEST * len(text):
                return f"it takes {seconds:.1f} s for a text of {len(text)} characters"
    return ""


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _texts(backend: Any) -> Iterator[str]:
    yield _PROSE
    yield from (mark * _RUN for mark in _RUNS)
    yield "".join(mark * 2 for mark in _RUNS) * 8
    yield from (mark * _LONG for mark in "a \n1.")
    for token in sorted(backend.get_vocab(with_added_tokens=True), key=len)[-_LONGEST:]:
        yield (token * (_LONG // max(len(token), 1) + 1))[:_LONG]


def in_time(work: Callable[[], T], seconds: float) -> T:
    """Call a function that may never end, in a thread that is abandoned when the time is up.

    Raises:
        TimeoutError: it did not end in time.
    """
    results: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((work(), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]
