"""The thread of the device: jobs wait in a line, and those that go together are answered together.

Scoring is done a text at a time, so that a score hangs on no other request. All else is decoded in batches: the oldest
job, and of those behind it the ones with the same model, temperature, top-k and top-p, as far as there is room. A batch
runs to its end; what comes meanwhile is in a later one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from wgrad.device.errors import DeviceError, OutOfMemory, WgradError
from wgrad.train.data.tokenizer import Tokenizer
from wgrad.train.inference.generation import Decoder, not_finite, uniform_numbers
from wgrad.train.inference.scoring import LogProbs, log_probs, score
from wgrad.train.model.model import Model
from wgrad.train.serve.jobs import LENGTH, STOP, Answer, Failed, Job, Piece, TokenInfo, token_info
from wgrad.train.terminal.ending import one_line
from wgrad.train.terminal.output import say

BUSY, ENDING = 503, "the server is ending: ask again later"


class Full(Exception):
    """As many jobs wait as may."""


class Limits(NamedTuple):
    """positions: tokens of a prompt and its answer, and rows of the models' rotary tables. rows: texts of a batch.
    waiting: texts in the line."""

    positions: int
    rows: int
    waiting: int

    @property
    def prompt_tokens(self) -> int:
        """Tokens prefilled at once by several requests: at most those of a single prompt, or a small number."""
        return max(self.positions, 2048)


class Engine:
    """Answers jobs with `models` and their `tokenizers` (by name), on the thread that calls `run`."""

    def __init__(self, models: Mapping[str, Model], tokenizers: Mapping[str, Tokenizer], limits: Limits) -> None:
        self.models, self.tokenizers, self.limits = models, tokenizers, limits
        self.batches = 0  # that were begun
        self._line: list[Job] = []
        self._at_work: list[Answer] = []
        self._changed = threading.Condition()
        self._closing = False

    # ---- from any thread -----------------------------------------------------------------------
    def submit(self, jobs: Sequence[Job]) -> None:
        """All of them or none. Full: `waiting` are exceeded."""
        with self._changed:
            if self._closing:
                for job in jobs:
                    job.emit(Failed(BUSY, ENDING))
                return
            self._line = [job for job in self._line if not job.cancelled]
            # A single request may have more prompts than may wait, where it waits alone.
            if self._line and len(self._line) + len(jobs) > self.limits.waiting:
                raise Full
            self._line += jobs
            self._changed.notify()

    def close(self) -> None:
        """`run` returns, at the next token; jobs that are not done fail."""
        with self._changed:
            self._closing = True
            waiting, self._line = self._line, []
            self._changed.notify()
        for job in waiting:
            job.emit(Failed(BUSY, ENDING))

    # ---- the device's thread -------------------------------------------------------------------
    def run(self) -> None:
        """Until `close`. DeviceError: the device is lost."""
        try:
            while batch := self._next():
                self.batches += 1
                self._at_work = [Answer(job, self.tokenizers[job.model]) for job in batch]
                self._answer(self._at_work)
        finally:
            self.close()
            for answer in self._at_work:
                if not answer.ended:
                    answer.fail(BUSY, ENDING)

    def _next(self) -> list[Job]:
        """The jobs of a batch, taken out of the line; [] at the end."""
        with self._changed:
            while not self._closing:
                self._line = [job for job in self._line if not self._given_up(job)]
                if self._line:
                    batch = self._together()
                    self._line = [job for job in self._line if job not in batch]
                    return batch
                self._changed.wait(timeout=1.0)  # not without end: on Windows Ctrl-C does not end a wait
        return []

    @staticmethod
    def _given_up(job: Job) -> bool:
        if job.late and not job.cancelled:
            message = f"waited {job.seconds:g} s for the device (--max-seconds): ask again later, or for less"
            job.emit(Failed(BUSY, message))
        return job.late or job.cancelled

    def _together(self) -> list[Job]:
        first, *others = self._line
        batch = [first]
        if first.score:
            return batch
        longest, new = len(first.prompt), first.max_new_tokens
        for job in others:
            if len(batch) == self.limits.rows:
                break
            wider = max(longest, len(job.prompt)), max(new, job.max_new_tokens)
            # Prompts are filled up to the longest, so the rotary tables must hold that and the longest answer.
            read = (len(batch) + 1) * wider[0]
            fits = sum(wider) <= self.limits.positions and read <= self.limits.prompt_tokens
            if fits and not job.score and _kind(job) == _kind(first):
                batch.append(job)
                longest, new = wider
        return batch

    def _answer(self, answers: list[Answer]) -> None:
        """Report an error to each request; only a lost device ends the thread."""
        try:
            if answers[0].job.score:
                self._score(answers[0])
            else:
                self._decode(answers)
        except (WgradError, OutOfMemory, MemoryError) as error:
            self._fail(answers, one_line(error))
        except DeviceError as error:
            self._fail(answers, one_line(error))
            raise
        except Exception as error:  # a fault of ours: it ends one batch and not the server
            message = f"internal error: {type(error).__name__}: {one_line(error)}"
            say(f"wgrad: {message}", "stderr")
            self._fail(answers, message)

    @staticmethod
    def _fail(answers: Sequence[Answer], message: str) -> None:
        for answer in answers:
            if not answer.ended:
                answer.fail(500, message)

    def _decode(self, answers: list[Answer]) -> None:
        jobs = [answer.job for answer in answers]
        model, tops = self.models[jobs[0].model], [job.top for job in jobs if job.top is not None]
        most = max(job.max_new_tokens for job in jobs)
        seeds = [job.sampling.seed for job in jobs]
        decoder = Decoder(model, [job.prompt for job in jobs], most, jobs[0].sampling, seeds, keep_logits=bool(tops))
        for count, (row, logits) in enumerate(_steps(decoder, bool(tops)), start=1):
            found = None if logits is None else log_probs(logits, row, max(tops))
            for b, answer in enumerate(answers):
                if not answer.ended:
                    self._take(answer, model, row[b], count, found, b)
            if self._closing or all(answer.ended for answer in answers):
                return

    def _score(self, answer: Answer) -> None:
        """The prompt, and what follows it. One token more, as evaluations ask for, needs no second pass."""
        job = answer.job
        model, top = self.models[job.model], job.top or 0
        scored = score(model, job.prompt, top)
        job.emit(Piece("", _prompt_tokens(answer.tokenizer, job, scored.given, top)))
        if job.max_new_tokens == 0:
            answer.end(LENGTH)
        elif job.max_new_tokens > 1:
            self._decode([answer])
        else:
            number = model.device.upload(uniform_numbers(job.sampling.seed, 1))
            drawn = model.device.sample(scored.next_logits, number, **_kind(job).options())
            token = int(model.device.download(drawn)[0])
            found = log_probs(model.device.download(scored.next_logits), [token], top)
            self._take(answer, model, token, 1, found, 0)

    def _take(self, answer: Answer, model: Model, token: int, count: int, found: LogProbs | None, row: int) -> None:
        """token: the answer's `count`-th."""
        if answer.job.cancelled:
            answer.ended = True
        elif token < 0:
            answer.fail(500, one_line(not_finite(model, count)))
        elif token in answer.tokenizer.stop_ids:
            answer.end(STOP)
        else:
            answer.add(token, found, row)
            if answer.job.late and not answer.ended:
                answer.end(LENGTH)


class _Kind(NamedTuple):
    """Common parameters of a batch's sequences."""

    model: str
    temperature: float
    top_k: int
    top_p: float

    def options(self) -> dict[str, Any]:
        """Arguments of the operator `sample`."""
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}


def _kind(job: Job) -> _Kind:
    return _Kind(job.model, job.sampling.temperature, job.sampling.top_k, job.sampling.top_p)


def _steps(decoder: Decoder, with_logits: bool) -> Iterator[tuple[list[int], np.ndarray | None]]:
    if with_logits:
        yield from decoder.tokens_and_logits()
    else:
        yield from ((row, None) for row in decoder.tokens())


def _prompt_tokens(tokenizer: Tokenizer, job: Job, given: LogProbs, top: int) -> list[TokenInfo]:
    stream, ids = tokenizer.decode_stream(skip_special_tokens=False), job.prompt
    texts = [stream.add(token) for token in ids]
    texts[-1] += stream.rest()
    first = TokenInfo(ids[0], texts[0], None)
    infos = [first, *(token_info(ids[n], texts[n], given, n - 1, top) for n in range(1, len(ids)))]
    before, behind = job.around
    return [replace(info, shown=before <= n < len(ids) - behind) for n, info in enumerate(infos)]
