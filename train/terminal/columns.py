"""Growing texts in columns, without terminal codes: a row is written once it no longer changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rich.cells import cell_len

_BETWEEN = " | "
_TAB = "    "
_LEAST = 8  # least width of a text, however narrow the terminal is


def wrap(text: str, width: int) -> list[str]:
    """Wrap a text into lines of at most `width` columns, at spaces if possible.

    If the text grows, all lines but the last stay the same.
    """
    lines = []
    for paragraph in text.replace("\t", _TAB).split("\n"):
        line = ""
        for word in re.findall(r" *[^ ]+| +", paragraph):
            if line and cell_len(line + word) > width:
                lines.append(line)
                line, word = "", word.lstrip(" ")
            for character in word:
                if line and cell_len(line + character) > width:
                    lines.append(line)
                    line = ""
                line += character
        lines.append(line)
    return lines


class Columns:
    """Writes several growing texts side by side.

    Args:
        names: Headings of the columns.
        width: Width of all columns together.
        write: Writes text.
        live: Whether to show and overwrite the unfinished row, on a terminal.
    """

    def __init__(self, names: Sequence[str], width: int, write: Callable[[str], object], live: bool) -> None:
        # A terminal may wrap to the next line after its last column.
        self._width = max((width - 1 - len(_BETWEEN) * (len(names) - 1)) // len(names), _LEAST)
        self._write, self._live = write, live
        self._texts, self._done = ["" for _ in names], [False for _ in names]
        self._written = 0
        self._write(self._row([wrap(name, self._width)[0] for name in names]) + "\n")

    def add(self, number: int, text: str) -> None:
        self._texts[number] += text
        self._draw()

    def end(self, number: int) -> None:
        """Mark a text as complete."""
        self._done[number] = True
        self._draw()

    def _draw(self) -> None:
        lines = [wrap(text, self._width) for text in self._texts]
        growing = [len(found) - 1 for found, done in zip(lines, self._done) if not done]
        ready = min(growing) if growing else max(map(len, lines))
        start = "\r" if self._live else ""
        for row in range(self._written, ready):
            self._write(start + self._row(_at(lines, row)) + "\n")
        self._written = ready
        if self._live and growing:
            self._write(start + self._row(_at(lines, ready)))

    def _row(self, parts: Sequence[str]) -> str:
        row = _BETWEEN.join(part + " " * (self._width - cell_len(part)) for part in parts)
        return row if self._live else row.rstrip(" ")


def _at(lines: Sequence[Sequence[str]], row: int) -> list[str]:
    return [found[row] if row < len(found) else "" for found in lines]
