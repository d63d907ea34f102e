"""Texts at which an answer ends, found across the pieces in which it comes."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Holds back what may be the beginning of one of `stops`; nothing of a stop itself is ever given.

    Special tokens are searched too, though they are not part of the answer's text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held, self._shown = "", list[bool]()  # shown: of each character, whether the answer has it
        self.found = False

    def add(self, piece: str, special: str = "", pending: str = "") -> str:
        """-> what of the text so far can be given now. After a stop was found: nothing.

        special: the text of a special token that follows the piece. pending: what would follow if the answer ended
        here; it comes again in a later piece.
        """
        if self.found:
            return ""
        text = self._held + piece + special
        shown = self._shown + [True] * len(piece) + [False] * len(special)
        whole = text + pending
        ends = [at for stop in self._stops if (at := whole.find(stop)) >= 0]
        if ends:
            self.found, self._held, self._shown = True, "", []
            return _visible(whole[: min(ends)], shown + [True] * len(pending))
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        cut = len(text) - keep
        self._held, self._shown = text[cut:], shown[cut:]
        return _visible(text[:cut], shown)

    def rest(self) -> str:
        """Return the withheld text at the end of the answer."""
        text, self._held = _visible(self._held, self._shown), ""
        return text


def _visible(text: str, shown: Sequence[bool]) -> str:
    return "".join(character for character, seen in zip(text, shown) if seen)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, but is not."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
