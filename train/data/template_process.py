"""A child process that renders chat templates and tries out tokenizers; it is ended when an answer takes too long.

Both are programs from a base model that may never end, or write without end. The process is started by the first
request, serves all later ones, and is ended by `close`, with this process, or when an answer is late. It does not
import the running script, which therefore needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from wgrad.device.errors import WgradError

SECONDS = 5.0  # for compiling a template, for rendering one conversation, and for trying out a small tokenizer
_START_SECONDS = 60.0  # enough for a cold disk or a busy machine
_CODE = "import sys; sys.path[:] = {path!r}; from wgrad.train.data.template_worker import main; main({seconds!r})"


class _NoAnswer(Exception):
    """The process ended, or was ended, without an answer; the message says why."""


class TemplateProcess:
    """Compiles and renders templates in a process of its own, one request at a time."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._source: str | None = None  # of the template that the process has compiled
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # id of the process that started it: one forked from this one starts its own
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def compile(self, source: str) -> None:
        """Compile a template. Raises WgradError if it does not compile in time."""
        if self._process is not None and self._source == source and self._owner == os.getpid():
            return
        self._source = None
        answer = self._ask_template({"source": source})
        if "failure" in answer:
            raise WgradError(f"--model: the tokenizer's chat template does not compile: {_what(answer)}")
        self._source = source

    def render(
        self,
        source: str,
        values: dict[str, Any],
        learn: Sequence[int] | None = None,
        check: bool = False,
        unasked: str = "",
    ) -> dict[str, Any]:
        """Return the worker's answer: "text", or "failure", "message" and "line".

        Args:
            learn: turns that are learned. The answer then has "prefixes", [turn, start, end] of those that the rule of
                prefixes finds, and "messages" and "generated" (`template_engine.py`) where that is not enough.
            check: the answer has "unseen" too: `unseen_parts` of `template_spans.py`.
            unasked: a prompt that the template writes behind every conversation.
        """
        self.compile(source)
        return self._ask_template({"values": values, "learn": learn, "check": check, "unasked": unasked})

    def try_tokenizer(self, path: str, seconds: float) -> str:
        """Try out a tokenizer.json (`try_out` of `tokenizer_trial.py`), and describe its fault, or return "".

        seconds: time that it may take in addition to the usual.
        """
        was_running = self._process is not None
        try:
            return str(self._ask({"tokenizer": path}, seconds)["message"])
        except _NoAnswer as error:
            return f"it {error}"
        finally:
            if not was_running:
                self.close()

    def _ask_template(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._ask(request)
        except _NoAnswer as error:
            raise WgradError(
                f"--model: the tokenizer's chat template {error}: correct it, or give data with prompt and completion "
                "as text"
            ) from error

    def _ask(self, request: dict[str, Any], more_seconds: float = 0.0) -> dict[str, Any]:
        seconds = self._seconds + more_seconds
        try:
            process = self._started()
            assert process.stdin is not None
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            self.close()
            raise _NoAnswer(f"does not end within {seconds:.3g} s") from None
        except OSError:
            line = b""
        except BaseException:  # Ctrl-C: the pending answer must not be taken for the next one
            self.close()
            raise
        if not line:
            self.close()
            raise _NoAnswer("ends the process that runs it")
        result: dict[str, Any] = json.loads(line)
        return result

    def _started(self) -> subprocess.Popen[bytes]:
        """Return the process, ready for a request."""
        if self._owner != os.getpid():
            self._process, self._source, self._owner = None, None, os.getpid()
        if self._process is None:
            atexit.register(self.close)
            # The worker's stderr is not needed: failures are answers, or end the process.
            command = [sys.executable, "-c", _CODE.format(path=sys.path, seconds=self._seconds)]
            try:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
            except OSError as error:
                raise _no_start(error.strerror or str(error)) from error
            # A pipe cannot be read with a time limit on Windows; a queue can.
            self._answers = queue.SimpleQueue()
            threading.Thread(target=_read, args=(self._process.stdout, self._answers), daemon=True).start()
            try:
                ready = self._answers.get(timeout=_START_SECONDS)
            except queue.Empty:
                ready = b""
            if not ready:
                self.close()
                raise _no_start("no answer")
        return self._process

    def close(self) -> None:
        """End the process. The next request starts another."""
        atexit.unregister(self.close)
        process, self._process, self._source = self._process, None, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # unwritten output
                    pass


def _no_start(reason: str) -> WgradError:
    return WgradError(
        "--model: the process that runs chat templates and tokenizers does not start "
        f"({sys.executable}: {reason.lower()}): try again"
    )


def _read(pipe: Any, answers: queue.SimpleQueue[bytes]) -> None:
    try:
        for line in pipe:
            answers.put(line)
    except (OSError, ValueError):  # closed while it was read
        pass
    answers.put(b"")


def _what(answer: dict[str, Any]) -> str:
    """Describe a failure, with the line of the template if known."""
    result: str = answer["message"] + (f" (line {answer['line']} of the template)" if answer["line"] else "")
    return result


_shared = TemplateProcess()


def shared_process() -> TemplateProcess:
    """Return the process that all templates of this one share."""
    return _shared
