"""Limits of what a server does at once."""

from __future__ import annotations

from typing import NamedTuple


class Full(Exception):
    """As many jobs wait as may."""


class Limits(NamedTuple):
    """positions: tokens of a prompt and its answer, and rows of the models' rotary tables. rows: texts of a batch.
    waiting: texts in the line. keys: of the cache, in all rows together."""

    positions: int
    rows: int
    waiting: int
    keys: int | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens prefilled at once by several requests: at most those of a single prompt, or a small number."""
        return max(self.positions, 2048)
