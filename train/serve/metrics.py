"""Counts of what a server does, as Prometheus reads them."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from typing import NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_RATE_SECONDS = 10.0  # over which tokens/s are measured


class State(NamedTuple):
    """State of a server: sequences in the queue, in the batch, and at most in it; tokens in pages of the cache that
    these sequences hold, that are kept for others, and in all."""

    waiting: int
    running: int
    most: int
    used_keys: int
    kept_keys: int
    total_keys: int


class Metrics:
    """Counters of a server; any thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._responses: Counter[int] = Counter()  # by status
        self._seconds = 0.0  # of all requests
        self._prompt_tokens = self._shared_tokens = self._new_tokens = 0
        self._firsts, self._first_seconds = 0, 0.0
        self._recent: deque[tuple[float, int]] = deque()

    def answered(self, status: int, seconds: float) -> None:
        """Count a response of the web."""
        with self._lock:
            self._responses[status] += 1
            self._seconds += seconds

    def joined(self, prompt_tokens: int) -> None:
        """Count a prompt that is read."""
        with self._lock:
            self._prompt_tokens += prompt_tokens

    def shared(self, tokens: int) -> None:
        """Count tokens of prompts that were in the cache."""
        with self._lock:
            self._shared_tokens += tokens

    def first(self, seconds: float) -> None:
        """Count the first token of an answer. seconds: since its request arrived."""
        with self._lock:
            self._firsts += 1
            self._first_seconds += seconds

    def drew(self, tokens: int) -> None:
        """Count tokens of answers."""
        now = time.monotonic()
        with self._lock:
            self._new_tokens += tokens
            self._recent.append((now, tokens))
            self._forget(now)

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - _RATE_SECONDS:
            self._recent.popleft()

    def text(self, state: State) -> str:
        """Return all of them in Prometheus' text format."""
        now = time.monotonic()
        with self._lock:
            self._forget(now)
            rate = sum(tokens for _, tokens in self._recent) / _RATE_SECONDS
            responses = dict(sorted(self._responses.items()))
            counters = {
                "prompt_tokens_total": (self._prompt_tokens, "Tokens of prompts."),
                "prompt_tokens_cached_total": (self._shared_tokens, "Tokens of prompts that were in the cache."),
                "generated_tokens_total": (self._new_tokens, "Tokens of answers."),
                "request_seconds_sum": (self._seconds, "Seconds of all requests."),
                "request_seconds_count": (sum(responses.values()), "Requests that were answered."),
                "first_token_seconds_sum": (self._first_seconds, "Seconds to the first token of all answers."),
                "first_token_seconds_count": (self._firsts, "Answers with a first token."),
            }
        gauges = {
            "requests_waiting": (state.waiting, "Sequences in the queue."),
            "batch_size": (state.running, "Sequences that are generated."),
            "batch_size_limit": (state.most, "Most sequences at once (--batch-size)."),
            "cache_tokens": (state.used_keys, "Tokens in the pages of running sequences."),
            "cache_tokens_kept": (state.kept_keys, "Tokens in pages that are kept for prompts that begin alike."),
            "cache_tokens_capacity": (state.total_keys, "Tokens that the cache has room for now."),
            "tokens_per_second": (rate, f"Tokens of answers, over the last {_RATE_SECONDS:g} seconds."),
        }
        lines = ["# HELP wgrad_requests_total Requests by HTTP status.", "# TYPE wgrad_requests_total counter"]
        lines += [f'wgrad_requests_total{{status="{status}"}} {count}' for status, count in responses.items()]
        for kind, values in (("gauge", gauges), ("counter", counters)):
            for name, (value, words) in values.items():
                lines += [f"# HELP wgrad_{name} {words}", f"# TYPE wgrad_{name} {kind}", f"wgrad_{name} {value:g}"]
        return "\n".join(lines) + "\n"
