"""Continuous batching: sequences join a running batch and leave it between tokens.

Every sequence has a row, and pages of a cache as it needs them. A step is recorded once per number of rows and width of
the page table. Sequences with a common beginning share its pages (pages.py). Sequences of one base model with different
adapters are in one batch (adapter_mix.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wgrad.device.contract import PAGE
from wgrad.device.errors import OutOfMemory
from wgrad.train.inference.batch_step import MOST_STEPS, BatchStep
from wgrad.train.inference.growing import Block, Growing, Part
from wgrad.train.inference.pages import Pages
from wgrad.train.inference.prompt_reader import PromptReader, Reading
from wgrad.train.inference.row_cache import RowCache, page_table
from wgrad.train.model.model import Model
from wgrad.train.model.token_tables import TokenTables

CHUNK = 512  # tokens of a long prompt that are read between two steps
PROMPT_STEP = 32  # prompts are padded to a power of two of at least this, long ones to a multiple
FEW = 2  # up to so many prompts that arrive together are read one by one; more of them in groups
GROUP, LARGE_GROUP = 8, 32  # prompts of a group; of a large one, if more than two groups arrive together
GROUP_TOKENS = 1024  # most tokens of a group, with padding
LEAST_WIDTH = 16  # pages of a row for which steps are recorded: 16, 32, 64, ...
_LEAST_PAGES = 8  # of a cache


class Batch:
    """At most `rows` sequences that grow together, with one model or several that mix. The rotary tables must hold each
    one's prompt and answer.

    most_keys: most keys of the cache, of all sequences together; a single sequence always fits.
    """

    def __init__(self, model: Model, rows: int, most_keys: int | None = None) -> None:
        self.model, self.device, self.rows = model, model.device, rows
        self._joined = 0  # sequences so far
        self._members: list[Growing | None] = [None] * rows
        self._ending: list[Growing] = []  # without a row, but with pages until their last tokens have arrived
        self._one = -(-model.positions // PAGE)  # pages of the longest sequence
        most_keys = rows * self._one * PAGE if most_keys is None else most_keys
        self._most_pages = 1 + max(-(-most_keys // PAGE), self._one)
        self._pages = Pages(self._most_pages)
        self._cache: RowCache | None = None
        self._steps: dict[tuple[Model, int, int], BatchStep] = {}  # by model, rows, and pages of a row
        self._readers: dict[tuple[Model, int, int, int], PromptReader] = {}  # by model, prompts, new and all tokens
        self._long: Growing | None = None  # the sequence whose prompt is read in chunks
        # Not with angles that depend on a sequence's length, nor with states of linear attention, which have no pages.
        self._shares = model.config.linear is None and self._fixed_angles(model.positions)

    # ---- members -------------------------------------------------------------------------------
    @property
    def members(self) -> list[Growing]:
        return [member for member in self._members if member is not None]

    @property
    def free(self) -> int:
        return self._members.count(None)

    @property
    def reads(self) -> bool:
        """Return whether a long prompt is being read."""
        return self._long is not None

    @property
    def growing(self) -> list[Growing]:
        """Members whose prompts have been read."""
        return [member for member in self.members if member is not self._long]

    @property
    def used_keys(self) -> int:
        """Tokens that fit into the pages of all sequences; `total_keys` is that of the whole cache."""
        return self._pages.held * PAGE

    @property
    def kept_keys(self) -> int:
        """Tokens in pages that no sequence holds, but that others may begin with."""
        return self._pages.kept * PAGE

    @property
    def total_keys(self) -> int:
        return 0 if self._cache is None else (self._cache.pages - 1) * PAGE

    def use(self, model: Model) -> None:
        """Switch to this model and those that mix with it; the batch must be empty."""
        assert not self.members
        self.model = model

    def mixes(self, model: Model) -> bool:
        """Return whether sequences of a model can join those of the batch's."""
        return model is self.model or _of_all(model) is _of_all(self.model)

    def model_of(self, one: Growing) -> Model:
        return self.model if one.model is None else one.model

    def leave(self, member: Growing) -> None:
        """Free its row and its pages, if it has them."""
        if member is self._long:
            self._long = None
        if member.row >= 0:
            self._members[member.row] = None
            member.row = -1
        self._ending = [other for other in self._ending if other is not member]
        if member.pages:
            self._publish(member)
            self._pages.let_go(member.pages)
            member.pages = []

    def _publish(self, member: Growing) -> None:
        """Let others share the pages of the tokens that it has read and drawn, if all are known and finite."""
        if self._shares and -1 not in member.ids:
            known = [*member.prompt, *member.ids][: member.cached]
            self._pages.publish(self.model_of(member), known, member.pages)

    def reset(self) -> None:
        """Free all memory, also after an error."""
        for member in [*self.members, *self._ending]:
            member.row, member.pages = -1, []
        self._members, self._ending = [None] * self.rows, []
        self._pages, self._cache, self._long = Pages(self._most_pages), None, None
        self._forget()

    def _forget(self) -> None:
        """Drop all recordings."""
        self._steps, self._readers = {}, {}

    # ---- joining -------------------------------------------------------------------------------
    def is_long(self, one: Growing) -> bool:
        """Return whether a prompt is read in chunks: if others would wait for it, its angles do not depend on its
        length, and there are no states of linear attention, which need it whole."""
        if not self.members or self.model.config.linear is not None or not self._fixed_angles(len(one.prompt)):
            return False
        return self.unread(one) > CHUNK

    def _fixed_angles(self, tokens: int) -> bool:
        """Return whether the rotary angles of sequences of up to `tokens` do not depend on their length."""
        return TokenTables.empty(self.model.config, 1, tokens, self.device) is None

    def unread(self, one: Growing) -> int:
        """Return the number of tokens of a prompt that are not in the cache."""
        return len(one.prompt) - len(self._pages.match(self.model_of(one), one.prompt)) * PAGE

    def should_wait(self, one: Growing, others: Sequence[Growing]) -> bool:
        """Return whether more of a prompt will be in the cache once the prompts of these others have been read."""
        end = len(one.prompt) - self.unread(one) + PAGE
        if not self._shares or len(one.prompt) <= end:
            return False
        first, model = [*one.prompt[:end]], self.model_of(one)
        return any([*other.prompt[:end]] == first and self.model_of(other) is model for other in others)

    def can_join(self, newcomers: Sequence[Growing]) -> bool:
        """Return whether there is room. While a long prompt is being read, no other is begun."""
        if len(newcomers) > self.free or (self._long and any(map(self.is_long, newcomers))):
            return False
        wanted = sum(self._pages.wanted(self.model_of(one), one.prompt) for one in newcomers)
        return wanted + len(self.members) <= self._pages.available  # a page for each of the others to continue

    def crowded(self, steps: int) -> list[Growing]:
        """Return the latest members that must leave to make room for `steps` more steps of the others.
        They may join again with all of their tokens (`Growing.go_on`)."""
        members = sorted(self.members, key=lambda one: one.number)
        wanted = [0 if one is self._long else self._wanted(one, min(steps, MOST_STEPS)) for one in members]
        left, available = list[Growing](), self._pages.available
        while len(wanted) > 1 and sum(wanted) > available:
            left.append(members[len(wanted) - 1])
            available += self._pages.alone(left[-1].pages)
            wanted.pop()
        return left

    def _wanted(self, one: Growing, steps: int) -> int:
        """Return the number of pages that it still needs; tokens drawn beyond its end need none."""
        return -(-min(one.cached + steps, len(one.prompt) + one.most) // PAGE) - len(one.pages)

    def join(self, newcomers: Sequence[Growing]) -> None:
        """Add sequences and read their prompts, or the first chunk of a single long one."""
        long = len(newcomers) == 1 and self.is_long(newcomers[0])
        for one in newcomers:
            if self._shares:
                one.pages = self._pages.share(self.model_of(one), one.prompt)
            one.shared = one.cached = len(one.pages) * PAGE
        self._get([(one, -(-len(one.prompt) // PAGE) - len(one.pages)) for one in newcomers])
        rows = [row for row, member in enumerate(self._members) if member is None][: len(newcomers)]
        self._have_rows(1 + max(rows[-1], *(one.row for one in self.members), 0))
        for one, row in zip(newcomers, rows):
            one.row, self._members[row] = row, one
            one.number, self._joined = self._joined, self._joined + 1
        if long:
            self._long = newcomers[0]
            self.read_chunk()
            return
        for model in dict.fromkeys(map(self.model_of, newcomers)):
            self._read([one for one in newcomers if self.model_of(one) is model])

    def _read(self, newcomers: Sequence[Growing]) -> None:
        """Read prompts of one model one by one, or in groups; all at once if recordings do not apply to prompts of this
        length."""
        width = padded(max(len(one.prompt) - one.cached for one in newcomers))
        recorded = all(self._fixed_angles(len(one.prompt)) for one in newcomers)
        if len(newcomers) <= FEW and width <= CHUNK and recorded:
            for one in newcomers:
                self._read_some([one], len(one.prompt))
        elif GROUP * width <= GROUP_TOKENS and recorded:
            rest = list(newcomers)
            while rest:
                large = len(rest) > 2 * GROUP and LARGE_GROUP * width <= GROUP_TOKENS
                count = LARGE_GROUP if large else GROUP
                self._read_some(rest[:count], None, count, width)
                rest = rest[count:]
        else:
            self._read_some(newcomers, None, len(newcomers), width, once=True)
        if self._shares:
            for one in newcomers:
                self._publish(one)

    def _read_some(
        self, some: Sequence[Growing], end: int | None, count: int = 1, width: int = 0, once: bool = False
    ) -> None:
        """Read some prompts together. end: of a single prompt's part. count, width: of the group."""
        ends = [len(one.prompt) if end is None else end for one in some]
        width = width or padded(ends[0] - some[0].cached)
        keys = width
        if max(ends) > width:  # with the tokens that are in the cache
            keys = -(-max(ends) // PAGE) * PAGE if once else max(1 << (max(ends) - 1).bit_length(), LEAST_WIDTH * PAGE)
        assert self._cache is not None
        model = self.model_of(some[0])
        reader = self._readers.get((model, count, width, keys))
        if reader is None or once:
            reader = PromptReader(model, self._cache, count, width, keys, once)
            if not once:
                self._readers[model, count, width, keys] = reader
        reader.run([Reading(o.prompt, o.cached, last, o.row, o.pages) for o, last in zip(some, ends)])
        for one, last in zip(some, ends):
            one.cached = last

    def read_chunk(self) -> None:
        """Read the next chunk of the long prompt, which joins the growing ones after the last. The others may have a
        step between two chunks."""
        one = self._long
        assert one is not None
        self._read_some([one], min(one.cached + CHUNK, len(one.prompt)))
        if one.cached == len(one.prompt):
            self._long = None
            self._publish(one)

    def reserve(self, rows: int, keys: int | None = None) -> int:
        """Make a cache for `rows` rows of `keys` keys (by default the most), within the limits, so that it need not
        grow. The batch must be empty. Returns the number of rows."""
        pages = self._most_pages if keys is None else min(1 + rows * -(-keys // PAGE), self._most_pages)
        self.reset()
        self._cache = RowCache(self.model, self._bucket(min(rows, self.rows), self.rows), pages)
        self._pages.grow(pages)
        return self._cache.rows

    # ---- growing -------------------------------------------------------------------------------
    def queue(self, steps: int, keep_logits: bool = False) -> Block:
        """Queue up to `steps` tokens of each sequence; one if logits are changed, so that it can be read while the
        device computes the next logits. Sequences with all of their tokens leave.

        keep_logits: do a single step, and return its logits.
        """
        active = self.growing
        changed = any(one.bias is not None or one.factors is not None for one in active)
        steps = (
            1 if self.reads or keep_logits or changed else min(steps, MOST_STEPS, max(o.most - o.drawn for o in active))
        )
        steps = min(steps, *(self._most_steps(one) for one in active))
        self._gather(active)
        self._get([(one, self._wanted(one, steps)) for one in active])
        cache = self._cache
        assert cache is not None
        rows = self._bucket(1 + max(one.row for one in active), cache.rows)
        models = {self.model_of(one) for one in active}
        model = models.pop() if len(models) == 1 else _of_all(self.model)
        step = self._step(model, rows, max(len(one.pages) for one in active))
        cached, settings = np.zeros(rows, np.int32), np.zeros((rows, 4), np.float32)
        settings[:, 2], adapters = 1.0, np.full(rows, -1, np.int32)
        uniforms, pages = np.zeros((steps, rows), np.float32), [list[int]()] * rows
        for one in active:
            cached[one.row], settings[one.row], pages[one.row] = one.cached, one.settings, one.pages
            if (mixed := self.model_of(one).mixed) is not None:
                adapters[one.row] = mixed.number
            numbers = one.uniforms[one.drawn : one.drawn + steps]
            uniforms[: len(numbers), one.row] = numbers
        step.begin(cached, page_table(pages, rows, step.width), settings, uniforms, adapters)
        if changed:
            biases = {one.row: one.bias for one in active if one.bias is not None}
            factors = {one.row: one.factors for one in active if one.factors is not None}
            step.draw(biases, factors)
        logits = self.device.readback(step.logits) if keep_logits else None
        if changed:
            tokens = step.read(steps)
            step.go_on()
        else:
            for _ in range(steps):
                step.run()
            tokens = step.read(steps)
        parts = [self._count(one, steps) for one in active]
        return Block(parts, steps, rows, tokens, logits, self._end)

    def _step(self, model: Model, rows: int, pages: int) -> BatchStep:
        """Return the step for rows with at least `pages` pages."""
        width = min(max(1 << (pages - 1).bit_length(), LEAST_WIDTH), self._one)
        step = self._steps.get((model, rows, width))
        if step is None:
            assert self._cache is not None
            step = self._steps[model, rows, width] = BatchStep(model, self._cache, rows, width)
        return step

    def _count(self, one: Growing, steps: int) -> Part:
        mine, row = min(steps, one.most - one.drawn), one.row
        one.drawn += mine
        one.cached += steps
        one.bias = one.factors = None
        done, again = one.drawn == one.most, one.cached == self.model.config.read_again_at
        if done or again:
            self._members[row], one.row = None, -1
            self._ending.append(one)
        return Part(one, row, mine, again and not done)

    def _end(self, parts: Sequence[Part]) -> None:
        """Free the pages of sequences that have ended, once the host has all of their tokens."""
        for part in parts:
            if part.sequence.row < 0:
                self.leave(part.sequence)

    def _most_steps(self, one: Growing) -> int:
        """Return the most steps of a block: a sequence may grow beyond its end, but not beyond the rotary tables."""
        again = self.model.config.read_again_at
        end = again if one.cached < again else self.model.positions
        return max(end - one.cached, 1)

    # ---- rows and pages ------------------------------------------------------------------------
    def _bucket(self, rows: int, most: int) -> int:
        """Return the number of rows of a step: a power of two, or all."""
        return min(1 << (rows - 1).bit_length(), most)

    def _get(self, wanted: Sequence[tuple[Growing, int]]) -> None:
        """Give pages to sequences; they must be available."""
        self._have_pages(sum(max(count, 0) for _, count in wanted))
        for one, count in wanted:
            one.pages += self._pages.take(max(count, 0))

    def _have_pages(self, count: int) -> None:
        """Allocate memory for `count` more pages, up to the limit."""
        pages, lacks = self._pages, self._pages.lacks(count)
        size = min(max(pages.size + lacks, min(2 * pages.size, pages.size * 5 // 4 + 1024), _LEAST_PAGES), pages.most)
        if not lacks or size == pages.size:
            return
        if self._cache is None:
            self._cache = RowCache(self.model, 1, size)
        else:
            self._forget()
            try:
                self._cache.grow(size)
            except OutOfMemory:
                pages.most = pages.size  # kept pages are reused, and sequences wait
                if lacks > pages.kept:
                    raise
                return
        pages.grow(size)

    def _have_rows(self, rows: int) -> None:
        cache = self._cache
        assert cache is not None
        if rows > cache.rows:
            self._forget()
            cache.move(self._bucket(rows, self.rows), range(cache.rows))

    def _gather(self, active: Sequence[Growing]) -> None:
        """Move sequences to the first rows if a step can then have half as many."""
        assert self._cache is not None
        rows = self._bucket(len(active), self._cache.rows)
        above = [one for one in self.members if one.row >= rows]
        if not above or self.reads:
            return
        order = list(range(self._cache.rows))
        for one in above:
            target = self._members.index(None)
            order[target] = one.row
            self._members[one.row], self._members[target], one.row = None, one, target
        self._cache.move(self._cache.rows, order)


def _of_all(model: Model) -> Model:
    """Return the model that computes this one together with those that mix with it."""
    return model if model.mixed is None else model.mixed.model


def padded(tokens: int) -> int:
    """Return the number of tokens to which a prompt of `tokens` is padded."""
    if tokens <= CHUNK:
        return max(1 << (tokens - 1).bit_length(), PROMPT_STEP)
    return -(-tokens // PROMPT_STEP) * PROMPT_STEP
