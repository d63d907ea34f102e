"""Pages of a cache of keys and values: who has them, and which hold the beginning of a sequence that others share.

A page that is full never changes. So sequences that begin alike share it, as long as any of them is there and later,
until its memory is wanted: of the pages that nobody has, the one that was let go of first goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from wgrad.device.contract import PAGE

NOWHERE = 0  # a page of nobody, for what is written and read past a sequence's end


class _Content(NamedTuple):
    """Tokens of a page behind those of another, or behind none: of a model then."""

    before: Hashable
    tokens: bytes


class Pages:
    """At most `most` pages, of which `size` have memory (`grow`)."""

    def __init__(self, most: int) -> None:
        self.most, self.size = most, 1
        self._free = list[int]()
        self._holders = dict[int, int]()  # of pages that anybody has
        self._places = dict[_Content, int]()
        # Of pages in _places, and a number that is never given again.
        self._contents = dict[int, tuple[_Content, int]]()
        self._kept = OrderedDict[int, None]()  # those of them that nobody has, the oldest first
        self._numbers = 0

    @property
    def held(self) -> int:
        return len(self._holders)

    @property
    def kept(self) -> int:
        """Pages of nobody that hold beginnings of sequences."""
        return len(self._kept)

    @property
    def available(self) -> int:
        return self.most - 1 - len(self._holders)

    # ---- beginnings ----------------------------------------------------------------------------
    def match(self, root: Hashable, tokens: Sequence[int]) -> list[int]:
        """The pages that hold the beginning of `tokens`, as a model (`root`) reads them; never all of them, as the last
        one must be read to go on."""
        found, before = list[int](), root
        for first in range(0, (len(tokens) - 1) // PAGE * PAGE, PAGE):
            page = self._places.get(_Content(before, _as_bytes(tokens[first : first + PAGE])))
            if page is None:
                break
            found.append(page)
            before = self._contents[page][1]
        return found

    def wanted(self, root: Hashable, tokens: Sequence[int]) -> int:
        """Pages that are available now and would not be any more if this sequence came."""
        matched = self.match(root, tokens)
        return -(-len(tokens) // PAGE) - len(matched) + sum(page in self._kept for page in matched)

    def share(self, root: Hashable, tokens: Sequence[int]) -> list[int]:
        """`match`, for somebody who has these pages from now on."""
        found = self.match(root, tokens)
        for page in found:
            self._kept.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1
        return found

    def publish(self, root: Hashable, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """These pages hold `tokens`, from the first on; those that they fill may be shared."""
        before = root
        for number in range(min(len(tokens) // PAGE, len(pages))):
            content = _Content(before, _as_bytes(tokens[number * PAGE : (number + 1) * PAGE]))
            page = self._places.get(content)
            if page is None:
                page, self._numbers = pages[number], self._numbers + 1
                if page in self._contents:  # behind another beginning, which has been given up since
                    return
                self._places[content] = page
                self._contents[page] = content, self._numbers
            before = self._contents[page][1]

    # ---- memory --------------------------------------------------------------------------------
    def lacks(self, count: int) -> int:
        """How many pages would have to get memory, for `count` more."""
        return max(count - len(self._free), 0)

    def grow(self, size: int) -> None:
        """There is memory for so many."""
        self._free += range(size - 1, self.size - 1, -1)
        self.size = size

    def take(self, count: int) -> list[int]:
        """For somebody; `count` must be available. Pages that are kept go where no others are free."""
        while len(self._free) < count:
            page, _ = self._kept.popitem(last=False)
            del self._places[self._contents.pop(page)[0]]
            self._free.append(page)
        taken = [self._free.pop() for _ in range(count)]
        self._holders |= dict.fromkeys(taken, 1)
        return taken

    def let_go(self, pages: Sequence[int]) -> None:
        """In reverse: of a sequence's pages the last ones go first."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if page in self._contents:
                self._kept[page] = None
            else:
                self._free.append(page)

    def alone(self, pages: Sequence[int]) -> int:
        """How many of them nobody else has."""
        return sum(self._holders[page] == 1 for page in pages)


def _as_bytes(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, np.int32).tobytes()
