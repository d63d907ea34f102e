"""A prompt to be answered, and its answer: pieces on their way from the device's thread to a client."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from wgrad.train.data.tokenizer import Tokenizer
from wgrad.train.inference.guide import Guide
from wgrad.train.inference.repetition import Repetition
from wgrad.train.inference.scoring import LogProbs
from wgrad.train.options.choices import Pooling
from wgrad.train.options.generate_config import Sampling
from wgrad.train.serve.logit_edits import LogitEdits
from wgrad.train.serve.stop_text import StopText

STOP, LENGTH = "stop", "length"  # why an answer ended, in the words of OpenAI's API


@dataclass(frozen=True)
class TokenInfo:
    """A token of a prompt or an answer.

    text: the text that it completes; "" in the middle of a character.
    log_prob: None for the first token of a prompt.
    top: ids and log-probabilities of the likeliest tokens at its place.
    shown: whether the text is part of the answer's.
    """

    id: int
    text: str
    log_prob: float | None
    top: Sequence[tuple[int, float]] = ()
    shown: bool = True

    @property
    def width(self) -> int:
        """Characters of the answer's text."""
        return len(self.text) if self.shown else 0


@dataclass(frozen=True)
class Piece:
    """A part of an answer, or of its prompt.

    tokens: of the text, if they were asked for; one whose text is held back comes with a later piece.
    new: number of tokens drawn. finish: in the last piece, the reason of the end.
    vector: an embedding, which is a single piece without text.
    """

    text: str
    tokens: Sequence[TokenInfo] = ()
    new: int = 0
    finish: str = ""
    vector: np.ndarray | None = None


@dataclass(frozen=True)
class Failed:
    """The failure of an answer, its last event. status: of HTTP."""

    status: int
    message: str


Event = Piece | Failed


@dataclass(eq=False)
class Job:
    """One prompt to be answered.

    sampling: its seed is that of this text. top: None, or the number of likeliest tokens to report.
    score: whether to report the prompt's too. around: number of tokens that the tokenizer put before and after the
    prompt's text. edits: changes of logits. guide: the grammar of the answer. shown: special tokens in the text.
    pooling: for an embedding instead of an answer. emit: takes each event, on the device's thread.
    """

    model: str
    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling
    stops: Sequence[str]
    top: int | None
    score: bool
    seconds: float
    emit: Callable[[Event], None]
    around: tuple[int, int] = (0, 0)
    edits: LogitEdits | None = None
    guide: Guide | None = None
    shown: Collection[str] = ()
    pooling: Pooling | None = None
    cancelled: bool = False  # set when the client no longer waits
    losses: int = 0  # of the device, while it was answered
    cached: int = 0  # tokens of the prompt that were in the cache
    begun: float = field(default_factory=time.monotonic)
    _repetition: Repetition | None = field(default=None, init=False)

    @property
    def is_edited(self) -> bool:
        """Return whether the logits of the next token are changed, for which the host must know the tokens before."""
        return self.edits is not None or (self.guide is not None and self.guide.active)

    def bias(self, vocab_size: int, drawn: Sequence[int]) -> np.ndarray | None:
        """Return float32 [V] to add to the logits of the next token; the same array if it has not changed."""
        guided = self.guide.bias() if self.guide is not None and self.guide.active else None
        edited = self.edits.as_bias(vocab_size, drawn) if self.edits is not None and self.edits.adds else None
        return edited if guided is None else guided if edited is None else guided + edited

    def factors(self, vocab_size: int, drawn: Sequence[int]) -> np.ndarray | None:
        """Return the factors float32 [V] of the repetition penalty; the same array if they have not changed."""
        if self.edits is None or self.edits.repetition == 1:
            return None
        if self._repetition is None:
            self._repetition = Repetition(self.edits.repetition, vocab_size, self.prompt)
        return self._repetition.factors(drawn)

    @property
    def is_read_alone(self) -> bool:
        """Return whether the prompt is read by itself, outside of the batch."""
        return self.score or self.pooling is not None

    @property
    def late(self) -> bool:
        return time.monotonic() - self.begun > self.seconds


class Answer:
    """The growing text of a job, emitted in pieces: at each `flush`, and at its end."""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self.job, self.tokenizer = job, tokenizer
        self._text = tokenizer.decode_stream(job.prompt, shown=job.shown)
        self._stop = StopText(job.stops)
        self._decoded = self._given = 0  # characters
        self._pending = ""  # text that would follow if the answer ended now, if it is needed
        self._waiting: deque[tuple[int, int, TokenInfo]] = deque()  # tokens held back, with first and last character
        self._new = self._told = 0  # tokens
        self._unsent: Piece | None = None
        self.ended = False

    def add(self, token: int, found: LogProbs | None = None, row: int = 0) -> None:
        """Add the next token, which must not be an end of the text. found: row `row` of it is this token's."""
        text, first = self._text.add(token), self._decoded
        self._decoded += len(text)
        self._new += 1
        self._pending = self._text.rest() if self.job.stops or self.job.top is not None else ""
        if self.job.top is not None and found is not None:
            info = token_info(token, text, found, row, self.job.top)
            self._waiting.append((first, self._decoded, info))
        given = text
        if self.job.stops:
            special = self.tokenizer.special_text(token)
            given = self._stop.add(text, "" if special in self.job.shown else special, self._pending)
        self._given += len(given)
        if self._stop.found:
            if self._given > self._decoded:  # a part of what was pending belongs to the answer
                self._add_to_last(given[self._decoded - self._given :])
            self._waiting = deque(t for t in self._waiting if t[0] < self._given)
            self._end(STOP, given)
        elif self._new >= self.job.max_new_tokens:
            self.end(LENGTH, given)
        elif given:
            self._send(given, [self._waiting.popleft()[2] for _ in range(self._whole())])

    def _whole(self) -> int:
        """Return how many waiting tokens can be emitted: those whose text is emitted and can no longer grow."""
        whole = sum(last <= self._given for _, last, _ in self._waiting)
        return whole - (whole == len(self._waiting) > 0 and self._pending != "")

    def _add_to_last(self, text: str) -> None:
        """Add text that came after its tokens to the last of them."""
        if text and self._waiting:
            first, last, info = self._waiting.pop()
            self._waiting.append((first, last + len(text), replace(info, text=info.text + text)))

    def end(self, reason: str, given: str = "") -> None:
        """Emit the last piece, with all text held back, even an incomplete character."""
        rest = self._text.rest()
        self._add_to_last(rest)
        self._end(reason, given + self._stop.rest() + rest)

    def _end(self, reason: str, text: str) -> None:
        self._send(text, [info for _, _, info in self._waiting], reason)
        self.flush()
        self.ended = True

    def fail(self, status: int, message: str) -> None:
        self.flush()
        self.job.emit(Failed(status, message))
        self.ended = True

    def _send(self, text: str, tokens: list[TokenInfo], finish: str = "") -> None:
        before = self._unsent or Piece("")
        new = before.new + self._new - self._told
        self._unsent = Piece(before.text + text, [*before.tokens, *tokens], new, finish)
        self._told = self._new

    def flush(self) -> None:
        """Emit the collected text: one event for the tokens of a block."""
        if self._unsent is not None:
            self.job.emit(self._unsent)
            self._unsent = None


def token_info(token: int, text: str, found: LogProbs, row: int, top_count: int) -> TokenInfo:
    """Return the entry of a token. found: row `row` of it is this token's, with at least `top_count` likeliest."""
    top = [(int(i), float(p)) for i, p in zip(found.top_ids[row, :top_count], found.top[row, :top_count])]
    return TokenInfo(token, text, float(found.of_tokens[row]), top)
