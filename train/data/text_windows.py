"""Tokenizing a long text in windows, with the same ids as in one go but bounded memory.

Encoding takes some 200 bytes of memory per character, so a text is encoded in overlapping windows. A token depends on
the text around it, but rarely on text far away, so each cut is checked: a window begins some tokens before the cut of
the window before it, and both must agree on _AGREE tokens to either side of the cut; else the two become one window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from wgrad.device.errors import WgradError

WINDOW = 1 << 13  # characters; a window and the next take some 6 MiB, whatever the size of the file
_LARGEST = 1 << 20  # characters of a window that had to grow
_AGREE = 24  # tokens
_LEAD = 256  # tokens before those, so that the beginning of a window has no influence


@dataclass(frozen=True)
class Encoded:
    """Tokens of a text. ids[i] covers the characters [start, end) = offsets[i]; (0, 0) for added tokens such as bos."""

    ids: list[int]
    offsets: list[tuple[int, int]]


Encode = Callable[[str], Encoded]


def encode_windows(blocks: Iterable[str], encode: Encode, window: int = WINDOW) -> Iterator[Encoded]:
    """Yield the tokens of a text given in blocks; offsets count from its beginning.

    encode: returns ids and offsets of a text, without bos and eos.

    Raises:
        WgradError: there is no place to cut the text.
    """
    source = _Source(blocks)
    base, text = 0, source.take(window)  # of the window
    tokens, done = encode(text), 0  # done: how many of them the window before gave
    size = window
    while not source.is_over():
        more = source.take(size)
        cut = _clean(tokens, len(tokens.ids) - _AGREE - _LEAD)
        lead = _clean(tokens, cut - _AGREE - _LEAD)
        if lead and cut - _AGREE >= done:
            start = tokens.offsets[lead - 1][1]
            following = encode(text[start:] + more)
            resumed = _find(tokens, cut, following, start)
            if resumed:
                yield _part(tokens, done, cut, base)
                base, text, tokens, done = base + start, text[start:] + more, following, resumed
                size = window
                continue
        text += more
        size = len(text)
        if size > _LARGEST:
            raise WgradError(
                f"the tokenizer finds no place to cut the text in the {size} characters after character {base}: "
                "cut it into several examples"
            )
        tokens = encode(text)
    yield _part(tokens, done, len(tokens.ids), base)


def pieces(text: str) -> Iterator[str]:
    """Yield a text in blocks, which avoids copying all of it repeatedly."""
    return (text[start : start + WINDOW] for start in range(0, len(text), WINDOW))


class _Source:
    """Text in blocks of any size, taken in pieces of another."""

    def __init__(self, blocks: Iterable[str]) -> None:
        self._blocks, self._text = iter(blocks), ""

    def take(self, size: int) -> str:
        """Return the next `size` characters, fewer only at the end."""
        pieces, length = [self._text], len(self._text)
        while length < size and (block := next(self._blocks, None)) is not None:
            pieces.append(block)
            length += len(block)
        text = "".join(pieces)
        self._text = text[size:]
        return text[:size]

    def is_over(self) -> bool:
        while not self._text:
            block = next(self._blocks, None)
            if block is None:
                return True
            self._text = block
        return False


def _clean(tokens: Encoded, place: int) -> int:
    """Return the last place up to `place` between tokens that share no character; 0: there is none."""
    while place > 0 and tokens.offsets[place - 1][1] > tokens.offsets[place][0]:
        place -= 1
    return max(place, 0)


def _find(tokens: Encoded, cut: int, following: Encoded, start: int) -> int:
    """Return the index of token `cut` in `following`, whose text begins at character `start`; 0: they do not agree."""
    first, last = cut - _AGREE, cut + _AGREE
    ids, offsets = tokens.ids[first:last], [(a - start, b - start) for a, b in tokens.offsets[first:last]]
    for place in range(1, min(len(following.ids), 4 * (_AGREE + _LEAD))):
        if following.offsets[place] == offsets[0]:
            end = place + 2 * _AGREE
            if following.ids[place:end] == ids and following.offsets[place:end] == offsets:
                return place + _AGREE
    return 0


def _part(tokens: Encoded, first: int, last: int, base: int) -> Encoded:
    offsets = tokens.offsets[first:last]
    return Encoded(tokens.ids[first:last], [(a + base, b + base) for a, b in offsets] if base else offsets)
