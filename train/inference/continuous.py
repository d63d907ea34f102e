"""Continuous batching: sequences join a batch and leave it between the tokens that they grow by.

Every sequence has a row of a cache. All rows write at the same key, `at`, which counts up by one with each step, and a
sequence's keys are the last ones before it: so a step needs no positions of its own for each row, and is recorded once
for each number of rows. Before `at` passes the end of the cache, the keys are moved to its beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wgrad.train.inference.batch_step import MOST_STEPS, BatchStep
from wgrad.train.inference.generation import prefill, prefill_part
from wgrad.train.inference.growing import Block, Growing, Part
from wgrad.train.inference.recorded_prefill import RecordedGroup, RecordedPrefill
from wgrad.train.inference.slot_cache import Place, SlotCache
from wgrad.train.model.model import Model
from wgrad.train.model.token_tables import TokenTables

CHUNK = 512  # tokens of a long prompt that are read between two steps
PROMPT_STEP = 32  # a prompt is filled up to a power of two of at least this, a long one to a multiple
FEW = 2  # prompts that come together and are read one after the other; more of them in groups
GROUP, GROUP_TOKENS = 8, 1024  # prompts of a group, and at most so many tokens with what fills them up
SPARE = 256  # keys behind the longest sequence, at least: so often they are moved
_VIEW = 64  # a cache has a multiple of as many keys: slot_cache.py


@dataclass
class _LongPrompt:
    """A prompt that is read in chunks, with one step of the others after each. at: of the batch as it began."""

    sequence: Growing
    at: int
    chunks: int
    done: int = 0  # chunks

    @property
    def end(self) -> int:
        """The key at which it joins."""
        return self.at + self.chunks - 1


class Batch:
    """Sequences that grow together on a model, at most `rows`. The rotary tables must hold each one's prompt and
    answer.

    most_keys: of the cache, in all rows together: where sequences grow long there are fewer of them, but always one.
    """

    def __init__(self, model: Model, rows: int, most_keys: int | None = None) -> None:
        self.model, self.device, self.rows, self._most_keys = model, model.device, rows, most_keys
        self._joined = 0  # sequences so far
        self._members: list[Growing | None] = [None] * rows
        self._slots: SlotCache | None = None
        self._steps: dict[int, BatchStep] = {}  # by rows
        self._prefills: dict[int, RecordedPrefill] = {}  # by width
        self._groups: dict[int, RecordedGroup] = {}  # by width
        self._at = 0
        self._long: _LongPrompt | None = None

    # ---- who is in it --------------------------------------------------------------------------
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
        """Members whose prompts are read."""
        reading = None if self._long is None else self._long.sequence
        return [member for member in self.members if member is not reading]

    @property
    def used_keys(self) -> int:
        """Keys of all sequences; those of the cache are `total_keys`."""
        return sum(member.cached for member in self.members)

    @property
    def total_keys(self) -> int:
        return 0 if self._slots is None else self._slots.rows * self._slots.keys

    def use(self, model: Model) -> None:
        """From here on another model with the same base; the batch must be empty."""
        assert not self.members
        if model is not self.model:
            self.model = model
            self._forget()

    def leave(self, member: Growing) -> None:
        """Free its row, if it has one."""
        if member.row < 0:
            return
        if self._long is not None and self._long.sequence is member:
            self._long = None
        self._members[member.row] = None
        member.row = -1

    def reset(self) -> None:
        """Free all memory, also after an error."""
        for member in self.members:
            member.row = -1
        self._members = [None] * self.rows
        self._slots, self._long, self._at = None, None, 0
        self._forget()

    def _forget(self) -> None:
        """Drop what is recorded."""
        self._steps, self._prefills, self._groups = {}, {}, {}

    # ---- joining -------------------------------------------------------------------------------
    def is_long(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt is read in chunks: where others would wait for it, its angles do not hang on its
        length, and the steps in between leave it as it is, which states of linear attention they would not."""
        alone = not self.members or self.model.config.linear is not None
        return len(prompt) > CHUNK and not alone and self._fixed_angles(prompt)

    def _fixed_angles(self, prompt: Sequence[int]) -> bool:
        """Return whether the rotary angles of a prompt are the same whatever its length."""
        return TokenTables.empty(self.model.config, 1, len(prompt), self.device) is None

    def can_join(self, newcomers: Sequence[Growing]) -> bool:
        """Return whether there is room. While a long prompt is read, no keys can be moved, and no other be begun."""
        if len(newcomers) > self.free:
            return False
        longest = max(len(one.prompt) for one in newcomers)
        if self._has_room(self._rows_with(len(newcomers)), padded(longest), 1):
            return self._long is None or longest <= CHUNK
        steps = 1 + (-(-longest // CHUNK) if len(newcomers) == 1 and self.is_long(newcomers[0].prompt) else 0)
        longest = max(padded(longest), *(one.cached for one in self.members), 0)
        fits = len(self.members) + len(newcomers) <= self._most_rows(self._wanted_keys(longest, steps))
        return self._long is None and fits

    def crowded(self, steps: int) -> list[Growing]:
        """Return those who joined last and must leave before so many steps are queued, for the others to have room.
        They may join again with all of their tokens (`Growing.go_on`)."""
        members = self.growing
        if self._has_room(self._rows_with(0), 0, min(steps, MOST_STEPS)):
            return []
        most = self._most_rows(self._wanted_keys(max(one.cached for one in members), min(steps, MOST_STEPS)))
        return sorted(members, key=lambda one: one.number)[most:]

    def join(self, newcomers: Sequence[Growing]) -> None:
        """Read their prompts, or begin to with a single long one."""
        if len(newcomers) == 1 and self.is_long(newcomers[0].prompt):
            self._begin_long(newcomers[0])
            return
        width = padded(max(len(one.prompt) for one in newcomers))
        self._make_room(len(newcomers), width, 1)
        rows = [row for row, member in enumerate(self._members) if member is None]
        if not all(self._fixed_angles(one.prompt) for one in newcomers) or not self._read_recorded(
            newcomers, rows, width
        ):
            self._read_at_once(newcomers, rows, width)
        for one, row in zip(newcomers, rows):
            self._add(one, row)

    def _read_recorded(self, newcomers: Sequence[Growing], rows: Sequence[int], width: int) -> bool:
        """One after the other, or in groups. Returns False where neither is recorded for prompts as long as these."""
        slots, prompts = self._slots, [one.prompt for one in newcomers]
        assert slots is not None
        if len(prompts) <= FEW:
            recorded = [self._recorded_prefill(len(prompt), self._at) for prompt in prompts]
            found = [one for one in recorded if one is not None]
            if len(found) < len(prompts):
                return False
            for one, prompt, row in zip(found, prompts, rows):
                one.run(prompt, 0, len(prompt), row, self._at)
            return True
        if GROUP * width > GROUP_TOKENS:
            return False
        group = self._groups.get(width)
        if group is None:
            group = self._groups[width] = RecordedGroup(self.model, slots, GROUP, width)
        for first in range(0, len(prompts), GROUP):
            group.run(prompts[first : first + GROUP], rows[first : first + GROUP], self._at)
        return True

    def _read_at_once(self, newcomers: Sequence[Growing], rows: Sequence[int], width: int) -> None:
        """In stretches of rows that follow one another."""
        slots, left, at = self._slots, list(newcomers), 0
        assert slots is not None
        while left:
            count = 1
            while count < len(left) and rows[at + count] == rows[at] + count:
                count += 1
            prompts = [one.prompt for one in left[:count]]
            slots.set_logits(rows[at], prefill(self.model, prompts, slots.part(rows[at], count), self._at, width))
            left, at = left[count:], at + count

    def _recorded_prefill(self, tokens: int, end: int) -> RecordedPrefill | None:
        """None for more than a chunk, and where what fills it up has no room."""
        width = padded(tokens)
        if width > CHUNK or width > end:
            return None
        assert self._slots is not None
        found = self._prefills.get(width)
        if found is None:
            found = self._prefills[width] = RecordedPrefill(self.model, self._slots, width)
        return found

    def _add(self, one: Growing, row: int) -> None:
        one.row, one.cached, self._members[row] = row, len(one.prompt), one
        one.number, self._joined = self._joined, self._joined + 1

    def _begin_long(self, one: Growing) -> None:
        chunks = -(-len(one.prompt) // CHUNK)
        # The steps in between write a row's keys too: into the last chunk's, which are read after them.
        assert chunks <= CHUNK
        self._make_room(1, len(one.prompt), chunks + 1)
        self._add(one, self._members.index(None))
        one.cached = 0
        self._long = _LongPrompt(one, self._at, chunks)
        self.read_chunk()

    def read_chunk(self) -> None:
        """Read the next one of the long prompt, which joins with the last. Between two of them the others, if there are
        any, have a step."""
        long, slots = self._long, self._slots
        assert long is not None and slots is not None
        one, prompt = long.sequence, long.sequence.prompt
        if not self.growing:  # no steps of others have counted
            self._at = long.at + long.done
        assert self._at == long.at + long.done
        last = len(prompt) - (long.chunks - 1 - long.done) * CHUNK
        first = max(last - CHUNK, 0)
        start = long.end - len(prompt)
        recorded = self._recorded_prefill(last - first, start + last)
        if recorded is not None:
            recorded.run(prompt, first, last, one.row, start + last)
        else:
            slots.set_logits(one.row, prefill_part(self.model, prompt, first, last, slots.part(one.row, 1), start))
        long.done += 1
        if long.done == long.chunks:
            one.cached, self._long = len(prompt), None

    def reserve(self, rows: int, keys: int) -> int:
        """Make a cache that need not grow up to so many rows and keys, as far as there may be. The batch must be empty.
        Returns its rows."""
        keys = -(-min(keys, self._most_keys or keys) // _VIEW) * _VIEW
        rows = min(self._bucket(rows, self.rows), self._most_rows(keys))
        self._slots, self._at = SlotCache(self.model, rows, keys), 0
        self._forget()
        return rows

    # ---- growing -------------------------------------------------------------------------------
    def queue(self, steps: int, keep_logits: bool = False) -> Block:
        """Draw up to `steps` tokens of each sequence: one where a sequence has a bias, which can be read while
        the device makes the next logits. Those that have all of theirs leave.

        keep_logits: of a single step.
        """
        active = self.growing
        biases = {one: one.bias for one in active if one.bias is not None}
        steps = (
            1 if self.reads or keep_logits or biases else min(steps, MOST_STEPS, max(o.most - o.drawn for o in active))
        )
        steps = min(steps, *(self._most_steps(one) for one in active))
        if not self.reads:
            self._gather(active)
        self._make_room(0, 0, steps)
        slots = self._slots
        assert slots is not None
        rows = self._bucket(1 + max(one.row for one in active), slots.rows)
        step = self._steps.get(rows)
        if step is None:
            step = self._steps[rows] = BatchStep(self.model, slots, rows)
        starts, settings = np.full(rows, self._at, np.int32), np.zeros((rows, 4), np.float32)
        settings[:, 2] = 1.0
        uniforms = np.zeros((steps, rows), np.float32)
        for one in active:
            starts[one.row], settings[one.row] = self._at - one.cached, one.settings
            numbers = one.uniforms[one.drawn : one.drawn + steps]
            uniforms[: len(numbers), one.row] = numbers
        step.begin(self._at, starts, settings, uniforms)
        if biases:
            step.draw({one.row: bias for one, bias in biases.items()})
        logits = self.device.readback(step.logits) if keep_logits else None
        if biases:
            tokens = step.read(steps)
            step.go_on()
        else:
            for _ in range(steps):
                step.run()
            tokens = step.read(steps)
        self._at += steps
        return Block([self._count(one, steps) for one in active], steps, rows, tokens, logits)

    def _count(self, one: Growing, steps: int) -> Part:
        mine, row = min(steps, one.most - one.drawn), one.row
        one.drawn += mine
        one.cached += steps
        one.bias = None
        done, again = one.drawn == one.most, one.cached == self.model.config.read_again_at
        if done or again:
            self.leave(one)
        return Part(one, row, mine, again and not done)

    def _most_steps(self, one: Growing) -> int:
        """A sequence may grow beyond its end within a block, but not beyond the rotary tables."""
        again = self.model.config.read_again_at
        end = again if one.cached < again else self.model.positions
        return max(end - one.cached, 1)

    # ---- rows and keys -------------------------------------------------------------------------
    def _bucket(self, rows: int, most: int) -> int:
        """Rows of a step: a power of two, or all."""
        return min(1 << (rows - 1).bit_length(), most)

    def _rows_with(self, newcomers: int) -> int:
        """Return the rows up to the last one that is used, with so many more sequences."""
        free = [row for row, member in enumerate(self._members) if member is None][:newcomers]
        return 1 + max([*free, *(one.row for one in self.members)])

    def _most_rows(self, keys: int) -> int:
        """Return how many rows of so many keys there may be."""
        return self.rows if self._most_keys is None else max(min(self.rows, self._most_keys // keys), 1)

    def _wanted_keys(self, longest: int, steps: int) -> int:
        """Return the keys of a row for sequences of up to `longest`, which go on growing."""
        had = self._slots.keys if self._slots is not None else 0
        if longest + max(steps, SPARE) <= had <= 4 * (longest + SPARE):
            return had
        wanted = max(longest, min(longest * 5 // 4, self.model.positions)) + max(steps, SPARE)
        return -(-wanted // _VIEW) * _VIEW

    def _gather(self, active: Sequence[Growing]) -> None:
        """Into the first rows, where a step can have half as many."""
        slots = self._slots
        assert slots is not None
        rows = self._bucket(len(active), slots.rows)
        above = [one for one in active if one.row >= rows]
        if not above:
            return
        before = {one: one.row for one in active}
        for one in above:
            target = self._members.index(None)
            self._members[one.row], self._members[target], one.row = None, one, target
        places = {one.row: Place(before[one], one.cached) for one in active}
        slots.rebuild(slots.rows, slots.keys, places, self._at, self._at)

    def _has_room(self, rows: int, width: int, steps: int) -> bool:
        slots = self._slots
        return slots is not None and rows <= slots.rows and width <= self._at <= slots.keys - steps

    def _make_room(self, newcomers: int, width: int, steps: int) -> None:
        """For so many more rows, `width` keys before `at` and `steps` behind it."""
        if self._has_room(self._rows_with(newcomers), width, steps):
            return
        had, members = self._slots, self.members
        longest = max([width, *(one.cached for one in members)])
        keys = self._wanted_keys(longest, steps)
        most = self._most_rows(keys)
        before = {one: one.row for one in members}
        if self._rows_with(newcomers) > most:  # fewer rows than there were
            self._members = [*members, *[None] * (self.rows - len(members))]
            for row, one in enumerate(members):
                one.row = row
        rows = max(self._bucket(self._rows_with(newcomers), most), min(had.rows, most) if had is not None else 0)
        if had is not None and members:
            places = {one.row: Place(before[one], one.cached) for one in members}
            if had.rebuild(rows, keys, places, self._at, longest):
                self._forget()
        elif had is None or (rows, keys) != (had.rows, had.keys):
            self._slots = None
            self._forget()
            del had  # its memory is free before there is more
            self._slots = SlotCache(self.model, rows, keys)
        self._at = longest


def padded(tokens: int) -> int:
    """Return the tokens up to which a prompt of `tokens` is filled up."""
    if tokens <= CHUNK:
        return max(1 << (tokens - 1).bit_length(), PROMPT_STEP)
    return -(-tokens // PROMPT_STEP) * PROMPT_STEP
