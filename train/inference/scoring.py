"""Log-probabilities that a model gives to the tokens of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from wgrad.autograd import functional as F
from wgrad.autograd.ops.loss import LOGIT_ELEMENTS
from wgrad.autograd.tensor import no_grad
from wgrad.device.contract import Array
from wgrad.train.data.packing import ROW_STEP, Document, make_batch
from wgrad.train.inference.generation import Decoder, not_finite
from wgrad.train.model.inputs import whole_inputs
from wgrad.train.model.model import Model
from wgrad.train.options.generate_config import GREEDY

_VIEW = 64  # elements: where a view may begin


@dataclass(frozen=True)
class LogProbs:
    """Natural logarithms of probabilities, float32. of_tokens [N]: of N given tokens; top_ids int64, top [N, K]: the K
    likeliest tokens at each place, the likeliest first."""

    of_tokens: np.ndarray
    top_ids: np.ndarray
    top: np.ndarray


def log_probs(logits: np.ndarray, tokens: Sequence[int], top: int) -> LogProbs:
    """Return the log-probabilities of a token for each row of logits float32 [N, V]; NaN if logits are not finite.

    Uses the operations of the reference of `linear_cross_entropy`, so that the bits are equal.
    """
    rows = np.arange(len(tokens))
    with np.errstate(invalid="ignore"):
        shifted = logits - logits.max(axis=1, keepdims=True)
    log_sums = np.log(np.exp(shifted).sum(axis=1))
    ids = _likeliest(shifted, min(top, shifted.shape[1]))
    return LogProbs(shifted[rows, tokens] - log_sums, ids, shifted[rows[:, None], ids] - log_sums[:, None])


def _likeliest(values: np.ndarray, count: int) -> np.ndarray:
    """Return the ids of the `count` largest values of each row, the largest first."""
    if count == 0:
        return np.zeros((len(values), 0), np.int64)
    if count == 1:
        result: np.ndarray = values.argmax(axis=1)[:, None]
        return result
    ids = np.argpartition(values, -count, axis=1)[:, -count:]
    order = np.argsort(-np.take_along_axis(values, ids, axis=1), axis=1, kind="stable")
    return np.take_along_axis(ids, order, axis=1)


@dataclass(frozen=True)
class Scored:
    """Scores of a text. given: of each token but the first, given those before it. next_logits: float32 [1, V] on the
    device, of the token after the text."""

    given: LogProbs
    next_logits: Array


def score(model: Model, ids: Sequence[int], top: int = 0) -> Scored:
    """Score one text by itself, without a cache.

    It is a row as `wgrad eval` makes it for a file with only this text, so that on the NumPy device the numbers are the
    same to the bit. The rotary tables must hold the text.

    Raises:
        UnusableResult: logits are not finite.
    """
    device, n, width = model.device, len(ids), model.config.table_width
    document = Document(np.array(ids, np.int32), np.ones(n, np.bool_), "")
    row = make_batch([[document]], 1, -(-n // ROW_STEP) * ROW_STEP)
    inputs = whole_inputs(model, row.ids, row.positions, row.doc_start)
    with no_grad():
        hidden = model.hidden(inputs)
        last = F.embedding(hidden, device.upload(np.array([n - 1], np.int32)), dtype=hidden.dtype)
    parts = []
    rows = max(LOGIT_ELEMENTS // model.config.vocab_size // _VIEW, 1) * _VIEW
    for first in range(0, n - 1, rows):
        count = min(rows, n - 1 - first)
        logits = device.download(model.logits(device.view(hidden.data, (count, width), first * width)))
        part = log_probs(logits, ids[first + 1 : first + 1 + count], top)
        if not np.isfinite(part.of_tokens).all():
            raise not_finite(model, first + count + 1)
        parts.append(part)
    return Scored(_joined(parts, top), model.logits(last.data))


def _joined(parts: Sequence[LogProbs], top: int) -> LogProbs:
    if not parts:
        return LogProbs(np.zeros(0, np.float32), np.zeros((0, top), np.int64), np.zeros((0, top), np.float32))
    return LogProbs(*(np.concatenate([getattr(p, name) for p in parts]) for name in ("of_tokens", "top_ids", "top")))


def most_work(model: Model, positions: int, rows: int, prompt_tokens: int) -> None:
    """Run the work that takes the most memory for `rows` sequences of up to `positions` tokens: a score, a single
    prompt, and a batch, as long as possible (`prompt_tokens` in all), with three steps of each."""
    score(model, [0] * positions, top=1)
    for count in {1, rows}:
        longest = max(min(positions - 3, prompt_tokens // count), 1)
        decoder = Decoder(model, [[0] * longest] * count, positions - longest, replace(GREEDY, temperature=1.0))
        for _, step in zip(range(3), decoder.tokens()):
            del step
