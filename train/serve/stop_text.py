"""Finding the texts at which an answer ends, across the pieces in which it arrives."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Holds back text that may begin one of `stops`, so that no part of a stop is ever returned.

    Special tokens are searched too, even if they are not part of the answer's text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held, self._shown = "", list[bool]()  # shown: whether each character is part of the answer
        self.found = False

    def add(self, piece: str, special: str = "", pending: str = "") -> str:
        """Add a piece, and return the text that can be emitted now; "" after a stop was found.

        special: the text of a special token after the piece. pending: the text that would follow if the answer ended
        here; it is repeated in a later piece.
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
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        cut = len(text) - keep
        self._held, self._shown = text[cut:], shown[cut:]
        return _visible(text[:cut], shown)

    def rest(self) -> str:
        """Return the withheld text at the end of the answer."""
        text, self._held = _visible(self._held, self._shown), ""
        return text


def _visible(text: str, shown: Sequence[bool]) -> str:
    return "".join(character for character, seen in zip(text, shown) if seen)


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
