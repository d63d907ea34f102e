"""The thread of the device: jobs wait in a queue, join the batch when it has room, and leave it when they end.

Sequences of a batch share only the base model. While the first job of the queue has a model that does not mix with the
batch's, no job joins, so its turn comes when the batch has ended. Scores are computed between two blocks of steps, one
text at a time, so that they depend on no other request; so are embeddings.

The device is one block ahead: while it draws the tokens of a block, the host reads those of the block before.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from wgrad.device.errors import DeviceError, DeviceLost, DoesNotFit, WgradError
from wgrad.device.lost import lost_in
from wgrad.train.data.tokenizer import Tokenizer
from wgrad.train.inference.continuous import CHUNK, Batch, padded
from wgrad.train.inference.generation import not_finite
from wgrad.train.inference.growing import Block, Growing
from wgrad.train.inference.scoring import LogProbs, log_probs
from wgrad.train.inference.warm_up import warm_up
from wgrad.train.model.model import Model
from wgrad.train.serve.jobs import LENGTH, STOP, Answer, Failed, Job
from wgrad.train.serve.limits import Full, Limits
from wgrad.train.serve.losses import MOST_OF_A_REQUEST, Losses
from wgrad.train.serve.member import Member
from wgrad.train.serve.metrics import Metrics, State
from wgrad.train.serve.pace import Pace
from wgrad.train.serve.prompts import embed_prompts, score_prompt
from wgrad.train.terminal.ending import one_line
from wgrad.train.terminal.output import say

BUSY, ENDING = 503, "the server is ending: ask again later"
_AHEAD = 2  # blocks in the queue when the host waits for the first
_JOINING = 2 * CHUNK  # most tokens of prompts that are read between two blocks


class Engine:
    """Answers jobs with `models` and their `tokenizers` (by name), on the thread that calls `run`. losses: of the
    device so far."""

    def __init__(
        self,
        models: Mapping[str, Model],
        tokenizers: Mapping[str, Tokenizer],
        limits: Limits,
        losses: Losses | None = None,
    ) -> None:
        self.models, self.tokenizers, self.limits = models, tokenizers, limits
        self._line: list[Job] = []
        self._changed = threading.Condition()
        self._closing = self._recovering = False
        self.metrics, self._losses = Metrics(), losses or Losses(None)
        self._batch = Batch(next(iter(models.values())), limits.rows, limits.keys)
        self._members: dict[Growing, Member] = {}
        self._again: list[Member] = []  # members whose texts must be read again
        self._blocks: deque[Block] = deque()
        self._spoiled = False  # whether the cache has values that are not finite
        self.together: Callable[[], AbstractContextManager[None]] = nullcontext  # sends events within it as one
        self._pace = Pace()
        self._edits = False  # whether logits are changed, so that blocks have one step

    # ---- from any thread -----------------------------------------------------------------------
    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue all of these jobs. Raises Full, and queues none, if more than `waiting` would wait."""
        with self._changed:
            if self._closing:
                for job in jobs:
                    job.emit(Failed(BUSY, ENDING))
                return
            self._line = [job for job in self._line if not job.cancelled]
            # A request that waits alone may have more prompts than the limit.
            if self._line and len(self._line) + len(jobs) > self.limits.waiting:
                raise Full
            self._line += jobs
            self._changed.notify()

    def close(self) -> None:
        """Let `run` return after the next block; unfinished jobs fail."""
        with self._changed:
            self._closing = True
            waiting, self._line = self._line, []
            self._changed.notify()
        for job in waiting:
            job.emit(Failed(BUSY, ENDING))

    @property
    def health(self) -> str:
        """Return "ok", "recovering" from a lost device, or "ending"."""
        return "ending" if self._closing else "recovering" if self._recovering else "ok"

    def state(self) -> State:
        """Return the approximate state."""
        batch = vars(self).get("_batch")
        if batch is None:
            return State(len(self._line), 0, self.limits.rows, 0, 0, 0)
        keys = batch.used_keys, batch.kept_keys, batch.total_keys
        return State(len(self._line), len(batch.members), batch.rows, *keys)

    def warm_up(self, seconds: float) -> None:
        """Record the steps of the first requests, before `run`. Does nothing on the NumPy device.

        Raises DeviceLost if the device is lost for good.
        """
        if self._batch.device.name != "cpu" and (lost := lost_in(lambda: warm_up(self._batch, seconds))):
            self._recover(one_line(lost))

    # ---- the device's thread -------------------------------------------------------------------
    def run(self) -> None:
        """Answer jobs until `close`. Raises DeviceError if the device is lost for good."""
        reason = ENDING
        try:
            while self._wait():
                if lost := lost_in(self._turn_once):
                    self._recover(one_line(lost))
        except DeviceError as error:
            reason = one_line(error)
            raise
        finally:
            self.close()
            self._fail(list(self._members.values()), BUSY, reason)

    def _turn_once(self) -> None:
        self._guarded(self._turn, lambda: list(self._members.values()))

    def _recover(self, reason: str) -> None:
        """Load the models again, and continue the answers. Those that see a second loss fail."""
        self._recovering = True
        self._blocks.clear()
        self._again, again = [], list[Job]()
        for member in list(self._members.values()):
            job = member.answer.job
            job.losses += 1
            del self._members[member.sequence]
            if job.losses >= MOST_OF_A_REQUEST:
                member.answer.fail(BUSY, f"the device was lost {job.losses} times within this request: {reason}")
            elif job.is_read_alone and not member.scored:
                again.append(job)
            else:
                member.begin_again()
                self._members[member.sequence] = member
                self._again.append(member)
        with self._changed:
            self._line = [*again, *self._line]
        self._spoiled, self.models = False, {}
        del self._batch
        self.models = self._losses.recover(reason)
        self._batch = Batch(next(iter(self.models.values())), self.limits.rows, self.limits.keys)
        self._pace, self._recovering = Pace(), False

    def _wait(self) -> bool:
        """Wait for something to do. Returns False at the end."""
        with self._changed:
            while not self._closing:
                self._line = [job for job in self._line if not self._given_up(job)]
                if self._line or self._members:
                    return True
                self._pace.pause()
                self._changed.wait(timeout=1.0)  # on Windows Ctrl-C does not interrupt an endless wait
        return False

    @staticmethod
    def _given_up(job: Job) -> bool:
        if job.late and not job.cancelled:
            message = f"waited {job.seconds:g} s for the device (--max-seconds): ask again later, or for less"
            job.emit(Failed(BUSY, message))
        return job.late or job.cancelled

    def _guarded(self, work: Callable[[], None], concerned: Callable[[], list[Member]]) -> None:
        """Report an error to each request that it concerns; a loss of the device is raised."""
        try:
            work()
        except DeviceLost:
            raise
        except (WgradError, DoesNotFit, MemoryError) as error:
            self._give_up(concerned(), one_line(error))
        except DeviceError as error:
            self._give_up(concerned(), one_line(error))
            raise
        except Exception as error:  # a fault of wgrad ends one batch, not the server
            message = f"internal error: {type(error).__name__}: {one_line(error)}"
            say(f"wgrad: {message}", "stderr")
            self._give_up(concerned(), message)

    def _give_up(self, members: list[Member], message: str) -> None:
        """Fail these members and the whole batch, whose state may be inconsistent."""
        self._fail(members, 500, message)
        self._fail(list(self._members.values()), 500, message)
        self._blocks.clear()
        self._again = []
        self._batch.reset()

    def _fail(self, members: Sequence[Member], status: int, message: str) -> None:
        for member in members:
            if not member.answer.ended:
                member.answer.fail(status, message)
            self._members.pop(member.sequence, None)

    # ---- a turn: leaving, joining, a block ------------------------------------------------------
    def _turn(self) -> None:
        for member in list(self._members.values()):
            if member.answer.job.cancelled:
                self._remove(member)
        if self._spoiled and not self._members:
            self._batch.reset()
            self._spoiled = False
        if self._batch.reads:
            self._batch.read_chunk()
        self._admit()
        self._edit()
        if self._batch.growing:
            self._make_room()
        if self._batch.growing:
            self._blocks.append(self._queue())
        while self._blocks and (len(self._blocks) >= _AHEAD or not self._batch.growing):
            with self.together():
                self._read(self._blocks.popleft())

    def _remove(self, member: Member) -> None:
        member.answer.ended = True
        del self._members[member.sequence]
        self._batch.leave(member.sequence)
        self._again = [other for other in self._again if other is not member]

    def _admit(self) -> None:
        """Let members that must be read again join, then jobs of the queue, as far as there is room."""
        for member in self._again:
            member.sequence.model = self.models[member.answer.job.model]
        while self._again and self._batch.can_join([self._again[0].sequence]):
            self._batch.join([self._again.pop(0).sequence])
        while not (self._spoiled or self._again or self._closing):
            members = self._next_members()
            if not members:
                return
            self._guarded(lambda found=members: self._join(found), lambda found=members: found)  # type: ignore[misc]
            if self._batch.growing:
                return  # a step of these comes before the next prompts

    def _next_members(self) -> list[Member]:
        """Take the first jobs that are read together out of the queue; [] if none may join."""
        with self._changed:
            self._line = [job for job in self._line if not self._given_up(job)]
            if self._line and not self._members:
                self._batch.use(self.models[self._line[0].model])
            most = _JOINING if self._batch.growing else self.limits.prompt_tokens
            found, tokens = list[Member](), 0
            for job in self._line:
                first = found[0].answer.job if found else job
                sequence = Growing.begin(job.prompt, job.max_new_tokens, job.sampling)
                sequence.model = self.models[job.model]
                if not self._batch.mixes(sequence.model):
                    break
                if first.pooling != job.pooling or (found and (job.score or first.score)):
                    break
                if job.pooling is not None:
                    tokens += len(job.prompt)
                    if found and (tokens > self.limits.positions or job.model != first.model):
                        break
                    found.append(Member(Answer(job, self.tokenizers[job.model]), sequence))
                    continue
                together = [*(member.sequence for member in found), sequence]
                width = padded(max(map(self._batch.unread, together)))
                if found and (len(together) * width > most or self._batch.is_long(sequence)):
                    break
                if self._batch.should_wait(sequence, together[:-1]):
                    break
                if not self._batch.can_join(together):
                    break
                found.append(Member(Answer(job, self.tokenizers[job.model]), sequence))
            self._line = self._line[len(found) :]
            return found

    def _join(self, members: list[Member]) -> None:
        """Read the prompts of new members; there is only one if its prompt is scored."""
        first, model = members[0], self.models[members[0].answer.job.model]
        self.metrics.joined(sum(len(member.answer.job.prompt) for member in members))
        self._members |= {member.sequence: member for member in members}
        if first.answer.job.is_read_alone:
            if first.answer.job.pooling is not None:
                embed_prompts(model, [member.answer for member in members])
            elif (last := score_prompt(model, first.answer)) is not None:
                self._take(first.answer, model, last[0], 1, last[1], 0)
            first.scored = True
            if first.answer.ended:
                self._losses.answered()
                for member in members:
                    del self._members[member.sequence]
                return
        self._batch.join([member.sequence for member in members])
        for member in members:
            member.answer.job.cached = member.sequence.shared
        self.metrics.shared(sum(member.sequence.shared for member in members))

    def _queue(self) -> Block:
        tells = any(self._members[sequence].answer.job.top is not None for sequence in self._batch.growing)
        return self._batch.queue(self._pace.steps, tells)

    def _make_room(self) -> None:
        """Let the latest members leave for a while if the cache has no room for the next tokens of all."""
        if self._batch.crowded(self._pace.steps):
            self._drain()
        for sequence in self._batch.crowded(self._pace.steps) if self._batch.growing else ():
            self._members[sequence].answer.flush()
            self._batch.leave(sequence)
            self._read_again(self._members[sequence])

    def _drain(self) -> None:
        """Read all queued blocks."""
        while self._blocks:
            with self.together():
                self._read(self._blocks.popleft())

    def _edit(self) -> None:
        """Set the changes of logits for the jobs that have any, which depend on all tokens drawn so far."""
        edited = [member for member in self._members.values() if member.answer.job.is_edited]
        self._edits = bool(edited)
        if edited:
            self._drain()
        for member in edited:
            if not member.answer.ended:
                job, vocab = member.answer.job, self._batch.model.config.vocab_size
                member.sequence.bias = job.bias(vocab, member.ids)
                member.sequence.factors = job.factors(vocab, member.ids)

    def _read(self, block: Block) -> None:
        begin = time.monotonic()
        tokens, logits = block.tokens(), block.logits()
        self._pace.read(block.steps, time.monotonic() - begin)
        told = [part for part in block.parts if part.sequence in self._members and self._top(part.sequence) is not None]
        found, places = None, {part.sequence: place for place, part in enumerate(told)}
        if logits is not None and told:
            rows = [part.row for part in told]
            found = log_probs(
                logits[rows], tokens[0, rows].tolist(), max(self._top(part.sequence) or 0 for part in told)
            )
        drawn, gives = 0, self._pace.gives(self._edits)
        for part in block.parts:
            member = self._members.get(part.sequence)
            if member is None:  # it ended in an earlier block
                continue
            before = len(member.ids)
            for token in tokens[: part.steps, part.row].tolist():
                member.ids.append(token)
                self._take(
                    member.answer, self._batch.model, token, len(member.ids), found, places.get(part.sequence, 0)
                )
                if member.answer.ended:
                    self._losses.answered()
                    self._spoiled = self._spoiled or token < 0
                    self._remove(member)
                    break
            else:
                if gives or not before or part.read_again:
                    member.answer.flush()
                if part.read_again:
                    self._read_again(member)
            drawn += len(member.ids) - before
            if not before:
                self.metrics.first(time.monotonic() - member.answer.job.begun)
        self.metrics.drew(drawn)

    def _read_again(self, member: Member) -> None:
        del self._members[member.sequence]
        member.begin_again()
        self._members[member.sequence] = member
        self._again.append(member)

    def _top(self, sequence: Growing) -> int | None:
        return self._members[sequence].answer.job.top

    def _take(self, answer: Answer, model: Model, token: int, count: int, found: LogProbs | None, row: int) -> None:
        """Add the `count`-th token of an answer, or end it."""
        if answer.job.cancelled:
            answer.ended = True
        elif token < 0:
            answer.fail(500, one_line(not_finite(model, count)))
        elif token in answer.tokenizer.stop_ids:
            answer.end(STOP)
        else:
            answer.add(token, found, row)
            if answer.job.guide is not None and not answer.ended and answer.job.guide.add(token):
                self._end_of_grammar(answer, answer.job.guide.error)
            if answer.job.late and not answer.ended:
                answer.end(LENGTH)

    @staticmethod
    def _end_of_grammar(answer: Answer, error: str) -> None:
        if error:
            answer.fail(400, f"the grammar cannot go on: {error}")
        else:
            answer.end(STOP)
