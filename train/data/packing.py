"""Documents packed into rows, rows grouped into micro-batches and optimizer steps; the order is a function of the seed.

A row of `seq_len` tokens is a concatenation of whole documents and padding at its end:

    ids        the tokens; padding holds `pad_id`
    targets    the next token's id if it counts for the loss, else -100: on the last token of a document, before
               tokens that do not count (prompts), and on padding
    positions  0, 1, 2, ... from the start of each document
    doc_start  index in the row of the document's first token: attention sees nothing before it. A padding token is a
               document of its own (position 0, start = its own index), which is the cheapest thing to attend to.

Best-fit decreasing packing: "Fewer Truncations Improve Language Modeling", Ding et al. 2024 (arXiv 2404.10830).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from wgrad.device.errors import WgradError
from wgrad.device.shown import counted
from wgrad.train.data.mix import MOST_EPOCHS, Mix
from wgrad.train.options.finetune_config import RunOptions

IGNORE_INDEX = -100
ROW_STEP = 64  # tokens; shorter rows are rounded up to it, so that kernels still meet whole blocks


@dataclass(frozen=True)
class Document:
    """One training example.

    ids: int32 [n].
    loss_mask: bool [n], which tokens count for the loss. The first one never does, since no token precedes it.
    source: 'file:line'.
    label: 1 if the example is desirable, -1 if not, 0 if it has no label (KTO).
    beyond: ids that truncation removed from the end of the completion but that may fit after another prompt (KTO).
    """

    ids: np.ndarray
    loss_mask: np.ndarray
    source: str = ""
    label: int = 0
    beyond: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_targets(self) -> int:
        return int(np.count_nonzero(self.loss_mask[1:]))

    @property
    def parts(self) -> tuple[Document, ...]:
        """Return the documents of the example: itself alone."""
        return (self,)


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, each a document of its own."""

    chosen: Document
    rejected: Document

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)

    @property
    def source(self) -> str:
        return self.chosen.source

    @property
    def num_targets(self) -> int:
        return self.chosen.num_targets + self.rejected.num_targets

    @property
    def parts(self) -> tuple[Document, ...]:
        return self.chosen, self.rejected


Example = Document | Pair


@dataclass(frozen=True)
class Batch:
    """A micro-batch: ids, targets, positions, doc_start int32 [B, T] (see the top of this file).

    labels float32 [B], for preferences: 1 for a chosen or desirable row, -1 for another, 0 for padding.
    mismatched, for examples with labels: each prompt with the completion of the example before it in the batch.
    """

    ids: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    doc_start: np.ndarray
    num_targets: int  # targets that are not -100; for preferences the number of pairs or labeled examples
    num_tokens: int  # tokens that are not padding
    labels: np.ndarray | None = None
    mismatched: Batch | None = None


@dataclass(frozen=True)
class Step:
    """One optimizer step: its micro-batches, at most `accumulate` (fewer at the end of an epoch)."""

    index: int  # 0 for the first step of the run
    epoch: int  # 0 for the first pass over the data
    batches: list[Batch]
    num_targets: int = field(init=False)
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_targets", sum(b.num_targets for b in self.batches))
        object.__setattr__(self, "num_tokens", sum(b.num_tokens for b in self.batches))


def pack_documents(lengths: Sequence[int], seq_len: int, order: Sequence[int] | None = None) -> list[list[int]]:
    """Best-fit decreasing: each document, longest first, goes to the fullest row that still has room for it.

    lengths: tokens of each document, 1 ... seq_len. order: the sequence in which documents of equal length are
    placed (default: as they come). Returns rows of document numbers. The number of rows depends only on the
    lengths, not on `order`, so every epoch has as many. O(n log seq_len) for n documents.
    """
    rows: list[list[int]] = []
    room = defaultdict[int, list[int]](list)  # room[c]: rows with c free places
    free: list[int] = []  # the c > 0 with a row in room[c], rising
    for document in sorted(range(len(lengths)) if order is None else order, key=lambda i: -lengths[i]):
        length = lengths[document]
        if not 1 <= length <= seq_len:
            raise ValueError(f"lengths[{document}]: must be between 1 and seq_len = {seq_len}; got {length}")
        place = bisect_left(free, length)
        if place == len(free):
            row, left = len(rows), seq_len - length
            rows.append([document])
        else:
            capacity = free[place]
            row, left = room[capacity].pop(), capacity - length
            if not room[capacity]:
                free.pop(place)
            rows[row].append(document)
        if left:
            if not room[left]:
                insort(free, left)
            room[left].append(row)
    return rows


def make_batch(rows: Sequence[Sequence[Document]], batch_size: int, seq_len: int, pad_id: int = 0) -> Batch:
    """Return a Batch [batch_size, seq_len] of rows of documents; missing rows are padding."""
    shape = (batch_size, seq_len)
    ids = np.full(shape, pad_id, np.int32)
    targets = np.full(shape, IGNORE_INDEX, np.int32)
    positions = np.zeros(shape, np.int32)
    doc_start = np.tile(np.arange(seq_len, dtype=np.int32), (batch_size, 1))
    num_tokens = 0
    for row, documents in enumerate(rows):
        at = 0
        for document in documents:
            end = at + len(document)
            ids[row, at:end] = document.ids
            targets[row, at : end - 1] = np.where(document.loss_mask[1:], document.ids[1:], IGNORE_INDEX)
            positions[row, at:end] = np.arange(len(document))
            doc_start[row, at:end] = at
            at = end
        num_tokens += at
    return Batch(ids, targets, positions, doc_start, int(np.count_nonzero(targets != IGNORE_INDEX)), num_tokens)


def preference_batch(
    examples: Sequence[Example], batch_size: int, seq_len: int, pad_id: int = 0, *, mismatched: bool = False
) -> Batch:
    """Return a Batch of preferences.

    Pairs take 2 batch_size rows, first all chosen answers, then all rejected ones; labeled examples one row each.
    Missing rows are padding, which counts in no loss and no metric. mismatched: whether to add a batch of each prompt
    with another example's completion.
    """
    columns = list(zip(*(example.parts for example in examples)))
    rows = [[*([part] for part in column), *[[]] * (batch_size - len(column))] for column in columns]
    labels = np.zeros((len(columns), batch_size), np.float32)
    if len(columns) == 2:
        labels[:, : len(examples)] = [[1], [-1]]
    else:
        labels[0, : len(examples)] = [part.label for part in columns[0]]
    batch = make_batch([row for column in rows for row in column], labels.size, seq_len, pad_id)
    other = None
    if mismatched:
        other = make_batch([[part] for part in _mismatch(columns[0], seq_len)], batch_size, seq_len, pad_id)
    return replace(batch, num_targets=len(examples), labels=labels.reshape(-1), mismatched=other)


def _mismatch(documents: Sequence[Document], seq_len: int) -> list[Document]:
    """Return each prompt with the completion of the document before it (the first with that of the last), truncated
    after joining, as TRL does."""
    found = []
    for document, other in zip(documents, [documents[-1], *documents[:-1]]):
        at, begin = prompt_length(document), prompt_length(other)
        ids = np.concatenate([document.ids[:at], other.ids[begin:], other.beyond])
        mask = np.concatenate([document.loss_mask[:at], other.loss_mask[begin:], np.ones(len(other.beyond), bool)])
        found.append(Document(ids[:seq_len], mask[:seq_len]))
    return found


def prompt_length(document: Document) -> int:
    """Return the number of tokens before the first one that counts for the loss."""
    return int(np.argmax(document.loss_mask))


def _batch(rows: Sequence[Sequence[Example]], config: RunOptions, pad_id: int) -> Batch:
    """Return a micro-batch of rows of examples for the objective."""
    kind = config.objective_kind
    if kind.records == "texts":
        documents = [[part for example in row for part in example.parts] for row in rows]
        return make_batch(documents, config.batch_size, config.max_length, pad_id)
    examples = [row[0] for row in rows]
    return preference_batch(examples, config.batch_size, config.max_length, pad_id, mismatched=kind.mismatched)


def eval_batches(examples: Sequence[Example], config: RunOptions, pad_id: int = 0) -> list[Batch]:
    """Return the held-out examples as micro-batches, always in the same order."""
    rows = _rows([len(d) for d in examples], config, range(len(examples)))
    size = config.batch_size
    picked = [[examples[i] for i in row] for row in rows]
    return [_batch(picked[i : i + size], config, pad_id) for i in range(0, len(picked), size)]


def _rows(lengths: Sequence[int], config: RunOptions, order: Sequence[int]) -> list[list[int]]:
    if config.packs:
        return pack_documents(lengths, config.max_length, order)
    return [[i] for i in order]


class BatchStream:
    """The steps of a run, in an order that depends only on the documents, the configuration and its seed.

    Iterating yields the steps from the current one (0, or the one given to `restore`) to `total_steps`. Each epoch
    shuffles the documents with a generator of (seed, epoch), packs them and shuffles the rows, so any step can be
    computed without those before it.

    mix: the sources and their weights, if they have any. Epochs then differ in their numbers of rows and steps, and all
    epochs before a step are packed to find it.
    """

    def __init__(
        self, documents: Sequence[Example], config: RunOptions, pad_id: int = 0, mix: Mix | None = None
    ) -> None:
        if not len(documents):
            raise WgradError("--data: no example is left to train on: add data, or lower --eval-fraction")
        self.documents, self.config, self.pad_id, self.mix = documents, config, pad_id, mix
        self._lengths = [len(document) for document in documents]
        self._epoch: tuple[int, list[list[int]]] | None = None
        rows = len(self._epoch_rows(0) if mix is not None else _rows(self._lengths, config, range(len(documents))))
        self.rows_per_epoch = rows  # with a mix: of the first epoch
        self.steps_per_epoch = self._steps(rows)
        self._ends = [self.steps_per_epoch]  # with a mix: the steps of the first, of the first two, ... epochs together
        self.total_steps = config.max_steps or self._steps_of(config.epochs)
        self.step = 0  # the next one
        self._fingerprint = ""

    def __len__(self) -> int:
        return self.total_steps

    def __iter__(self) -> Iterator[Step]:
        while self.step < self.total_steps:
            step = self.get(self.step)
            self.step += 1  # before the yield, so that it is already the next step when the caller saves it
            yield step

    def get(self, index: int) -> Step:
        """Return step `index` of the run, which may be beyond total_steps."""
        epoch, within = self._place(index)
        rows = self._epoch_rows(epoch)
        size = self.config.batch_size
        first = within * size * self.config.gradient_accumulation_steps
        last = min(first + size * self.config.gradient_accumulation_steps, len(rows))
        batches = []
        for start in range(first, last, size):
            picked = [[self.documents[i] for i in row] for row in rows[start : min(start + size, last)]]
            batches.append(_batch(picked, self.config, self.pad_id))
        return Step(index, epoch, batches)

    def _steps(self, rows: int) -> int:
        return -(-rows // self.config.examples_per_step)

    def _steps_of(self, epochs: int) -> int:
        """Return the number of steps of the first epochs together."""
        if self.mix is None:
            return epochs * self.steps_per_epoch
        if epochs > MOST_EPOCHS:
            raise WgradError(
                f"--epochs: must be at most {MOST_EPOCHS} where sources have weights; got {epochs}: give --max-steps"
            )
        while len(self._ends) < epochs:
            self._add_end()
        return self._ends[epochs - 1]

    def _add_end(self) -> None:
        self._ends.append(self._ends[-1] + self._steps(len(self._epoch_rows(len(self._ends)))))

    def _place(self, index: int) -> tuple[int, int]:
        """Return the epoch of a step, and the number of the epoch's steps before it."""
        if self.mix is None:
            return divmod(index, self.steps_per_epoch)
        while self._ends[-1] <= index:
            self._add_end()
        epoch = bisect_right(self._ends, index)
        return epoch, index - (self._ends[epoch - 1] if epoch else 0)

    def _epoch_rows(self, epoch: int) -> list[list[int]]:
        if self._epoch is None or self._epoch[0] != epoch:
            generator = np.random.Generator(np.random.PCG64([self.config.seed, epoch]))
            if self.mix is None:
                order = generator.permutation(len(self.documents)).tolist()
            else:
                order = generator.permutation(self.mix.epoch(self.config.seed, epoch)).tolist()
            rows = _rows(self._lengths, self.config, order)
            self._epoch = (epoch, [rows[i] for i in generator.permutation(len(rows))])
        return self._epoch[1]

    def restore(self, step: int, fingerprint: str | None = None) -> None:
        """Continue at `step`.

        Raises:
            WgradError: `fingerprint` is not that of this data, or `step` is beyond the end.
        """
        if fingerprint is not None and fingerprint != self.fingerprint():
            raise WgradError(
                "--resume: the training data, or an option that orders it (--seed, --max-length, --batch-size, "
                "--gradient-accumulation-steps, --packing, --eval-fraction, "
                "--loss-on, weights of --data), is not that of the "
                "checkpoint: restore it, or start anew in another --out"
            )
        if step > self.total_steps:
            raise WgradError(
                f"--max-steps: the checkpoint already has {counted(step, 'step')}, more than the "
                f"{self.total_steps} asked for: "
                "give more --max-steps or --epochs, or leave both out"
            )
        self.step = step

    def fingerprint(self) -> str:
        """Return a hash of the documents and of the options that order them, 32 hexadecimal digits."""
        if self._fingerprint:
            return self._fingerprint
        c = self.config
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr((c.seed, c.max_length, c.batch_size, c.gradient_accumulation_steps, c.packing)).encode())
        if self.mix is not None:
            digest.update(repr((self.mix.counts, self.mix.weights)).encode())
        for document in (part for example in self.documents for part in example.parts):
            digest.update(np.int64(len(document)).tobytes())
            digest.update(np.ascontiguousarray(document.ids, np.int32).tobytes())
            digest.update(np.ascontiguousarray(document.loss_mask, np.uint8).tobytes())
            digest.update(str(document.label or "").encode())
        self._fingerprint = digest.hexdigest()
        return self._fingerprint
