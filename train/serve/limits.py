"""Limits of a server's simultaneous work."""

from __future__ import annotations

from typing import NamedTuple


class Full(Exception):
    """No more jobs may wait."""


class Limits(NamedTuple):
    """Limits of a server. positions: tokens of a prompt and its answer, and rows of the models' rotary tables. rows:
    texts of a batch. waiting: texts in the queue. keys: of the cache, in all rows together."""

    positions: int
    rows: int
    waiting: int
    keys: int | None = None

    @property
    def prompt_tokens(self) -> int:
        """Most tokens of prompts that are read together: those of a single prompt, or a small number."""
        return max(self.positions, 2048)
