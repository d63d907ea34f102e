"""Texts at which an answer ends, found across the pieces in which it comes."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Holds back what may be the beginning of one of `stops`; nothing of a stop itself is ever given."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """-> what of the text so far can be given now. After a stop was found: nothing."""
        if self.found:
            return ""
        text = self._held + piece
        ends = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """What was held back, at the end of the answer."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, but is not."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
