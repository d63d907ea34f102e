"""Pages of a cache of keys and values: which sequences hold them, and which beginnings of sequences they contain.

A full page never changes. Sequences with a common beginning share its pages, also after all of them have left, until
the memory is needed: then the page that was released first is reused first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from wgrad.device.contract import PAGE

NOWHERE = 0  # a page that no sequence holds, for writes and reads past a sequence's end


class _Content(NamedTuple):
    """Tokens of a page, and what precedes them: the number of the page before, or the model for a first page."""

    before: Hashable
    tokens: bytes


class Pages:
    """At most `most` pages, `size` of which have memory (see `grow`)."""

    def __init__(self, most: int) -> None:
        self.most, self.size = most, 1
        self._free = list[int]()
        self._holders = dict[int, int]()  # number of sequences that hold a page
        self._places = dict[_Content, int]()
        # The contents of pages in _places, and a number that is never reused.
        self._contents = dict[int, tuple[_Content, int]]()
        self._kept = OrderedDict[int, None]()  # those of them that no sequence holds, the oldest first
        self._numbers = 0

    @property
    def held(self) -> int:
        return len(self._holders)

    @property
    def kept(self) -> int:
        """Number of pages with beginnings of sequences that no sequence holds."""
        return len(self._kept)

    @property
    def available(self) -> int:
        return self.most - 1 - len(self._holders)

    # ---- beginnings ----------------------------------------------------------------------------
    def match(self, root: Hashable, tokens: Sequence[int]) -> list[int]:
        """Return the pages with the beginning of `tokens` for a model (`root`); never with all of them, since the last
        token must be read for its logits."""
        found, before = list[int](), root
        for first in range(0, (len(tokens) - 1) // PAGE * PAGE, PAGE):
            page = self._places.get(_Content(before, _as_bytes(tokens[first : first + PAGE])))
            if page is None:
                break
            found.append(page)
            before = self._contents[page][1]
        return found

    def wanted(self, root: Hashable, tokens: Sequence[int]) -> int:
        """Return how many available pages this sequence would take."""
        matched = self.match(root, tokens)
        return -(-len(tokens) // PAGE) - len(matched) + sum(page in self._kept for page in matched)

    def share(self, root: Hashable, tokens: Sequence[int]) -> list[int]:
        """Return the pages of `match`, and let a sequence hold them."""
        found = self.match(root, tokens)
        for page in found:
            self._kept.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1
        return found

    def publish(self, root: Hashable, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Note that these pages contain `tokens`, from the first on; those that are full may be shared."""
        before = root
        for number in range(min(len(tokens) // PAGE, len(pages))):
            content = _Content(before, _as_bytes(tokens[number * PAGE : (number + 1) * PAGE]))
            page = self._places.get(content)
            if page is None:
                page, self._numbers = pages[number], self._numbers + 1
                if page in self._contents:  # after another beginning, which has been released since
                    return
                self._places[content] = page
                self._contents[page] = content, self._numbers
            before = self._contents[page][1]

    # ---- memory --------------------------------------------------------------------------------
    def lacks(self, count: int) -> int:
        """Return how many pages need new memory if `count` more are taken."""
        return max(count - len(self._free), 0)

    def grow(self, size: int) -> None:
        """Note that there is memory for `size` pages."""
        self._free += range(size - 1, self.size - 1, -1)
        self.size = size

    def take(self, count: int) -> list[int]:
        """Give `count` pages to a sequence; they must be available. Kept pages are reused if no others are free."""
        while len(self._free) < count:
            page, _ = self._kept.popitem(last=False)
            del self._places[self._contents.pop(page)[0]]
            self._free.append(page)
        taken = [self._free.pop() for _ in range(count)]
        self._holders |= dict.fromkeys(taken, 1)
        return taken

    def let_go(self, pages: Sequence[int]) -> None:
        """Release a sequence's pages, in reverse, so that the last ones are reused first."""
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
        """Return how many of these pages only one sequence holds."""
        return sum(self._holders[page] == 1 for page in pages)


def _as_bytes(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, np.int32).tobytes()
